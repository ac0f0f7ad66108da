"""Finds, decodes and checks the files of datasets."""

from datamodules.files.decoding import load_rgb
from datamodules.files.folders import IMAGE_SUFFIXES, list_images, require_folder

__all__ = ["IMAGE_SUFFIXES", "list_images", "load_rgb", "require_folder"]
