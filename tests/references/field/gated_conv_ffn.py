"""The block of ``gated_conv`` at the width of a feed-forward network."""

from tests.references.field.gated_conv import macs, reference

CASES = [{}, {"hidden_ratio": 4, "kernel_size": 5, "conv_ratio": 2.0}]
__all__ = ["CASES", "macs", "reference"]
