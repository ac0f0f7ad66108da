"""Every host classifies images of 32 pixels with smaller patches, and only then."""

import math

import pytest
import torch

from backbones import create_backbone
from backbones.factory import small_patch_sizes
from backbones.registry import find_host
from heads.linear import LinearClassifier
from tests.families import HOSTS, SMALLEST, rest_slow_pairs, shorten
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


# Of every way in which a stem is made for small images one.
@pytest.mark.parametrize(
    ("name", "patch_size"),
    [("deit_t_afbo", 4), ("resnet18", 1)]
    + [
        pytest.param(name, patch_size, marks=pytest.mark.slow)
        for name, patch_size in (
            ("mixer_s16", 8), ("convnext_t", 2), ("swin_t", 1), ("poolformer_s12_glu", 2),
            ("lvt_r1", 1),
        )
    ],
)  # fmt: skip
def test_a_small_network_learns_and_its_weights_load(name, patch_size):
    def build():
        torch.manual_seed(0)
        options = {"img_size": 32, "patch_size": patch_size}
        return LinearClassifier(shorten(create_backbone(name, **options)), 3)

    model, x, labels = build().eval(), images(32, 32, batch=3).float(), torch.arange(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-5)
    losses = []
    for _ in range(3):
        logits = model(x)
        assert logits.shape == (3, 3)
        losses.append(torch.nn.functional.cross_entropy(logits, labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    again = build().eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_overlapping_kernels_keep_their_weights_and_see_more_places():
    """The positions of the published stem are every fourth of the finest one."""
    torch.manual_seed(0)
    usual = create_backbone("pvt_v2_b1").eval()
    fine = create_backbone("pvt_v2_b1", img_size=32, patch_size=1).eval()
    fine.load_state_dict(usual.state_dict())
    x = images(64, 96).float()
    with torch.no_grad():
        torch.testing.assert_close(fine.patch_embed(x)[:, ::4, ::4], usual.patch_embed(x))


def test_resnet18_for_cifar_is_the_usual_one():
    """11.17 M parameters without classifier, a 3x3 convolution and no pooling, as in the field."""
    with torch.device("meta"):
        backbone = create_backbone("resnet18", img_size=32, patch_size=1)
    assert sum(p.numel() for p in backbone.parameters()) == 11_168_832
    assert (backbone.conv1.kernel_size, backbone.conv1.stride) == ((3, 3), (1, 1))
    assert isinstance(backbone.maxpool, torch.nn.Identity)


def test_weights_of_other_patches_are_refused(tmp_path):
    path = tmp_path / "deit.pth"
    torch.save(create_backbone("deit_t").state_dict(), path)
    with pytest.raises(ValueError, match=r"patch_embed\.proj\.weight"):
        create_backbone("deit_t", patch_size=8, pretrained=path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deit_t", {"img_size": 32}, "at least 64 .* deit_t takes 32 and more with patch_size=4"),
        ("swin_t", {"img_size": 32}, "at least 64 .* swin_t takes 32 and more with patch_size=2"),
        ("swin_t", {"img_size": 31, "patch_size": 1}, "at least 32 in both directions"),
        ("swin_t", {"patch_size": 3}, "patch_size of swin_t must be 4 or, .*, 2, 1; got 3"),
        ("deit_t", {"patch_size": 1}, "patch_size of deit_t must be 16 or, .*, 8, 4, 2; got 1"),
        ("swin_t", {"patch_size": 2, "dense": True}, "detectors and segmentors read maps at"),
        ("swin_t", {"patch_size": 2, "pretrained": True}, "weights of swin_t are for patch_size=4"),
    ],
)
def test_what_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        create_backbone(name, **options)
