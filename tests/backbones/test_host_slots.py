"""What a mixer in a slot is given: maps, class tokens, grids, memory; and loading around it."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from backbones import Mixer, create_backbone, register_mixer
from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import in_memory
from backbones.layers.axes import mix_nchw, mix_tokens
from tests.families import TOKEN_SLOTS, rest_slow
from tests.references.names import AUTHORS


class Recorder(Mixer):
    """Remembers what it was given."""

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
)
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


def test_mixers_see_the_class_token_apart(recorder):
    backbone = create_backbone("deit_t_recorded", token_mixer={"name": "recorder"})
    backbone(torch.zeros(2, 3, 64, 96))
    assert recorder == [(2, 4, 6, 192), (2, 1, 192)] * 24


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
        report = adopt(backbone, in_memory(convert(plain), "plain"))
        expected = {f"{prefix}weight" for prefix in recorders(backbone)}
        assert expected
        assert expected <= set(report.initialised)
        assert all(key.startswith(tuple(backbone.mixers())) for key in report.initialised)
        replaced = (*backbone.mixers(), *backbone.classification_keys)
        assert all(key.startswith(replaced) for key in report.skipped)


def test_tokens_reach_a_mixer_in_row_major_order():
    mixer = Recorder(2)
    tokens = torch.arange(14.0).reshape(1, 7, 2)
    mixed = mix_tokens(mixer, tokens, grid=(2, 3), num_prefix_tokens=1)
    assert torch.equal(mixed, tokens)

    class Shift(Recorder):
        def mix(self, x):
            return x.roll(1, dims=2)

    mixed = mix_tokens(Shift(2), tokens, grid=(2, 3), num_prefix_tokens=1)
    assert mixed[0, :, 0].tolist() == [0, 6, 2, 4, 12, 8, 10]


def test_channels_last_maps_reach_a_mixer_without_copies():
    class Address(Mixer):
        def mix(self, x):
            assert x.is_contiguous()
            self.pointer = x.data_ptr()
            return x

    x = torch.randn(2, 8, 4, 6).contiguous(memory_format=torch.channels_last)
    mixer = Address()
    mixed = mix_nchw(mixer, x)
    assert mixer.pointer == mixed.data_ptr() == x.data_ptr()
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    backbone = create_backbone("poolformer_s12_glu")
    inputs = []
    for module in backbone.modules():
        if isinstance(module, Mixer):
            module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    backbone(torch.randn(1, 3, 64, 64))
    assert len(inputs) == 12
    assert all(x.is_contiguous() for x in inputs)
