"""Exports of annotation tools, converted into what our data modules read.

One module per format; ``detection`` and ``segmentation`` list them by tool.
"""
