"""FFNet for time series: CVIFFN, CIFFN and large depthwise kernels along time."""
