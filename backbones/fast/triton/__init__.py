"""Triton kernels behind the operators of AFBO and IFFN, for GPUs; no GPU has timed them yet."""
