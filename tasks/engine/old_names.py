"""Names of classes in run folders that were written before their modules moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Old module: where its classes are now.
MOVED = {
    "datamodules.ade20k": "datamodules.dense.ade20k",
    "datamodules.cifar100": "datamodules.images.cifar100",
    "datamodules.cityscapes": "datamodules.dense.cityscapes",
    "datamodules.class_folders": "datamodules.images.class_folders",
    "datamodules.coco": "datamodules.dense.coco",
    "datamodules.image_folder": "datamodules.images.image_folder",
    "datamodules.image_parquet": "datamodules.images.image_parquet",
    "datamodules.image_tars": "datamodules.images.image_tars",
    "datamodules.inaturalist": "datamodules.images.inaturalist",
    "datamodules.robustness": "datamodules.images.robustness",
    "datamodules.sample": "datamodules.sample.datamodules",
    "datamodules.segmentation_folder": "datamodules.dense.segmentation_folder",
    "datamodules.transforms": "datamodules.images.transforms",
    "datamodules.voc": "datamodules.dense.voc",
    "heads.mmdet_adapter": "heads.toolkits.detectors",
    "heads.mmseg_adapter": "heads.toolkits.segmentors",
    "tasks.classification": "tasks.classification.task",
    "tasks.detection": "tasks.detection.task",
    "tasks.segmentation": "tasks.segmentation.task",
}


def current_target(target: Any) -> Any:
    """Return a ``_target_`` with the module that has its class now."""
    module, _, name = target.rpartition(".") if isinstance(target, str) else ("", "", "")
    return f"{MOVED[module]}.{name}" if module in MOVED else target


def with_current_targets(config: Any) -> Any:
    """Return a config with the current name in each ``_target_``, at any depth."""
    if isinstance(config, Mapping):
        return {
            key: current_target(value) if key == "_target_" else with_current_targets(value)
            for key, value in config.items()
        }
    return [with_current_targets(item) for item in config] if isinstance(config, list) else config
