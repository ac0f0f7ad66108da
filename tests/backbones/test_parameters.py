"""Each parameter is in one group, with the rate and the decay that its authors declare."""

import hashlib
import json
from pathlib import Path

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from backbones import create_backbone, list_mixers
from backbones.parameters.decay import without_decay
from backbones.registry import find_host
from tasks.engine.optimisation.param_groups import (
    param_groups,
    parameter_rules,
    stored_rules,
)
from tests.errors import refuses
from tests.families import SMALLEST

# Parameters of several axes that are exempt from weight decay, by mixer. Sources: what the authors'
# code declares, as no_weight_decay or keywords. The released optimiser of VMamba (ss2d), NAT
# (neighborhood) and GC ViT (global_window) ignores the mark, and decays them. Biases of several
# axes (afno, experts, agent, dt_projs_bias) are our choice.
EXEMPT = {
    "afno": {"fc1.bias", "fc2.bias"},
    "agent": {"an_bias", "na_bias", "ah_bias", "aw_bias", "ha_bias", "wa_bias"},
    "aggregated": {
        "attn.near_bias", "attn.queries.embedding", "attn.queries.temperature",
        "attn.position.fc1.weight", "attn.position.fc2.weight",
    },
    "global_window": {"attn.rel_pos.relative_position_bias_table"},
    "neighborhood": {"rpb"},
    "shifted_window": {"attn.relative_position_bias_table"},
    "soft_moe": {"experts.b1", "experts.b2"},
    "sparse_moe": {"experts.b1", "experts.b2"},
    "ss2d": {"A_logs", "dt_projs_bias"},
    "window_attention": {"attn.relative_position_bias_table"},
}  # fmt: skip
# Groups of the release that stored none: rate, decay, number and names of each one's parameters.
EARLIER = json.loads((Path(__file__).parent / "earlier_groups.json").read_text())


class Model(nn.Module):
    """A backbone under the name that models have for it."""

    def __init__(self, name: str, **options) -> None:
        super().__init__()
        with torch.device("meta"):
            self.backbone = create_backbone(name, **options)


def exempt_parts(model):
    """Names of exempt parameters of several axes inside the mixers, relative to each."""
    exempt, parameters = without_decay(model), dict(model.named_parameters())
    names = (f"backbone.{prefix}" for prefix in model.backbone.mixers())
    return {
        name.removeprefix(prefix).removeprefix("mixer.")  # a timm host wraps its mixers
        for prefix in names
        for name in exempt
        if name.startswith(prefix) and parameters[name].ndim > 1
    }


@pytest.mark.parametrize(
    ("host", "mixers"),
    [
        ("poolformer_s12", list(EXEMPT)),
        *(pytest.param(host, list_mixers(), marks=pytest.mark.slow) for host in SMALLEST),
    ],
)
def test_mixers_are_exempt_from_decay_wherever_they_stand(host, mixers):
    plain, tried = exempt_parts(Model(host)), 0
    for mixer in mixers:
        kind = "mixer" if mixer in list_mixers("channel") else "token_mixer"
        try:
            model = Model(host, **{kind: mixer})
        except ValueError:  # the host takes other mixers
            continue
        tried += 1
        assert exempt_parts(model) - plain == EXEMPT.get(mixer, set()) - plain, mixer
    assert tried or not find_host(host).slots


@pytest.mark.parametrize("host", ["bert_tiny", "dit_s", "caformer_s18"])
def test_frozen_stages_leave_no_part_of_the_stem_to_train(host):
    options = {"backbone": host}
    if host == "caformer_s18":  # timm groups it into layers alone
        refuses("declares no stages", create_backbone, "timm", model=host, frozen_stages=0)
        options = {"backbone": "timm", "model": "swin_tiny_patch4_window7_224"}
    name = options.pop("backbone")
    backbone = Model(name, frozen_stages=1, **options).backbone
    trained = {key for key, p in backbone.named_parameters() if p.requires_grad}
    assert trained == {key for key in dict(backbone.named_parameters())
                       if backbone.layer_ids.stage(key) > 1}  # fmt: skip


@pytest.mark.parametrize("model", ["pit_ti_224", "caformer_s18", "poolformerv2_s12"])
def test_models_without_groups_have_timms_automatic_layers(model):
    ours = Model("timm", model=model)
    rules = parameter_rules(ours, 0.05, layer_decay=0.75)
    with torch.device("meta"):
        theirs = timm.create_model(model)
    groups = param_groups_layer_decay(theirs, 0.05, layer_decay=0.75)
    names = {parameter: name for name, parameter in theirs.named_parameters()}
    expected = {names[p]: group["lr_scale"] for group in groups for p in group["params"]}
    prefix = "backbone.network."
    for name, rule in rules.items():
        assert rule.lr_scale == pytest.approx(expected[name.removeprefix(prefix)]), name
    assert len({rule.lr_scale for rule in rules.values()}) >= 9


@pytest.mark.parametrize("case", EARLIER, ids=lambda case: f"{case['backbone']}-{case['options']}")
def test_runs_without_stored_rules_keep_their_groups(case):
    model = Model(case["backbone"], **case["options"])
    options = {"weight_decay": 0.05, "layer_decay": case["layer_decay"]}
    rules = stored_rules({"optimizer_states": []}, model, options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = []
    for group in param_groups(model, rules, 1.0):
        text = "\n".join(names[parameter] for parameter in group["params"])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        rate = round(group["lr_scale"], 12)
        groups.append([rate, group["weight_decay"], len(group["params"]), digest])
    assert groups == case["groups"]
