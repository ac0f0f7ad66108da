"""The commands, one file each; what they share is in the folders beside them."""

from backbones.options.origins import check_packages

check_packages("heads", "tasks", "datamodules")
