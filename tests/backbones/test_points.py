"""Hosts of point clouds: submanifold convolutions, FFNet_3D against plain references, counts."""

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone, create_mixer
from backbones.analysis.counting import count_macs, count_parameters
from backbones.fast import FastModule, fast
from backbones.hosts.ffnet_3d.host import FFNet3D
from backbones.hosts.scaffolds.point_mixers import VoxelKernel, fit_to_voxels, mix_voxels
from backbones.hosts.scaffolds.points import flat_square
from backbones.layers.sparse import SubmanifoldConv3d, VoxelLevel
from backbones.slots import HostConfig
from heads.point_segmentation import PointSegmenter
from tests.errors import refuses
from tests.references import points as plain
from tests.steps import assert_a_step_lowers_the_loss
from tools.papers.published import load_rows

SMALL = {"depths": (1, 1), "dims": (4, 6), "decoder_depths": (1,), "decoder_dims": (5,),
         "kernel_size": 3, "act": "gelu", "channels": 3}  # fmt: skip


def voxels(count=60, side=5, batch=2):
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, side, (count, 3), generator=generator)
    return torch.cat([torch.arange(count)[:, None] % batch, places], dim=1)


def randomised(module):
    """Every tensor drawn at random, so that no part is zero or the identity."""
    generator = torch.Generator().manual_seed(1)
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            value.copy_(0.5 * torch.rand(value.shape, generator=generator, dtype=value.dtype))
            if "weight" in name:
                value.sub_(0.2)
            if "running_var" in name:
                value.add_(0.5)
    return module


@pytest.mark.parametrize(("side", "groups"), [(3, 1), (5, 1), (3, 4)])
def test_it_equals_a_masked_dense_convolution(side, groups):
    level = VoxelLevel(voxels())
    conv = SubmanifoldConv3d(4, 4, side, groups=groups).double()
    x = torch.randn(len(level), 4, dtype=torch.double, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    weight = conv.weight.detach().clone().requires_grad_()
    at = tuple(level.coords.T)
    dense = torch.zeros(2, 5, 5, 5, 4, dtype=torch.double).index_put(at, other)
    dense = F.conv3d(
        dense.movedim(4, 1), weight.movedim(4, 1), conv.bias.detach(), padding=side // 2,
        groups=groups,
    )  # fmt: skip
    wanted, found = dense.movedim(1, 4)[at], conv(x, level)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    weights = torch.randn_like(wanted)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=1e-12)
    torch.testing.assert_close(conv.weight.grad, weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", [3, 5])
def test_it_computes_in_the_type_of_autocast_and_sums_in_float32(side):
    level = VoxelLevel(voxels())
    conv = SubmanifoldConv3d(8, 8, side)
    with torch.no_grad():  # numbers that bfloat16 has, so that products alone are rounded
        conv.weight.copy_(conv.weight.bfloat16())
    x = torch.randn(len(level), 8).bfloat16().float().requires_grad_()
    wanted = conv(x, level)
    wanted.square().sum().backward()
    full = x.grad, conv.weight.grad
    x.grad = conv.weight.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        found = conv(x, level)
    found.float().square().sum().backward()
    torch.testing.assert_close(found.float(), wanted, rtol=0.01, atol=0.01)
    for one, other in zip((x.grad, conv.weight.grad), full, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.01 * other.norm()


@pytest.mark.parametrize("side", [3, 5])
def test_spconv_computes_the_same_from_the_same_weights(side):
    pytest.importorskip("spconv")
    conv = fast(SubmanifoldConv3d(4, 6, side))
    assert isinstance(conv, FastModule)
    level = VoxelLevel(voxels())
    x = torch.randn(len(level), 4)
    with torch.no_grad():
        wanted, found = conv(x, level), conv.compute(x, level)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(conv.compute(2 * x, level) - conv.bias, 2 * (wanted - conv.bias))
    assert list(level.spconv.indice_dict) == [f"side {side}"]


def test_the_network_equals_a_plain_one_with_gradients():
    host = randomised(FFNet3D(HostConfig((1, 1)), **SMALL).double().eval())
    level = VoxelLevel(voxels(30, 4))
    x = torch.randn(len(level), 3, dtype=torch.double, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    weights = {
        name: value.detach().clone().requires_grad_(value.is_floating_point())
        for name, value in host.state_dict().items()
    }
    places = [tuple(row) for row in level.coords.tolist()]
    wanted = plain.encode(places, other, weights, SMALL["depths"], SMALL["decoder_depths"])
    found = host.encode(x, level)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    by = torch.randn_like(wanted)
    (found * by).sum().backward()
    (wanted * by).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-8, atol=1e-8)
    for name, parameter in host.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-7, atol=1e-7, msg=name
        )


def test_clouds_are_independent_and_their_order_is_free():
    host = randomised(create_backbone("ffnet_3d_tiny", channels=3, fast=False).double().eval())
    cloud = torch.cat([8 * torch.rand(50, 3), torch.randn(50, 3)], dim=1).double()
    order = torch.randperm(50)
    other = torch.full((60, 6), float("nan"), dtype=torch.double)
    other[:50] = cloud[order]
    other[:50, :3] += torch.tensor([16.0, -32.0, 64.0])  # by whole cells of the coarsest level
    full = torch.cat([10 * torch.rand(60, 3), torch.randn(60, 3)], dim=1).double()
    (alone,) = host(cloud[None])
    (both,) = host(torch.stack([other, full]))
    torch.testing.assert_close(both[0, :, :50], alone[0][:, order])
    assert (both[0, :, 50:] == 0).all()
    torch.testing.assert_close(host.embed(cloud[None]), alone.mean(2))


def test_counts():
    with torch.device("meta"):
        host = create_backbone("ffnet_3d")
        assert count_parameters(PointSegmenter(host, 20, 0.02)) == 103_212_436
        assert count_parameters(host) == 103_211_136
        text = create_backbone("ffnet_3d", form="paper")
    assert [len(stage.blocks) for stage in text.stages] == [0, 2, 2, 6, 2, 1, 1, 1, 1]
    assert flat_square(1, 9)[:, 1:3].tolist() == [[i, j] for i in range(3) for j in range(3)]
    conv = SubmanifoldConv3d(2, 3, 3)

    def on_a_square(x):
        return conv.to("meta")(x[0], VoxelLevel(flat_square(1, 9), x.device))

    pairs = 9 + 2 * (6 + 6 + 4 + 4)  # itself, and the neighbours in a square of 3 x 3
    assert count_macs(on_a_square, shape=(9, 2)) == pairs * 2 * 3
    conv = SubmanifoldConv3d(2, 2, 3, groups=2)
    assert count_macs(on_a_square, shape=(9, 2)) == pairs * 2


FITTING = [
    {"mixer": "glu"}, {"mixer": "mix_ffn"}, {"mixer": "afbo"}, {"mixer": "scheme_44"},
    {"token_mixer": "sep_conv"}, {"token_mixer": "xca"},
]  # fmt: skip


@pytest.mark.parametrize("options", FITTING, ids=lambda options: next(iter(options.values())))
def test_mixers_read_voxels_and_their_neighbours_alone(options):
    host = create_backbone("ffnet_3d_tiny", channels=3, drop_path_rate=0.1, **options).eval()
    plain_form = create_backbone("ffnet_3d_tiny", channels=3, fast=False, **options).eval()
    plain_form.load_state_dict(host.state_dict())
    clouds = torch.cat([9 * torch.rand(2, 150, 3), torch.randn(2, 150, 3)], dim=2)
    clouds[1, 100:] = float("nan")
    order = torch.randperm(100)
    (found,), (alone,) = host(clouds), host(clouds[1:, order])
    torch.testing.assert_close(found[1:][..., order], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain_form(clouds)[0], found, rtol=1e-4, atol=1e-5)
    host.train()(clouds)[0].square().mean().backward()
    assert all(p.grad is not None for p in host.parameters())


def test_kernels_of_mixers_become_submanifold_kernels():
    torch.manual_seed(0)
    mixer = create_mixer("mix_ffn", 4, hidden_ratio=2.0)
    before = mixer.dwconv
    fit_to_voxels(mixer, 4, check=True)
    mixer.double()
    assert isinstance(mixer.dwconv, VoxelKernel)
    weight, bias = mixer.dwconv.weight, mixer.dwconv.bias
    assert weight.shape == (8, 3, 3, 3, 1)
    torch.testing.assert_close(weight[:, 1, 1, 1, 0].float(), before.weight[:, 0, 1, 1])
    level = VoxelLevel(voxels())
    x = torch.randn(len(level), 4, dtype=torch.double)
    hidden = x @ mixer.fc1.weight.flatten(1).T + mixer.fc1.bias
    dense = torch.zeros(2, 5, 5, 5, 8, dtype=torch.double)
    at = tuple(level.coords.T)
    dense[at] = hidden
    dense = F.conv3d(dense.movedim(4, 1), weight.movedim(4, 1), bias, padding=1, groups=8)
    hidden = F.gelu(dense.movedim(1, 4)[at])
    wanted = hidden @ mixer.fc2.weight.flatten(1).T + mixer.fc2.bias
    torch.testing.assert_close(mix_voxels(mixer, x, level), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mixer": "convnext_v2"}, "not serve ffnet_3d_tiny, because its norm reads all tokens"),
     ({"mixer": "rwkv_channel_mix"}, "because it shifts channels from four sides of a map"),
     ({"token_mixer": "ss2d"}, "reads more voxels than neighbours, or their order"),
     ({"token_mixer": "pooling"}, r"has a NeighbourMean of 3 \(pool\) without a form on voxels")],
    ids=["convnext_v2", "rwkv_channel_mix", "ss2d", "pooling"],
)  # fmt: skip
def test_mixers_of_whole_maps_are_refused(options, message):
    torch.manual_seed(1)  # with which ss2d depends on far voxels but little
    refuses(message, create_backbone, "ffnet_3d_tiny", **options)


@pytest.mark.slow
def test_the_full_host_takes_a_training_step():
    torch.manual_seed(0)
    model = PointSegmenter(create_backbone("ffnet_3d"), 20, 0.02).train()
    places = torch.rand(2, 1500, 3) * torch.tensor([2.0, 2.0, 0.05])
    points = torch.cat([places, torch.randn(2, 1500, 6)], dim=2)
    batch = {"points": points, "labels": torch.randint(0, 20, (2, 1500))}
    assert_a_step_lowers_the_loss(model, batch)


@pytest.mark.parametrize("row", load_rows("ffnet", "point_segmentation"), ids=lambda row: row.name)
def test_published_rows(row):
    classes = {"scannet": 20, "scannet200": 200, "s3dis": 13}[row.train.data]
    with torch.device("meta"):
        host = create_backbone(row.backbone, **row.options)
        assert count_parameters(PointSegmenter(host, classes, 0.02)) == row.params
