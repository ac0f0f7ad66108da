"""Adapters to MMDetection, MMSegmentation and mmcv; the only place that imports them."""
