"""Optimisers and schedules."""

import math

import pytest
import torch
from torch import nn

from backbones import create_backbone
from heads.linear import LinearClassifier
from tasks.optim import build_optimizer, learning_rate_factor, param_groups

# Schedules: 100 steps in 10 epochs


def test_cosine_after_warmup():
    factor = learning_rate_factor(
        100, 10, name="cosine", warmup=2, warmup_start=0.01, min_lr_ratio=0.1
    )
    assert factor(0) == pytest.approx(0.01)
    assert factor(10) == pytest.approx((0.01 + 1) / 2)
    assert factor(20) == pytest.approx(1)
    assert factor(40) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert factor(60) == pytest.approx((1 + 0.1) / 2)
    assert factor(100) == factor(101) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "poly"}, {0: 1, 50: 0.5, 100: 0}),
        ({"name": "poly", "power": 0.9}, {25: 0.75**0.9, 100: 0}),
        ({"name": "poly", "min_lr_ratio": 0.2}, {50: 0.6, 100: 0.2}),
        ({"name": "constant"}, {0: 1, 99: 1, 100: 1}),
        ({"name": "constant", "warmup": 1, "warmup_start": 0}, {0: 0, 5: 0.5, 10: 1, 99: 1}),
        ({"name": "poly", "cooldown": 5, "min_lr_ratio": 0.2}, {25: 0.6, 50: 0.2, 99: 0.2}),
        ({"name": "poly", "cooldown": 4, "warmup": 2}, {20: 1, 40: 0.5, 60: 0, 99: 0}),
        ({"name": "poly", "warmup": 2, "warmup_within": True}, {10: 0.5005, 20: 0.8, 50: 0.5}),
        (
            {"name": "poly", "lr": 0.1, "min_lr": 0.02, "warmup": 1, "warmup_lr": 0.05},
            {0: 0.5, 5: 0.75, 10: 1, 55: 0.6, 100: 0.2},
        ),
        ({"name": "multistep", "milestones": (8, 9)}, {79: 1, 80: 0.1, 89: 0.1, 90: 0.01}),
        ({"name": "multistep", "milestones": (5,), "gamma": 0.5, "warmup": 1}, {10: 1, 50: 0.5}),
    ],
)
def test_schedules(options, expected):
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
        ({"name": "constant", "cooldown": 1}, r"cooldown=1 is for cosine and poly; with constant"),
        ({"name": "poly", "min_lr": 0.1, "min_lr_ratio": 0}, r"min_lr_ratio exclude each other"),
        ({"name": "poly", "min_lr": 2}, r"min_lr=2 must be from 0 to the top rate, which is 1 "),
        ({"name": "poly", "warmup_lr": -1}, r"warmup_lr=-1 must be from 0 to the top rate"),
    ],
)
def test_schedule_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        learning_rate_factor(100, 10, **options)


# Optimisers


def named_groups(model):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [{names[p] for p in group["params"]} for group in param_groups(model, 0.05)]


@pytest.mark.parametrize("name", ["deit_t_afbo", "swin_t", "poolformer_s12_afbo"])
def test_param_groups(name):
    with torch.device("meta"):
        model = LinearClassifier(create_backbone(name), 10)
    exempt = {f"backbone.{key}" for key in model.backbone.no_weight_decay}
    sizes = {key: parameter.ndim for key, parameter in model.named_parameters()}
    assert exempt <= sizes.keys()
    decayed, plain = named_groups(model)
    assert plain == {key for key, ndim in sizes.items() if ndim <= 1} | exempt
    assert decayed == sizes.keys() - plain
    assert [group["weight_decay"] for group in param_groups(model, 0.05)] == [0.05, 0]


def test_named_exceptions_are_matrices_that_do_not_decay():
    with torch.device("meta"):
        model = LinearClassifier(create_backbone("deit_t"), 10)
    assert {"backbone.pos_embed", "backbone.cls_token"} <= named_groups(model)[1]


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert named_groups(model) == [{"1.weight"}, {"1.bias"}]


def test_options_reach_the_optimizer():
    optimizer = build_optimizer(
        nn.Linear(3, 2), name="adamw", lr=0.1, weight_decay=0.2, betas=(0.8, 0.9)
    )
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0]
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {
        (0.1, (0.8, 0.9))
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adam"}, r"optimizer\.name must be one of adamw, sgd, got 'adam'"),
        ({"lr": 0}, r"optimizer\.lr must be above 0, got 0"),
        ({"weight_decay": -1}, r"optimizer\.weight_decay must not be below 0, got -1"),
        ({"betas": (0.9, 0.99)}, r"sgd has no option \['betas'\]; it has .*momentum"),
        ({"momentum": -2}, r"sgd refuses its options \{'momentum': -2\}"),
    ],
)
def test_optimizer_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(nn.Linear(3, 2), **{"name": "sgd", "lr": 0.1, **options})


@pytest.mark.parametrize(("batch", "rate"), [(None, 0.1), (256, 0.1), (64, 0.025), (512, 0.2)])
def test_a_rate_for_a_batch_is_scaled_to_the_one_in_use(batch, rate):
    options = {"name": "sgd", "lr": 0.1, "reference_batch": 256}
    optimizer = build_optimizer(nn.Linear(3, 2), None, batch, **options)
    assert {group["lr"] for group in optimizer.param_groups} == {rate}
    fixed = build_optimizer(nn.Linear(3, 2), None, batch, name="sgd", lr=0.1)
    assert {group["lr"] for group in fixed.param_groups} == {0.1}
