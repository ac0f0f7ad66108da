"""What is installed, and whether it works together, by the standard library alone."""
