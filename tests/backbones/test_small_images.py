"""Every host classifies images of 32 pixels with smaller patches, and only then."""

import math

import pytest
import torch

from backbones import create_backbone
from backbones.factory import small_patch_sizes
from backbones.registry import find_host
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import HOSTS, SMALLEST, meta_backbone, rest_slow_pairs, shorten
from tests.tensors import images

PATCHES = [(name, size) for name in HOSTS for size in small_patch_sizes(find_host(name))]
# Of each host that is the first of its file one patch size, the sizes by turns.
TURNS = [
    (name, sizes[index % len(sizes)])
    for index, name in enumerate(SMALLEST)
    if (sizes := small_patch_sizes(find_host(name)))
]


@pytest.mark.parametrize(("name", "patch_size"), rest_slow_pairs(PATCHES, TURNS))
def test_every_host_takes_small_images_with_each_patch_size(name, patch_size):
    with torch.device("meta"), torch.no_grad():
        backbone = shorten(create_backbone(name, img_size=32, patch_size=patch_size))
        strides = [patch_size * 2**level for level in range(len(backbone.feature_info))]
        assert [info.stride for info in backbone.feature_info] == strides
        for height, width in ((32, 32), (33, 47)):
            maps = backbone(torch.empty(2, 3, height, width))
            sizes = [(math.ceil(height / s), math.ceil(width / s)) for s in strides]
            assert [tuple(x.shape[2:]) for x in maps] == sizes


STEMS = [
    ("deit_t_afbo", 4), ("resnet18", 1), ("mixer_s16", 8), ("convnext_t", 2), ("swin_t", 1),
    ("poolformer_s12_glu", 2), ("lvt_r1", 1),
]  # fmt: skip


# Of every way in which a stem is made for small images one.
@pytest.mark.parametrize(("name", "patch_size"), rest_slow_pairs(STEMS, STEMS[:2]))
def test_a_small_network_learns_and_its_weights_load(name, patch_size):
    def build():
        torch.manual_seed(0)
        options = {"img_size": 32, "patch_size": patch_size}
        return LinearClassifier(shorten(create_backbone(name, **options)), 3)

    model, x, labels, losses = build().eval(), images(32, 32, batch=3).float(), torch.arange(3), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-5)
    for _ in range(3):
        losses.append(torch.nn.functional.cross_entropy(model(x), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    again = build().eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_stems_for_small_images_and_their_weights(tmp_path):
    """The positions of the published stem are every fourth of the finest one."""
    torch.manual_seed(0)
    usual = create_backbone("pvt_v2_b1").eval()
    fine = create_backbone("pvt_v2_b1", img_size=32, patch_size=1).eval()
    fine.load_state_dict(usual.state_dict())
    x = images(64, 96).float()
    with torch.no_grad():
        torch.testing.assert_close(fine.patch_embed(x)[:, ::4, ::4], usual.patch_embed(x))
    # 11.17 M parameters without classifier, a 3x3 convolution and no pooling, as in the field.
    backbone = meta_backbone("resnet18", img_size=32, patch_size=1)
    assert sum(p.numel() for p in backbone.parameters()) == 11_168_832
    assert (backbone.conv1.kernel_size, backbone.conv1.stride) == ((3, 3), (1, 1))
    assert isinstance(backbone.maxpool, torch.nn.Identity)
    path = tmp_path / "deit.pth"
    torch.save(create_backbone("deit_t").state_dict(), path)
    refuses(r"patch_embed\.proj\.weight", create_backbone, "deit_t", patch_size=8, pretrained=path)
