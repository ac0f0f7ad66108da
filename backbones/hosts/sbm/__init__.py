"""SBM: star with bilinear mapping; see ``host``."""

from backbones.hosts.sbm import host

__all__ = ["host"]
