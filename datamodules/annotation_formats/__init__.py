"""Converts exports of annotation tools into the form of our datamodules.

One module per format; ``box_exports`` and ``mask_exports`` list them by tool.
"""
