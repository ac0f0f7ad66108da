"""Optimisers and schedules."""

import copy
import io
import math
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import timm
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from timm.models._manipulate import group_parameters
from timm.optim import param_groups_layer_decay
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import backbones.timm_models  # noqa: F401
from backbones import create_backbone
from backbones.parameters.layer_scales import layer_scales
from heads.linear import LinearClassifier
from tasks.engine.optimisation import optimizer as optim
from tasks.engine.optimisation.optimizer import (
    build_optimizer,
    learning_rate_factor,
)
from tasks.engine.optimisation.param_groups import param_groups, parameter_rules
from tests.families import rest_slow
from tests.running.tiny import tiny_task

ADAMW = {"name": "adamw", "lr": 0.1}
COSINE = {"name": "cosine", "warmup": 2, "warmup_start": 0.01, "min_lr_ratio": 0.1}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (COSINE, {0: 0.01, 10: (0.01 + 1) / 2, 20: 1, 60: (1 + 0.1) / 2, 100: 0.1, 101: 0.1,
                  40: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))}),
        ({"name": "poly"}, {0: 1, 50: 0.5, 100: 0}),
        ({"name": "poly", "power": 0.9}, {25: 0.75**0.9, 100: 0}),
        ({"name": "poly", "min_lr_ratio": 0.2}, {50: 0.6, 100: 0.2}),
        ({"name": "constant"}, {0: 1, 99: 1, 100: 1}),
        ({"name": "constant", "warmup": 1, "warmup_start": 0}, {0: 0, 5: 0.5, 10: 1, 99: 1}),
        ({"name": "poly", "cooldown": 5, "min_lr_ratio": 0.2}, {25: 0.6, 50: 0.2, 99: 0.2}),
        ({"name": "poly", "cooldown": 4, "warmup": 2}, {20: 1, 40: 0.5, 60: 0, 99: 0}),
        ({"name": "poly", "warmup": 2, "warmup_within": True}, {10: 0.5005, 20: 0.8, 50: 0.5}),
        ({"name": "poly", "lr": 0.1, "min_lr": 0.02, "warmup": 1, "warmup_lr": 0.05},
         {0: 0.5, 5: 0.75, 10: 1, 55: 0.6, 100: 0.2}),
        ({"name": "poly", "by_epoch": True}, {0: 1, 9: 1, 10: 0.9, 19: 0.9, 99: 0.1}),
        ({"name": "poly", "by_epoch": True, "lag": 1}, {0: 1, 19: 1, 20: 0.9, 99: 0.2}),
        ({"name": "constant", "by_epoch": True, "lag": 1, "warmup": 2, "warmup_start": 0.5},
         {0: 0.5, 19: 0.5, 20: 0.75, 29: 0.75, 30: 1}),
        ({"name": "multistep", "milestones": (8, 9)}, {79: 1, 80: 0.1, 89: 0.1, 90: 0.01}),
        ({"name": "multistep", "milestones": (5,), "gamma": 0.5, "warmup": 1}, {10: 1, 50: 0.5}),
    ],
)  # fmt: skip
def test_schedules(options, expected):
    """100 steps in 10 epochs."""
    factor = learning_rate_factor(100, 10, **options)
    assert {step: factor(step) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "linear"}, r"schedule\.name must be one of cosine, .*, got 'linear'"),
        ({"name": "cosine", "warmup": -1}, r"schedule\.warmup must not be below 0, got -1"),
        ({"name": "cosine", "warmup_start": 2}, r"schedule\.warmup_start must be from 0 to 1"),
        ({"name": "poly", "min_lr_ratio": -0.1}, r"schedule\.min_lr_ratio must be from 0 to 1"),
        ({"name": "poly", "cooldown": -1}, r"schedule\.cooldown must not be below 0, got -1"),
        ({"name": "cosine", "by_epoch": True, "lag": -1}, r"schedule\.lag must not be below 0"),
        ({"name": "cosine", "lag": 1}, r"schedule\.lag=1 is for schedule\.by_epoch=true"),
        ({"name": "constant", "cooldown": 1}, r"cooldown=1 is for cosine, poly, .*with constant"),
        ({"name": "step", "decay_epochs": 0}, r"schedule\.decay_epochs must be above 0, got 0"),
        ({"name": "wsd", "decay_fn": "x"}, r"schedule\.decay_fn must be one of linear, 1-sqrt"),
        ({"name": "rsqrt"}, r"rsqrt needs schedule\.stable_timescale=<epochs> or a warm-up"),
        ({"name": "poly", "power": -1}, r"schedule\.power must not be below 0, got -1"),
        ({"name": "multistep", "gamma": -1}, r"schedule\.gamma must not be below 0, got -1"),
        ({"name": "poly", "min_lr": 0.1, "min_lr_ratio": 0}, r"min_lr_ratio exclude each other"),
        ({"name": "poly", "min_lr": 2}, r"min_lr=2 must be from 0 to the top rate, which is 1 "),
        ({"name": "poly", "warmup_lr": -1}, r"warmup_lr=-1 must be from 0 to the top rate"),
    ],
)
def test_schedule_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        learning_rate_factor(100, 10, **options)


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("tanh", {"min_lr": 0.01}, {"min_lr": 0.01}),
        ("tanh", {"cooldown": 2}, {}),
        ("step", {"decay_epochs": 1.5, "gamma": 0.3}, {"decay_epochs": 1.5, "decay_rate": 0.3}),
        ("step", {}, {}),
        ("wsd", {"min_lr": 0.01}, {"min_lr": 0.01}),
        ("wsd", {"decay_epochs": 3, "decay_fn": "cosine"},
         {"decay_epochs": 3, "decay_fn": "cosine"}),
        ("rsqrt", {"min_lr": 0.02}, {"min_lr": 0.02}),
        ("rsqrt", {"stable_timescale": 0.5, "decay_fn": "1-sqrt", "decay_epochs": 0.5},
         {"stable_timescale": 0.5, "decay_fn": "1-sqrt", "decay_epochs": 0.5}),
    ],
)  # fmt: skip
def test_schedules_equal_timms(name, ours, theirs):
    """10 epochs of 10 steps with 2 epochs of warm-up, which timm counts separately if it can."""
    cooldown = ours.get("cooldown", 0)
    factor = learning_rate_factor(100, 10, 0.1, name=name, warmup=2, warmup_lr=0.001, **ours)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    prefixed = name not in ("wsd", "rsqrt")
    scheduler, _ = create_scheduler_v2(
        optimizer, name, num_epochs=10 - 2 * prefixed - cooldown, warmup_epochs=2, warmup_lr=0.001,
        warmup_prefix=prefixed, step_on_epochs=False, updates_per_epoch=10, **theirs,
    )  # fmt: skip
    for step in range(100):
        scheduler.step_update(step)
        assert 0.1 * factor(step) == pytest.approx(optimizer.param_groups[0]["lr"]), step


@pytest.mark.parametrize(
    ("device", "options", "precision", "clip", "expected"),
    [
        ("cpu", ADAMW, "32-true", 1.0, True),
        ("cpu", {**ADAMW, "name": "sgd"}, "32-true", None, None),
        ("cuda", ADAMW, "32-true", 1.0, True),
        *(("cuda", {**ADAMW, "name": name}, "bf16-mixed", None, True)
          for name in ("adamw", "adam", "sgd", "momentum", "nesterov")),
        ("cuda", ADAMW, "bf16-mixed", 1.0, None),
        ("cuda", ADAMW, "16-mixed", None, None),
        ("cuda", {**ADAMW, "foreach": True}, "32-true", None, None),
        ("cuda", {**ADAMW, "fused": False}, "32-true", None, False),
        ("cuda", {**ADAMW, "name": "lamb"}, "32-true", None, None),
        ("meta", ADAMW, "32-true", None, None),
    ],
)  # fmt: skip
def test_optimisers_are_fused_where_lightning_can_clip(device, options, precision, clip, expected):
    task = tiny_task(optimizer=options)
    task.trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device(device)), precision=precision,
        gradient_clip_val=clip, fit_loop=SimpleNamespace(setup_data=lambda: None),
        estimated_stepping_batches=9, num_training_batches=9, accumulate_grad_batches=1,
    )  # fmt: skip
    optimizer = task.configure_optimizers()["optimizer"]
    assert optimizer.param_groups[0].get("fused") is expected
    if clip is not None:
        mixed = precision.endswith("-mixed")
        plugin = MixedPrecision(precision, "cpu") if mixed else Precision()
        plugin.clip_gradients(optimizer, clip)


def named_groups(model):
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = param_groups(model, parameter_rules(model, 0.05), 1.0)
    return [{names[p] for p in group["params"]} for group in groups]


@pytest.mark.parametrize("name", ["deit_t_afbo", "swin_t", "poolformer_s12_afbo"])
def test_param_groups(name):
    with torch.device("meta"):
        model = LinearClassifier(create_backbone(name), 10)
    exempt = {f"backbone.{key}" for key in model.backbone.no_weight_decay}
    sizes = {key: parameter.ndim for key, parameter in model.named_parameters()}
    assert exempt <= sizes.keys()
    assert name[:4] != "deit" or exempt >= {"backbone.pos_embed", "backbone.cls_token"}
    decayed, plain = named_groups(model)
    assert plain == {key for key, ndim in sizes.items() if ndim <= 1} | exempt
    assert decayed == sizes.keys() - plain
    groups = param_groups(model, parameter_rules(model, 0.05), 0.1)
    shared = [(group["weight_decay"], group["lr"], group["lr_scale"]) for group in groups]
    assert shared == [(0.05, 0.1, 1.0), (0, 0.1, 1.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamm"}, r"no optimiser \(optimizer\.name\).*'adamm'; did you mean adam"),
        ({"name": "AdamW"}, r"did you mean adamw\?$"),
        ({"name": "adahessian"}, r"optimizer\.name=adahessian needs second derivatives"),
        ({"name": "fusedlamb"}, r"GPU and the package apex; .*pass optimizer\.name=lamb"),
        ({"name": "bnblion8bit"}, r"the package bitsandbytes; .*optimizer\.name=lion"),
        ({"name": "lion", "eps": 1e-3}, r"lion has no option \['eps'\]"),
        ({"lr": 0}, r"optimizer\.lr must be above 0, got 0"),
        ({"weight_decay": -1}, r"optimizer\.weight_decay must not be below 0, got -1"),
        ({"name": "adamw", "betas": [0.9]}, r"betas must be 2 numbers .*, got \[0\.9\]"),
        ({"name": "adamw", "betas": [0.9, 0.99, 0.9]}, "betas must be 2 numbers"),
        ({"name": "adamw", "betas": 0.9}, "betas must be 2 numbers"),
        ({"name": "lamb", "betas": []}, "betas must be 2 numbers"),
        ({"betas": (0.9, 0.99)}, r"sgd has no option \['betas'\]; it has .*momentum"),
        ({"momentum": -2}, r"sgd refuses its options \{'momentum': -2\}"),
    ],
)
def test_optimizer_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(nn.Linear(3, 2), **{"name": "sgd", "lr": 0.1, **options})


@pytest.mark.parametrize(("batch", "rate"), [(None, 0.1), (256, 0.1), (64, 0.025), (512, 0.2)])
def test_a_rate_for_a_reference_batch_is_scaled(batch, rate):
    options = {"name": "sgd", "lr": 0.1, "reference_batch": 256}
    optimizer = build_optimizer(nn.Linear(3, 2), None, batch, **options)
    assert {group["lr"] for group in optimizer.param_groups} == {rate}
    fixed = build_optimizer(nn.Linear(3, 2), None, batch, name="sgd", lr=0.1)
    assert {group["lr"] for group in fixed.param_groups} == {0.1}


@pytest.mark.parametrize(
    ("name", "kind", "options", "expected"),
    [
        ("sgd", torch.optim.SGD, {}, {"nesterov": False, "momentum": 0}),
        ("nesterov", torch.optim.SGD, {}, {"nesterov": True, "momentum": 0.9}),
        ("adamw", torch.optim.AdamW, {}, {"betas": (0.9, 0.999), "eps": 1e-8}),
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.9)}, {"betas": (0.8, 0.9)}),
        ("nadamw", timm.optim.NAdamW, {}, {}),
        ("muon", timm.optim.Muon, {}, {}),
        ("adopt", timm.optim.Adopt, {}, {}),
        ("lamb", timm.optim.Lamb, {"trust_clip": True}, {"trust_clip": True}),
    ],
)
def test_names_except_sgd_are_timms(name, kind, options, expected):
    optimizer = build_optimizer(nn.Linear(3, 2), name=name, lr=0.1, weight_decay=0.2, **options)
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0]
    for group in optimizer.param_groups:
        assert {"lr": 0.1, **expected}.items() <= group.items()


ELSEWHERE = ("fused", "bnb") if find_spec("schedulefree") else ("fused", "bnb", "schedulefree")
HERE = [name for name in optim.optimizer_names() if not name.startswith(ELSEWHERE)]


def small_model(name, **group):
    """Return a network and its optimiser, with a group of its own for the last layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    options = {"weight_decay": 0.05, "groups": [{"match": "3.*", **group}]}
    return model, build_optimizer(model, name=name, lr=1e-2, **options)


def train_some(model, optimizer, scheduler, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)

        def closure(generator=generator):
            optimizer.zero_grad()
            images = torch.randn(5, 3, 8, 8, generator=generator)
            loss = model(images.to(model[0].weight.dtype)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()


# Kron compiles its parts, for half a minute.
@pytest.mark.parametrize("name", rest_slow(HERE, [n for n in HERE if not n.startswith("kron")]))
def test_each_optimiser_resumes_to_the_bit_and_trains_weights_of_any_type(name):
    """With rates by group; all states pass through a file, as in a checkpoint."""
    groups = small_model(name, lr_scale=10, weight_decay=0.1)[1].param_groups
    found = sorted((len(g["params"]), g["lr_scale"], g["weight_decay"]) for g in groups)
    assert found == [(1, 1.0, 0.05), (1, 10.0, 0.1), (1, 10.0, 0.1), (3, 1.0, 0.0)]

    def parts():
        model, optimizer = small_model(name, lr_scale=0.5)
        factor = learning_rate_factor(9, 3, name="cosine", warmup=1)
        return model, optimizer, LambdaLR(optimizer, factor)

    whole = parts()
    start = copy.deepcopy(whole[0].state_dict())
    train_some(*whole, range(9))
    assert any(not torch.equal(start[key], value) for key, value in whole[0].state_dict().items())
    first, file = parts(), io.BytesIO()
    train_some(*first, range(4))
    torch.save([*(part.state_dict() for part in first), torch.get_rng_state()], file)
    file.seek(0)
    second = parts()
    *states, random_state = torch.load(file, weights_only=True)
    for part, state in zip(second, states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random_state)
    train_some(*second, range(4, 9))
    torch.testing.assert_close(second[0].state_dict(), whole[0].state_dict(), rtol=0, atol=0)
    for kind in (torch.float64, torch.bfloat16):
        model = small_model(name)[0].to(kind)
        start = [parameter.clone() for parameter in model.parameters()]
        optimizer = build_optimizer(model, name=name, lr=1e-2)
        train_some(model, optimizer, LambdaLR(optimizer, lambda _: 1), range(9))
        assert all(p.dtype == kind and p.isfinite().all() for p in model.parameters())
        assert any(not torch.equal(*pair) for pair in zip(start, model.parameters(), strict=True))


@pytest.mark.parametrize("name", optim.SCHEDULE_FREE)
def test_schedule_free_optimisers_name_their_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(ValueError, match=rf"name={name} needs .*mixerlab\[schedulefree\]"):
        build_optimizer(nn.Linear(3, 2), name=name, lr=0.1)


def meta(name, dense=False):
    with torch.device("meta"):
        backbone = create_backbone(name, dense=dense)
        return backbone if dense else LinearClassifier(backbone, 10)


@pytest.mark.parametrize("name", ["deit_t", "swin_t", "convnext_t", "ffnet_1"])
def test_timm_groups_our_networks_as_we_do(name):
    """timm builds its groups of the same network, with the layers from timm_models."""
    with torch.device("meta"):
        theirs = timm.create_model(name)
    groups = param_groups_layer_decay(theirs, 0.05, theirs.no_weight_decay(), layer_decay=0.9)
    expected = {p: (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    rules = parameter_rules(theirs, 0.05, layer_decay=0.9)
    assert len(rules) == len(expected)
    for key, parameter in theirs.named_parameters():
        found = rules[key].lr_scale, rules[key].weight_decay
        assert found == pytest.approx(expected[parameter])
    assert len({rule.lr_scale for rule in rules.values()}) == theirs.backbone.num_layers


def stage(name):
    """Return the stage in a name, from 1; 0 for a stem and 5 for what follows."""
    if name.startswith("stages."):
        return int(name.split(".")[1]) + 1
    return 0 if name.startswith(("stem", "patch_embed")) else 5


def behind(name, ours):
    """Count timm's layers between a parameter and the end; a final norm counts too."""
    return 1 if name.startswith("norm.") else ours


# Of timm's own networks: layers between a parameter and the end, from its name and ours.
TIMMS_LAYERS = {
    "deit_tiny_patch16_224": ("deit_t", behind),
    "mixer_s16_224": ("mixer_s16", behind),
    "gmlp_s16_224": ("gmlp_s", behind),
    "convnext_tiny": ("convnext_t", lambda name, ours: ours),
    "resnet50": ("resnet50", lambda name, ours: ours),
    "swin_tiny_patch4_window7_224": (
        "swin_t", lambda name, ours: behind(name, ours - ("downsample" in name))
    ),
    "pvt_v2_b1": ("pvt_v2_b1", lambda name, ours: 5 - stage(name)),
    "gcvit_xxtiny": ("gcvit_xxt", lambda name, ours: 5 - stage(name)),
}  # fmt: skip


@pytest.mark.parametrize("theirs", TIMMS_LAYERS)
def test_known_differences_from_timms_layers(theirs):
    """Exactly the differences that ``layer_scales`` states."""
    ours, rule = TIMMS_LAYERS[theirs]
    backbone = meta(ours).backbone
    with torch.device("meta"):
        network = timm.create_model(theirs)
    layers = group_parameters(network, network.group_matcher(coarse=False), reverse=True)
    scales = layer_scales(backbone, 0.5)
    compared = scales.keys() & layers.keys()
    assert len(scales) - len(compared) <= 2  # the last norm may have another name
    expected = {name: rule(name, round(-math.log2(scales[name]))) for name in compared}
    assert expected == {name: max(layers.values()) - layers[name] for name in compared}


def test_convnexts_layers():
    scales = layer_scales(meta("convnext_t", dense=True), 0.5, "convnext")
    for part, layer in {
        "stem.0": 0, "stages.0.blocks.2": 1, "stages.1.downsample": 2, "stages.1.blocks.0": 2,
        "stages.2.downsample": 3, "stages.2.blocks.2": 3, "stages.2.blocks.3": 4,
        "stages.2.blocks.8": 5, "stages.3.downsample": 6, "stages.3.blocks.0": 6,
    }.items():  # fmt: skip
        found = {scale for key, scale in scales.items() if key.startswith(f"{part}.")}
        assert found == {0.5 ** (7 - layer)}, part
    with pytest.raises(ValueError, match=r"four stages, but deit_t has .*layers=blocks"):
        layer_scales(meta("deit_t", dense=True), 0.5, "convnext")


def test_groups_by_pattern():
    model = meta("deit_t")
    groups = [
        {"match": "classifier.*", "lr_scale": 10},
        {"match": "*.bias", "weight_decay": 0.05},
        {"match": "backbone.pos_embed", "lr_scale": 0.5, "weight_decay": 0.1},
    ]
    rules = parameter_rules(model, 0.05, layer_decay=0.5, groups=groups)
    last = model.backbone.num_layers - 1
    expected = {
        "classifier.weight": (10, 0.05), "classifier.bias": (10, 0),
        "backbone.norm.bias": (1, 0.05), "backbone.norm.weight": (1, 0),
        "backbone.pos_embed": (0.5 * 0.5**last, 0.1), "backbone.cls_token": (0.5**last, 0),
    }  # fmt: skip
    rules = {key: (rule.lr_scale, rule.weight_decay) for key, rule in rules.items()}
    assert {key: rules[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_decay": 0}, r"layer_decay must be above 0 and at most 1, got 0"),
        ({"layer_decay": 1.1}, r"layer_decay must be above 0 and at most 1, got 1\.1"),
        ({"layers": "ffnet"}, r"layers=ffnet needs optimizer\.layer_decay"),
        ({"groups": ["head"]}, r"optimizer\.groups\.0=head is not a group; .*match"),
        ({"groups": [{"lr_scale": 2}]}, r"optimizer\.groups\.0\.match is missing"),
        ({"groups": [{"match": "*", "lr": 2}]}, r"no option of optimizer\.groups\.0 called 'lr'; "),
        ({"groups": [{"match": "*", "lr_scale": 0}]}, r"lr_scale must be above 0, got 0"),
        ({"groups": [{"match": "*", "weight_decay": -1}]}, r"weight_decay must not be below 0"),
        ({"groups": [{"match": "clasifier.weight"}]},
         r"no parameter .*'clasifier\.weight'; did you mean classifier\.weight"),
    ],
)  # fmt: skip
def test_rules_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        parameter_rules(meta("deit_t"), 0.05, **options)
    with pytest.raises(ValueError, match="for models around a backbone"):
        parameter_rules(nn.Linear(2, 2), 0.05, layer_decay=0.9)
