"""Adapters to MMDetection, MMSegmentation and mmcv, which are imported only here."""
