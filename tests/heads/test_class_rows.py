"""A head that trains on with other classes: a class has the weights of its name."""

import pytest
import torch

from heads.toolkits.samples import collate_detection, collate_segmentation
from tasks.engine.checkpoints.class_rows import compare_classes, find_class_axes, with_classes
from tests.dense_heads import DENSE, FEW, HEADS, model_of
from tests.families import rest_slow, short

BEFORE, PERMUTED, MORE = "abcd", "cadb", "axbcd"
BUILDERS = {
    "detection": "heads.toolkits.detectors.build_detector",
    "segmentation": "heads.toolkits.segmentors.build_segmentor",
}
# One config per way of ordering the outputs of classes, besides those of configs/head.
DETECTORS = """
atss/atss_r50_fpn_1x_coco double_heads/dh-faster-rcnn_r50_fpn_1x_coco
faster_rcnn/faster-rcnn_r50_fpn_1x_coco fcos/fcos_r50-caffe_fpn_gn-head_1x_coco
free_anchor/freeanchor_r50_fpn_1x_coco fsaf/fsaf_r50_fpn_1x_coco gfl/gfl_r50_fpn_1x_coco
sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco yolact/yolact_r50_1xb8-55e_coco
""".split()
SEGMENTORS = """
deeplabv3_r50-d8 encnet_r50-d8 ocrnet_hr18 pointrend_r50 setr_pup
""".split()
CASES = {
    **{name: (HEADS[name], FEW[HEADS[name]["_tasks_"][0]]) for name in DENSE},
    **{
        base: ({"_target_": BUILDERS[task], "_tasks_": [task], "name": base, "base": base}, {})
        for task, bases in (("detection", DETECTORS), ("segmentation", SEGMENTORS))
        for base in bases
    },
}
QUICK = ["retinanet", "semantic_fpn"]


def model(head, few, classes, seed=0):
    torch.manual_seed(seed)
    built = model_of(head, short("resnet18", dense=True), len(classes), **few).eval()
    for name, parameter in built.named_parameters():
        if name.endswith("bias") and (parameter < -2).all():  # a prior of few objects
            parameter.data.fill_(-1.0)
    for part in built.modules():
        take_all(getattr(part, "test_cfg", None))
    return built


def take_all(settings):
    """Set the least score of a detection to 0."""
    for key, value in (settings or {}).items():
        if key in ("score_thr", "filter_thr"):
            settings[key] = 0.0
        elif isinstance(value, dict):
            take_all(value)


def loaded(saved, head, few, before, now, seed):
    """Return a model of other classes with the weights of a saved one."""
    built = model(head, few, now, seed)
    with torch.device("meta"):
        wider = model_of(head, short("resnet18", dense=True), len(now) + 1, **few)
    axes = find_class_axes(built, wider, len(now))
    assert axes
    built.load_state_dict(with_classes(saved.state_dict(), built, axes, before, now))
    return built


def unmarked(task):
    """Return a batch of one image without objects, or with all pixels ignored."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 255, (3, 96, 96), generator=generator, dtype=torch.uint8)
    if task == "segmentation":
        return collate_segmentation([{"image": image, "mask": torch.full((96, 96), 255)}])
    objects = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    return collate_detection([{"image": image, **objects}])


def answers(model, head, classes):
    """Return a table of what a model predicts, by the names of its classes."""
    (task,) = head["_tasks_"]
    with torch.no_grad():
        (sample,) = model.predict(unmarked(task))
    if task == "segmentation":
        rows = dict(zip(classes, sample.seg_logits.data.flatten(1), strict=True))
        return torch.stack([rows[name] for name in sorted(classes)])
    predicted = sample.pred_instances
    assert len(predicted) > 3
    labels = torch.tensor([sorted(classes).index(classes[label]) for label in predicted.labels])
    masks = predicted.masks.flatten(1).sum(1) if "masks" in predicted else torch.zeros(len(labels))
    columns = [predicted.scores, labels, masks, *predicted.bboxes.T]
    table = torch.stack([column.double() for column in columns], dim=1)
    return table[table[:, :2].mul(torch.tensor([-1.0, 1e-6])).sum(1).argsort()]


@pytest.mark.parametrize("name", rest_slow(CASES, QUICK))
def test_each_class_keeps_its_weights(name):
    """In another order all answers stay; a class more and less changes no tensor of the others."""
    head, few = CASES[name]
    saved = model(head, few, BEFORE)
    permuted = loaded(saved, head, few, BEFORE, PERMUTED, seed=1)
    torch.testing.assert_close(
        answers(permuted, head, PERMUTED), answers(saved, head, BEFORE), rtol=1e-4, atol=1e-4
    )
    wider = loaded(saved, head, few, BEFORE, MORE, seed=2)
    again = loaded(wider, head, few, MORE, BEFORE, seed=3)
    torch.testing.assert_close(again.state_dict(), saved.state_dict(), rtol=0, atol=0)


def test_a_new_class_keeps_its_initialisation():
    head, few = CASES["mask_rcnn"]
    saved, fresh = (model(head, few, names, seed) for names, seed in ((BEFORE, 0), (MORE, 2)))
    wider = loaded(saved, head, few, BEFORE, MORE, seed=2)
    new, old, start = (m.model.roi_head.bbox_head for m in (wider, saved, fresh))
    for part, step in (("fc_cls", 1), ("fc_reg", 4)):
        weights, before, initial = (getattr(h, part).weight for h in (new, old, start))
        x = MORE.index("x") * step
        torch.testing.assert_close(weights[x : x + step], initial[x : x + step], rtol=0, atol=0)
        torch.testing.assert_close(weights[x + step :], before[x:], rtol=0, atol=0)


def test_classes_are_compared_by_name():
    changes = compare_classes(["cat", "dog"], ["dog", "hen"])
    assert str(changes) == "loaded dog; initialised hen; left out cat"
    assert str(compare_classes("ab", "ba")) == "loaded b, a"
