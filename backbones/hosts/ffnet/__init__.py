"""FFNet: FFNified attention and ConvNeXt blocks; see ``host``."""
