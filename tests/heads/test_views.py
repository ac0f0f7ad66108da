"""Several views of an image and sliding windows, against the toolkits' own."""

import copy

import pytest
import torch

from datamodules import SampleDetection, SampleSegmentation
from heads.toolkits.detectors import MERGE, build_detector
from heads.toolkits.segmentors import build_segmentor
from tests.datamodules.loading import ready
from tests.errors import refuses
from tests.families import short

pytest.importorskip("mmdet")
pytest.importorskip("mmseg")

NETWORK = "resnet18"
VIEWS = {"test_scales": [0.75, 1.0], "test_flip": True}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def scenes(kind, cache, **options):
    sizes = {"num_train": 2, "num_val": 3, "scene_size": 64, "scale": 96, "num_workers": 0}
    return ready(kind, cache, **sizes, **options)


def segmentor(**options):
    torch.manual_seed(0)
    backbone = short(NETWORK, dense=True)
    model = build_segmentor(backbone, 11, channels=64, group_norm=True, **options).eval()
    torch.nn.init.normal_(model.model.decode_head.conv_seg.weight, std=0.5)
    return model


def check_same_segments(ours, theirs):
    assert [one.img_path for one in ours] == [other.img_path for other in theirs]
    for one, other in zip(ours, theirs, strict=True):
        found = other.pred_sem_seg.data
        assert len(found.unique()) > 2
        assert torch.equal(one.pred_sem_seg.data, found.reshape(one.pred_sem_seg.data.shape))
        assert one.pred_sem_seg.data.shape == one.gt_sem_seg.data.shape


@torch.no_grad()
def test_segmentors_merge_views_as_mmsegs_does(cache):
    from mmseg.models import SegTTAModel

    data, model = scenes(SampleSegmentation, cache, eval_batch_size=2, **VIEWS), segmentor()
    merger = SegTTAModel(module=model.model)
    assert torch.is_tensor(next(iter(data.val_dataloader()))["inputs"][0])
    batches = list(data.test_dataloader())
    assert [len(batch["inputs"]) for batch in batches] == [4, 4]
    sizes = [view[0].shape[1] for view in batches[0]["inputs"]]
    assert sizes == [72, 72, 96, 96]
    flips = [view[0].flip for view in batches[0]["data_samples"]]
    assert flips == [False, True, False, True]
    for batch in batches:
        ours = model.predict(copy.deepcopy(batch))
        check_same_segments(ours, merger.test_step(copy.deepcopy(batch)))
        for sample in ours:
            probabilities = sample.seg_logits.data.exp()
            torch.testing.assert_close(probabilities.sum(0), torch.ones(64, 64))
            assert torch.equal(probabilities.argmax(0), sample.pred_sem_seg.data[0])


@pytest.mark.slow
@torch.no_grad()
def test_windows_slide_as_mmsegs_do(cache):
    data = scenes(SampleSegmentation, cache, eval_batch_size=3)
    batch = next(iter(data.val_dataloader()))
    whole, slid = segmentor(), segmentor(test_crop=[64, 48], test_stride=32)
    sizes = []
    slid.backbone.register_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[2:]))
    ours = slid.predict(copy.deepcopy(batch))
    assert set(sizes) == {(64, 48)}
    assert len(sizes) == 2 * 3
    slide = {"mode": "slide", "crop_size": (64, 48), "stride": (32, 32)}
    whole.model.test_cfg = type(slid.model.test_cfg)(slide)
    check_same_segments(ours, whole.model.test_step(copy.deepcopy(batch)))
    assert slid.model.test_cfg.stride == (32, 32)
    assert segmentor(test_crop=512).model.test_cfg.stride == (342, 342)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_stride": 32}, r"pass head\.test_crop"),
        ({"test_crop": 32, "test_stride": 33}, "leaves gaps"),
        ({"test_crop": [1, 2, 3]}, r"head\.test_crop must be one positive .*, got \[1, 2, 3\]"),
    ],
)
def test_invalid_windows_are_rejected(options, message):
    refuses(message, segmentor, **options)


def detector(name, **options):
    torch.manual_seed(0)
    return build_detector(short(NETWORK, dense=True), 10, name=name, **options).eval()


@pytest.mark.slow
@torch.no_grad()
def test_detectors_merge_views_as_mmdets_does(cache):
    from mmdet.models.test_time_augs import DetTTAModel
    from mmengine import ConfigDict

    data, model = scenes(SampleDetection, cache, eval_batch_size=2, **VIEWS), detector("retinanet")
    model.model.bbox_head.retina_cls.bias.data.fill_(-1.0)  # otherwise detections are empty
    merger = DetTTAModel(tta_cfg=ConfigDict(MERGE), module=model.model)
    for batch in data.test_dataloader():
        ours = model.predict(copy.deepcopy(batch))
        theirs = merger.test_step(copy.deepcopy(batch))
        for one, other in zip(ours, theirs, strict=True):
            assert one.img_id == other.img_id
            assert len(one.pred_instances) > 10
            for key in ("bboxes", "scores", "labels"):
                assert torch.equal(one.pred_instances[key], other.pred_instances[key])
