"""LVT: convolutional self-attention, then recursive atrous self-attention; see ``host``."""

from backbones.hosts.lvt import host

__all__ = ["host"]
