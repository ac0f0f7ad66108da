"""Toolkit heads: the backbone inside, losses, predictions, options."""

import copy
import importlib.util

import pytest
import torch

from backbones import create_backbone
from heads.toolkits.detectors import DETECTORS, build_detector
from heads.toolkits.samples import collate_detection, collate_segmentation
from heads.toolkits.segmentors import SEGMENTORS, build_segmentor
from tasks.engine.optimisation.param_groups import parameter_rules
from tests.dense_heads import DENSE, small_model, task_of
from tests.errors import refuses
from tests.families import rest_slow, short

SMALLEST = "poolformer_s12_afbo"
ADAPTERS = (*DETECTORS, *SEGMENTORS)
NUM_CLASSES = {**dict.fromkeys(DETECTORS, 10), **dict.fromkeys(SEGMENTORS, 11)}
# Options for a small second stage; one-stage detectors ignore them.
SMALL_SECOND_STAGE = {"num_rois": 16, "num_proposals": 30}


def build(head, backbone=None, **options):
    pytest.importorskip("mmdet" if head in DETECTORS else "mmseg")
    backbone = backbone or short(SMALLEST, dense=True)
    make = build_detector if head in DETECTORS else build_segmentor
    return make(backbone, NUM_CLASSES[head], name=head, **options)


@pytest.mark.parametrize(
    ("head", "parts"),
    [("mask_rcnn", 2), ("retinanet", 1), ("cascade_mask_rcnn", 6), ("upernet", 3)],
)
def test_heads_take_the_backbone_unchanged_and_the_number_of_classes(head, parts):
    torch.manual_seed(0)
    backbone = short(SMALLEST, dense=True)
    before = copy.deepcopy(backbone.state_dict())
    model = build(head, backbone, **(SMALL_SECOND_STAGE if head in DETECTORS else {}))
    assert model.backbone is model.model.backbone is backbone
    torch.testing.assert_close(backbone.state_dict(), before, rtol=0, atol=0)
    counts = [
        module.num_classes
        for name, module in model.model.named_modules()
        # An RPN only separates objects from background.
        if hasattr(module, "num_classes") and name != "rpn_head"
    ]
    assert counts == [NUM_CLASSES[head]] * parts


@pytest.mark.parametrize("head", ["retinanet", "upernet"])
def test_the_preprocessor_follows_the_module_that_holds_it(head):
    holder = torch.nn.Sequential(build(head)).to("meta")
    assert holder[0].model.data_preprocessor.device.type == "meta"
    holder.to_empty(device="cpu")
    assert holder[0].model.data_preprocessor.device.type == "cpu"


@pytest.mark.parametrize("head", ["mask_rcnn", "cascade_mask_rcnn"])
def test_sizes_reach_the_two_stage_detectors(head):
    sizes = {"num_rois": 24, "num_proposals": 40, "mask_size": 20, "anchor_scale": 4}
    model = build(head, **sizes, group_norm=True).model
    assert model.rpn_head.anchor_generator.scales.tolist() == [4]
    assert model.test_cfg.rpn.max_per_img == model.train_cfg.rpn_proposal.max_per_img == 40
    assert model.test_cfg.rpn.nms_pre == 80
    stages, extractors, masks = (
        part if head == "cascade_mask_rcnn" else [part]
        for part in (
            model.train_cfg.rcnn, model.roi_head.mask_roi_extractor, model.roi_head.mask_head
        )
    )  # fmt: skip
    assert {(stage.sampler.num, stage.mask_size) for stage in stages} == {(24, 20)}
    assert {e.roi_layers[0].output_size for e in extractors} == {(10, 10)}
    assert has_group_norm(model.neck, *masks)


def has_group_norm(*parts):
    return all(any(isinstance(m, torch.nn.GroupNorm) for m in part.modules()) for part in parts)


def test_sizes_suit_other_detectors():
    sizes = {"num_rois": 24, "num_proposals": 20, "mask_size": 14}
    model = build("mask_rcnn", base="faster_rcnn/faster-rcnn_r50_fpn_1x_coco", **sizes).model
    assert not model.with_mask
    assert model.test_cfg.rpn.max_per_img == 20
    model = build("mask_rcnn", base="sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco", **sizes).model
    assert model.rpn_head.num_proposals == 20
    pairs = 20 * model.roi_head.bbox_head[0].num_classes
    assert model.roi_head.test_cfg.max_per_img == min(100, pairs)
    model = build("retinanet", anchor_scale=2, group_norm=True, **SMALL_SECOND_STAGE).model
    assert model.bbox_head.anchor_generator.octave_base_scale == 2
    assert has_group_norm(model.neck, model.bbox_head)


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
def test_unknown_options_are_rejected(head, key):
    refuses(rf"model config lacks '{key}'; known here: .*backbone, ", build, head, options={key: 1})


@pytest.mark.parametrize(
    ("make", "task", "package"),
    [(build_detector, "detection", "mmdet"), (build_segmentor, "segmentation", "mmseg")],
)
def test_other_heads_backbones_and_a_missing_toolkit_are_rejected(make, task, package, monkeypatch):
    pytest.importorskip(package)
    dense = create_backbone(SMALLEST, dense=True)
    refuses(r"unknown .* 'yolo'; choose from (mask_rcnn, .*|upernet)", make, dense, 10, name="yolo")
    for name in ("deit_t_afbo", SMALLEST):
        with pytest.raises(ValueError, match=rf"create_backbone\('{name}', dense=True\)"):
            make(create_backbone(name), 10)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses(rf"task={task} needs {package}; type: pip install ", make, dense, 10)


def plain_batch(task, has_targets):
    """Two images of 64 pixels with two objects each or none, or with classes or ignored pixels."""
    images = torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8)
    if task == "segmentation":
        mask = torch.arange(64).expand(64, 64) // 8 if has_targets else torch.full((64, 64), 255)
        return collate_segmentation([{"image": image, "mask": mask} for image in images])
    boxes = torch.tensor([[4, 4, 30, 30], [20, 10, 60, 50]])[: 2 * has_targets]
    masks = torch.zeros(len(boxes), 64, 64, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = True
    objects = {"boxes": boxes, "masks": masks, "labels": torch.arange(len(boxes))}
    return collate_detection([{"image": image, **objects} for image in images])


@pytest.mark.parametrize("name", rest_slow(DENSE, ("retinanet", "semantic_fpn")))
def test_batches_without_targets_have_the_losses_of_others(name):
    """Processes of a run exchange the losses by their order."""
    model = small_model(name).train()
    found, empty = (model.loss(plain_batch(task_of(name), some)) for some in (True, False))
    assert list(found) == list(empty)
    assert all(value.isfinite() for value in empty.values())
    sum(value for key, value in empty.items() if "loss" in key).backward()


@pytest.mark.parametrize(
    ("build", "options", "rate", "undecayed"),
    [
        (
            build_segmentor,
            {"name": "mask2former", "base": "mask2former/mask2former_r50_8xb2-160k_ade20k-512x512"},
            0.1,
            {"query_embed", "query_feat", "level_embed"},
        ),
        (build_detector, {"name": "dino", "base": "dino/dino-4scale_r50_8xb2-12e_coco"}, 0.1, ()),
        (build_segmentor, {"name": "upernet"}, 1.0, ()),
    ],
    ids=["mask2former", "dino", "upernet"],
)
def test_multipliers_of_a_toolkits_config_are_taken(build, options, rate, undecayed):
    with torch.device("meta"):
        model = build(create_backbone("swin_t", dense=True), 5, **options)
    rules = parameter_rules(model, 0.05)
    backbone = {n: rule for n, rule in rules.items() if n.startswith("model.backbone.")}
    assert {rule.lr_scale for rule in backbone.values()} == {rate}
    assert {rule.weight_decay for rule in backbone.values()} == {0.0, 0.05}
    for part in undecayed:
        of_part = [rule for name, rule in rules.items() if part in name]
        assert of_part
        assert {(rule.lr_scale, rule.weight_decay) for rule in of_part} == {(1.0, 0.0)}
    # Layer decay multiplies; a typed group replaces the multiplier.
    groups = [{"match": "backbone.*", "lr_scale": 0.5}]
    typed = parameter_rules(model, 0.05, layer_decay=0.9, groups=groups)
    decayed = parameter_rules(model, 0.05, layer_decay=0.9)
    name = "model.backbone.patch_embed.proj.weight"
    last = model.backbone.num_layers - 1
    assert typed[name].lr_scale == pytest.approx(0.5 * 0.9**last)
    assert decayed[name].lr_scale == pytest.approx(rate * 0.9**last)
    assert ["not taken" in note for note in model.training_notes] == [True] * (rate < 1)
