"""What is measured inside networks, against plain references and on every host."""

import functools
import itertools
import math

import pytest
import torch
from timm.layers import Mlp
from torch import nn

from backbones import create_backbone
from backbones.analysis.capturing import block_maps, choose_blocks, coefficients, value_layer
from backbones.analysis.class_activation import METHODS, class_activation
from backbones.analysis.entropy import feature_entropy, map_entropy
from backbones.analysis.learnt_activations import learnt_activations
from backbones.analysis.receptive_field import contributions, high_contribution, receptive_field
from backbones.base import Backbone, FeatureInfo
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import SMALLEST, rest_slow, short, shorten
from tests.tensors import images, tokens

SIZE = (64, 96)
# One of each layout of blocks, of a class token, of halves and of a network without slots.
QUICK = ("deit_t", "poolformer_s12", "swin_t_afbo")
SWAPPED = ("deit_t_iffn", "swin_t_afbo", "ffnet_1_glu", "poolformer_s12_scheme_12")


@functools.cache
def network(name):
    return short(name).double().eval().requires_grad_(False)


class Convolutions(Backbone):
    """Blocks that are 3x3 convolutions without padding of another size: every step is known."""

    def __init__(self, depth=2, width=4):
        super().__init__()
        self.name = "convolutions"
        widths = [3] + [width] * depth
        self.blocks = nn.Sequential(
            *(
                nn.Conv2d(before, after, 3, padding=1)
                for before, after in itertools.pairwise(widths)
            )
        )
        self.feature_info, self.num_features = (FeatureInfo(width, 1),), width
        self.block_layout = "nchw"

    def forward(self, images):
        return (self.blocks(images),)

    def embed(self, images):
        return self.blocks(images).mean((2, 3))


@pytest.mark.parametrize("name", rest_slow([*SMALLEST, *SWAPPED], QUICK))
def test_blocks_give_maps_and_coefficients_on_every_host(name):
    backbone = network(name)
    maps = block_maps(backbone, images(*SIZE, batch=2))
    assert list(maps) == list(backbone.block_names())
    layers = [backbone.layer_id(f"{block}.norm.weight") for block in maps]
    assert layers == list(range(1, len(layers) + 1))
    height, width = SIZE
    for map_ in maps.values():
        stride = height / map_.shape[2]
        assert map_.shape[0] == 2
        assert map_.shape[3] == width / stride
        assert math.log2(stride) % 1 == 0
    last = backbone(images(*SIZE, batch=2))[-1]
    assert list(maps.values())[-1].shape == last.shape
    backbone = network(name)
    found = coefficients(backbone, images(*SIZE))
    mixers = {n: m for n, m in backbone.channel_mixers().items() if value_layer(m)}
    assert set(mixers) <= set(found)
    assert all(found[n].shape[1] > 1 and found[n].shape[0] == 1 for n in mixers)
    assert all(not parameter.requires_grad for parameter in backbone.parameters())


def test_blocks_have_names_numbers_and_coefficients():
    backbone = network("swin_t")
    names = backbone.block_names()
    assert choose_blocks(backbone, ["1", "-1", names[2]]) == (names[0], names[-1], names[2])
    for wrong, text in (
        ("0", "blocks 1 to 8"),
        ("9", "blocks 1 to 8"),
        ("layers.0", r"layers\.3\.blocks\.0"),
    ):
        refuses(text, choose_blocks, backbone, [wrong])
    backbone = network("deit_t")
    name = "blocks.1.mlp"
    mlp = backbone.get_submodule(name)
    assert isinstance(mlp, Mlp)
    kept = []
    handle = mlp.register_forward_hook(lambda module, inputs, output: kept.append(inputs[0]))
    found = coefficients(backbone, images(*SIZE), [name])[name]
    handle.remove()
    expected = nn.functional.gelu(nn.functional.linear(kept[0], mlp.fc1.weight, mlp.fc1.bias))
    expected = expected[:, 1:].transpose(1, 2).unflatten(2, (4, 6))  # without the class token
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="lacks coefficients"):
        coefficients(network("poolformer_s12"), images(*SIZE), ["stages.0.blocks.0.token_mixer"])


def test_entropy_by_a_plain_histogram_and_of_blocks():
    uniform = torch.arange(256.0)[None].repeat(1, 4)
    assert map_entropy(uniform).item() == pytest.approx(8)
    assert map_entropy(torch.full((2, 9), 3.0)).tolist() == [0, 0]
    assert map_entropy(torch.tensor([[0.0, 0, 0, 1]])).item() == pytest.approx(0.8112781)
    x = tokens(3, 5, 7)
    for found, one in zip(map_entropy(x, bins=16), x, strict=True):
        shares = torch.histc(one, 16) / one.numel()
        shares = shares[shares > 0]
        assert found.item() == pytest.approx(-(shares * shares.log2()).sum().item())
    refuses("NaN", map_entropy, torch.full((1, 2), math.nan))
    backbone = network("poolformer_s12")
    found = feature_entropy(backbone, images(*SIZE, batch=2), ["-1"])
    (map_,) = block_maps(backbone, images(*SIZE, batch=2), ["-1"]).values()
    assert torch.equal(next(iter(found.values())), map_entropy(map_))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_receptive_field_of_convolutions_is_known(depth):
    torch.manual_seed(0)
    backbone = Convolutions(depth).double().eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.abs_()
    field = receptive_field(backbone, [images(21, 31).abs(), images(21, 31).abs()])
    seen = (field > 0).nonzero()
    middle = torch.tensor([10, 15])
    assert torch.equal(seen.min(0).values, middle - depth)
    assert torch.equal(seen.max(0).values, middle + depth)
    assert len(seen) == (2 * depth + 1) ** 2
    assert high_contribution(field, [0.999])[0].side == 2 * max(depth, 1) + 1


def test_shares_and_directions_of_contributions():
    torch.manual_seed(0)
    backbone = Convolutions().double().eval()
    x = images(9, 9).requires_grad_()
    middle = backbone(x)[0][0, :, 4, 4]
    (gradient,) = torch.autograd.grad(middle.relu().sum(), x)
    torch.testing.assert_close(contributions(backbone, x)[0], gradient[0].relu().sum(0))
    found = high_contribution(torch.ones(41, 41))
    for one in found[:3]:
        area = math.isqrt(math.ceil(one.threshold * 41 * 41))
        side = next(s for s in range(3, 41, 2) if s * s / 41**2 > one.threshold)
        assert one.side == side
        assert one.ratio == pytest.approx((side / 41) ** 2)
        assert side >= area
    assert (found[3].side, found[3].ratio) == (None, None)  # the whole image is never tried
    # 9 in the middle is log10(10) = 1, beside four pixels of 99, of log10(100) = 2.
    field = torch.zeros(11, 11)
    field[5, 5] = 9.0
    for row, column in ((2, 5), (8, 5), (5, 2), (5, 8)):
        field[row, column] = 99.0
    assert high_contribution(field, [0.1])[0].side == 3
    assert high_contribution(field, [0.12])[0].side == 7


@pytest.mark.parametrize("name", rest_slow([*SMALLEST, "swin_t_afbo"], QUICK))
def test_receptive_fields_and_class_maps_of_every_host(name):
    backbone = network(name)
    field = contributions(backbone, images(*SIZE, batch=2))
    assert field.shape == (2, *SIZE)
    assert field.isfinite().all()
    assert field.sum() > 0
    torch.manual_seed(0)
    model = LinearClassifier(backbone, 4).double().eval()
    for block in ("1", "-1"):
        found, classes = class_activation(model, backbone, images(*SIZE, batch=2), block=block)
        assert found.shape[0] == len(classes) == 2
        assert found.isfinite().all()
    other = class_activation(model, backbone, images(*SIZE, batch=2), (classes + 1) % 4)[0]
    assert not torch.equal(found, other)


def plain_class_activation(features, gradients, method):
    """One image at a time, from the papers' equations."""
    maps = []
    for a, g in zip(features, gradients, strict=True):
        total = torch.zeros_like(a[0])
        for channel, slope in zip(a, g, strict=True):
            if method == "gradcam":
                total = total + slope.mean() * channel
            elif method == "xgradcam":
                total = total + (slope * channel).sum() / channel.sum() * channel
            elif method == "hirescam":
                total = total + slope * channel
            elif method == "layercam":
                total = total + slope.clamp(min=0) * channel
            elif method == "gradcam++":
                alpha = slope**2 / (2 * slope**2 + channel.sum() * slope**3)
                total = total + (alpha * slope.clamp(min=0)).sum() * channel
        maps.append(total.clamp(min=0))
    return torch.stack(maps)


@pytest.mark.parametrize("method", [m for m in METHODS if m != "eigencam"])
def test_class_maps_by_plain_equations(method):
    torch.manual_seed(0)
    backbone = Convolutions(3).double().eval()
    head = nn.Linear(4, 5).double()
    x = images(12, 10, batch=2)

    def model(pictures):
        return head(backbone.embed(pictures).tanh())

    features = backbone.blocks[:2](x).requires_grad_()
    scores = head(backbone.blocks[2](features).mean((2, 3)).tanh())
    gradients = torch.autograd.grad(scores[:, 3].sum(), features)[0]
    found, _ = class_activation(model, backbone, x, torch.tensor([3, 3]), block="2", method=method)
    expected = plain_class_activation(features.detach(), gradients, method)
    torch.testing.assert_close(found, expected)
    assert found.sum() > 0


def test_learnt_activations_are_evaluated_channel_by_channel():
    backbone = shorten(create_backbone("deit_t_iffn")).double()
    points = torch.linspace(-3, 3, 13, dtype=torch.float64)
    found = learnt_activations(backbone, points)
    assert len(found) == 4  # two blocks of two branches
    for one in found.values():  # at the start all are GELU
        expected = nn.functional.gelu(points).expand_as(one.curves)
        torch.testing.assert_close(one.curves, expected)
        assert one.kind == "arb(gelu)"
        assert set(one.coefficients) == {"alpha", "beta", "gamma", "theta"}
    name = next(iter(found))
    arb = backbone.get_submodule(name)
    with torch.no_grad():
        arb.alpha[1], arb.beta[1], arb.gamma[1], arb.theta[1] = -2.0, 0.5, 0.3, 1.0
    changed = learnt_activations(backbone, points)[name].curves[1]
    torch.testing.assert_close(changed, 0.5 * nn.functional.gelu(-2 * points + 0.3) + 1)
    refuses("iffn or affn", learnt_activations, network("deit_t"), points)
