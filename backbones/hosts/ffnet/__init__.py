"""FFNet: FFNified attention and ConvNeXt blocks; see ``host``."""

from backbones.hosts.ffnet import host

__all__ = ["host"]
