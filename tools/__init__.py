"""The commands, one file each; what they share is in the folders beside them."""
