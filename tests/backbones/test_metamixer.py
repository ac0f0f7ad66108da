"""MetaMixer's instances against independent references, and what it refuses to combine."""

import copy

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.convnext import ConvNeXtBlock
from timm.models.metaformer import Pooling
from torch import nn

from backbones import create_mixer
from backbones.analysis.counting import count_parameters
from backbones.layers.reparam import BranchedConv, ConvBN, depthwise, fuse, is_fused
from backbones.mixers.metamixer.instances import (
    convnext_block,
    feed_forward,
    self_attention,
    spatial_mlp,
)
from tests.errors import refuses
from tests.references import ffnet as reference
from tests.tensors import build_mixer, randomise, tokens

SIZES = [(4, 6), (5, 3), (1, 7)]
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def assert_same_with_gradient(found, expected, x):
    x = x.clone().requires_grad_()
    left, right = found(x), expected(x)
    torch.testing.assert_close(left, right, **EXACT)
    (left_grad,) = torch.autograd.grad(left.sin().sum(), x)
    (right_grad,) = torch.autograd.grad(right.sin().sum(), x)
    torch.testing.assert_close(left_grad, right_grad, **EXACT)


def torch_attention(mixer, dim, num_heads):
    theirs = nn.MultiheadAttention(dim, num_heads, batch_first=True).double().eval()
    query, memory = mixer.query.proj, mixer.memory.proj
    theirs.in_proj_weight.data = torch.cat([query.weight.data, memory.weight.data])
    theirs.in_proj_bias.data = torch.cat([query.bias.data, memory.bias.data])
    theirs.out_proj.load_state_dict(mixer.leave.proj.state_dict())
    return theirs


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("dim", "num_heads"), [(12, 1), (12, 3), (20, 5)])
def test_self_attention_equals_torchs(dim, num_heads, size):
    mixer = randomise(self_attention(dim, num_heads))
    theirs = torch_attention(mixer, dim, num_heads)

    def expected(x):
        flat = x.flatten(1, 2)
        return theirs(flat, flat, flat, need_weights=False)[0].view(x.shape)

    x = tokens(2, *size, dim)
    assert_same_with_gradient(mixer, expected, x)
    coefficients, values = mixer.coefficients(x)
    flat = x.flatten(1, 2)
    weights = theirs(flat, flat, flat, average_attn_weights=False)[1]
    torch.testing.assert_close(coefficients, weights, **EXACT)
    assert values.shape == (2, num_heads, size[0] * size[1], dim // num_heads)


@pytest.mark.parametrize("num_heads", [1, 4])
def test_fused_attention_equals_the_open_path(num_heads):
    mixer = randomise(self_attention(12, num_heads))
    opened = copy.deepcopy(mixer)
    opened.fused = None
    assert_same_with_gradient(mixer, opened, tokens(2, 5, 7, 12))


@pytest.mark.parametrize(
    ("dim", "heads"), [(8, 1), (24, 1), (64, 2), (80, 2), (176, 4), (352, 11), (768, 24)]
)
def test_attention_has_heads_of_at_least_32_channels(dim, heads):
    mixer = create_mixer("attention", dim)
    assert mixer.memory.num_heads == mixer.query.num_heads == heads
    assert sum(p.numel() for p in mixer.parameters()) == 4 * dim * dim + 4 * dim


def mlp_with_weights(mixer, width, hidden):
    mlp = Mlp(width, hidden).double()
    mlp.fc1.load_state_dict(mixer.memory.key.state_dict())
    mlp.fc2.load_state_dict(mixer.memory.value.state_dict())
    return mlp


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_feed_forward_spatial_mlp_and_convnext_equal_timms(size):
    mixer = randomise(feed_forward(6, 15))
    theirs = mlp_with_weights(mixer, 6, 15)
    assert_same_with_gradient(mixer, theirs, tokens(2, *size, 6))
    x = tokens(2, *size, 6)
    torch.testing.assert_close(mixer.coefficients(x)[0], F.gelu(theirs.fc1(x)), **EXACT)
    mixer = randomise(spatial_mlp(size, 5))
    theirs = mlp_with_weights(mixer, size[0] * size[1], 5)

    def expected(x):
        return theirs(x.flatten(1, 2).mT).mT.view(x.shape)

    assert_same_with_gradient(mixer, expected, tokens(2, *size, 6))
    assert mixer.coefficients(tokens(2, *size, 6))[0].shape == (2, 6, 5)
    # Without its residual; the norm that stands in timm's query is in ours too.
    theirs = ConvNeXtBlock(6, mlp_ratio=3, ls_init_value=None, conv_mlp=True)
    theirs = randomise(theirs)
    query = nn.Sequential(theirs.conv_dw, theirs.norm)
    mixer = convnext_block(query, 6, 18).double()
    mixer.memory.key.load_state_dict(theirs.mlp.fc1.state_dict())
    mixer.memory.value.load_state_dict(theirs.mlp.fc2.state_dict())

    def expected(x):
        maps = x.permute(0, 3, 1, 2)
        return (theirs(maps) - maps).permute(0, 2, 3, 1)

    assert_same_with_gradient(mixer, expected, tokens(2, *size, 6))
    assert mixer.coefficients(tokens(2, *size, 6))[0].shape == (2, 18, *size)


def by_shifts(mixer, training=False):
    """FFNified attention written over the tensors of the mixer, kernel offset by kernel offset."""
    tensors = dict(mixer.named_parameters()) | dict(mixer.named_buffers())

    def conv_bn(x, name, operation):
        x = operation(x, tensors[f"{name}.conv.weight"])
        return reference.batch_norm(x, tensors, f"{name}.norm", training)

    def spatial(x, name):
        if f"{name}.weight" in tensors:
            return reference.depthwise(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        branches = {k.split(".")[3] for k in tensors if k.startswith(f"{name}.branches.")}
        return sum(conv_bn(x, f"{name}.branches.{b}", reference.depthwise) for b in branches)

    def run(x):
        query = conv_bn(x.permute(0, 3, 1, 2), "query", reference.conv)
        coefficients = reference.gelu(spatial(query, "memory.key"))
        return spatial(coefficients, "memory.value").permute(0, 2, 3, 1)

    return run


OPTIONS = [
    {}, {"kernel_size": 3}, {"kernel_size": 5}, {"kernel_size": 7, "branches": "none"},
    {"kernel_size": 9, "branches": "strips"}, {"kernel_size": 3, "branches": "strips"},
    {"kernel_size": 1},
]  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ffnified_equals_its_equation(options, size, training):
    mixer = randomise(create_mixer("ffnified", 6, **options)).train(training)
    expected = by_shifts(copy.deepcopy(mixer), training)
    assert_same_with_gradient(mixer, expected, tokens(3, *size, 6))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_ffnifieds_parameters(options):
    mixer = randomise(create_mixer("ffnified", 4, **options)).train()
    twin = copy.deepcopy(mixer)
    x = tokens(3, 5, 3, 4)
    mixer(x).sin().sum().backward()
    by_shifts(twin, training=True)(x).sin().sum().backward()
    ours, theirs = ({key: p.grad for key, p in m.named_parameters()} for m in (mixer, twin))
    torch.testing.assert_close(ours, theirs, **EXACT)


def test_branches_and_parameters_of_ffnified():
    for (size, branches), kernels in {
        (7, "small"): {"7x7", "3x3"},
        (5, "small"): {"5x5", "1x1"},
        (9, "strips"): {"9x9", "5x5", "1x9", "9x1"},
        (3, "strips"): {"3x3", "1x3", "3x1"},
    }.items():
        memory = create_mixer("ffnified", 4, kernel_size=size, branches=branches).memory
        assert set(memory.key.branches) == set(memory.value.branches) == kernels
    usual = create_mixer("ffnified", 4).memory
    assert set(usual.key.branches) == {"7x7", "3x3"}
    for size in (1, 3, 7):
        mixer = create_mixer("ffnified", 10, kernel_size=size, branches="none")
        assert count_parameters(mixer) == 10 * 10 + 2 * 10 + 2 * 10 * (size**2 + 1)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_pooling_equals_timms(kernel_size, size):
    mixer, theirs = create_mixer("pooling", 6, kernel_size=kernel_size), Pooling(kernel_size)

    def expected(x):
        return theirs(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    assert_same_with_gradient(mixer, expected, tokens(2, *size, 6))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@torch.no_grad()
def test_fused_mixer_is_the_same(options):
    mixer = randomise(create_mixer("ffnified", 6, **options))
    x = tokens(2, 5, 9, 6)
    expected = mixer(x)
    assert not is_fused(mixer)
    fuse(mixer)
    assert is_fused(mixer)
    torch.testing.assert_close(mixer(x), expected, **EXACT)
    assert all(isinstance(part, nn.Conv2d) for part in (mixer.query, mixer.memory.key))
    assert all(p.requires_grad and p.dtype == torch.float64 for p in mixer.parameters())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", SIZES, ids=str)
@torch.no_grad()
def test_branches_fold_at_any_stride(size, stride):
    branched = randomise(BranchedConv(3, 6, [(7, 7), (3, 3), (1, 7), (5, 1)], stride=stride))
    x = tokens(2, *size, 3).permute(0, 3, 1, 2)
    torch.testing.assert_close(branched.fuse()(x), branched(x), **EXACT)
    with torch.enable_grad():
        torch.testing.assert_close(branched(x), branched.fuse()(x), **EXACT)


def test_branches_and_depthwise_convolutions():
    with pytest.raises(ValueError, match=r"a branch of 1x9 cannot fold into .* which is 7x7"):
        BranchedConv(4, 4, [(7, 7), (1, 9)])
    assert isinstance(depthwise(4, 7), nn.Conv2d)
    assert isinstance(depthwise(4, 7, ()), ConvBN)
    assert isinstance(depthwise(4, 7, [(3, 3)]), BranchedConv)
    refuses(r"kernel_size must be odd .* got 4", depthwise, 4, 4)


@pytest.mark.parametrize("num_prefix", [1, 2])
def test_attention_mixes_class_tokens_as_tokens_of_the_map(num_prefix):
    mixer = build_mixer("attention", 12, num_heads=3)
    x, prefix = tokens(2, 2, 3, 12), tokens(2, num_prefix, 12, seed=2)
    mixed, mixed_prefix = mixer(x, prefix)
    joined = torch.cat([prefix, x.flatten(1, 2)], dim=1)
    expected = mixer(joined[:, None])[:, 0]  # a map of a single row
    exact = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(mixed_prefix, expected[:, :num_prefix], **exact)
    torch.testing.assert_close(mixed.flatten(1, 2), expected[:, num_prefix:], **exact)
