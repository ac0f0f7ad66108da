"""LVT: convolutional self-attention, then recursive atrous self-attention; see ``host``."""
