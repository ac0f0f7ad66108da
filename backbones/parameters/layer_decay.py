"""Learning rates that fall towards the input, per layer or per stage.

Source: Clark et al., "ELECTRA", ICLR 2020, Sec. 3.1 (layer-wise decay); the groups are those of
MMDetection's and MMSegmentation's ``LearningRateDecayOptimizerConstructor``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backbones.parameters.decay import without_decay


def layer_decay_groups(
    model: Any, config: Mapping[str, Any], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Build the parameter groups of MMDetection's and MMSegmentation's layer decay.

    Args:
        model: Its ``backbone`` is one of ours; all other parts learn at full rate.
        config: The constructor's ``paramwise_cfg``: ``decay_rate``; ``decay_type``, by stages if
            "stage_wise"; optionally ``num_layers``, blocks (or stages) of the backbone.
        lr: Learning rate of the last layer.
        weight_decay: Weight decay, 0 for vectors and the parameters that the host's authors exempt.

    Raises:
        ValueError: Another number of layers than the backbone has.
    """
    backbone = model.backbone
    by_stage = config.get("decay_type", "layer_wise") == "stage_wise"
    count = len(backbone.layer_ids.depths) if by_stage else backbone.num_layers - 2
    if config.get("num_layers", count) != count:
        raise ValueError(
            f"paramwise_cfg.num_layers={config['num_layers']}, but {backbone.name} has {count} "
            f"{'stages' if by_stage else 'blocks'}; set num_layers={count} or leave it out"
        )
    exempt = without_decay(model)
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        inner_name = name.removeprefix("backbone.")
        place = backbone.layer_ids.stage(inner_name) if by_stage else backbone.layer_id(inner_name)
        layer = min(place, count + 1) if inner_name != name else count + 1
        decays = name not in exempt
        group = f"layer_{layer}_{'decay' if decays else 'no_decay'}"
        scale = config["decay_rate"] ** (count + 1 - layer)
        groups.setdefault(
            group,
            {
                "weight_decay": weight_decay if decays else 0.0, "params": [], "param_names": [],
                "lr_scale": scale, "group_name": group, "lr": scale * lr,
            },
        )  # fmt: skip
        groups[group]["params"].append(parameter)
        groups[group]["param_names"].append(name)
    return list(groups.values())
