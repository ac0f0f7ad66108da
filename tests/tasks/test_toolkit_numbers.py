"""One network yields equal numbers in our Lightning task and the toolkits' Runner."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

pytest.importorskip("heads")  # mmcv's operators, before a toolkit
pytest.importorskip("mmdet")
pytest.importorskip("mmseg")

from mmdet.evaluation import CocoMetric as TheirCocoMetric
from mmengine.dataset import pseudo_collate
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.runner import Runner
from mmseg.evaluation import IoUMetric
from torch import nn

from datamodules import CocoDataModule, SampleDetection, SampleSegmentation
from heads.toolkits.detectors import build_detector
from heads.toolkits.segmentors import build_segmentor
from heads.toolkits.toolkit import ToolkitModel
from tasks.detection.task import DetectionTask
from tasks.segmentation.task import SegmentationTask
from tests.coco_reference import evaluate_coco
from tests.families import short
from tests.near_truth import near_the_truth
from tests.runs import QUIET, RECIPE

NETWORK = "resnet18"
RATE = 1e-3


@pytest.fixture(autouse=True)
def no_logger_stays():
    yield
    MMLogger._instance_dict.clear()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def scenes(kind, cache, **options):
    given = {"num_train": 20, "num_val": 5, "scene_size": 64, "scale": 96, "num_workers": 0}
    data = kind(cache, **{**given, "batch_size": 2, **options})
    data.prepare_data()
    data.setup()
    return data


def our_figures(task, data, tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    (found,) = trainer.test(task, datamodule=data, verbose=False)
    return {name.removeprefix("test/"): value for name, value in found.items()}


def runner(model, tmp_path, scope, **parts):
    return Runner(
        model=model, work_dir=str(tmp_path / "work"), default_scope=scope, log_level="ERROR",
        default_hooks={"logger": None, "checkpoint": None}, **parts,
    )  # fmt: skip


def figures_of_runner(model, tmp_path, scope, dataset, metric):
    sampler = {"type": "DefaultSampler", "shuffle": False}
    loader = {"batch_size": 1, "num_workers": 0, "dataset": dataset, "sampler": sampler}
    return runner(
        model, tmp_path, scope,
        test_dataloader=loader, test_cfg={"type": "TestLoop"}, test_evaluator=[metric],
    ).test()  # fmt: skip


class ExactIoU(IoUMetric):
    """MMSegmentation's metric before rounding to two digits."""

    def compute_metrics(self, results):
        areas = [sum(parts) for parts in zip(*results, strict=True)]
        figures = self.total_area_to_metrics(*areas, self.metrics, self.nan_to_num)
        names = {"mIoU": "IoU", "mAcc": "Acc", "aAcc": "aAcc"}
        self.exact = {name: 100 * np.nanmean(figures[key]) for name, key in names.items()}
        return super().compute_metrics(results)


def segmentor(**options):
    torch.manual_seed(0)
    backbone = short(NETWORK, dense=True)
    model = build_segmentor(backbone, 11, channels=64, group_norm=True, **options)
    nn.init.normal_(model.model.decode_head.conv_seg.weight, std=0.5)
    return model


def mmsegs_pipeline(scale, factors, flips):
    annotations = {"type": "LoadAnnotations", "reduce_zero_label": True}
    size = {"type": "Resize", "keep_ratio": True}
    steps = [{"type": "LoadImageFromFile"}]
    if len(factors) * len(flips) == 1:
        return [*steps, {**size, "scale": scale}, annotations, {"type": "PackSegInputs"}]
    sizes = [{**size, "scale": tuple(round(edge * factor) for edge in scale)} for factor in factors]
    turned = [{"type": "RandomFlip", "prob": float(flip)} for flip in flips]
    views = [sizes, turned, [annotations], [{"type": "PackSegInputs"}]]
    return [*steps, {"type": "TestTimeAug", "transforms": views}]


PROTOCOLS = {
    "single": ({}, {}),
    "sliding": ({}, {"test_crop": 64, "test_stride": 32}),
    "multi-scale": ({"test_scales": [0.5, 1.0, 1.25], "test_flip": True}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_iou_equals_that_of_mmsegs_runner(protocol, cache, tmp_path):
    from mmseg.models import SegTTAModel

    views, windows = PROTOCOLS[protocol]
    data, model = scenes(SampleSegmentation, cache, **views), segmentor(**windows)
    theirs = copy.deepcopy(model.model)
    ours = our_figures(SegmentationTask(model, data.class_names, **RECIPE), data, tmp_path)
    metric = ExactIoU()
    flips = [False, True] if data.test_flip else [False]
    dataset = {
        "type": "BaseSegDataset", "metainfo": data.metainfo, "reduce_zero_label": True,
        "data_prefix": {"img_path": f"{data.folder}/images/validation",
                        "seg_map_path": f"{data.folder}/annotations/validation"},
        "img_suffix": ".jpg", "seg_map_suffix": ".png", "test_mode": True,
        "pipeline": mmsegs_pipeline(data.scale, data.test_scales, flips),
    }  # fmt: skip
    theirs = SegTTAModel(module=theirs) if views else theirs
    figures_of_runner(theirs, tmp_path, "mmseg", dataset, metric)
    assert 0.5 < metric.exact["mIoU"] < 99
    assert {name: ours[name] for name in metric.exact} == pytest.approx(metric.exact, abs=1e-5)


class NearTheTruth(BaseModel):
    """Detector with masks that finds shifted annotated objects and some others."""

    with_mask = True

    def forward(self, inputs, data_samples=None, mode="predict"):
        for sample in data_samples:
            sample.pred_instances = near_the_truth(sample)
        return data_samples


class Near(ToolkitModel):
    """The same with the interface of our tasks."""

    def __init__(self):
        super().__init__(NearTheTruth(), {})
        self.unused = nn.Linear(1, 1)

    def predict_once(self, batch):
        return self.model(batch["inputs"], batch["data_samples"])

    def merge_views(self, views):
        raise AssertionError("it has one view")


@pytest.fixture(scope="module")
def coco(cache, tmp_path_factory):
    """Create the sample scenes with crowds and a validation image without annotations."""
    root = tmp_path_factory.mktemp("coco") / "set"
    shutil.copytree(scenes(SampleDetection, cache).folder, root)
    path = root / "annotations/instances_val2017.json"
    content = json.loads(path.read_text())
    first, second = (image["id"] for image in content["images"][:2])
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] != first]
    crowd = next(a for a in content["annotations"] if a["image_id"] == second)
    counts = [0, 64 * 32, 64 * 32]  # the left half
    crowd |= {"iscrowd": 1, "segmentation": {"size": [64, 64], "counts": counts}, "area": 2048,
              "bbox": [0, 0, 32, 64]}  # fmt: skip
    path.write_text(json.dumps(content))
    return root


def mmdets_dataset(root, scale):
    keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
    return {
        "type": "CocoDataset", "data_root": str(root), "test_mode": True,
        "ann_file": "annotations/instances_val2017.json", "data_prefix": {"img": "val2017"},
        "metainfo": {"classes": tuple("0123456789")},
        "pipeline": [
            {"type": "LoadImageFromFile"},
            {"type": "Resize", "scale": scale, "keep_ratio": True},
            {"type": "LoadAnnotations", "with_bbox": True, "with_mask": True},
            {"type": "PackDetInputs", "meta_keys": keys},
        ],
    }  # fmt: skip


def coco_data(root, **options):
    data = CocoDataModule(root, scale=96, num_workers=0, eval_batch_size=2, flip=0.0, **options)
    data.setup()
    return data


def test_average_precision_equals_that_of_mmdets_runner_and_pycocotools(coco, tmp_path):
    data = coco_data(coco)
    ours = our_figures(DetectionTask(Near(), data.class_names, **RECIPE), data, tmp_path)
    annotations = coco / "annotations/instances_val2017.json"
    metric = TheirCocoMetric(
        ann_file=str(annotations), metric=["bbox", "segm"], outfile_prefix=str(tmp_path / "found")
    )
    dataset = mmdets_dataset(coco, data.scale)
    theirs = figures_of_runner(NearTheTruth(), tmp_path, "mmdet", dataset, metric)
    for kind, prefix in (("bbox", ""), ("segm", "mask_")):
        expected = evaluate_coco(annotations, str(tmp_path / f"found.{kind}.json"), kind)[:3]
        assert 0.05 < expected[0] < 0.95
        found = [ours[f"{prefix}{name}"] for name in ("AP", "AP50", "AP75")]
        assert found == pytest.approx(expected, abs=1e-6)
        assert theirs[f"coco/{kind}_mAP"] == pytest.approx(found[0], abs=1e-3)


class Kept(TheirCocoMetric):
    """MMDetection's metric that records its detections."""

    def process(self, data_batch, data_samples):
        self.kept = {**getattr(self, "kept", {}), **{s["img_id"]: s for s in data_samples}}
        super().process(data_batch, data_samples)


def detector(name):
    torch.manual_seed(0)
    backbone = short(NETWORK, dense=True)
    options = {"num_rois": 16, "num_proposals": 30} if name != "retinanet" else {}
    return build_detector(backbone, 10, name=name, **options)


@pytest.mark.slow
def test_detections_equal_those_of_mmdets_runner(coco, tmp_path):
    data, model = coco_data(coco), detector("retinanet")
    model.model.bbox_head.retina_cls.bias.data.fill_(-1.0)  # else detections are empty
    metric = Kept(ann_file=str(coco / "annotations/instances_val2017.json"), metric="bbox")
    dataset = mmdets_dataset(coco, data.scale)
    figures_of_runner(copy.deepcopy(model.model), tmp_path, "mmdet", dataset, metric)
    model.eval()
    with torch.no_grad():
        ours = [s for batch in data.val_dataloader() for s in model.predict(batch)]
    assert len(ours) == len(metric.kept) == 5
    for sample in ours:
        theirs = metric.kept[sample.img_id]["pred_instances"]
        assert len(sample.pred_instances) > 10
        for key in ("bboxes", "scores", "labels"):
            found = sample.pred_instances[key]
            torch.testing.assert_close(found, theirs[key], rtol=1e-4, atol=1e-4)


class Noted(Hook, Callback):
    """Seeds each step in both trainers and records its losses."""

    def __init__(self):
        self.losses = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        torch.manual_seed(batch_idx)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append({name: float(value) for name, value in outputs.items()})

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        torch.manual_seed(batch_idx)

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        shown = trainer.callback_metrics
        self.losses.append(
            {n.removeprefix("train/"): float(v) for n, v in shown.items() if n != "train/lr"}
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retinanet", "mask_rcnn", "upernet"])
def test_ten_steps_have_the_losses_of_the_toolkits_runner(name, cache, tmp_path):
    steps = 10
    if name == "upernet":
        data, model = scenes(SampleSegmentation, cache, crop_size=96), segmentor()
        kind, scope = SegmentationTask, "mmseg"
    else:
        data, model = scenes(SampleDetection, cache), detector(name)
        kind, scope = DetectionTask, "mmdet"
    optimizer = {"name": "sgd", "lr": RATE, "weight_decay": 0.0}
    task = kind(model, data.class_names, optimizer=optimizer, schedule={"name": "constant"})
    samples = [data.dataset("train")[0, index] for index in range(2 * steps)]
    theirs, ours = Noted(), Noted()
    engine = runner(
        copy.deepcopy(model.model), tmp_path, scope,
        train_dataloader=DataLoader(samples, batch_size=2, collate_fn=pseudo_collate),
        train_cfg={"by_epoch": False, "max_iters": steps},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": RATE}},
        custom_hooks=[theirs],
    )  # fmt: skip
    engine.train()
    trainer = Trainer(
        max_steps=steps, callbacks=[ours], default_root_dir=tmp_path, limit_val_batches=0,
        log_every_n_steps=1, **QUIET
    )  # fmt: skip
    loader = DataLoader(samples, batch_size=2, collate_fn=pseudo_collate)
    data.train_dataloader = lambda: loader
    trainer.fit(task, datamodule=data)
    assert len(theirs.losses) == len(ours.losses) == steps
    for one, other in zip(ours.losses, theirs.losses, strict=True):
        assert one == pytest.approx(other, rel=2e-4)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-6)
    total = [losses["loss"] for losses in ours.losses]
    assert max(total) - min(total) > 0.01 * total[0]  # the loss falls
