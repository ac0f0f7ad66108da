"""FFNet for time series: CVIFFN, CIFFN and large depthwise kernels along time."""

from backbones.hosts.ffnet_1d import host

__all__ = ["host"]
