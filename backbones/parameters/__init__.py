"""Depth of parameters in a network, and their learning rates."""
