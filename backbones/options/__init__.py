"""Options of users: their names, types and defaults, and the messages for wrong ones."""

from backbones.options.labels import matches_of, mixer_label, mixer_names
from backbones.options.remembered import Remembering, plain_config, remembering
from backbones.options.signatures import (
    built_class,
    check_arguments,
    check_builder,
    check_complete,
    check_types,
    defaults,
    keywords,
    whole_arguments,
    with_whole_values,
)
from backbones.options.suggestions import listed, plural, shortened, unknown, unknown_backbone
from backbones.options.values import check_odd, check_value
from backbones.options.variants import Origin, variant_of

__all__ = [
    "Origin",
    "Remembering",
    "built_class",
    "check_arguments",
    "check_builder",
    "check_complete",
    "check_odd",
    "check_types",
    "check_value",
    "defaults",
    "keywords",
    "listed",
    "matches_of",
    "mixer_label",
    "mixer_names",
    "plain_config",
    "plural",
    "remembering",
    "shortened",
    "unknown",
    "unknown_backbone",
    "variant_of",
    "whole_arguments",
    "with_whole_values",
]
