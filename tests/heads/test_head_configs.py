"""Every file of configs/head for dense tasks builds a model that trains and predicts."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import yaml

from backbones import create_backbone
from backbones.analysis.counting import count_parameters
from backbones.layers.reparam import fuse
from heads.toolkits.ffnet_seg import FFNetSegDecoder
from tests.datamodules.loading import ready
from tests.dense_heads import DENSE, FEW, HEADS, KINDS, model_of
from tests.errors import refuses
from tests.families import rest_slow, rest_slow_pairs, short
from tests.tensors import drawn_tensors

SMALL = "poolformer_s12_afbo"


@pytest.fixture
def on_meta(monkeypatch):
    """Skip initialisation, which reads values that meta tensors lack."""
    pytest.importorskip("mmengine")
    monkeypatch.setattr("mmengine.model.BaseModule.init_weights", lambda module: None)
    with torch.device("meta"):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    @functools.cache
    def make(task):
        own = {"crop_size": 96} if task == "segmentation" else {}
        return ready(
            KINDS[task], tmp_path_factory.mktemp(task), num_train=4, num_val=2, scene_size=64,
            scale=96, batch_size=2, num_workers=0, **own,
        )  # fmt: skip

    return make


def check_trains(head, data, steps=2, backbone=SMALL):
    """Train a few steps and predict; return the names of frozen weights."""
    (task,) = head["_tasks_"]
    torch.manual_seed(0)
    source = data(task)
    model = model_of(head, short(backbone, dense=True), source.num_classes, **FEW[task]).train()
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD([p for p in named.values() if p.requires_grad], lr=1e-4)
    moved = set()
    for _, batch in zip(range(steps), source.train_dataloader(), strict=False):
        losses = model.loss(batch)
        assert all(value.ndim == 0 and value.isfinite() for value in losses.values())
        optimizer.zero_grad()
        sum(value for name, value in losses.items() if "loss" in name).backward()
        moved |= {name for name, p in named.items() if p.grad is not None}
        assert all(
            named[name].grad.isfinite().all() for name in moved if named[name].grad is not None
        )
        optimizer.step()
    # DDP rejects trainable parameters without a gradient.
    assert moved == {name for name, p in named.items() if p.requires_grad}
    model.eval()
    (batch, *_) = source.val_dataloader()
    assert [tuple(image.shape) for image in batch["inputs"]] == [(3, 96, 96)] * 2
    with torch.no_grad():
        samples = model.predict(batch)
    assert [tuple(sample.ori_shape) for sample in samples] == [(64, 64)] * 2
    for sample in samples:
        if task == "segmentation":
            assert sample.pred_sem_seg.data.shape == (1, 64, 64)
            continue
        found = sample.pred_instances
        assert found.scores.isfinite().all()
        assert ((found.bboxes >= 0) & (found.bboxes <= 64)).all()
        if "masks" in found:
            assert len(found)
            assert found.masks.shape == (len(found), 64, 64)
    return named.keys() - moved


TRAINED = [
    *((name, SMALL) for name in DENSE),
    *((name, host) for name in ("mask_rcnn", "upernet") for host in ("swin_t_afbo", "deit_t_afbo")),
]
QUICK = [
    ("mask_rcnn", "swin_t_afbo"),
    *((n, SMALL) for n in ("retinanet", "upernet")),
]


@pytest.mark.parametrize(("name", "backbone"), rest_slow_pairs(TRAINED, QUICK))
def test_a_head_trains_two_steps_and_predicts(name, backbone, data):
    frozen = check_trains(HEADS[name], data, backbone=backbone)
    # Heads that leave the first map out freeze its norm.
    assert bool(frozen) == (name in ("retinanet", "dino", "ffnet_seg"))
    assert all("backbone.norm0." in name for name in frozen)


PSPNET = """
_target_: heads.toolkits.segmentors.build_segmentor
_tasks_: [segmentation]
name: pspnet
base: pspnet_r50-d8
"""
FCOS = """
_target_: heads.toolkits.detectors.build_detector
_tasks_: [detection]
name: fcos
base: fcos/fcos_r50-caffe_fpn_gn-head_1x_coco
"""


# One config of MMDetection per way of coding boxes.
BOX_HEADS = """
atss/atss_r50_fpn_1x_coco cascade_rcnn/cascade-mask-rcnn_r50-caffe_fpn_1x_coco
centernet/centernet-update_r50-caffe_fpn_ms-1x_coco
condinst/condinst_r50_fpn_ms-poly-90k_coco_instance
deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco
dino/dino-4scale_r50_8xb2-12e_coco
fcos/fcos_r50-caffe_fpn_gn-head-center-normbbox-centeronreg-giou_1x_coco
gfl/gfl_r50_fpn_1x_coco reppoints/reppoints-moment_r50_fpn_1x_coco
retinanet/retinanet_r50_fpn_1x_coco
rtmdet/rtmdet_l_8xb32-300e_coco tood/tood_r50_fpn_1x_coco
""".split()
QUICK_BOXES = ["gfl/gfl_r50_fpn_1x_coco"]


def is_coarse(values):
    """Share of values that are bfloat16 numbers."""
    return (values == values.bfloat16().float()).float().mean()


@pytest.mark.parametrize("base", rest_slow(BOX_HEADS, QUICK_BOXES))
@torch.no_grad()
def test_boxes_are_float32_beside_features_in_bfloat16(base, data, monkeypatch):
    """Boxes of the same outputs are equal without autocast, and few are bfloat16 numbers."""
    head = yaml.safe_load(FCOS) | {"base": base, "num_proposals": 20}
    torch.manual_seed(0)
    model = model_of(head, short("resnet18", dense=True), 10).eval()
    part = getattr(model.model, "rpn_head", None) or model.model.bbox_head
    plain, pairs = part.predict_by_feat, []

    def twice(*outputs, **options):
        copies = copy.deepcopy((outputs, options))
        with torch.autocast("cpu", enabled=False):
            exact = plain(*copies[0], **copies[1])
        found = plain(*outputs, **options)
        pairs.append(copy.deepcopy((found, exact)))  # mask heads change the boxes
        if any(name in base for name in ("rtmdet", "tood", "detr", "dino")):  # of exp or sigmoid
            assert is_coarse(outputs[1][0]) < 0.2
        return found

    monkeypatch.setattr(part, "predict_by_feat", twice)
    for settings in (part.test_cfg, model.model.test_cfg):
        if "score_thr" in (settings or ()):
            settings["score_thr"] = 0.0
    (batch, *_) = data("detection").val_dataloader()
    with torch.autocast("cpu", torch.bfloat16):
        samples = model.predict(batch)
    for given, exact in zip(*pairs[0], strict=True):
        assert len(given.bboxes)
        assert given.bboxes.dtype == torch.float32
        torch.testing.assert_close(given.bboxes, exact.bboxes, rtol=0, atol=0)
        inner = given.bboxes[(given.bboxes > 0) & (given.bboxes < 96)]  # borders are whole
        assert is_coarse(inner) < 0.6
    assert all(sample.pred_instances.bboxes.dtype == torch.float32 for sample in samples)


# Our segmentors, and configs of MMSegmentation with other heads over our maps.
SEGMENTORS = [name for name in DENSE if HEADS[name]["_tasks_"] == ["segmentation"]]
SEGMENTORS += """
danet_r50-d8 deeplabv3_r50-d8 fcn_r50-d8 pointrend_r50 pspnet_r50-d8 setr_pup
maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512
""".split()


@pytest.mark.parametrize("name", rest_slow(SEGMENTORS, ["segformer"]))
@torch.no_grad()
def test_logits_are_float32_beside_features_in_bfloat16(name, data):
    """They differ from those in float32 as features do, and few are bfloat16 numbers."""
    torch.manual_seed(0)
    source = data("segmentation")
    head = HEADS.get(name) or yaml.safe_load(PSPNET) | {"base": name}
    options = {"channels": 64} if name in HEADS else {}
    model = model_of(head, short("resnet18", dense=True), source.num_classes, **options)
    (batch, *_) = source.val_dataloader()

    def logits(network):
        samples = network.eval().predict(copy.deepcopy(batch))
        return torch.stack([sample.seg_logits.data for sample in samples])

    for mode in ("slide", "whole"):
        model.model.test_cfg.update(mode=mode, crop_size=(64, 64), stride=(40, 40))
        exact = logits(model)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = logits(model)
        for rounded in (mixed, logits(copy.deepcopy(model).bfloat16())):
            assert rounded.dtype == torch.float32
            assert is_coarse(rounded) < 0.2
            assert (rounded - exact).abs().max() < 0.2 * exact.std()
    vars(model.model.decode_head).pop("predict", None)  # leaves the toolkit's own
    torch.testing.assert_close(logits(model), exact)


@pytest.mark.parametrize("text", [PSPNET, FCOS], ids=["pspnet", "fcos"])
def test_another_head_of_a_toolkit_is_one_file(text, data):
    check_trains(yaml.safe_load(text), data, steps=1)


@pytest.mark.parametrize("base", ["{}/own", f"fcos/{'../' * 10}{{}}/own", "fcos/no"])
def test_foreign_configs_are_rejected(base, tmp_path):
    pytest.importorskip("mmdet")
    (tmp_path / "own.py").write_text("raise AssertionError('this was run')")
    head = yaml.safe_load(FCOS) | {"base": base.format(tmp_path)}
    with pytest.raises(ValueError, match="mmdet lacks the model config"):
        model_of(head, short(SMALL, dense=True), 10)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("retinanet", {"model": {"_base_": "x.py"}}, "head.model: _base_ is rejected"),
        (
            "retinanet",
            {"model": {"bbox_head": {"init_cfg": {"checkpoint": "x"}}}},
            "head.model: checkpoint is rejected",
        ),
        *(
            ("retinanet", {"model": {"bbox_head": {"type": kind}}}, f"type={kind} is rejected")
            for kind in ("os.system", "mmdet.nothing")
        ),
        ("dino", {"anchor_scale": 4}, r"head.anchor_scale=4 needs a detector with anchors"),
    ],
)
def test_foreign_keys_are_rejected(name, changes, message):
    with pytest.raises(ValueError, match=message):
        model_of(HEADS[name] | changes, short(SMALL, dense=True), 10)


def test_a_detr_with_too_many_queries_raises(data):
    model = model_of(HEADS["dino"], short("resnet18", dense=True), 10, num_proposals=500)
    (batch, *_) = data("detection").train_dataloader()
    refuses(r"fewer positions than the 500 queries .*num_proposals", model.loss, batch)


def test_cascade_with_four_convolutions(on_meta):
    model = model_of(HEADS["cascade_mask_rcnn_4conv"], create_backbone(SMALL, dense=True), 80)
    for head in model.model.roi_head.bbox_head:
        assert (len(head.shared_convs), len(head.shared_fcs)) == (4, 1)
        assert head.shared_fcs[0].out_features == 1024
        assert all(type(conv.norm) is torch.nn.BatchNorm2d for conv in head.shared_convs)
        assert head.fc_reg.out_features == 4 * 80
        assert head.reg_decoded_bbox
        assert type(head.loss_bbox).__name__ == "GIoULoss"
        assert head.loss_bbox.loss_weight == 10
    deviations = [head.bbox_coder.stds for head in model.model.roi_head.bbox_head]
    assert [(one[0], one[2]) for one in deviations] == [(0.1, 0.2), (0.05, 0.1), (0.033, 0.067)]
    assert all(one[0] == one[1] and one[2] == one[3] for one in deviations)
    assert model.model.roi_head.stage_loss_weights == [1, 0.5, 0.25]


def test_upernet_has_its_auxiliary_head(on_meta):
    model = model_of(HEADS["upernet"], create_backbone(SMALL, dense=True), 150).model
    main, beside = model.decode_head, model.auxiliary_head
    assert (main.channels, main.psp_modules.pool_scales) == (512, (1, 2, 3, 6))
    assert (beside.channels, beside.in_index, beside.loss_decode.loss_weight) == (256, 2, 0.4)


def test_detr_reads_three_maps(on_meta):
    model = model_of(HEADS["dino"], create_backbone(SMALL, dense=True), 80)
    assert model.maps == (1, 2, 3)
    assert [conv.conv.in_channels for conv in model.model.neck.convs] == [128, 320, 512]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen
    assert all("backbone.norm0." in name for name in frozen)


def test_no_object_keeps_its_weight_for_any_classes(on_meta):
    head = model_of(HEADS["mask2former"], create_backbone(SMALL, dense=True), 7).model.decode_head
    assert head.class_weight == [1.0] * 7 + [0.1]


# Its other form is for ADE20K; both follow the paper's App. F.1 and the authors' configs.
CITYSCAPES = {"depth": 5, "expansion": 1, "drop_path_rate": 0.0}


def ffnet_seg(backbone, classes, **changes):
    model = HEADS["ffnet_seg"]["model"]
    decoder = model["decode_head"] | changes
    return model_of(
        HEADS["ffnet_seg"] | {"model": model | {"decode_head": decoder}}, backbone, classes
    )


@pytest.mark.parametrize(
    ("classes", "changes", "fused", "count"),
    [
        (150, {}, False, 68_476_566),
        (150, {}, True, 67_231_574),
        (19, CITYSCAPES, False, 67_758_355),
        (19, CITYSCAPES, True, 66_436_051),
    ],
)
def test_ffnet_seg_has_the_parameters_of_its_forms(classes, changes, fused, count, on_meta):
    backbone = create_backbone("ffnet_seg", dense=True, fused=fused)
    assert count_parameters(ffnet_seg(backbone, classes, fused=fused, **changes)) == count


def lively(module):
    module = module.double()
    module.load_state_dict(drawn_tensors(module.state_dict()))
    return module.eval()


@torch.no_grad()
def test_ffnet_seg_decoder_is_its_equations_and_fuses():
    """Written again from the paper's App. F.1 and the authors' order of operations."""
    widths = (6, 10, 12)
    options = {"width": 8, "depth": 2, "expansion": 3}
    decoder = lively(FFNetSegDecoder(widths, 16, **options))
    maps = [torch.randn(2, c, 16 // 2**i, 24 // 2**i).double() for i, c in enumerate(widths)]

    def branched(x, module):
        return sum(branch.norm(branch.conv(x)) for branch in module.branches.values())

    larger = [F.interpolate(x, scale_factor=2**i, mode="bicubic") for i, x in enumerate(maps)]
    first, _, second = decoder.squeeze
    x = torch.cat(larger, 1)
    x = second.norm(second.conv(F.gelu(first.norm(first.conv(x)))))
    for block in decoder.blocks:
        token, channel = block.token_mixer, block.channel_mixer
        assert set(channel.query.branches) == {"9x9", "1x9", "9x1", "5x5"}
        q = token.query.norm(token.query.conv(x))
        y = branched(F.gelu(branched(q, token.memory.key)), token.memory.value)
        x = F.gelu(x + y)
        y = channel.memory.value(F.gelu(channel.memory.key(branched(x, channel.query))))
        x = F.gelu(x + y)
    align = decoder.align[0]
    expected = F.gelu(align.norm(align.conv(x)))
    torch.testing.assert_close(decoder(maps), expected, rtol=1e-10, atol=1e-10)
    plain = FFNetSegDecoder(widths, 16, **options, fused=True).double().eval()
    for folded in (plain.fold_state_dict(decoder.state_dict()), fuse(decoder).state_dict()):
        plain.load_state_dict(folded)
        torch.testing.assert_close(plain(maps), expected, rtol=1e-10, atol=1e-10)
