"""Dilation and pooling of ResNets against timm's networks, and their refusals."""

import pytest
import timm
import torch

from backbones import create_backbone

IMAGES = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize(
    ("stride", "pool", "strides"),
    [(8, "max", [4, 8, 8, 8]), (16, "avgmax", [4, 8, 16, 16]), (32, "avg", [4, 8, 16, 32])],
)
def test_a_resnet_with_dilation_and_pooling_is_timms(name, stride, pool, strides):
    torch.manual_seed(0)
    ours = create_backbone(name, img_size=64, output_stride=stride, global_pool=pool).eval()
    theirs = timm.create_model(name, num_classes=0, output_stride=stride, global_pool=pool).eval()
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours.embed(IMAGES), theirs(IMAGES), atol=1e-5, rtol=1e-5)
    assert [info.stride for info in ours.feature_info] == strides
    assert ours.size_divisor == stride


def test_a_model_of_timm_takes_both_options():
    options = {"output_stride": 16, "global_pool": "max"}
    backbone = create_backbone("timm", model="resnet18", img_size=64, options=options)
    assert backbone.feature_info[-1].stride == 16
    assert backbone.pooling == "max"
    with pytest.raises(ValueError, match=r"timm refuses vit_tiny_patch16_224 with .*output_stride"):
        create_backbone("timm", model="vit_tiny_patch16_224", options={"output_stride": 8})


def test_segmentors_take_dilated_maps_and_detectors_refuse_them():
    from heads.toolkits.detectors import build_detector
    from heads.toolkits.segmentors import build_segmentor

    backbone = create_backbone("resnet18", img_size=64, dense=True, output_stride=8)
    model = build_segmentor(backbone, 3, base="pspnet_r50-d8", group_norm=True).eval()
    assert model.model.encode_decode(IMAGES, [{"img_shape": (64, 96)}]).shape == (2, 3, 64, 96)
    with pytest.raises(ValueError, match=r"got \(4, 8, 8, 8\): .*without backbone.output_stride"):
        build_detector(backbone, 3, name="retinanet")
