"""What run folders of earlier commits leave out or name otherwise: classes, options of mixers."""

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
SCENES = {f"Sample{task}": "datamodules.sample.dense" for task in ("Detection", "Segmentation")}

# Mixer: options that came later or had another default, with which older networks were built.
EARLIER_OPTIONS: dict[str, dict[str, Any]] = {"iffn": {"norm": "batch", "dw_residual": False}}


def current_target(target: Any) -> Any:
    """Return a ``_target_`` with the module that has its class now."""
    module, _, name = target.rpartition(".") if isinstance(target, str) else ("", "", "")
    module = MOVED.get(module, module)
    place = SCENES.get(name, module) if module == "datamodules.sample.datamodules" else module
    return f"{place}.{name}" if module else target


def with_current_targets(config: Any) -> Any:
    """Return a config with the current name in each ``_target_``, at any depth."""
    if isinstance(config, Mapping):
        return {
            key: current_target(value) if key == "_target_" else with_current_targets(value)
            for key, value in config.items()
        }
    return [with_current_targets(item) for item in config] if isinstance(config, list) else config


def with_earlier_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config with the options that its mixer was built with and that it lacks.

    Configs name all options of their mixer, so a missing one is newer than the config. timm's
    models took mixers in any share of their blocks.
    """
    backbone = config["backbone"]
    if str(backbone["name"]).partition("_")[0] == "timm":
        config = {**config, "backbone": {"partial": True, **backbone}}
        backbone = config["backbone"]
    if not isinstance(backbone.get("mixer") or {}, Mapping):  # lists are of later versions
        return dict(config)
    mixer_options = dict(backbone.get("mixer") or {})
    earlier = [m for m in EARLIER_OPTIONS if str(backbone["name"]).endswith(f"_{m}")]
    options = {key: v for mixer in earlier for key, v in EARLIER_OPTIONS[mixer].items()}
    if options.keys() <= mixer_options.keys():
        return dict(config)
    return {**config, "backbone": {**backbone, "mixer": {**options, **mixer_options}}}
