"""Exports of annotation tools, converted into what our data modules read.

One module per format; ``detection`` and ``segmentation`` list them by tool.
"""

from collections.abc import Sequence


def checked_layout(layout: str, known: Sequence[str]) -> str:
    """Return a value of ``data.layout``.

    Raises:
        ValueError: It is none of the known ones.
    """
    if layout not in known:
        raise ValueError(f"data.layout={layout} must be one of {', '.join(known)}")
    return layout
