"""Heads: feature maps -> predictions and losses."""

from heads import mmcv_finder

mmcv_finder.install()
