"""Base of the MMDetection and MMSegmentation adapters: base configs in, a trainable model out.

The toolkits are imported inside functions, so everything else works without them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from backbones import Backbone
from backbones.layers.bounds import check_positive, check_range
from backbones.options import unknown

STRIDES = (4, 8, 16, 32)
# mmcv's operators, which no registry lists.
UNREGISTERED = ("RoIAlign", "RoIPool", "nms", "soft_nms")
# Toolkits with parts that a config may name as ``<toolkit>.<part>``.
SCOPES = ("mmdet", "mmseg")
# Keys that make the toolkits import code or load weights from elsewhere.
FOREIGN = ("_scope_", "_base_", "_delete_", "custom_imports", "pretrained", "checkpoint")

# Building changes the toolkits' default scope and the logging level, which threads share.
BUILDING = threading.Lock()


class ToolkitModel(nn.Module, ABC):
    """A toolkit's detector or segmentor with ``loss(batch)`` and ``predict(batch)``.

    Batches come from the toolkits' collation: ``{"inputs": list of uint8 (3, H, W), BGR,
    "data_samples": list}``. The toolkit's own data preprocessor normalises and pads them.

    Args:
        model: Result of ``build_model`` with our backbone.
        config: The toolkit's config that it was built from.
        optimisation: What the toolkit says of the training; see ``base_optimisation``.
        maps: Indices of the backbone's maps that the neck gets.

    Attributes:
        multipliers: Factors of rate and weight decay by a part of a parameter's name.
        training_notes: Sentences that a training logs at its start.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Mapping[str, Any],
        optimisation: tuple[Mapping[str, tuple[float, float]], str] = ({}, ""),
        maps: Sequence[int] = (0, 1, 2, 3),
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.maps = tuple(maps)
        self.multipliers, rest = optimisation
        self.training_notes = [f"{rest} of the toolkit's config are not taken"] if rest else []
        # Exporters write this; the backbone describes itself.
        self.config = {key: value for key, value in config.items() if key != "backbone"}

    @property
    def backbone(self) -> Backbone:
        """The backbone inside the toolkit's model."""
        backbone: Backbone = self.model.backbone
        return backbone

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the parameters; the preprocessor keeps a device beside them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.model._set_device(next(self.parameters()).device)
        return self

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return losses (names with "loss", to be summed) and figures to log, each a scalar."""
        data = self._prepare(batch, training=True)
        with self._precision():
            losses = self.model(**data, mode="loss")
        _, totals = self.model.parse_losses(losses)  # some losses are lists over feature levels
        return {name: totals[name] for name in losses}

    def predict(self, batch: Mapping[str, Any]) -> list[Any]:
        """Return the toolkit's data samples with predictions at the original image size.

        The order is the batch's, and each prediction equals that of the image alone. With several
        views per image, ``{"inputs": a list of images per view, "data_samples": likewise}``, the
        views' predictions are merged.
        """
        if isinstance(batch["inputs"][0], list | tuple):
            count = len(batch["inputs"])
            return self.merge_views({k: v[view] for k, v in batch.items()} for view in range(count))
        return self.predict_once(batch)

    def predict_once(self, batch: Mapping[str, Any]) -> list[Any]:
        """Predict a batch with one view per image.

        The toolkit pads a batch to its largest image, and networks see the padding. Images of
        different ``network_size`` are therefore predicted in separate batches.
        """
        places: dict[tuple[int, int], list[int]] = {}
        for place, image in enumerate(batch["inputs"]):
            places.setdefault(self.network_size(image), []).append(place)
        predictions: list[Any] = [None] * len(batch["inputs"])
        for group in places.values():
            part = {key: [values[place] for place in group] for key, values in batch.items()}
            data = self._prepare(part, training=False)
            with self._precision():
                samples = self.model(**data, mode="predict")
            for place, result in zip(group, samples, strict=True):
                predictions[place] = result
        return predictions

    def network_size(self, image: Tensor) -> tuple[int, int]:
        """Return the (H, W) that images must share to be predicted in one batch.

        Here the size of the image itself: heads of MMSegmentation use the first image's size for
        the whole batch.
        """
        height, width = image.shape[-2:]
        return height, width

    @abstractmethod
    def merge_views(self, views: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return one prediction per image, merged from its views."""

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        """Make new tensors float32 beside weights of any type, and half weights meet them.

        The toolkits add float32 positions to features, which autocast allows.
        """
        weight, default = next(self.model.parameters()), torch.get_default_dtype()
        is_half = weight.dtype in (torch.bfloat16, torch.float16)
        cast = torch.autocast(weight.device.type, weight.dtype) if is_half else nullcontext()
        torch.set_default_dtype(torch.float32)
        try:
            with cast:
                yield
        finally:
            torch.set_default_dtype(default)

    def _prepare(self, batch: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
        """Return a batch for the toolkit's model, with images in the precision of its weights."""
        data: dict[str, Any] = self.model.data_preprocessor(dict(batch), training=training)
        weights = next(self.model.parameters())
        return data | {"inputs": data["inputs"].to(weights.dtype)}


def base_config(toolkit: str, name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Return the model of a config that the installed toolkit ships.

    Args:
        toolkit: "mmdet" or "mmseg".
        name: File name under ``configs/_base_/models`` without ending, or a path under ``configs``,
            such as ``fcos/fcos_r50-caffe_fpn_gn-head_1x_coco``.
        changes: Changes, merged as the toolkit merges a config into its base: lists are replaced,
            and so are dicts with ``_delete_: true``.

    Raises:
        ValueError: The toolkit or config is missing, or ``check_foreign_keys`` rejects the changes.
    """
    if importlib.util.find_spec(toolkit) is None:
        task = {"mmdet": "detection", "mmseg": "segmentation"}[toolkit]
        raise ValueError(f'task={task} needs {toolkit}; type: pip install "mixerlab[dense]"')
    from mmengine import Config

    config = _read_base(toolkit, name)
    model_config = Config({"model": config.model})
    if changes:
        check_foreign_keys(changes, "head.model", exception="_delete_")
        # Merging removes `_delete_` from its argument, so it gets a copy.
        model_config.merge_from_dict({"model": copy.deepcopy(dict(changes))})
    return model_config.model


def _read_base(toolkit: str, name: str) -> Any:
    from mmengine import Config

    models = base_configs(toolkit) / "models"
    folder = models.parents[1] if "/" in name else models
    path = (folder / f"{name}.py").resolve()
    # Configs are programs, so only the toolkit's own are read.
    is_shipped = path.is_relative_to(folder.resolve()) and path.is_file()
    config = Config.fromfile(path) if is_shipped else Config()
    if config.get("model") is None:
        raise ValueError(_absent_config(toolkit, folder, name))
    return config


def base_optimisation(toolkit: str, name: str) -> tuple[dict[str, tuple[float, float]], str]:
    """Return what a shipped config says of its training; see ``base_config`` for the arguments.

    Returns:
        The multipliers of rate and weight decay by a part of a parameter's name
        (``paramwise_cfg.custom_keys``), and the rest in words: optimiser, clipping and schedule,
        which are not taken. Both are empty for a config of a model alone.
    """
    config = _read_base(toolkit, name)
    wrapper = config.get("optim_wrapper") or {}
    keys = (wrapper.get("paramwise_cfg") or {}).get("custom_keys") or {}
    multipliers = {
        key: (float(part.get("lr_mult", 1)), float(part.get("decay_mult", 1)))
        for key, part in keys.items()
    }
    optimizer, clipping = wrapper.get("optimizer") or {}, wrapper.get("clip_grad")
    rest = [f"{optimizer['type']} of rate {optimizer['lr']:g}"] if optimizer else []
    rest += [f"clipping to {clipping['max_norm']:g}"] if clipping else []
    rest += sorted({part["type"] for part in config.get("param_scheduler") or []})
    return multipliers, ", ".join(rest)


def _absent_config(toolkit: str, folder: Path, name: str) -> str:
    shipped = sorted(path.stem for path in (base_configs(toolkit) / "models").glob("*.py"))
    subfolder = folder / name.partition("/")[0]
    if "/" in name and ".." not in name and subfolder.is_dir():
        shipped = sorted(f"{subfolder.name}/{path.stem}" for path in subfolder.glob("*.py"))
    return f"{toolkit} lacks the model config {name!r}; it has {', '.join(shipped)}"


def base_configs(toolkit: str) -> Path:
    """Return the folder of the base configs that an installed toolkit ships.

    mmengine.hub.get_config would pip-install the original mmsegmentation over our fork of it.
    """
    package = importlib.import_module(toolkit)
    return Path(str(package.__file__)).parent / ".mim" / "configs" / "_base_"


def build_model(
    toolkit: str, config: Any, backbone: Backbone, *, is_changed: bool = False
) -> nn.Module:
    """Build a toolkit's model with an existing backbone.

    mmengine's ``build`` accepts any callable as type. So the backbone is passed as it is, with its
    weights, and our classes need no registration with the toolkit.

    Args:
        toolkit: "mmdet" or "mmseg".
        config: The toolkit's config of the parts around the backbone.
        backbone: Our backbone.
        is_changed: True if a user changed the config; errors of the toolkit are then reworded.

    Raises:
        ValueError: The toolkit lacks a part, or rejects a user's value.
    """
    from mmengine.registry import DefaultScope

    importlib.import_module(f"{toolkit}.models")  # registers the toolkit's modules
    config.pop("pretrained", None)
    config.backbone = None
    check_registered_types(toolkit, config)
    config.backbone = {"type": lambda: backbone}
    # Heads and necks start from the toolkit's initialisation. A Backbone lacks init_weights, so it
    # keeps its weights.
    with BUILDING, silence_toolkits(), DefaultScope.overwrite_default_scope(toolkit):
        models = importlib.import_module(f"{toolkit}.registry").MODELS
        try:
            model: nn.Module = models.build(copy.deepcopy(config))  # builders change their input
        except Exception as error:  # builders raise all kinds over a user's value
            if not is_changed:
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"{toolkit} cannot build a model with head.options: {reason}"
            ) from error
        # Models on the meta device are only counted: they lack values to initialise.
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.init_weights()  # type: ignore[operator]
    return model


@contextlib.contextmanager
def silence_toolkits() -> Iterator[None]:
    """Silence the toolkits' log, which has one line per initialised parameter."""
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(disabled)


def check_least(**options: float | None) -> None:
    """Raise an error for given integers below 1 and other numbers of 0 or below."""
    for name, value in options.items():
        if isinstance(value, int):
            check_range(f"head.{name}", value, 1)
        elif value is not None:
            check_positive(f"head.{name}", value)


def check_preset(kind: str, name: str | None, presets: Collection[str]) -> None:
    """Check the name of a detector or segmentor; None for one by a config of the toolkit.

    Raises:
        ValueError: It is unknown.
    """
    if name is not None and name not in presets:
        raise ValueError(
            f"unknown {kind} {name!r}; choose from {', '.join(presets)}, or pass any config of the "
            "toolkit as head.base"
        )


def check_pyramid(backbone: Backbone, head: str, *, dilated: bool = False) -> list[int]:
    """Return the channels of the four maps that dense heads read.

    Args:
        backbone: The backbone.
        head: Name of the head, for the message.
        dilated: Allow a last stride below 32, of a backbone with ``output_stride``.

    Raises:
        ValueError: The backbone was built without ``dense=True``, or has other strides.
    """
    strides = tuple(info.stride for info in backbone.feature_info)
    if dilated and len(strides) == len(STRIDES):
        strides = tuple(
            usual if stride == min(usual, strides[-1]) else stride
            for stride, usual in zip(strides, STRIDES, strict=True)
        )
    if not backbone.dense or strides != STRIDES:
        raise ValueError(
            f"{head} needs normalised maps at strides {STRIDES}, got {strides}: build the backbone "
            f"with create_backbone({backbone.name!r}, dense=True), and without "
            "backbone.output_stride unless it is for segmentation"
        )
    return [info.channels for info in backbone.feature_info]


def freeze_unread(backbone: Backbone, read: Collection[int]) -> None:
    """Freeze the parameters of unread maps, as DDP waits for every gradient."""
    for index, prefix in enumerate(backbone.map_keys):
        if index not in read:
            backbone.get_submodule(prefix.removesuffix(".")).requires_grad_(False)


def set_classes(config: Any, num_classes: int) -> None:
    """Set the number of classes everywhere, with class weights and the no-object weight."""
    if isinstance(config, list | tuple):
        for item in config:
            set_classes(item, num_classes)
    elif isinstance(config, dict):
        before = config.get("num_classes")
        weights = (config.get("loss_cls") or {}).get("class_weight")
        if before is not None and isinstance(weights, list) and len(weights) == before + 1:
            config["loss_cls"]["class_weight"] = [weights[0]] * num_classes + [weights[-1]]
        if "num_classes" in config:
            config["num_classes"] = num_classes
        for item in config.values():
            set_classes(item, num_classes)


def replace_batch_norms(config: Any, norm: Mapping[str, Any]) -> None:
    """Replace every SyncBN and BatchNorm in a config by another norm."""
    if isinstance(config, list | tuple):
        for item in config:
            replace_batch_norms(item, norm)
    elif isinstance(config, dict):
        if config.get("type") in ("SyncBN", "BN"):
            config.clear()
            config.update(norm)
        for item in config.values():
            replace_batch_norms(item, norm)


def override(config: Any, options: Mapping[str, Any]) -> None:
    """Set existing values of a toolkit's config.

    Args:
        config: Config, changed in place.
        options: Values, nested as in the config or with names joined by dots, such as
            ``{"rpn_head.anchor_generator": {"scales": [4]}}``; list items go by their number.

    Raises:
        ValueError: The config lacks a key, or ``check_foreign_keys`` rejects the options.
    """
    check_foreign_keys(options)
    for dotted, value in options.items():
        *parents, last = (int(name) if name.isdigit() else name for name in str(dotted).split("."))
        node = config
        for name in parents:
            node = node[name] if _has(node, name) else None
        if not _has(node, last):
            keys = range(len(config)) if isinstance(config, list) else sorted(config)
            raise ValueError(
                f"the toolkit's model config lacks '{dotted}'; known here: "
                f"{', '.join(map(str, keys))}"
            )
        if isinstance(value, Mapping) and isinstance(node[last], dict | list):
            override(node[last], value)
        else:
            node[last] = value


def check_foreign_keys(options: Any, group: str = "head.options", exception: str = "") -> None:
    """Reject options that would make a toolkit import or read things from elsewhere.

    Args:
        options: Nested dicts and lists.
        group: Name of the option group, for messages.
        exception: One of ``FOREIGN`` that is allowed.

    Raises:
        ValueError: A key is foreign; the message names it.
    """
    if isinstance(options, list | tuple):
        for item in options:
            check_foreign_keys(item, group, exception)
    elif isinstance(options, Mapping):
        for key, value in options.items():
            last = str(key).rpartition(".")[2]
            if last in FOREIGN and last != exception:
                raise ValueError(
                    f"{group}: {key} is rejected, as it reads things from elsewhere; options "
                    "must be values of the toolkit's own parts"
                )
            check_foreign_keys(value, group, exception)


def check_registered_types(toolkit: str, config: Any) -> None:
    """Reject a ``type`` that is not a part of the toolkit: mmengine imports and calls any name.

    Raises:
        ValueError: A type is unknown; the message suggests similar ones.
    """
    valid_types = {*UNREGISTERED, *_registered_names(toolkit), *_registered_names("mmengine")}

    def check(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                check(item)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if key == "type" and not isinstance(item, Mapping) and not is_known(item):
                    raise ValueError(
                        f"head.options: type={item} is rejected: "
                        + unknown(
                            f"part of {toolkit}", str(item), valid_types, "see its documentation."
                        )
                    )
                check(item)

    def is_known(name: Any) -> bool:
        scope, _, part = str(name).partition(".")
        return name in valid_types or (scope in SCOPES and part in _registered_names(scope))

    check(config)


def _registered_names(package: str) -> set[str]:
    """Return all names in the registries of a toolkit or of mmengine."""
    from mmengine.registry import Registry

    if package in SCOPES:
        importlib.import_module(f"{package}.models")  # registers the toolkit's modules
    registries = vars(importlib.import_module(f"{package}.registry")).values()
    return {
        name
        for registry in registries
        if isinstance(registry, Registry)
        for name in registry.module_dict
    }


def _has(node: Any, name: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(name, int) and name < len(node)
    return isinstance(node, dict) and name in node
