"""What a user may set, and how a wrong name or value is refused, wherever options are taken."""

from backbones.options.signatures import check_arguments, check_builder, check_complete, keywords
from backbones.options.suggestions import unknown, unknown_backbone
from backbones.options.values import check_odd, check_value
from backbones.options.variants import Origin, variant_of

__all__ = [
    "Origin",
    "check_arguments",
    "check_builder",
    "check_complete",
    "check_odd",
    "check_value",
    "keywords",
    "unknown",
    "unknown_backbone",
    "variant_of",
]
