"""Batches of the toolkits from plain tensors, and average precision against them."""

import numpy as np
import pytest
import torch

from heads.toolkits.samples import collate_detection, collate_segmentation
from tests.errors import refuses

IMAGE = torch.arange(3 * 20 * 30).reshape(3, 20, 30).remainder(256).byte()
BOXES = torch.tensor([[2, 3, 12, 9], [5.5, 1, 29, 19]])


def sample(**changes):
    return {"image": IMAGE, "boxes": BOXES, "labels": torch.tensor([1, 0])} | changes


def test_images_are_bgr_and_boxes_stay():
    masks = torch.zeros(2, 20, 30, dtype=torch.bool)
    masks[0, 3:9, 2:12] = True
    batch = collate_detection([sample(masks=masks, sample_id=7, name="a.png"), sample()])
    assert torch.equal(batch["inputs"][0], IMAGE[[2, 1, 0]])
    first, second = batch["data_samples"]
    assert (first.img_id, first.img_path, second.img_id) == (7, "a.png", -1)
    assert torch.equal(first.gt_instances.bboxes, BOXES)
    assert first.gt_instances.masks.to_ndarray().sum() == 60
    batch = collate_segmentation([{"image": IMAGE, "mask": torch.full((20, 30), 3)}])
    assert batch["data_samples"][0].gt_sem_seg.data.shape == (1, 20, 30)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image": IMAGE.float()}, r"torch.float32 \(3, 20, 30\); expected RGB bytes"),
        ({"image": IMAGE[0]}, r"torch.uint8 \(20, 30\); expected RGB bytes"),
        ({"labels": torch.tensor([1])}, "has 2 boxes, 1 labels"),
        ({"boxes": BOXES[:, [2, 1, 0, 3]]}, "needs a label, and an area"),
        ({"masks": torch.zeros(2, 30, 20)}, r"masks \(2, 30, 20\); .* need \(2, 20, 30\)"),
    ],
)
def test_wrong_samples_are_named(changes, said):
    with pytest.raises(ValueError, match=rf"sample 1 of the batch .*{said}"):
        collate_detection([sample(), sample(**changes)])


def test_missing_entries_are_named():
    with pytest.raises(ValueError, match=r"sample 0 of the batch lacks 'mask'; it has the keys"):
        collate_segmentation([sample()])
    refuses(r"lacks 'image'; it has <class 'tuple'>", collate_detection, [(IMAGE, {})])
    with pytest.raises(ValueError, match=r"masks \(30, 20\); .* need \(20, 30\)"):
        collate_segmentation([{"image": IMAGE, "mask": torch.zeros(30, 20)}])


def test_precision_against_a_batch_is_that_against_a_file():
    from mmengine.structures import InstanceData

    from tasks.detection.coco_metric import BatchCocoMetric, CocoMetric

    generator = np.random.default_rng(0)
    content = {"images": [], "annotations": [], "categories": [{"id": 1}, {"id": 2}]}
    found = []
    for image in range(6):
        corners = generator.uniform(0, 60, (4, 2)).astype(np.float32)
        boxes = torch.tensor(
            np.concatenate(
                [corners, corners + generator.uniform(9, 40, (4, 2)).astype(np.float32)], 1
            )
        )
        labels = torch.tensor(generator.integers(0, 2, 4))
        content["images"].append({"id": image})
        for (left, top, right, bottom), label in zip(boxes.tolist(), labels.tolist(), strict=True):
            area = (right - left) * (bottom - top)
            content["annotations"].append(
                {"id": len(content["annotations"]), "image_id": image, "category_id": label + 1}
                | {"bbox": [left, top, right - left, bottom - top], "area": area, "iscrowd": 0}
            )
        picture = torch.zeros(3, 128, 128, dtype=torch.uint8)
        made = {"image": picture, "boxes": boxes, "labels": labels}
        (one,) = collate_detection([made])["data_samples"]
        shifted = boxes + torch.tensor(generator.normal(0, 3, (4, 4)).astype(np.float32))
        scores = torch.tensor(generator.random(4))
        one.pred_instances = InstanceData(bboxes=shifted, labels=labels, scores=scores)
        found.append(one)
    own = BatchCocoMetric(["a", "b"], with_masks=False)
    for _ in range(2):  # the second epoch starts afresh
        own.reset()
        for one in found:
            one.set_metainfo({"img_id": -1})
        own.update(found[:2])
        own.update(found[2:])
        figures = own.compute()
    file = CocoMetric(content, (1, 2), with_masks=False)
    for index, one in enumerate(found):
        one.set_metainfo({"img_id": index})
    file.update(found)
    assert 0.2 < figures["AP"] < 0.9
    expected = {name: float(value) for name, value in file.compute().items()}
    assert {name: float(value) for name, value in figures.items()} == pytest.approx(expected)
    assert own.class_figures[1].keys() == {"AP", "AP50"}
