"""FFNet for point clouds: submanifold convolutions in a U-Net."""

from backbones.hosts.ffnet_3d import host

__all__ = ["host"]
