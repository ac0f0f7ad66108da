"""Toolkit heads: the backbone inside, losses, predictions, options."""

import functools
import importlib.util

import pytest
import torch

from backbones import create_backbone
from datamodules import SampleDetection, SampleSegmentation
from heads.toolkits.detectors import DETECTORS, build_detector
from heads.toolkits.segmentors import SEGMENTORS, build_segmentor
from tests.families import short

SMALLEST = "poolformer_s12_afbo"
ADAPTERS = (*DETECTORS, *SEGMENTORS)
NUM_CLASSES = {**dict.fromkeys(DETECTORS, 10), **dict.fromkeys(SEGMENTORS, 11)}
# Options for a small second stage; one-stage detectors ignore them.
SMALL_SECOND_STAGE = {"num_rois": 16, "num_proposals": 30}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def make_data(head, cache):
    """Return scenes of 64 pixels, resized to 96."""
    kind = SampleDetection if head in DETECTORS else SampleSegmentation
    options = {} if head in DETECTORS else {"crop_size": 96}
    data = kind(
        cache, num_train=4, num_val=2, scene_size=64, scale=96, batch_size=2,
        num_workers=0, **options,
    )  # fmt: skip
    data.setup()
    return data


def build(head, backbone=None, **options):
    pytest.importorskip("mmdet" if head in DETECTORS else "mmseg")
    backbone = backbone or short(SMALLEST, dense=True)
    make = build_detector if head in DETECTORS else build_segmentor
    return make(backbone, NUM_CLASSES[head], name=head, **options)


@functools.cache
def built(head, backbone_name=SMALLEST):
    """Return a model, and the weights that its backbone had before."""
    torch.manual_seed(0)
    backbone = short(backbone_name, dense=True)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    return build(head, backbone, **(SMALL_SECOND_STAGE if head in DETECTORS else {})), before


@pytest.mark.parametrize("head", ADAPTERS)
def test_the_backbone_is_used_unchanged(head):
    model, before = built(head)
    inside = {
        key.removeprefix("model.backbone."): value
        for key, value in model.state_dict().items()
        if key.startswith("model.backbone.")
    }
    torch.testing.assert_close(inside, before, rtol=0, atol=0)
    assert model.backbone is model.model.backbone


@pytest.mark.parametrize("head", ADAPTERS)
def test_all_parts_have_the_number_of_classes(head):
    model, _ = built(head)
    counts = {
        name: module.num_classes
        for name, module in model.model.named_modules()
        # An RPN only separates objects from background.
        if hasattr(module, "num_classes") and name != "rpn_head"
    }
    expected = {"mask_rcnn": 2, "retinanet": 1, "cascade_mask_rcnn": 6, "upernet": 3}[head]
    assert len(counts) == expected
    assert set(counts.values()) == {NUM_CLASSES[head]}


def train_once(head, backbone, cache):
    """Return a model with the gradients of one batch."""
    model, _ = built(head, backbone)
    model.train().zero_grad()
    torch.manual_seed(0)
    losses = model.loss(next(iter(make_data(head, cache).train_dataloader())))
    assert all(value.ndim == 0 and value.isfinite() for value in losses.values())
    torch.stack([value for name, value in losses.items() if "loss" in name]).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)
    return model


@pytest.mark.parametrize(
    ("head", "backbone"),
    [
        ("mask_rcnn", "swin_t_afbo"),
        pytest.param("upernet", "deit_t_afbo", marks=pytest.mark.slow),
        pytest.param("mask_rcnn", "deit_t_afbo", marks=pytest.mark.slow),
        pytest.param("upernet", "swin_t_afbo", marks=pytest.mark.slow),
        *(
            pytest.param(head, SMALLEST, marks=pytest.mark.slow)
            for head in ("mask_rcnn", "upernet", "cascade_mask_rcnn")
        ),
    ],
)
def test_every_parameter_trains(head, backbone, cache):
    model = train_once(head, backbone, cache)
    assert not untrained(model)


def test_retinanet_trains_all_but_the_norm_of_the_unused_map(cache):
    model = train_once("retinanet", SMALLEST, cache)
    assert not untrained(model)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert all("backbone.norm0." in name for name in frozen)


def untrained(model):
    """Return trainable parameters without a gradient; DDP rejects them."""
    named = model.named_parameters()
    return [name for name, p in named if p.requires_grad and p.grad is None]


@pytest.mark.parametrize(
    "head",
    [
        "mask_rcnn",
        pytest.param("retinanet", marks=pytest.mark.slow),
        "upernet",
        pytest.param("cascade_mask_rcnn", marks=pytest.mark.slow),
    ],
)
def test_predictions_have_the_original_size(head, cache):
    model, _ = built(head)
    model.eval()
    (batch,) = make_data(head, cache).val_dataloader()
    assert [tuple(image.shape) for image in batch["inputs"]] == [(3, 96, 96)] * 2
    with torch.no_grad():
        samples = model.predict(batch)
    assert len(samples) == 2
    for sample in samples:
        assert tuple(sample.ori_shape) == (64, 64)
        if head in SEGMENTORS:
            assert sample.pred_sem_seg.data.shape == (1, 64, 64)
            continue
        found = sample.pred_instances
        assert (found.bboxes >= 0).all()
        assert (found.bboxes <= 64).all()
        if head != "retinanet":
            assert len(found)
            assert found.masks.shape == (len(found), 64, 64)


def test_segmentor_predicts_images_of_several_sizes(cache):
    model, _ = built("upernet")
    model.eval()
    (batch,) = make_data("upernet", cache).val_dataloader()
    first, second = batch["inputs"]
    with torch.no_grad():
        uneven = model.predict({**batch, "inputs": [first, second[:, :70]]})
        even = model.predict(batch)
    assert len(uneven) == 2
    assert uneven[0].pred_sem_seg.data.equal(even[0].pred_sem_seg.data)


def test_sizes_reach_the_two_stage_detectors():
    for head in ("mask_rcnn", "cascade_mask_rcnn"):
        model = build(
            head, num_rois=24, num_proposals=40, mask_size=20, anchor_scale=4, group_norm=True
        ).model
        roi_head = model.roi_head
        assert model.rpn_head.anchor_generator.scales.tolist() == [4]
        assert model.test_cfg.rpn.max_per_img == model.train_cfg.rpn_proposal.max_per_img == 40
        assert model.test_cfg.rpn.nms_pre == 80
        stages = model.train_cfg.rcnn if head == "cascade_mask_rcnn" else [model.train_cfg.rcnn]
        assert {(stage.sampler.num, stage.mask_size) for stage in stages} == {(24, 20)}
        extractors, masks = roi_head.mask_roi_extractor, roi_head.mask_head
        if head == "mask_rcnn":
            extractors, masks = [extractors], [masks]
        assert {e.roi_layers[0].output_size for e in extractors} == {(10, 10)}
        for part in (model.neck, *masks):
            assert any(isinstance(module, torch.nn.GroupNorm) for module in part.modules())


def test_sizes_suit_detectors_without_masks_and_with_learnt_proposals():
    sizes = {"num_rois": 24, "num_proposals": 20, "mask_size": 14}
    model = build("mask_rcnn", base="faster_rcnn/faster-rcnn_r50_fpn_1x_coco", **sizes).model
    assert not model.with_mask
    assert model.test_cfg.rpn.max_per_img == 20
    model = build("mask_rcnn", base="sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco", **sizes).model
    assert model.rpn_head.num_proposals == 20
    pairs = 20 * model.roi_head.bbox_head[0].num_classes
    assert model.roi_head.test_cfg.max_per_img == min(100, pairs)


def test_sizes_reach_retinanet():
    model = build("retinanet", anchor_scale=2, group_norm=True, **SMALL_SECOND_STAGE).model
    assert model.bbox_head.anchor_generator.octave_base_scale == 2
    for part in (model.neck, model.bbox_head):
        assert any(isinstance(module, torch.nn.GroupNorm) for module in part.modules())


def test_options_reach_the_models():
    model = build("upernet", channels=64, options={"auxiliary_head.num_convs": 2}).model
    assert (model.decode_head.channels, model.auxiliary_head.channels) == (64, 32)
    assert model.auxiliary_head.num_convs == 2
    assert not any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules())
    model = build("mask_rcnn", options={"test_cfg.rcnn": {"score_thr": 0.25}}).model
    assert model.roi_head.test_cfg.score_thr == 0.25
    assert model.roi_head.test_cfg.max_per_img == 100
    model = build("cascade_mask_rcnn", options={"train_cfg.rcnn.1.sampler.num": 8}).model
    assert [stage.sampler.num for stage in model.train_cfg.rcnn] == [512, 8, 512]


@pytest.mark.parametrize("head", ADAPTERS)
@pytest.mark.parametrize("key", ["absent", "backbone.absent", "neck.absent.deeper", "neck.9"])
def test_unknown_option(head, key):
    with pytest.raises(ValueError, match=rf"model config lacks '{key}'; known here: .*backbone, "):
        build(head, options={key: 1})


@pytest.mark.parametrize("index", ["3", 3])  # from a dotted name and from a key in braces
def test_unknown_item_of_a_list(index):
    with pytest.raises(ValueError, match="model config lacks '3'; known here: 0, 1, 2"):
        build("cascade_mask_rcnn", options={"roi_head.bbox_head": {index: {"num_classes": 2}}})


@pytest.mark.parametrize("make", [build_detector, build_segmentor])
def test_unknown_head(make):
    with pytest.raises(ValueError, match=r"unknown .* 'yolo'; choose from (mask_rcnn, .*|upernet)"):
        make(create_backbone(SMALLEST, dense=True), 10, name="yolo")


def test_model_config_missing_from_the_toolkit(monkeypatch):
    pytest.importorskip("mmdet")
    monkeypatch.setitem(DETECTORS, "mask_rcnn", "mask-rcnn_r51")
    with pytest.raises(ValueError, match=r"lacks the model config 'mask-rcnn_r51'; it has .*fpn"):
        build("mask_rcnn")


@pytest.mark.parametrize("make", [build_detector, build_segmentor])
@pytest.mark.parametrize("name", ["deit_t_afbo", SMALLEST])
def test_backbone_without_a_pyramid(make, name):
    pytest.importorskip("mmdet")
    pytest.importorskip("mmseg")
    with pytest.raises(ValueError, match=rf"create_backbone\('{name}', dense=True\)"):
        make(create_backbone(name), 10)


@pytest.mark.parametrize(
    ("make", "task", "package"),
    [(build_detector, "detection", "mmdet"), (build_segmentor, "segmentation", "mmseg")],
)
def test_missing_toolkit(make, task, package, monkeypatch):
    backbone = create_backbone(SMALLEST, dense=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"task={task} needs {package}; type make install"):
        make(backbone, 10)
