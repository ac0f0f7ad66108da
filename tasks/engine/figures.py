"""Matplotlib's interface for figures that become files."""

from __future__ import annotations

from typing import Any


def load_pyplot() -> Any:
    """Import pyplot; it draws into files, and shows names with dollar signs as they are."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["text.parse_math"] = False
    import matplotlib.pyplot as plt

    return plt
