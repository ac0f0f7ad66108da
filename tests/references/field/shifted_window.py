"""timm's WindowAttention on shifted windows, in odd blocks."""

from tests.references.field.window_attention import macs, reference

CASES = [{}, {"window": 3, "block": 1}, {"window": 4, "block": 3, "num_heads": 2}]
__all__ = ["CASES", "macs", "reference"]
