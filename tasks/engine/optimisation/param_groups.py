"""Learning rate and weight decay per parameter: layer-wise rates, groups by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from backbones.options import check_arguments, check_complete, unknown
from backbones.parameters.decay import without_decay
from backbones.parameters.layer_scales import Layers, layer_scales

RULES = ("layer_decay", "layers", "groups")  # options of ``parameter_rules``
STORED_RULES = "parameter_rules"  # the entry of a checkpoint


class Rule(NamedTuple):
    """Learning rate and weight decay of a parameter.

    Attributes:
        lr_scale: Its rate over the schedule's.
        exempt: True if it is exempt from weight decay; see ``backbones.parameters.decay``.
        weight_decay: Its decay.
    """

    lr_scale: float
    exempt: bool
    weight_decay: float


class Group(NamedTuple):
    """Parameters by a pattern of their names, with their own options."""

    match: str
    lr_scale: float
    weight_decay: float | None


def parameter_rules(
    model: nn.Module,
    weight_decay: float,
    *,
    layer_decay: float | None = None,
    layers: Layers | None = None,
    groups: Sequence[Mapping[str, Any]] | None = None,
    earlier: bool = False,
) -> dict[str, Rule]:
    """Return the rule of each parameter, before a strategy shards and flattens them.

    A head's ``multipliers`` of rate and decay, of a toolkit's config, come on top of layer-wise
    rates and give way to ``groups``.

    Args:
        model: With its ``backbone``, if it has one; what is not in it learns at full rate.
        weight_decay: Decay of all other parameters.
        layer_decay: The rate of a layer over that of the next one; None: one rate for all.
        layers: Meaning of a layer, see ``layer_scales``; None: every block.
        groups: ``match``, a pattern of names (without ``model.`` before them), with ``lr_scale``
            or ``weight_decay`` or both. The first that matches counts; its ``lr_scale`` comes on
            top of layer-wise rates, its ``weight_decay`` takes the place of the usual one.
        earlier: Return the rules of releases that stored none in their checkpoints: only hosts
            marked parameters, some parts of a stem learnt at full rate, and heads had no
            multipliers.

    Raises:
        ValueError: A value out of range, a pattern without a match, a model without layers.
    """
    if layers is not None and layer_decay is None:
        raise ValueError(
            f"optimizer.layers={layers} needs optimizer.layer_decay; pass both, "
            "such as optimizer.layer_decay=0.9, or optimizer.layers=null"
        )
    if weight_decay < 0:
        raise ValueError(f"optimizer.weight_decay must not be below 0, got {weight_decay}")
    choices = [_group(index, options) for index, options in enumerate(groups or ())]
    scales = {}
    if layer_decay is not None:
        scales = _scales(model, layer_decay, layers or "blocks", earlier=earlier)
    exempt = without_decay(model, hosts_only=earlier)
    multipliers = {} if earlier else getattr(model, "multipliers", {})
    rules, unmatched = {}, {group.match for group in choices}
    for name, parameter in model.named_parameters():
        label = name.removeprefix("model.")
        group = next((g for g in choices if fnmatchcase(label, g.match)), None)
        unmatched -= {g.match for g in choices if fnmatchcase(label, g.match)}
        scale, decay = scales.get(parameter, 1.0), 0.0 if name in exempt else weight_decay
        if group is None:
            of_rate, of_decay = _multiplier(multipliers, label)
            scale, decay = scale * of_rate, decay * of_decay
        else:
            scale *= group.lr_scale
            decay = decay if group.weight_decay is None else group.weight_decay
        rules[name] = Rule(scale, name in exempt, decay)
    if unmatched:
        names = [name.removeprefix("model.") for name in rules]
        some = f"names are such as {names[0]} and {names[-1]}; * stands for any part of one."
        raise ValueError(unknown("parameter (optimizer.groups)", min(unmatched), names, some))
    return rules


def stored_rules(
    checkpoint: Mapping[str, Any], model: nn.Module, options: Mapping[str, Any]
) -> dict[str, Rule]:
    """Return the rules that a run began with, by which its optimiser's states are in order.

    Args:
        checkpoint: With the optimiser's states; those of earlier releases lack the rules.
        model: The run's.
        options: Of the optimiser, see ``build_optimizer``.

    Raises:
        ValueError: The rules are those of another model.
    """
    if STORED_RULES in checkpoint:
        rules = {name: Rule(*rule) for name, rule in checkpoint[STORED_RULES].items()}
        if rules.keys() != {name for name, _ in model.named_parameters()}:
            raise ValueError(
                f"{STORED_RULES} of the checkpoint names other parameters; pass another"
            )
        return rules
    backbone = getattr(model, "backbone", None)
    if backbone is not None and getattr(backbone, "frozen_stages", -1) >= 0:
        for name, parameter in backbone.named_parameters():
            if name.startswith(tuple(backbone.layer_ids.tail)):
                parameter.requires_grad_(True)  # earlier releases left it out of the stem
    rule_options = {key: options[key] for key in RULES if key in options}
    return parameter_rules(model, options.get("weight_decay", 0.0), earlier=True, **rule_options)


def param_groups(model: nn.Module, rules: Mapping[str, Rule], lr: float) -> list[dict[str, Any]]:
    """Return the trainable parameters as torch's optimisers take them, one group per rule.

    The fastest come first, and of these the decayed ones, so that the order of a plain run does not
    depend on the network.
    """
    gathered: dict[Rule, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gathered.setdefault(rules[name], []).append(parameter)
    order = sorted(gathered, key=lambda r: (-r.lr_scale, r.exempt, -r.weight_decay))
    return [
        {
            "params": gathered[rule],
            "weight_decay": rule.weight_decay,
            "lr": lr * rule.lr_scale,
            "lr_scale": rule.lr_scale,
        }
        for rule in order
    ]


def schedule_rate(group: Mapping[str, Any]) -> float:
    """Return the schedule's rate, of which a group of an optimiser has its share."""
    # Older checkpoints lack shares.
    return float(group["lr"] / group.get("lr_scale", 1.0))


def group(*, match: str, lr_scale: float = 1.0, weight_decay: float | None = None) -> Group:
    """Read an entry of ``optimizer.groups``; see ``parameter_rules``."""
    return Group(match, lr_scale, weight_decay)


def _group(index: int, options: Mapping[str, Any]) -> Group:
    name = f"optimizer.groups.{index}"
    if not isinstance(options, Mapping):
        raise ValueError(
            f"{name}={options} is not a group; give a pattern with its options, such as "
            "optimizer.groups=[{match: 'decode_head.*', lr_scale: 10}]"
        )
    check_complete(group, options, name)
    check_arguments(group, options, name)
    result = group(**options)
    if result.lr_scale <= 0:
        raise ValueError(f"{name}.lr_scale must be above 0, got {result.lr_scale}")
    if result.weight_decay is not None and result.weight_decay < 0:
        raise ValueError(f"{name}.weight_decay must not be below 0, got {result.weight_decay}")
    return result


def _multiplier(multipliers: Mapping[str, tuple[float, float]], name: str) -> tuple[float, float]:
    """Return the multipliers of the longest key in a parameter's name, as MMEngine does."""
    keys = sorted((key for key in multipliers if key in name), key=lambda key: (-len(key), key))
    return multipliers[keys[0]] if keys else (1.0, 1.0)


def _scales(
    model: nn.Module, decay: float, layers: Layers, *, earlier: bool
) -> dict[nn.Parameter, float]:
    if not 0 < decay <= 1:
        raise ValueError(f"optimizer.layer_decay must be above 0 and at most 1, got {decay}")
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        raise ValueError("optimizer.layer_decay is for models around a backbone; leave it out")
    scales = layer_scales(backbone, decay, layers)
    if set(scales.values()) == {1.0} and decay < 1:
        raise ValueError(
            f"optimizer.layer_decay={decay} has no effect, as the layers of {backbone.name} are "
            "unknown; leave it out"
        )
    prefixes = backbone.layer_ids.tail if earlier else ()
    return {
        parameter: 1.0 if name.startswith(tuple(prefixes)) else scales[name]
        for name, parameter in backbone.named_parameters()
    }
