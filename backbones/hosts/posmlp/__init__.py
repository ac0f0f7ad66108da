"""PosMLP: windowed gating units with relative positional encoding; see ``host``."""

from backbones.hosts.posmlp import host

__all__ = ["host"]
