"""Metrics of the tasks against their references."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, precision_recall_fscore_support
from torch import nn
from torchmetrics import Metric

from tasks.classification.task import ClassificationTask
from tasks.detection.coco_metric import STATS, CocoMetric
from tasks.segmentation.task import IGNORED, SegmentationTask
from tests.coco_reference import evaluate_coco
from tests.runs import RECIPE
from tools.analyses.coco_errors import precision_curves
from tools.comparison.answers import Precisions

CATEGORIES = (3, 7)


def box_mask(box, size):
    mask = np.zeros(size, bool)
    x1, y1, x2, y2 = np.round(box).astype(int)
    mask[y1:y2, x1:x2] = True
    mask[y1 : (y1 + y2) // 2, x1 : (x1 + x2) // 2] = False  # masks differ from boxes
    return mask


def coco_case(folder, num_images=8, size=(200, 240)):
    """Return annotations and, as mmdet's samples, detections near and far from the objects."""
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
            region = {"size": list(encoded["size"]), "counts": encoded["counts"].decode()}
            annotations.append({
                "id": len(annotations) + 1, "image_id": image, "category_id": CATEGORIES[label],
                "bbox": [*box[:2].tolist(), *(box[2:] - box[:2]).tolist()],
                "area": float(mask.sum()), "iscrowd": int(len(annotations) % 9 == 8),
                "segmentation": region,
            })  # fmt: skip
        found = np.clip(boxes + generator.normal(0, 2, boxes.shape), 0, 200)
        keep = 0 if image == 2 else 6  # nothing found in the second image
        instances = InstanceData(
            bboxes=torch.tensor(found[:keep], dtype=torch.float32),
            labels=torch.tensor(labels[:keep]),
            scores=torch.tensor(generator.random(6)[:keep], dtype=torch.float32),
            masks=torch.from_numpy(np.stack([box_mask(box, size) for box in found])[:keep]),
        )
        samples.append(SimpleNamespace(img_id=image, pred_instances=instances))
    images = [{"id": i, "width": size[1], "height": size[0], "file_name": f"{i}.jpg"}
              for i in range(1, num_images + 1)]  # fmt: skip
    categories = [{"id": i, "name": str(i)} for i in CATEGORIES]
    content = {"info": {}, "images": images, "annotations": annotations, "categories": categories}
    path = folder / "annotations.json"
    path.write_text(json.dumps(content))
    return str(path), samples


def reference_figures(path, samples, kind, categories=None, ids=CATEGORIES):
    """Evaluate with pycocotools, from separately built rows."""
    from pycocotools import mask as coco_mask

    rows = []
    for sample in samples:
        found = sample.pred_instances
        for i in range(len(found)):
            x1, y1, x2, y2 = found.bboxes[i].double().tolist()
            mask = np.asfortranarray(found.masks[i].numpy(), dtype=np.uint8)
            box, mask = [x1, y1, x2 - x1, y2 - y1], coco_mask.encode(mask)
            region = {"bbox": box} if kind == "bbox" else {"segmentation": mask}
            row = {"image_id": sample.img_id, "category_id": ids[found.labels[i].item()]}
            rows.append({**row, "score": found.scores[i].item(), **region})
    images = [sample.img_id for sample in samples]
    return evaluate_coco(path, rows, kind, images, list(categories or ids))


@pytest.fixture
def coco(tmp_path):
    """Return the path of annotations, their content, and detections."""
    for package in ("mmengine", "pycocotools", "faster_coco_eval"):
        pytest.importorskip(package)
    path, samples = coco_case(tmp_path)
    return path, json.loads(Path(path).read_text()), samples


def scored(content, samples, categories=CATEGORIES, **options):
    """Return a metric that has seen samples, and its figures."""
    metric = CocoMetric(content, categories, **{"with_masks": False, **options})
    metric.update(samples)
    return metric, metric.compute()


@pytest.mark.parametrize("seen", [8, 5])
def test_coco_metric_equals_pycocotools(coco, seen):
    path, content, samples = coco
    samples = samples[:seen]
    metric = CocoMetric(content, CATEGORIES, with_masks=True)
    metric.update(samples[:3])
    metric.update(samples[2:])  # the third image comes twice, as from a padded sampler
    figures = metric.compute()
    for kind, prefix in (("bbox", ""), ("segm", "mask_")):
        expected = reference_figures(path, samples, kind)
        assert 0.1 < expected[0] < 1
        ours = [figures[f"{prefix}AP{name}"].item() for name in STATS]
        assert ours == pytest.approx(expected, abs=1e-6)
    assert metric.compute() == figures  # the same index serves every evaluation of a run


def test_restricted_sets_and_classes_without_detections_or_ground_truth(coco):
    path, content, samples = coco
    found = copy.deepcopy(samples)
    for sample in found:
        sample.pred_instances = sample.pred_instances[sample.pred_instances.labels == 1]
        sample.pred_instances.labels[:] = 0
    _, figures = scored(content, found, CATEGORIES[1:])
    expected = reference_figures(path, samples, "bbox", CATEGORIES[1:])
    assert figures["AP"].item() == pytest.approx(expected[0])
    _, content, samples = coco
    content["annotations"] = [a for a in content["annotations"] if a["category_id"] == 7]
    metric, _ = scored(content, samples[1:2])  # without detections
    assert metric.class_figures == {3: {"AP": None, "AP50": None}, 7: {"AP": 0.0, "AP50": 0.0}}
    metric.update(samples)
    metric.compute()
    assert metric.class_figures[3]["AP"] is None
    assert metric.class_figures[7]["AP"] > 0


@pytest.mark.parametrize("seen", [[0], [1]])
def test_images_without_ground_truth_have_no_average_precision(coco, seen):
    """With and without detections; the second image has none."""
    _, content, samples = coco
    content["annotations"] = [a for a in content["annotations"] if a["image_id"] > 2]
    with pytest.raises(ValueError, match=r"the 1 evaluated images .*limit_val_batches"):
        scored(content, [samples[place] for place in seen])


HUGE = 2**63
# Ids of 8 images, of 32 annotations and of both categories; their ranks are the clean file's ids.
ODD_IDS = {
    "from zero": (range(8), range(32), (0, 1)),
    "one annotation is zero": (range(1, 9), (*range(1, 32), 0), (3, 7)),
    "negative": (range(-9, -1), range(-40, -8), (-7, 0)),
    "beyond doubles": (range(2**53, 2**53 + 8), range(2**53, 2**53 + 32), (2**53, 2**53 + 1)),
    "beyond 64 bits": (range(HUGE - 4, HUGE + 4), range(10**30, 10**30 + 32), (-HUGE, 10**40)),
    "far apart": ([10**n for n in range(8)], [3**n for n in range(32)], (5, 9**20)),
    "falling": (range(80, 72, -1), range(100, 68, -1), (9, 2)),
    "shuffled": ((4, 70, 2, 9, 1, 33, 8, 5), [n * 19 % 97 for n in range(32)], (8, 6)),
    "floats": ([n / 1 for n in range(8)], [float(n) for n in range(32)], (0.0, 1.0)),
}


def with_ids(content, samples, images, annotations, categories):
    """Replace the ids of ground truth and detections, in the file's order."""
    images = dict(zip([one["id"] for one in content["images"]], images, strict=True))
    categories = dict(zip(CATEGORIES, categories, strict=True))
    rows = [
        {**row, "id": number, "image_id": images[row["image_id"]],
         "category_id": categories[row["category_id"]]}
        for row, number in zip(content["annotations"], annotations, strict=True)
    ]  # fmt: skip
    changed = {key: [{**one, "id": ids[one["id"]]} for one in content[key]]
               for key, ids in (("images", images), ("categories", categories))}  # fmt: skip
    found = [copy.copy(sample) for sample in samples]
    for sample in found:
        sample.img_id = images[sample.img_id]
    return {**content, **changed, "annotations": rows}, found


def ranks(numbers):
    return [sorted(numbers).index(number) + 1 for number in numbers]


def tied(samples):
    """Reduce the detections to three different scores."""
    found = copy.deepcopy(samples)
    for sample in found:
        sample.pred_instances.scores = (3 * sample.pred_instances.scores).ceil() / 3
    return found


@pytest.mark.parametrize("kind", ODD_IDS)
def test_ids_do_not_decide_average_precision(coco, tmp_path, kind):
    """The reference has ids 1, 2, 3, ... in the order of the unusual ids."""
    _, whole, samples = coco
    images, annotations, categories = ODD_IDS[kind]
    samples = tied(samples)
    clean, found = with_ids(whole, samples, *map(ranks, (images, annotations, categories)))
    reference = tmp_path / "clean.json"
    reference.write_text(json.dumps(clean))
    content, odd = with_ids(whole, samples, images, annotations, categories)
    before = copy.deepcopy(content)
    metric = CocoMetric(content, categories, with_masks=True)
    metric.update(odd[4:])
    metric.update(odd[:4])
    figures = metric.compute()
    rows = [row for rows in metric.detections.values() for row in rows]
    curves = precision_curves(content, rows, images)
    for kind, prefix in (("bbox", ""), ("segm", "mask_")):
        expected = reference_figures(reference, found, kind, ids=ranks(categories))
        ours = [figures[f"{prefix}AP{name}"].item() for name in STATS]
        assert ours == pytest.approx(expected, abs=1e-6)
        assert 0.1 < expected[0] < 0.9
        for category, rank in zip(categories, ranks(categories), strict=True):
            alone = reference_figures(reference, found, kind, [rank], ids=ranks(categories))
            row = metric.class_figures[category]
            assert [row[f"{prefix}AP"], row[f"{prefix}AP50"]] == pytest.approx(alone[:2], abs=1e-6)
            if kind == "bbox":
                at_75, at_50 = curves[category][:2].mean(1)
                assert [at_50, at_75] == pytest.approx(alone[1:3], abs=1e-6)
    assert content == before
    assert {row["image_id"] for row in rows} <= {*images}


def test_precision_of_images_that_are_drawn_again(coco):
    """Images that occur several times, or never, and a crowd."""
    _, content, samples = coco
    content["annotations"][0]["iscrowd"] = 1
    metric, figures = scored(content, samples)
    matches = metric.match().arrays
    assert set(np.unique(matches["match"])) == {-1, 0, 1}
    answers = Precisions([matches, matches])
    assert answers.measure(0, np.ones((1, 8)))[0] == pytest.approx(figures["AP"].item(), abs=1e-6)
    times = [2, 0, 1, 3, 0, 1, 1, 0]
    again, found = {**content, "images": [], "annotations": []}, []
    for sample, count in zip(samples, times, strict=True):
        for _ in range(count):
            number = len(again["images"]) + 1
            again["images"].append({**content["images"][sample.img_id - 1], "id": number})
            again["annotations"] += [
                {**row, "id": 10 * number + place, "image_id": number}
                for place, row in enumerate(content["annotations"], start=1)
                if row["image_id"] == sample.img_id
            ]
            found.append(copy.copy(sample))
            found[-1].img_id = number
    for place, row in enumerate(again["annotations"], start=1):
        row["id"] = place
    _, expected = scored(again, found)
    drawn = answers.measure(1, np.array([times, [1] + 7 * [0]], float))
    assert drawn[0] == pytest.approx(expected["AP"].item(), abs=1e-6)
    assert drawn[0] != pytest.approx(figures["AP"].item(), abs=1e-3)
    _, alone = scored(content, samples[:1])
    assert drawn[1] == pytest.approx(alone["AP"].item(), abs=1e-6)


def test_boxes_that_training_leaves_out_count_as_in_pycocotools(coco, tmp_path):
    """Boxes without area or width, outside the image or marked ignore; and a crowd."""
    path, content, samples = coco
    whole = reference_figures(path, samples, "bbox")
    first = content["annotations"][0]
    for number, change in enumerate(
        ({"area": 0}, {"bbox": [5, 5, 0, 9]}, {"bbox": [5, 5, 9, -9]}, {"bbox": [900, 5, 9, 9]},
         {"ignore": 1}, {"iscrowd": 1}),
        start=1000,
    ):  # fmt: skip
        content["annotations"].append({**first, "id": number, **change})
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content))
    expected = reference_figures(changed, samples, "bbox")
    _, figures = scored(content, samples)
    assert [figures[f"AP{name}"].item() for name in STATS] == pytest.approx(expected, abs=1e-6)
    assert expected[0] < whole[0] - 0.02


def segmented(predicted, truth):
    return SimpleNamespace(
        pred_sem_seg=SimpleNamespace(data=torch.from_numpy(predicted)[None]),
        gt_sem_seg=SimpleNamespace(data=torch.from_numpy(truth)[None]),
    )


def test_segmentation_metrics_equal_a_plain_count():
    generator = np.random.default_rng(0)
    # Class 3 is predicted but does not occur; class 4 is neither.
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
    rows = {row.pop("class"): row for row in task.class_figures}
    assert [rows[name]["IoU"] for name in "abcd"] == pytest.approx([100 * iou for iou in ious])
    assert rows["d"]["Acc"] is rows["e"]["IoU"] is None
    assert [rows[name]["pixels"] for name in "abcde"] == [(t == c).sum() for c in range(5)]


def test_top5_stays_apart_from_top1_after_a_batch_of_equal_ones():
    task = ClassificationTask(nn.Linear(1, 1), "abcdefgh")
    logits = torch.arange(8.0)[None]
    for label in (0, 4):  # in neither, in the best five
        task.update_metrics({"label": torch.tensor([label])}, logits)
    assert task.compute_metrics()["top5"] == 50


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
    assert {name: figures[name].item() for name in expected} == pytest.approx(expected)
    few = ClassificationTask(nn.Linear(1, 1), "abcde", **RECIPE)
    few.update_metrics({"label": torch.tensor([2])}, torch.eye(5)[2:3])
    assert few.compute_metrics() == dict.fromkeys(few.metric_names, 100)


def test_loss_of_validation_is_the_plain_cross_entropy_over_all_images():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 6, generator=generator)
    labels = torch.randint(6, (40,), generator=generator)
    labels[3] = -1  # unknown
    model = nn.Linear(1, 1)
    model.predict = lambda batch: batch["logits"]
    task = ClassificationTask(model, "abcdef", **RECIPE)
    monkey = {}
    task.log = lambda name, value, **_: monkey.__setitem__(name, float(value))
    task.update_metrics = lambda batch, predictions: None
    state = torch.get_rng_state()
    task.on_validation_epoch_start()
    for part in (slice(0, 32), slice(32, 40)):
        task.validation_step({"logits": logits[part], "label": labels[part]}, 0)
    task.compute_metrics = dict
    task.on_validation_epoch_end()
    known = labels >= 0
    expected = -logits.log_softmax(-1)[known, labels[known]].mean().item()
    assert monkey == {"val/loss": pytest.approx(expected, rel=1e-6)}
    assert torch.equal(torch.get_rng_state(), state)
    assert not [key for key in task.state_dict() if "loss" in key]


def test_loss_of_segmentation_counts_the_pixels_that_count_and_detectors_have_none():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 5, generator=generator)
    truth = torch.randint(3, (2, 4, 5), generator=generator)
    truth[0, :2], truth[1] = IGNORED, IGNORED
    given = [[SimpleNamespace(data=one) for one in part] for part in (logits, truth[:, None])]
    samples = [SimpleNamespace(seg_logits=one, gt_sem_seg=labels)
               for one, labels in zip(*given, strict=True)]  # fmt: skip
    task = SegmentationTask(nn.Linear(1, 1), "abc", **RECIPE)
    loss, count = task.evaluation_loss({}, samples)
    assert count == 10
    picked = logits[0].log_softmax(0).permute(1, 2, 0)[2:].reshape(10, 3)
    expected = -picked[torch.arange(10), truth[0, 2:].flatten()].sum()
    torch.testing.assert_close(loss, expected)
    from tasks.detection.task import DetectionTask

    assert "at random" in DetectionTask.why_no_loss
    assert not ClassificationTask.why_no_loss
    assert not SegmentationTask.why_no_loss


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_states_of_metrics_keep_their_types_beside_weights_of_any(kind):
    """Lightning converts weights by ``to``, at which torchmetrics' own states would be rounded."""
    names = [str(index) for index in range(6)]
    task = ClassificationTask(nn.Linear(4, 6), names, calibrate=True, **RECIPE)
    metrics = [part for part in task.modules() if isinstance(part, Metric)]
    types = [{name: getattr(m, name) for name in m.metric_state} for m in metrics]
    task.loss_sum.update(torch.tensor(0.1, dtype=torch.float64))
    task.to(kind).to(torch.bfloat16).to("cpu")
    assert task.loss_sum.compute() == torch.tensor(0.1, dtype=torch.float64)  # states in use, too
    assert {value.dtype for value in task.model.state_dict().values()} == {torch.bfloat16}
    for metric, before in zip(metrics, types, strict=True):
        metric.reset()
        for name, value in before.items():
            now = getattr(metric, name)
            assert type(now) is type(value)
            assert not isinstance(now, torch.Tensor) or now.dtype == value.dtype
    task.on_validation_epoch_start()
    for _ in range(500):  # sums of pixels
        task.loss_sum.update(torch.tensor(6400 * 0.7, dtype=torch.float64))
        task.loss_count.update(torch.tensor(6400))
    mean = task.loss_sum.compute() / task.loss_count.compute()
    assert mean.item() == pytest.approx(0.7, abs=1e-12)


def test_figures_of_classes_equal_scikit_learn_s():
    """Class d never occurs and c is never predicted."""
    names = ("a", "b", "c", "d")
    truth = torch.tensor([0, 0, 0, 1, 1, 2, 2, 0])
    predicted = torch.tensor([0, 1, 3, 1, 0, 0, 1, 0])
    task = ClassificationTask(nn.Linear(1, 1), names)
    logits = torch.eye(4)[predicted]
    for part in (slice(3), slice(3, None)):
        task.update_metrics({"label": truth[part]}, logits[part])
    figures = task.compute_metrics()
    assert tuple(figures) == task.metric_names == ("top1", "balanced_accuracy", "F1")
    expected = precision_recall_fscore_support(
        truth, predicted, labels=range(4), zero_division=np.nan
    )
    rows = [
        [np.nan if row[key] is None else row[key] for key in ("precision", "recall", "F1")]
        for row in task.class_figures
    ]
    np.testing.assert_allclose(np.array(rows).T[:2], 100 * np.array(expected[:2]))
    np.testing.assert_allclose(np.array(rows).T[2, :3], 100 * expected[2][:3])
    assert [row["images"] for row in task.class_figures] == expected[3].tolist() == [4, 2, 2, 0]
    balanced = 100 * balanced_accuracy_score(truth, predicted)
    assert float(figures["balanced_accuracy"]) == pytest.approx(balanced)
    assert float(figures["F1"]) == pytest.approx(100 * expected[2][:3].mean())
