"""Sphinx configuration of the documentation site; ``make docs`` builds it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]

project = "MixerLab"
project_copyright = author = "The MixerLab authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "mathhtml",
    "reference_pages",
]
exclude_patterns = [
    "_build",
    "_ext",
    "examples",
    "measurements/*/*.json",
    "reference/papers_table.md",
]
nitpicky = False

myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 4
highlight_language = "none"  # of blocks without a language: commands, folders

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_custom_sections = ["Shape", "Source"]
napoleon_use_ivar = True

html_theme = "furo"
html_title = "MixerLab"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["tables.js"]
html_copy_source = False
html_show_sourcelink = False
