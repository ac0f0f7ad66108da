"""Converts exports of annotation tools into the form of our datamodules.

One module per format; ``box_exports`` and ``mask_exports`` list them by tool.
"""

from collections.abc import Sequence

AUTO = "auto"  # value of data.layout that recognises the format
WHOLE = "the export"  # name of the only split of an undivided export


def check_layout(layout: str, known: Sequence[str]) -> str:
    """Return a value of ``data.layout``.

    Raises:
        ValueError: The value is unknown.
    """
    if layout not in known:
        raise ValueError(f"data.layout={layout} must be one of {', '.join(known)}")
    return layout
