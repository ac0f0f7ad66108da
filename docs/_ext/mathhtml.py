"""Write equations as HTML with docutils' converter, without scripts, network or fonts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes, writers
from docutils.utils.math.math2html import math2html

STYLE = Path(writers.__file__).parent / "html5_polyglot" / "math.css"


def _inline(translator: Any, node: nodes.Node) -> None:
    translator.body.append(f'<span class="formula">{math2html(node.astext())}</span>')
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.Node) -> None:
    translator.body.append(f'<div class="formula">{math2html(node.astext())}</div>')
    raise nodes.SkipNode


def _add_style(app: Any, exception: Exception | None) -> None:
    if exception is None:
        (Path(app.outdir) / "_static" / STYLE.name).write_bytes(STYLE.read_bytes())


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer and its style."""
    app.add_html_math_renderer("mathhtml", (_inline, None), (_block, None))
    app.config.html_math_renderer = "mathhtml"
    app.add_css_file(STYLE.name)
    app.connect("build-finished", _add_style)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
