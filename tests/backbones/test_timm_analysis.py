"""Analyses of models of timm: attention, maps and coefficients lie where the pixels lie."""

import functools

import pytest
import torch

from backbones import create_backbone
from backbones.analysis.attention import record_attention
from backbones.analysis.capturing import block_maps, coefficients
from backbones.analysis.mappings import channel_mappings
from tests.errors import refuses


def first_map(measure, backbone, images):
    return next(iter(measure(backbone, images).values()))


def changed(backbone, measure, top: int, left: int, side: int):
    """Return two measurements, the second after pixels have changed."""
    images = torch.randn(1, 3, *backbone.img_size, generator=torch.Generator().manual_seed(1))
    before = measure(images)
    images[:, :, top : top + side, left : left + side] *= -3
    return before, measure(images)


@pytest.mark.parametrize(
    ("model", "layer", "stride", "window", "step"),
    [
        ("hiera_tiny_224", 0, 4, 8, 1),  # units of 8 x 8 tokens in an order of their own
        ("nest_tiny", 0, 4, 14, 1),  # blocks of 14 x 14 tokens on an axis of their own
        ("mobilevit_xxs", 0, 8, 16, 2),  # one window for each place in patches of 2 x 2
        ("test_maxvit", 1, 4, 5, 8),  # a grid of 5 x 5 tokens, 8 apart
        ("swin_tiny_patch4_window7_224", 0, 4, 7, 1),
    ],
)
def test_attention_lies_where_the_pixels_lie(model, layer, stride, window, step):
    torch.manual_seed(0)
    backbone = create_backbone("timm", model=model).eval()

    def measure(images):
        return list(record_attention(backbone, images).values())[layer]

    row, column = 3, 12  # of the map
    before, after = changed(backbone, measure, row * stride, column * stride, stride)
    assert before.query_size == (window, window)
    assert (before.step, before.stride) == (step, stride)
    change = (after.weights - before.weights)[0].abs().amax(1).mean(-1)  # (V, N)
    query = int(change.amax(0).argmax())
    inside = (row // step, column // step) if step > 1 else (row % window, column % window)
    found = divmod(query, window)
    assert max(abs(a - b) for a, b in zip(found, inside, strict=True)) <= 1  # by convolutions


def test_attention_between_channels_is_left_out_and_prefix_tokens_are_those_of_the_block():
    channels = create_backbone("timm", model="davit_tiny").eval()
    found = record_attention(channels, torch.randn(1, 3, *channels.img_size))
    assert len(found) == 6  # every other of 12
    assert not any("channel" in name for name in found)
    late = create_backbone("timm", model="cait_xxs24_224", token_mixer=None).eval()
    found = record_attention(late, torch.randn(1, 3, 224, 224))  # the class token comes later
    assert {one.num_prefix_tokens for one in found.values()} == {0}


@pytest.mark.parametrize(
    ("model", "side"), [("nest_tiny", 56), ("mobilevitv2_050", 32), ("efficientformer_l1", 56)]
)
def test_maps_and_coefficients_change_where_the_pixels_change(model, side):
    torch.manual_seed(0)
    backbone = create_backbone("timm", model=model, token_mixer={"name": "identity"}).eval()
    stride = backbone.img_size[0] // side
    for measure in (block_maps, coefficients):
        first = functools.partial(first_map, measure, backbone)
        before, after = changed(backbone, first, 64, 96, 32)
        assert before.shape[2:] == (side, side)
        change = (after - before)[0].abs().amax(0)
        places = (change > 0.1 * change.max()).nonzero().double().mean(0) * stride
        assert (places - torch.tensor([80.0, 112.0])).abs().max() < 2 * stride


def test_every_feed_forward_network_has_coefficients_and_mappings():
    for model, count in (("levit_128s", 11), ("fasternet_t0", 13)):  # without fc1 and fc2
        backbone = create_backbone("timm", model=model).eval()
        found = coefficients(backbone, torch.randn(1, 3, *backbone.img_size))
        assert len(found) == len(channel_mappings(backbone)) == count


def test_blocks_may_return_more_than_their_map():
    backbone = create_backbone("timm", model="efficientvim_m1").eval()
    maps = block_maps(backbone, torch.randn(1, 3, 224, 224))
    assert {one.shape[2] for one in maps.values()} <= {14, 7, 4}
    branches = create_backbone("timm", model="crossvit_tiny_240").eval()
    refuses("is not a known order", block_maps, branches, torch.randn(1, 3, 240, 240))
