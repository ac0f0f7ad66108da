"""U-DiT and U-FFNet: U-Nets that denoise."""

from backbones.hosts.u_dit import host

__all__ = ["host"]
