"""The toolkits' models as functions of pixels predict what they predict from samples."""

import pytest
import torch

from heads.toolkits.graphs import LabelMaps, detections_of
from heads.toolkits.samples import collate_detection, collate_segmentation
from tests.dense_heads import small_model

ONE_STAGE = {
    "retinanet": None,
    "fcos": "fcos/fcos_r50-caffe_fpn_gn-head_1x_coco",
    "atss": "atss/atss_r50_fpn_1x_coco",
}
SIZE = (62, 75)  # of images, which are padded


def images_of(count):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *SIZE, 3), dtype=torch.uint8, generator=generator)


def dense_model(name):
    """A detector that finds much, by few proposals."""
    if "mask_rcnn" in name:
        return small_model(name, options={"test_cfg.rcnn.max_per_img": 20})
    values = {"test_cfg": {"score_thr": 0.001, "max_per_img": 20}}
    return small_model("retinanet", base=ONE_STAGE[name], options=values)


@pytest.mark.parametrize("name", [*ONE_STAGE, "mask_rcnn", "cascade_mask_rcnn"])
def test_answers_are_those_of_the_detector_in_the_original_image(name):
    model, images, size = dense_model(name), images_of(2), (124, 90)
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    batch = collate_detection([{"image": image.permute(2, 0, 1), **nothing} for image in images])
    for sample in batch["data_samples"]:
        factors = SIZE[1] / size[1], SIZE[0] / size[0]
        sample.set_metainfo({"ori_shape": size, "scale_factor": factors})
    with torch.no_grad():
        predicted = model.predict(batch)
        answers = detections_of(model)(images, torch.tensor(size))
    for sample, labels, scores, boxes, *masks in zip(predicted, *answers, strict=True):
        expected = sample.pred_instances
        count = len(expected)
        assert count
        assert labels.tolist() == [*expected.labels.tolist(), *[-1] * (20 - count)]
        torch.testing.assert_close(scores[:count], expected.scores)
        torch.testing.assert_close(boxes[:count], expected.bboxes)
        if "mask_rcnn" in name:
            assert (masks[0][:count] != expected.masks).float().mean() < 1e-4
            assert not masks[0][count:].any()


@pytest.mark.parametrize("name", ["upernet", "semantic_fpn", "ffnet_seg", "segformer"])
@pytest.mark.parametrize("size", [SIZE, (40, 90)])
def test_labels_are_those_of_the_segmentor(name, size):
    model = small_model(name)
    images = images_of(2)
    samples = [
        {"image": image.permute(2, 0, 1), "mask": torch.zeros(SIZE, dtype=torch.long)}
        for image in images
    ]
    batch = collate_segmentation(samples)
    for sample in batch["data_samples"]:
        sample.set_metainfo({"ori_shape": size})
    with torch.no_grad():
        predicted = model.predict(batch)
        labels, shares = LabelMaps(model)(images, torch.tensor(size))
    expected = torch.stack([sample.seg_logits.data.softmax(0) for sample in predicted])
    torch.testing.assert_close(shares, expected.amax(1))
    assert (labels.long() == expected.argmax(1)).float().mean() > 0.999


@pytest.mark.parametrize(
    ("name", "graph", "more"),
    [
        ("dino", detections_of, {}),
        ("mask2former", LabelMaps, {}),
        ("upernet", LabelMaps, {"test_crop": 64}),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(name, graph, more):
    with pytest.raises(ValueError, match=r"by rules of its own|in sliding windows"):
        graph(small_model(name, **more))
