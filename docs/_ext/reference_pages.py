"""Generate the reference and the measurements from the code when the site is built."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import catalogue_page
import command_page
import config_pages
import host_pages
import leaderboard_page
import measurement_pages
import mixer_pages
import notebook_pages
import paper_pages
import python_page
import timm_page

DOCS = Path(__file__).resolve().parents[1]
REFERENCE = DOCS / "reference"
KINDS = (
    catalogue_page, command_page, config_pages, host_pages, mixer_pages, notebook_pages,
    paper_pages, python_page, timm_page,
)  # fmt: skip
INDEX = """# Reference

Every page of this part is generated from the code when the site is built.

```{toctree}
:maxdepth: 1

command_line
configuration
hosts/index
mixers/index
timm
heads
recipes
published/index
data
python
```
"""


def generate(app: Any = None) -> None:
    """Write all generated pages; pages of what is gone are removed."""
    logging.getLogger("backbones").setLevel(logging.WARNING)  # notices on class tokens
    pages = {"index": INDEX}
    for kind in KINDS:
        pages |= kind.pages()
    write_pages(REFERENCE, pages)
    notebook_pages.write_notebooks(REFERENCE / "notebooks")
    measured = measurement_pages.pages() | leaderboard_page.pages()
    write_pages(DOCS / "measurements", measured, remove=False)


def write_pages(folder: Path, pages: dict[str, str], *, remove: bool = True) -> None:
    """Write pages by name; an unchanged one keeps its time, so that it is not built again."""
    for name, text in pages.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.rglob("*.md") if remove else ():
        if path.relative_to(folder).with_suffix("").as_posix() not in pages:
            path.unlink()


def setup(app: Any) -> dict[str, bool]:
    """Generate pages before Sphinx looks for sources."""
    app.connect("builder-inited", generate)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    generate()
