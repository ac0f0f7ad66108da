"""Commands, one file each; the folders hold their shared parts."""

from backbones.options.origins import check_packages

check_packages("heads", "tasks", "datamodules")
