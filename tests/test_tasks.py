"""Tasks: schedules, optimisers, metrics against their references, and files that survive."""

import errno
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.utils import ModelEmaV3
from torch import nn

from backbones import create_backbone
from heads.linear import LinearClassifier
from tasks.average import WeightAverage
from tasks.base import BaseTask
from tasks.callbacks import random_state, set_random_state
from tasks.checkpoint_io import AtomicCheckpointIO
from tasks.classification import ClassificationTask
from tasks.coco_metric import STATS, CocoMetric
from tasks.drawing import (
    PALETTE,
    contact_sheet,
    draw_instances,
    draw_segments,
    side_by_side,
    to_image,
)
from tasks.loggers import CsvLog, read_rows
from tasks.optim import build_optimizer, learning_rate_factor, param_groups
from tasks.segmentation import IGNORED, SegmentationTask

RECIPE = {"optimizer": {"name": "sgd", "lr": 0.1}, "schedule": {"name": "constant"}}


# Schedules: 100 steps in 10 epochs


def test_cosine_after_warmup():
    factor = learning_rate_factor(
        100, 10, name="cosine", warmup=2, warmup_start=0.01, min_lr_ratio=0.1
    )
    assert factor(0) == pytest.approx(0.01)
    assert factor(10) == pytest.approx((0.01 + 1) / 2)
    assert factor(20) == pytest.approx(1)
    assert factor(40) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert factor(60) == pytest.approx((1 + 0.1) / 2)
    assert factor(100) == factor(101) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "poly"}, {0: 1, 50: 0.5, 100: 0}),
        ({"name": "poly", "power": 0.9}, {25: 0.75**0.9, 100: 0}),
        ({"name": "poly", "min_lr_ratio": 0.2}, {50: 0.6, 100: 0.2}),
        ({"name": "constant"}, {0: 1, 99: 1, 100: 1}),
        ({"name": "constant", "warmup": 1, "warmup_start": 0}, {0: 0, 5: 0.5, 10: 1, 99: 1}),
        ({"name": "poly", "cooldown": 5, "min_lr_ratio": 0.2}, {25: 0.6, 50: 0.2, 99: 0.2}),
        ({"name": "poly", "cooldown": 4, "warmup": 2}, {20: 1, 40: 0.5, 60: 0, 99: 0}),
        ({"name": "poly", "warmup": 2, "warmup_within": True}, {10: 0.5005, 20: 0.8, 50: 0.5}),
        (
            {"name": "poly", "lr": 0.1, "min_lr": 0.02, "warmup": 1, "warmup_lr": 0.05},
            {0: 0.5, 5: 0.75, 10: 1, 55: 0.6, 100: 0.2},
        ),
        ({"name": "multistep", "milestones": (8, 9)}, {79: 1, 80: 0.1, 89: 0.1, 90: 0.01}),
        ({"name": "multistep", "milestones": (5,), "gamma": 0.5, "warmup": 1}, {10: 1, 50: 0.5}),
    ],
)
def test_schedules(options, expected):
    factor = learning_rate_factor(100, 10, **options)
    assert {step: factor(step) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "linear"}, r"schedule\.name must be one of cosine, .*, got 'linear'"),
        ({"name": "cosine", "warmup": -1}, r"schedule\.warmup must not be below 0, got -1"),
        ({"name": "cosine", "warmup_start": 2}, r"schedule\.warmup_start must be from 0 to 1"),
        ({"name": "poly", "min_lr_ratio": -0.1}, r"schedule\.min_lr_ratio must be from 0 to 1"),
        ({"name": "poly", "cooldown": -1}, r"schedule\.cooldown must not be below 0, got -1"),
        ({"name": "constant", "cooldown": 1}, r"cooldown=1 is for cosine and poly; with constant"),
        ({"name": "poly", "min_lr": 0.1, "min_lr_ratio": 0}, r"min_lr_ratio exclude each other"),
        ({"name": "poly", "min_lr": 2}, r"min_lr=2 must be from 0 to the top rate, which is 1 "),
        ({"name": "poly", "warmup_lr": -1}, r"warmup_lr=-1 must be from 0 to the top rate"),
    ],
)
def test_schedule_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        learning_rate_factor(100, 10, **options)


# Optimisers


def named_groups(model):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [{names[p] for p in group["params"]} for group in param_groups(model, 0.05)]


@pytest.mark.parametrize("name", ["deit_t_afbo", "swin_t", "poolformer_s12_afbo"])
def test_param_groups(name):
    with torch.device("meta"):
        model = LinearClassifier(create_backbone(name), 10)
    exempt = {f"backbone.{key}" for key in model.backbone.no_weight_decay}
    sizes = {key: parameter.ndim for key, parameter in model.named_parameters()}
    assert exempt <= sizes.keys()
    decayed, plain = named_groups(model)
    assert plain == {key for key, ndim in sizes.items() if ndim <= 1} | exempt
    assert decayed == sizes.keys() - plain
    assert [group["weight_decay"] for group in param_groups(model, 0.05)] == [0.05, 0]


def test_named_exceptions_are_matrices_that_do_not_decay():
    with torch.device("meta"):
        model = LinearClassifier(create_backbone("deit_t"), 10)
    assert {"backbone.pos_embed", "backbone.cls_token"} <= named_groups(model)[1]


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert named_groups(model) == [{"1.weight"}, {"1.bias"}]


def test_options_reach_the_optimizer():
    optimizer = build_optimizer(
        nn.Linear(3, 2), name="adamw", lr=0.1, weight_decay=0.2, betas=(0.8, 0.9)
    )
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0]
    assert {(group["lr"], group["betas"]) for group in optimizer.param_groups} == {
        (0.1, (0.8, 0.9))
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adam"}, r"optimizer\.name must be one of adamw, sgd, got 'adam'"),
        ({"lr": 0}, r"optimizer\.lr must be above 0, got 0"),
        ({"weight_decay": -1}, r"optimizer\.weight_decay must not be below 0, got -1"),
        ({"betas": (0.9, 0.99)}, r"sgd has no option \['betas'\]; it has .*momentum"),
        ({"momentum": -2}, r"sgd refuses its options \{'momentum': -2\}"),
    ],
)
def test_optimizer_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_optimizer(nn.Linear(3, 2), **{"name": "sgd", "lr": 0.1, **options})


@pytest.mark.parametrize(("batch", "rate"), [(None, 0.1), (256, 0.1), (64, 0.025), (512, 0.2)])
def test_a_rate_for_a_batch_is_scaled_to_the_one_in_use(batch, rate):
    options = {"name": "sgd", "lr": 0.1, "reference_batch": 256}
    optimizer = build_optimizer(nn.Linear(3, 2), None, batch, **options)
    assert {group["lr"] for group in optimizer.param_groups} == {rate}
    fixed = build_optimizer(nn.Linear(3, 2), None, batch, name="sgd", lr=0.1)
    assert {group["lr"] for group in fixed.param_groups} == {0.1}


def test_tasks_refuse_bad_recipes_at_once():
    with pytest.raises(ValueError, match=r"optimizer\.name"):
        BaseTask(nn.Linear(2, 2), "ab", **{**RECIPE, "optimizer": {"name": "lion", "lr": 1}})
    with pytest.raises(ValueError, match=r"schedule\.name"):
        BaseTask(nn.Linear(2, 2), "ab", **{**RECIPE, "schedule": {"name": "step"}})


# COCO's average precision


CATEGORIES = (3, 7)


def box_mask(box, size):
    mask = np.zeros(size, bool)
    x1, y1, x2, y2 = np.round(box).astype(int)
    mask[y1:y2, x1:x2] = True
    mask[y1 : (y1 + y2) // 2, x1 : (x1 + x2) // 2] = False  # a corner off: masks are not boxes
    return mask


def coco_case(folder, num_images=8, size=(200, 240)):
    """An annotation file and detections near and far from its objects, as mmdet's samples."""
    from mmengine.structures import InstanceData
    from pycocotools import mask as coco_mask

    generator = np.random.default_rng(0)
    annotations, samples = [], []
    for image in range(1, num_images + 1):
        corners = generator.uniform(0, 68, (6, 2))
        sides = generator.choice([12.0, 50.0, 130.0], (6, 1)) * generator.uniform(0.9, 1, (6, 2))
        boxes = np.hstack([corners, corners + sides])
        labels = generator.integers(0, 2, 6)
        for box, label in zip(boxes[:4], labels[:4], strict=True):
            mask = np.asfortranarray(box_mask(box, size), dtype=np.uint8)
            encoded = coco_mask.encode(mask)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": CATEGORIES[label],
                    "bbox": [*box[:2].tolist(), *(box[2:] - box[:2]).tolist()],
                    "area": float(mask.sum()),
                    "iscrowd": int(len(annotations) % 9 == 8),
                    "segmentation": {
                        "size": list(encoded["size"]),
                        "counts": encoded["counts"].decode(),
                    },
                }
            )
        found = np.clip(boxes + generator.normal(0, 2, boxes.shape), 0, 200)
        keep = 0 if image == 2 else 6  # nothing found in the second image
        instances = InstanceData(
            bboxes=torch.tensor(found[:keep], dtype=torch.float32),
            labels=torch.tensor(labels[:keep]),
            scores=torch.tensor(generator.random(6)[:keep], dtype=torch.float32),
            masks=torch.from_numpy(np.stack([box_mask(box, size) for box in found])[:keep]),
        )
        samples.append(SimpleNamespace(img_id=image, pred_instances=instances))
    content = {
        "info": {},
        "images": [
            {"id": i, "width": size[1], "height": size[0], "file_name": f"{i}.jpg"}
            for i in range(1, num_images + 1)
        ],
        "annotations": annotations,
        "categories": [{"id": i, "name": str(i)} for i in CATEGORIES],
    }
    path = folder / "annotations.json"
    path.write_text(json.dumps(content))
    return str(path), samples


def reference_figures(path, samples, kind):
    """pycocotools' own evaluation, from rows that are made here."""
    from pycocotools import mask as coco_mask
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    rows = []
    for sample in samples:
        found = sample.pred_instances
        for i in range(len(found)):
            x1, y1, x2, y2 = found.bboxes[i].double().tolist()
            mask = np.asfortranarray(found.masks[i].numpy(), dtype=np.uint8)
            region = (
                {"bbox": [x1, y1, x2 - x1, y2 - y1]}
                if kind == "bbox"
                else {"segmentation": coco_mask.encode(mask)}
            )
            label, score = found.labels[i].item(), found.scores[i].item()
            rows.append(
                {
                    "image_id": sample.img_id,
                    "category_id": CATEGORIES[label],
                    "score": score,
                    **region,
                }
            )
    truth = COCO(path)
    evaluation = COCOeval(truth, truth.loadRes(rows), kind)
    evaluation.params.imgIds = [sample.img_id for sample in samples]
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[:6]


@pytest.fixture
def coco(tmp_path):
    for package in ("mmengine", "pycocotools", "faster_coco_eval"):
        pytest.importorskip(package)
    return coco_case(tmp_path)


@pytest.mark.parametrize("seen", [8, 5])
def test_coco_metric_equals_pycocotools(coco, seen):
    path, samples = coco
    samples = samples[:seen]
    metric = CocoMetric(path, CATEGORIES, with_masks=True)
    metric.update(samples[:3])
    metric.update(samples[2:])  # the third image comes twice, as a padded sampler sends it
    figures = metric.compute()
    for kind, prefix in (("bbox", ""), ("segm", "mask_")):
        expected = reference_figures(path, samples, kind)
        assert 0.1 < expected[0] < 1
        ours = [figures[f"{prefix}AP{name}"].item() for name in STATS]
        assert ours == pytest.approx(expected, abs=1e-6)


def test_detections_of_several_processes_are_one_set(coco, monkeypatch):
    path, samples = coco
    metrics = [CocoMetric(path, CATEGORIES, with_masks=True) for _ in range(3)]
    for metric, part in zip(metrics, (samples, samples[::2], samples[1::2]), strict=True):
        metric.update(part)
    whole, *parts = metrics
    expected = whole.compute()
    monkeypatch.setattr(
        "tasks.coco_metric.gather_objects", lambda _: [part.detections for part in parts]
    )
    assert parts[0].compute() == expected


def test_coco_metric_without_masks_or_detections(coco):
    path, samples = coco
    metric = CocoMetric(path, CATEGORIES, with_masks=False)
    metric.update(samples[1:2])
    assert metric.compute() == {"AP": 0, "AP50": 0, "AP75": 0}
    metric.reset()
    metric.update(samples)
    assert metric.compute().keys() == {f"AP{name}" for name in STATS}
    metric.reset()
    assert not metric.detections


def test_size_range_without_objects_has_no_figure(coco, tmp_path):
    path, samples = coco
    content = json.loads(Path(path).read_text())
    for row in content["annotations"]:
        row["area"] = 50.0
    small = tmp_path / "small.json"
    small.write_text(json.dumps(content))
    metric = CocoMetric(str(small), CATEGORIES, with_masks=False)
    metric.update(samples)
    assert metric.compute().keys() == {"AP", "AP50", "AP75", "AP_small"}


# Segmentation and classification


def segmented(predicted, truth):
    return SimpleNamespace(
        pred_sem_seg=SimpleNamespace(data=torch.from_numpy(predicted)[None]),
        gt_sem_seg=SimpleNamespace(data=torch.from_numpy(truth)[None]),
    )


def test_segmentation_metrics_equal_a_plain_count():
    generator = np.random.default_rng(0)
    # Class 3 does not occur but is predicted, class 4 neither.
    truth = generator.choice([0, 1, 2, IGNORED], (3, 20, 30), p=[0.6, 0.2, 0.1, 0.1])
    noise = generator.integers(0, 4, truth.shape)
    predicted = np.where((generator.random(truth.shape) < 0.7) & (truth < 5), truth, noise)
    task = SegmentationTask(nn.Linear(1, 1), "abcde", **RECIPE)
    task.update_metrics({}, [segmented(predicted[0], truth[0])])
    task.reset_metrics()
    task.update_metrics({}, [segmented(p, t) for p, t in zip(predicted, truth, strict=True)][:2])
    task.update_metrics({}, [segmented(predicted[2], truth[2])])
    p, t = predicted[truth != IGNORED], truth[truth != IGNORED]
    ious = [((p == c) & (t == c)).sum() / ((p == c) | (t == c)).sum() for c in range(4)]
    expected = {
        "mIoU": 100 * np.mean(ious),
        "mAcc": 100 * np.mean([(p == c)[t == c].mean() for c in range(3)]),
        "aAcc": 100 * (p == t).mean(),
    }
    figures = task.compute_metrics()
    assert {name: value.item() for name, value in figures.items()} == pytest.approx(expected)
    assert ious[3] == 0


def test_classes_that_do_not_occur_are_named_once(caplog):
    task = SegmentationTask(nn.Linear(1, 1), "abc", **RECIPE)
    with caplog.at_level("INFO"):
        for _ in range(2):
            task.update_metrics({}, [segmented(np.zeros((2, 2), int), np.zeros((2, 2), int))])
            task.compute_metrics()
    assert caplog.text.count("2 of 3 classes do not occur in validation: b, c") == 1


def test_top1_and_top5():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 12, generator=generator)
    labels = torch.randint(12, (40,), generator=generator)
    task = ClassificationTask(nn.Linear(1, 1), "abcdefghijkl", **RECIPE)
    task.update_metrics({"label": labels}, -logits)
    task.reset_metrics()
    for part in (slice(0, 32), slice(32, 40)):
        task.update_metrics({"label": labels[part]}, logits[part])
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    expected = {f"top{k}": 100 * (ranks < k).double().mean().item() for k in (1, 5)}
    figures = task.compute_metrics()
    assert {name: value.item() for name, value in figures.items()} == pytest.approx(expected)


def test_no_top5_of_few_classes():
    task = ClassificationTask(nn.Linear(1, 1), "abcde", **RECIPE)
    task.update_metrics({"label": torch.tensor([2])}, torch.eye(5)[2:3])
    assert task.compute_metrics() == {"top1": 100}


def test_mixup_mixes_images_and_labels():
    batch = {"image": torch.randn(4, 3, 8, 8), "label": torch.arange(4)}
    task = ClassificationTask(nn.Linear(1, 1), "abcdef", **RECIPE)
    assert task.prepare_batch(batch) is batch
    task = ClassificationTask(nn.Linear(1, 1), "abcdef", **RECIPE, mixup={"mixup_alpha": 1.0})
    mixed = task.prepare_batch({**batch, "sample_id": 7})
    assert mixed["label"].shape == (4, 6)
    torch.testing.assert_close(mixed["label"].sum(1), torch.ones(4))
    assert mixed["sample_id"] == 7


def test_mixup_is_refused():
    names = "abcdef"
    task = ClassificationTask(nn.Linear(1, 1), names, **RECIPE, mixup={"mixup_alpha": 1.0})
    odd = {"image": torch.randn(3, 3, 8, 8), "label": torch.arange(3)}
    with pytest.raises(ValueError, match=r"there are 3; pass an even data\.batch_size"):
        task.prepare_batch(odd)
    with pytest.raises(ValueError, match=r"task\.mixup\.alpha; did you mean"):
        ClassificationTask(nn.Linear(1, 1), names, **RECIPE, mixup={"alpha": 1.0})
    model = nn.Linear(1, 1)
    model.label_smoothing = 0.2
    with pytest.raises(ValueError, match=r"set one of them to 0"):
        ClassificationTask(model, names, **RECIPE, mixup={"mixup_alpha": 1.0})
    plain = {"mixup_alpha": 1.0, "label_smoothing": 0.0}
    assert ClassificationTask(model, names, **RECIPE, mixup=plain).mixup.label_smoothing == 0


@pytest.mark.parametrize("warmup", [False, True])
def test_weight_average_is_timms(warmup):
    """timm's, which begins with a copy as well; its buffers are averaged, its counters copied."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    theirs = ModelEmaV3(model, decay=0.8, use_warmup=warmup)
    ours = WeightAverage(decay=0.8, warmup=warmup)
    for step in range(1, 7):
        model(torch.randn(5, 3))
        with torch.no_grad():
            model[0].weight += torch.randn(4, 3)
        ours.update(model)
        theirs.update(model, step)
    expected = theirs.module.state_dict()
    assert ours.tensors.keys() == expected.keys()
    for key, value in ours.tensors.items():
        torch.testing.assert_close(value, expected[key])
    assert ours.tensors["1.num_batches_tracked"] == 6


def test_weight_average_is_put_in_and_taken_out():
    model, average = nn.Linear(2, 2).bfloat16(), WeightAverage(decay=0.5)
    average.put_into(model)  # nothing yet
    before = model.weight.clone()
    average.update(model)
    with torch.no_grad():
        model.weight.zero_()
    average.update(model)
    assert average.tensors["weight"].dtype == torch.float32
    average.put_into(model)
    torch.testing.assert_close(model.weight, before / 2)
    average.take_out(model)
    assert not model.weight.any()


def test_weight_average_of_another_model_is_refused():
    average = WeightAverage()
    average.update(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="average is one of another model"):
        WeightAverage().load_state_dict(average.state_dict(), nn.Linear(2, 2, bias=False))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite(value):
    class Broken(nn.Linear):
        def loss(self, batch):
            return {"loss_a": self.weight.sum(), "loss_b": torch.tensor(value)}

    task = BaseTask(Broken(2, 2), "ab", **RECIPE)
    with pytest.raises(ValueError, match=rf"the loss is {value} at step 0.*optimizer\.lr"):
        task.training_step({"image": torch.zeros(1)}, 0)


# Checkpoints


def test_checkpoint_round_trip(tmp_path):
    target = tmp_path / "new" / "last.ckpt"
    content = {"state_dict": {"w": torch.arange(3.0)}, "epoch": 2, "notes": ["a", None]}
    AtomicCheckpointIO().save_checkpoint(content, target)
    loaded = AtomicCheckpointIO().load_checkpoint(target)
    assert loaded["state_dict"]["w"].equal(content["state_dict"]["w"])
    assert (loaded["epoch"], loaded["notes"]) == (2, ["a", None])
    assert [path.name for path in target.parent.iterdir()] == ["last.ckpt"]


def test_what_a_kill_left_is_removed(tmp_path):
    (tmp_path / "epoch=1.ckpt.partial").write_bytes(b"half a file")
    AtomicCheckpointIO().save_checkpoint({"epoch": 2}, tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("short")])
def test_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch, error):
    target = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"epoch": 1}, target)
    before = target.read_bytes()

    def half(content, file):
        file.write(before[: len(before) // 2])
        raise error

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match=r"last\.ckpt could not be written .*the one before is kept"):
        AtomicCheckpointIO().save_checkpoint({"epoch": 2}, target)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    torch.save({"epoch": Harmful(tmp_path / "ran")}, tmp_path / "bad.ckpt")
    for weights_only in (True, False, None):
        with pytest.raises(ValueError, match=r"bad\.ckpt is truncated or no checkpoint of tensors"):
            AtomicCheckpointIO().load_checkpoint(tmp_path / "bad.ckpt", weights_only=weights_only)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.95])
def test_truncated_checkpoint(tmp_path, share):
    target = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(1000)}, target)
    content = target.read_bytes()
    target.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"last\.ckpt is truncated"):
        AtomicCheckpointIO().load_checkpoint(target)


def test_absent_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="there is no checkpoint at"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")


# metrics.csv


def test_metrics_of_one_step_share_a_row(tmp_path):
    log = CsvLog(tmp_path / "metrics.csv", flush_every=2)
    for step in (0, 1, 2):
        log.log_metrics({"train/loss": 1.5 - step}, step)
        log.log_metrics({"train/lr": 0.1}, step)
    log.log_metrics({"val/top1": 50.0}, 2)
    log.finalize("success")
    rows = [{"step": step, "train/loss": 1.5 - step, "train/lr": 0.1} for step in (0, 1, 2)]
    rows[2]["val/top1"] = 50.0
    assert read_rows(tmp_path / "metrics.csv") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_resumed_log_keeps_the_rows_before(tmp_path):
    path = tmp_path / "metrics.csv"
    log = CsvLog(path)
    for step in range(4):
        log.log_metrics({"loss": step / 2}, step)
    log.save()
    with path.open("a") as file:
        file.write("1.0,")  # cut off by a kill
    log = CsvLog(path)
    log.resume_at(2)
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    log.log_metrics({"loss": 9.5}, 2)
    log.save()
    log.log_metrics({"loss": 8.5, "other": 1.5}, 3)
    log.save()
    assert read_rows(path) == [
        {"step": 0, "loss": 0.0},
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 9.5},
        {"step": 3, "loss": 8.5, "other": 1.5},
    ]
    assert read_rows(tmp_path / "absent.csv") == []


# Random state


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.randn(3).tolist(),
        torch.rand(3).tolist(),
    ]


def test_random_state_goes_through_a_safe_checkpoint(tmp_path):
    own = random_state()
    random.gauss(0, 1)  # leaves a second number cached
    np.random.randn()
    torch.save(random_state(), tmp_path / "state.pt")
    expected = draw()
    draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == expected
    set_random_state(own)


# Drawing


def test_pictures():
    photo = to_image(torch.zeros(3, 60, 80), IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    assert (photo.mode, photo.size) == ("RGB", (80, 60))
    assert photo.getpixel((0, 0)) == (124, 116, 104)  # ImageNet's mean
    grey = photo.convert("L")
    sheet = contact_sheet([(grey, "a long caption of a tile", True), (photo, "b", False)] * 2)
    assert (sheet.mode, sheet.size) == ("RGB", (2 * 116 + 4, 2 * 134 + 4))
    mask = np.zeros((1, 60, 80), bool)
    mask[0, 10:20, 10:30] = True
    boxed = draw_instances(grey, [[10, 10, 30, 20]], [13], ["cat 0.9"], mask)
    assert (boxed.mode, boxed.size) == ("RGB", (320, 240))
    r, g, b = boxed.getpixel((100, 70))
    assert not r == g == b
    assert draw_instances(photo, [], [], []).size == (320, 240)
    labels = np.zeros((60, 80), np.int64)
    labels[:30], labels[50:] = 1, IGNORED
    drawn = draw_segments(photo, labels, ("photo", "cat"), background="photo")
    assert (drawn.mode, drawn.size) == ("RGB", (320, 240))
    assert drawn.getpixel((2, 2)) != drawn.getpixel((2, 150)) == drawn.getpixel((2, 230))
    pair = side_by_side(drawn, Image.new("RGB", (100, 300)), ("left", "right"))
    assert (pair.mode, pair.size) == ("RGB", (320 + 100 + 6, 300 + 20))


def test_boxes_and_masks_sit_where_they_belong():
    mask = np.zeros((1, 40, 80), bool)
    mask[0, 10:20, 30:50] = True
    drawn = draw_instances(Image.new("RGB", (80, 40)), [[30, 10, 50, 20]], [0], [""], mask)
    assert drawn.size == (320, 160)  # four times as large
    assert drawn.getpixel((120, 60)) == drawn.getpixel((200, 80)) == PALETTE[0]
    assert drawn.getpixel((160, 60)) == tuple(round(c * 130 / 255) for c in PALETTE[0])
    assert drawn.getpixel((160, 90)) == drawn.getpixel((215, 60)) == (0, 0, 0)


def test_only_the_background_keeps_the_photograph():
    photo, labels = Image.new("RGB", (80, 40)), np.zeros((40, 80), int)
    drawn = draw_segments(photo, labels, ["photo"], background="photo")
    assert drawn.getpixel((10, 10)) == (0, 0, 0)
    assert draw_segments(photo, labels, ["photo"]).getpixel((10, 10)) != (0, 0, 0)
