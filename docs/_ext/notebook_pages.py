"""Pages and .ipynb files of the notebooks, whose sources are in docs/examples/notebooks."""

from __future__ import annotations

from pathlib import Path

import jupytext
from nbformat import NotebookNode

SOURCES = sorted((Path(__file__).resolve().parents[1] / "examples/notebooks").glob("*.py"))
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def read_notebook(source: Path) -> NotebookNode:
    """Return a source as a notebook for the usual kernel."""
    notebook = jupytext.read(source)
    notebook.metadata["kernelspec"] = KERNEL
    return notebook


def pages() -> dict[str, str]:
    """Return a page per notebook."""
    return {
        f"notebooks/{source.stem}": _page(source.stem, read_notebook(source)) for source in SOURCES
    }


def write_notebooks(folder: Path) -> None:
    """Write the .ipynb file of each page beside it."""
    for source in SOURCES:
        jupytext.write(read_notebook(source), folder / f"{source.stem}.ipynb")


def _page(name: str, notebook: NotebookNode) -> str:
    title, *cells = [
        cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```"
        for cell in notebook.cells
    ]
    download = f"{{download}}`{name}.ipynb <{name}.ipynb>` has these cells."
    return "\n\n".join([title, download, *cells]) + "\n"
