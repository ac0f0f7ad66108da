"""Build configs of the MM toolkits from those that the installed toolkit ships."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmengine import Config

from backbones import Backbone
from backbones.parameters.decay import without_decay
from datamodules.files import IMAGE_SUFFIXES
from datamodules.images.synsets import SYNSETS
from heads.toolkits.detectors import DETECTORS, base_detector
from heads.toolkits.segmentors import DECODE_HEADS, SEGMENTORS, base_segmentor
from heads.toolkits.toolkit import base_configs, set_classes
from tools.exports.preprocessing import Preprocessing

# Base configs of MMDetection, MMSegmentation (classes of COCO and ADE20K) and MMPretrain.
DATASETS = {"mmdet": "coco_instance", "mmseg": "ade20k", "mmpretrain": "imagenet_bs64_swin_224"}
SCHEDULES = {
    "mmdet": "schedule_1x",
    "mmseg": "schedule_160k",
    "mmpretrain": "imagenet_bs1024_adamw_swin",
}
BACKBONE = "backbone"  # the name of the backbone in a toolkit's model
FOLDER_SUFFIXES = tuple(sorted(IMAGE_SUFFIXES))
# AdamW settings of the hosts on COCO and ADE20K (Swin, App. A2.2 and A2.3).
LEARNING = {
    "mmdet": {"lr": 1e-4, "weight_decay": 0.05},
    "mmseg": {"lr": 6e-5, "weight_decay": 0.01},
}


def base_files(toolkit: str, model: str | None, *, with_mask: bool = True) -> list[str]:
    """Return the toolkit's base files for these values.

    Args:
        toolkit: "mmdet", "mmseg" or "mmpretrain".
        model: Name of the detector's or segmentor's base config, if it is a base file. MMPretrain's
            classifier lacks one, and other configs are written in full.
        with_mask: The detector predicts masks.
    """
    return [
        *([f"models/{model}"] if model and "/" not in model else []),
        f"datasets/{_dataset(toolkit, with_mask)}",
        f"schedules/{SCHEDULES[toolkit]}",
        "default_runtime",
    ]


def model_base(toolkit: str, head: Mapping[str, Any]) -> str:
    """Return the toolkit's config that a run's detector or segmentor is based on."""
    names = {"mmdet": DETECTORS, "mmseg": SEGMENTORS}[toolkit]
    return str(head.get("base") or names[head["name"]])


def required_modules(model: Mapping[str, Any]) -> list[str]:
    """Return the modules that a config must import for the toolkit to know all parts of a model."""
    types = set(_types(model))
    modules = ["backbones.mm"]
    if types & set(DECODE_HEADS):
        modules.append("heads.mm")
    if any(name.startswith("mmdet.") for name in types):
        modules.append("mmdet.models")
    return modules


def _types(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("type"), str):
            yield value["type"]
        for item in value.values():
            yield from _types(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _types(item)


def _dataset(toolkit: str, with_mask: bool) -> str:
    return "coco_detection" if toolkit == "mmdet" and not with_mask else DATASETS[toolkit]


def shipped(toolkit: str, name: str) -> dict[str, Any]:
    """Read a base config of an installed toolkit as plain values."""
    config: dict[str, Any] = Config.fromfile(base_configs(toolkit) / f"{name}.py").to_dict()
    return config


def model_config(toolkit: str, backbone: Backbone, num_classes: int = 0) -> dict[str, Any]:
    """Return a model config without its backbone: Mask R-CNN, UperNet or a classifier.

    Args:
        toolkit: "mmdet", "mmseg" or "mmpretrain".
        backbone: Provides channels and strides.
        num_classes: Of MMPretrain's classifier; the others have those of COCO and ADE20K.
    """
    if toolkit == "mmpretrain":
        head = {
            "type": "LinearClsHead",
            "num_classes": num_classes,
            "in_channels": backbone.num_features,
            "loss": {"type": "LabelSmoothLoss", "label_smooth_val": 0.1, "mode": "original"},
        }
        augments = [{"type": "Mixup", "alpha": 0.8}, {"type": "CutMix", "alpha": 1.0}]
        # The backbone returns a vector, so a neck is not needed.
        return {
            "type": "ImageClassifier", "neck": None, "head": head,
            "train_cfg": {"augments": augments},
        }  # fmt: skip
    if toolkit == "mmdet":
        config, _ = base_detector(backbone, "mask_rcnn")
    else:
        config = base_segmentor(backbone, "upernet")
        set_classes(config, 150)
    del config["backbone"]
    return dict(config)


def dataset_config(
    toolkit: str,
    datamodule: Any = None,
    *,
    with_mask: bool = True,
    num_classes: int = 1000,
    class_names: Sequence[str] = (),
    prepared: Preprocessing | None = None,
) -> dict[str, Any]:
    """Return the config of datasets, pipelines and evaluators.

    Args:
        toolkit: "mmdet", "mmseg" or "mmpretrain".
        datamodule: One of ours; provides classes and image sizes.
        with_mask: The datamodule's detector predicts masks.
        num_classes: Of MMPretrain's classifier; other numbers than 1000 read class folders.
        class_names: Of MMPretrain's classifier in label order; empty if unknown.
        prepared: Preprocessing for MMPretrain; None uses that of its own Swin.
    """
    config = shipped(toolkit, f"datasets/{_dataset(toolkit, with_mask)}")
    if toolkit == "mmpretrain":
        config["data_root"] = config["train_dataloader"]["dataset"]["data_root"]
        if prepared is not None:
            _set_preprocessing(config, prepared)
        if num_classes != 1000 or tuple(class_names or SYNSETS) != SYNSETS:
            _set_folders(config, num_classes, class_names)
    if datamodule is not None:
        _take_over(config, datamodule, toolkit)
    return config


def _take_over(config: dict[str, Any], datamodule: Any, toolkit: str) -> None:
    """Set the classes and image sizes of a toolkit's datasets from one of our data modules."""
    metainfo = {key: list(value) for key, value in datamodule.metainfo.items()}
    config["metainfo"] = metainfo
    zero_is_ignored = toolkit == "mmseg" and bool(datamodule.reduces_zero_label)
    for step in _steps(config):
        if step["type"] == "LoadImageFromFile":
            step["imdecode_backend"] = "pillow"  # as in training; decoders differ
        if step["type"] == "LoadAnnotations" and "reduce_zero_label" in step:
            step["reduce_zero_label"] = zero_is_ignored
        if step["type"] in ("Resize", "RandomResize"):
            step["scale"] = tuple(datamodule.scale)
        if step["type"] == "RandomFlip":
            step["prob"] = datamodule.flip
        if step["type"] == "RandomCrop":
            step["crop_size"] = tuple(datamodule.crop_size)
    for split in ("train", "val", "test"):
        dataset = config[f"{split}_dataloader"]["dataset"]
        dataset["metainfo"] = metainfo
        if toolkit == "mmseg":  # its own class has ADE20K's names fixed
            dataset |= {"type": "BaseSegDataset", "reduce_zero_label": zero_is_ignored}


def _set_preprocessing(config: dict[str, Any], prepared: Preprocessing) -> None:
    """Set the preprocessing of MMPretrain's evaluation to that of the run."""
    resize = {"backend": "pillow", "interpolation": prepared.interpolation}
    for step in _steps(config):
        if step["type"] == "LoadImageFromFile":  # decoders differ, and the run ignored EXIF
            step |= {"imdecode_backend": "pillow", "color_type": "color_ignore_orientation"}
        if step["type"] == "RandomResizedCrop":
            step["scale"] = prepared.size
        if step["type"] == "CenterCrop":
            step["crop_size"] = prepared.size
        if step["type"] == "ResizeEdge" and prepared.squash:
            step.clear()
            step |= {"type": "Resize", "scale": (prepared.resized, prepared.resized), **resize}
        elif step["type"] == "ResizeEdge":
            step |= {"scale": prepared.resized, **resize}
    statistics = {"mean": prepared.mean, "std": prepared.std}
    config["data_preprocessor"] |= {
        name: [255 * value for value in values] for name, values in statistics.items()
    }


def _set_folders(config: dict[str, Any], num_classes: int, class_names: Sequence[str]) -> None:
    """Let MMPretrain read class folders with these classes in this order.

    Its dataset sorts folders as text, so classes in another order are read from lists of images.
    """
    config["data_preprocessor"]["num_classes"] = num_classes
    config["data_root"] = "data"
    for split in ("val", "test"):  # with at most 5 classes, top-5 is always right
        topk = tuple(k for k in (1, 5) if k == 1 or k < num_classes)
        config[f"{split}_evaluator"]["topk"] = topk
    for split in ("train", "val", "test"):
        dataset = config[f"{split}_dataloader"]["dataset"]
        folder = "train" if split == "train" else "val"
        dataset.pop("split")
        dataset |= {"type": "CustomDataset", "data_prefix": folder, "data_root": "data"}
        dataset["extensions"] = FOLDER_SUFFIXES
        if class_names:
            dataset["metainfo"] = {"classes": tuple(class_names)}
        if list(class_names) != sorted(class_names):
            dataset["ann_file"] = f"{folder}.txt"


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every step of every pipeline in a config."""
    for item in value if isinstance(value, Sequence) and not isinstance(value, str) else []:
        if isinstance(item, dict) and "type" in item:
            yield item
        yield from _steps(item)
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _steps(item)


def _custom_keys(
    backbone: Backbone, multipliers: Mapping[str, tuple[float, float]]
) -> dict[str, dict[str, float]]:
    """Return MMEngine's ``custom_keys``: parts of names with factors of rate and decay.

    MMEngine looks for a key anywhere in a name and takes the longest one alone. Its own options for
    vectors know norms and biases only, and none under a key of the whole backbone.
    """
    keys = {
        key: {"lr_mult": rate, "decay_mult": decay} for key, (rate, decay) in multipliers.items()
    }
    rate = {"lr_mult": multipliers[BACKBONE][0]} if BACKBONE in multipliers else {}
    exempt = without_decay(backbone)
    decayed = [name for name, _ in backbone.named_parameters() if name not in exempt]
    for name, _ in backbone.named_parameters():
        if name in exempt:
            parts = f"{BACKBONE}.{name}".split(".")
            ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
            key = next(
                end
                for end in ends
                if len(end) > len(BACKBONE) * bool(rate)
                and not any(end in f"{BACKBONE}.{decayed_name}" for decayed_name in decayed)
            )
            keys[key] = {**rate, "decay_mult": 0.0}
    return dict(sorted(keys.items()))


def training_config(
    toolkit: str, backbone: Backbone, multipliers: Mapping[str, tuple[float, float]]
) -> dict[str, Any]:
    """Return runtime, schedule and optimiser, with the rate and decay of each parameter.

    Args:
        toolkit: "mmdet", "mmseg" or "mmpretrain".
        backbone: Whose marks say what is exempt from weight decay.
        multipliers: Those of the head; see ``heads.toolkits.toolkit.base_optimisation``.
    """
    config = shipped(toolkit, "default_runtime")
    config |= shipped(toolkit, f"schedules/{SCHEDULES[toolkit]}")
    paramwise = {
        "norm_decay_mult": 0.0,
        "bias_decay_mult": 0.0,
        "custom_keys": _custom_keys(backbone, multipliers),
    }
    wrapper = config["optim_wrapper"]
    if toolkit in LEARNING:
        wrapper["optimizer"] = {"type": "AdamW", "betas": (0.9, 0.999), **LEARNING[toolkit]}
        if "optimizer" in config:  # of MMSegmentation's schedules
            config["optimizer"] = wrapper["optimizer"]
    wrapper["paramwise_cfg"] = wrapper.get("paramwise_cfg", {}) | paramwise
    config.pop("load_from", None)
    return config
