"""Inputs of a mixer in a slot (maps, class tokens, grids, memory), and loading around it."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from backbones import (
    Mixer,
    PointwiseMixer,
    Slot,
    backbone_schema,
    create_backbone,
    list_mixers,
    register_mixer,
)
from backbones.analysis.patch_reach import reached_patches
from backbones.options import variant_of
from backbones.slots import fill
from tests.errors import refuses
from tests.families import TOKEN_SLOTS, build_short, load, meta_backbone, rest_slow
from tests.references.names import AUTHORS
from tests.tensors import images


class Recorder(Mixer):
    seen: ClassVar[list] = []

    def __init__(self, dim, *, grid=(14, 14)):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.grid = grid

    def mix(self, x):
        self.seen.append(tuple(x.shape))
        return x * self.weight

    def mix_prefix(self, prefix):
        self.seen.append(tuple(prefix.shape))
        return prefix * self.weight


@pytest.fixture
def recorder(monkeypatch, registering):
    monkeypatch.setattr(Recorder, "seen", [])
    register_mixer("recorder", kind="token", source="this test")(Recorder)
    register_mixer("recorded", kind="channel", source="this test")(Recorder)
    return Recorder.seen


@pytest.mark.parametrize(
    ("host", "depths", "widths"),
    [
        ("swin_t", (2, 2, 6, 2), (96, 192, 384, 768)),
        ("poolformer_s12", (2, 2, 6, 2), (64, 128, 320, 512)),
        ("pvt_v2_b1", (2, 2, 2, 2), (64, 128, 320, 512)),
        ("gcvit_xxt", (2, 2, 6, 2), (64, 128, 256, 512)),
        ("convnext_t", (3, 3, 9, 3), (96, 192, 384, 768)),
    ],
)  # fmt: skip
def test_mixers_of_both_kinds_see_the_map(recorder, host, depths, widths):
    backbone = create_backbone(f"{host}_recorded", token_mixer="recorder", img_size=(128, 192))
    backbone(torch.zeros(1, 3, 64, 96))
    expected = [
        (1, 16 // 2**stage, 24 // 2**stage, width)
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True))
        for _ in range(2 * depth)
    ]
    assert recorder == expected
    grids = [module.grid for module in backbone.modules() if isinstance(module, Recorder)]
    assert grids == [(2 * height, 2 * width) for _, height, width, _ in expected]


def test_class_tokens_are_seen_apart_or_refused(recorder):
    backbone = create_backbone("deit_t_recorded")
    backbone(torch.zeros(2, 3, 64, 96))
    assert recorder == [(2, 4, 6, 192), (2, 1, 192)] * 12
    block = nn.Module()
    block.attn = nn.Identity()
    slot = Slot(8, 4.0, (2, 3), stage=0, block=0, dense=False, num_prefix_tokens=1)
    with pytest.raises(ValueError, match=r"Linear takes no class tokens .*declare"):
        fill(block, "attn", lambda slot: WithoutPrefix(slot.dim), slot)


class Joint(Recorder):
    prefix_mixing = "joint"

    def mix_joint(self, x, prefix):
        self.seen.append((tuple(x.shape), tuple(prefix.shape)))
        return x * self.weight, prefix + x.sum((1, 2), keepdim=True)[:, 0] * self.weight


class Pooled(Recorder):
    prefix_mixing = "pooled"


class PooledPointwise(PointwiseMixer):
    prefix_mixing = "pooled"

    def __init__(self, dim):
        super().__init__()

    def mix(self, x):
        return x


def linear(base):
    """Return a mixer class that maps the channels, without a method for prefix tokens."""

    class Linear(base):
        def __init__(self, dim):
            super().__init__()
            self.linear = nn.Linear(dim, dim)

        def mix(self, x):
            return self.linear(x)

    return Linear


Apart, WithoutPrefix = linear(PointwiseMixer), linear(Mixer)


def function_of_a_joint_mixer(dim, *, grid=(14, 14)) -> Joint:
    return Joint(dim, grid=grid)


@variant_of(Joint)
def variant_of_a_joint_mixer():
    """The same."""


def function_without_annotation(dim):
    return Joint(dim)


BUILDS = {
    ("token", "class token"): [
        Joint, function_of_a_joint_mixer, variant_of_a_joint_mixer, Pooled, PooledPointwise,
    ],
    # The method mix_prefix alone would leave a class token blind.
    ("token", "mean of the map"): [function_without_annotation, Recorder, Apart, WithoutPrefix],
    ("channel", "class token"): [Joint, Pooled, Recorder, Apart],
    ("channel", "mean of the map"): [WithoutPrefix],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "build", "pooling"),
    [(kind, build, pooling) for (kind, pooling), builds in BUILDS.items() for build in builds],
)
@pytest.mark.parametrize("dense", [False, True])
def test_the_embedding_sees_the_image_for_every_declaration(recorder, kind, build, pooling, dense):
    register_mixer("trial", kind=kind, source="this test")(build)
    name, options = (
        ("deit_t", {"token_mixer": "trial"}) if kind == "token" else ("deit_t_trial", {})
    )
    backbone = build_short(name, **options, dense=dense, img_size=64).double().eval()
    assert backbone.pooling == pooling
    assert backbone.num_prefix_tokens == (pooling == "class token")
    x = images(64, 96, batch=2)
    assert backbone(x)[0].shape[2:] == ((16, 24) if dense else (4, 6))
    if not dense:
        assert reached_patches(backbone, x, 16).all()
        embedded = backbone.embed(x)
        assert (embedded[0] - embedded[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "token_mixer", "pooling", "cause"),
    [
        ("deit_t_blind", "joint", "mean of the map", "blind"),
        ("deit_t_recorded", "pooling", "mean of the map", "pooling"),
        ("deit_t_iffn", "joint", "mean of the map", "iffn"),
        ("deit_t_recorded", "joint", "class token", ""),
        ("swin_t_blind", "pooling", "mean of the map", ""),
    ],
)
def test_one_mixer_without_class_tokens_decides_for_the_network(
    recorder, caplog, name, token_mixer, pooling, cause
):
    register_mixer("blind", kind="channel", source="this test")(WithoutPrefix)
    register_mixer("joint", kind="token", source="this test")(Joint)
    caplog.set_level("INFO")
    assert meta_backbone(name, token_mixer=token_mixer).pooling == pooling
    said = [f"deit_t with {cause} lacks the class token and pools the map"] if cause else []
    assert [line.partition(";")[0] for line in caplog.messages] == said
    schemas = (backbone_schema(f"deit_t_{mixer}") for mixer in ("blind", "recorded"))
    assert [schema["class_token"] for schema in schemas] == [False, True]
    both = meta_backbone("deit_t", token_mixer="joint", distilled=True)
    assert both.pooling == "class and distillation token"
    gives = "=True gives deit_t class tokens, but"
    for option in ("class_token", "distilled"):
        options = {"token_mixer": {"name": "pooling"}, option: True}
        refuses(f"{option}{gives} pooling .* such as attention", meta_backbone, "deit_t", **options)
    message = f"class_token{gives} blind .* a channel mixer"
    refuses(message, meta_backbone, "deit_t_blind", class_token=True)


def recorders(backbone):
    return [f"{name}." for name, m in backbone.named_modules() if isinstance(m, Recorder)]


@pytest.mark.parametrize(
    "host", rest_slow(TOKEN_SLOTS, ("deit_t", "gmlp_ti", "swin_t", "poolformer_s12"))
)
def test_weights_load_around_a_swapped_token_mixer(recorder, host):
    plain = create_backbone(host).state_dict()
    # gMLP would have a norm in its stem that its own weights do not have.
    options = {"stem_norm": False} if host.startswith("gmlp") else {}
    for convert in (dict, AUTHORS.get(host, dict)):
        backbone = create_backbone(host, token_mixer="recorder", **options)
        report = load(backbone, convert(plain), "plain")
        expected = {f"{prefix}weight" for prefix in recorders(backbone)}
        assert expected
        assert expected <= set(report.initialised)
        assert all(key.startswith(tuple(backbone.mixers())) for key in report.initialised)
        replaced = (*backbone.mixers(), *backbone.classification_keys)
        assert all(key.startswith(replaced) for key in report.skipped)


@pytest.mark.parametrize("token_mixer", rest_slow(list_mixers("token"), list_mixers("token")[::6]))
@pytest.mark.parametrize("host", rest_slow(["swin_t_glu", "poolformer_s12"], ["swin_t_glu"]))
@torch.no_grad()
def test_token_mixers_fit_beside_any_channel_mixer_at_any_size(host, token_mixer):
    backbone, plain = (
        build_short(host, token_mixer=mixer, dense=True, img_size=(96, 64)).eval()
        for mixer in (token_mixer, None)
    )
    swapped = {f"{name}." for name in backbone.token_mixers()}
    assert swapped
    assert swapped <= backbone.mixers().keys()
    assert swapped.isdisjoint(plain.mixers())
    for size in [(96, 64), (75, 110)]:
        x = images(*size).float()
        assert [m.shape for m in backbone(x)] == [m.shape for m in plain(x)]


def test_token_mixers_follow_the_stage_and_their_options():
    units = meta_backbone("swin_t_glu", token_mixer="ggqpe", dense=True).mixers().values()
    windows = [m.gate.relation.window for m in units if hasattr(m, "gate")]
    assert windows == [14] * 10 + [7] * 2
    stars = meta_backbone("swin_t", token_mixer={"name": "sbm", "rank": 8}, img_size=(96, 64))
    grids = [mixer.bilinear.grid for mixer in stars.mixers().values()]
    assert grids[:2] + grids[-2:] == [(24, 16)] * 2 + [(3, 2)] * 2
    options = {"name": "ffnified", "kernel_size": 9, "branches": "strips"}
    mixers = meta_backbone("swin_t", token_mixer=options).mixers().values()
    assert ["1x9" in mixer.memory.key.branches for mixer in mixers] == [True] * 12
    units = meta_backbone("posmlp_t", token_mixer={"name": "glrpe", "structure": "add"}).mixers()
    assert [mixer.gate.structure for mixer in units.values()] == ["add"] * 24
