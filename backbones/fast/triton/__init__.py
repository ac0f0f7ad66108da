"""Triton kernels for GPUs; ``choice`` tries each on a device before its first use there."""
