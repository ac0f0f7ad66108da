"""Classification of images with any number of labels each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tasks.classification.family import FAMILY as CLASSIFICATION
from tasks.classification.family import usual_data as class_folders
from tasks.engine.family import ANY, Metric


def usual_data(img_size: Any) -> dict[str, Any]:
    """Return the config of a data module that prepares images as ImageNet's evaluation."""
    return {**class_folders(img_size), "labels": "labels.csv"}


FAMILY = replace(
    CLASSIFICATION,
    name="multi_label",
    task="tasks.multi_label.task.MultiLabelTask",
    batch={"image": "(B, 3, H, W)", "label": "(B, K) of 0 and 1"},
    metrics=(
        Metric("mAP", "mean average precision in %"),
        Metric("F1", "mean F1 of the classes in %"),
        Metric("F1_micro", "F1 of all labels in %"),
        Metric("exact", "images with all labels right in %"),
    ),
    monitor="mAP",
    answers="exact",
    usual_data=usual_data,
    counted=None,
    pipeline="",
    exports={ANY: "classifier", "mmpretrain": ""},  # its classifier has one label
    whole_graph="tasks.multi_label.whole.WholeLabels",
    analyses={
        "activations": "",
        "attention": "",
        "coefficients": "",
        "entropy": "",
        "erf": "",
        "landscape": "multi_label_objective",
        "mappings": "",
        "relations": "",
        "report": "",
        "similarity": "",
    },
    peculiarity="whose images have any number of labels",
    remedies={"errors": "run.py mode=test writes AP and F1 of each class to classes.csv"},
    parts_evaluation="",
    published=None,
)
