"""What the MMDetection and MMSegmentation adapters share: base configs in, a trainable model out.

The toolkits are imported inside functions, so that everything else works where they are absent.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from backbones import Backbone
from backbones.options import unknown

STRIDES = (4, 8, 16, 32)
# Types that are in no registry: mmcv's operators.
UNREGISTERED = ("RoIAlign", "RoIPool", "nms", "soft_nms")
# The toolkits whose parts a config may name by ``<toolkit>.<part>``.
SCOPES = ("mmdet", "mmseg")
# Keys by which the toolkits look elsewhere for what they build, or load weights from a path or URL.
FOREIGN = ("_scope_", "_base_", "_delete_", "custom_imports", "pretrained", "checkpoint")

# The toolkits' default scope and the level of logging are the same for all threads.
BUILDING = threading.Lock()


class ToolkitModel(nn.Module):
    """A toolkit's detector or segmentor behind ``loss(batch)`` and ``predict(batch)``.

    Batches are what the toolkits' collation makes: ``{"inputs": list of uint8 (3, H, W), BGR,
    "data_samples": list}``; the toolkit's own data preprocessor normalises and pads them.

    Args:
        model: Built by ``build_model``; its backbone is ours.
        config: The toolkit's config that it was built from.
        maps: Which of the backbone's maps the neck gets.
    """

    def __init__(
        self, model: nn.Module, config: Mapping[str, Any], maps: Sequence[int] = (0, 1, 2, 3)
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.maps = tuple(maps)
        # Exporters write it down; the backbone's part is theirs to say.
        self.config = {key: value for key, value in config.items() if key != "backbone"}

    @property
    def backbone(self) -> Backbone:
        """The backbone inside the toolkit's model."""
        backbone: Backbone = self.model.backbone
        return backbone

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Losses (names with "loss", to be summed) and figures to watch, each a scalar."""
        data = self._prepared(batch, training=True)
        losses = self.model(**data, mode="loss")
        _, totals = self.model.parse_losses(losses)  # some come per feature level
        return {name: totals[name] for name in losses}

    def predict(self, batch: Mapping[str, Any]) -> list[Any]:
        """Return the toolkit's data samples with predictions at the original image size.

        Each image gets the prediction that it gets alone, in the order of the batch. Where the
        batch has several views of each image, ``{"inputs": a list of images for each view,
        "data_samples": likewise}``, their predictions are merged.
        """
        if isinstance(batch["inputs"][0], list | tuple):
            count = len(batch["inputs"])
            return self.merged({k: v[view] for k, v in batch.items()} for view in range(count))
        return self.predict_once(batch)

    def predict_once(self, batch: Mapping[str, Any]) -> list[Any]:
        """Predict a batch that has one view of each image.

        The toolkit pads a batch to its largest image, and networks see the padding. Images of
        different ``network_size`` therefore pass the network in separate batches.
        """
        places: dict[tuple[int, int], list[int]] = {}
        for place, image in enumerate(batch["inputs"]):
            places.setdefault(self.network_size(image), []).append(place)
        predictions: list[Any] = [None] * len(batch["inputs"])
        for group in places.values():
            part = {key: [values[place] for place in group] for key, values in batch.items()}
            data = self._prepared(part, training=False)
            for place, found in zip(group, self.model(**data, mode="predict"), strict=True):
                predictions[place] = found
        return predictions

    def network_size(self, image: Tensor) -> tuple[int, int]:
        """Return the (H, W) that images must share to be predicted in one batch.

        It is the size of the image itself: heads of MMSegmentation read the size of the first
        image for the whole batch.
        """
        height, width = image.shape[-2:]
        return height, width

    def merged(self, views: Iterable[Mapping[str, Any]]) -> list[Any]:
        """One prediction for each image, from those for its views."""
        raise NotImplementedError

    def _prepared(self, batch: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
        """The batch as the toolkit's model takes it, the images in the precision of its weights."""
        data: dict[str, Any] = self.model.data_preprocessor(dict(batch), training=training)
        weights = next(self.model.parameters())
        return data | {"inputs": data["inputs"].to(weights.dtype)}


def base_config(toolkit: str, name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Read the model of a config that the installed toolkit ships.

    Args:
        toolkit: "mmdet" or "mmseg".
        name: File name under ``configs/_base_/models``, without ending, or, with its folder, under
            ``configs``, such as ``fcos/fcos_r50-caffe_fpn_gn-head_1x_coco``.
        changes: What differs, merged as a config of the toolkit's is into the one that it inherits
            from: a list is replaced, and so is a dict with ``_delete_: true`` in it.

    Raises:
        ValueError: The toolkit or the config is absent, or the changes name what ``refuse_foreign``
            refuses.
    """
    if importlib.util.find_spec(toolkit) is None:
        task = {"mmdet": "detection", "mmseg": "segmentation"}[toolkit]
        raise ValueError(
            f"task={task} needs {toolkit}; run: make install, or pip install -e '.[dense]'"
        )
    from mmengine import Config

    models = base_configs(toolkit) / "models"
    folder = models.parents[1] if "/" in name else models
    path = (folder / f"{name}.py").resolve()
    # A config is a program, so that none from elsewhere is read.
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        raise ValueError(_absent_config(toolkit, folder, name))
    config = Config.fromfile(path)
    if config.get("model") is None:
        raise ValueError(f"{toolkit}'s config {name!r} has no model; name one that has")
    found = Config({"model": config.model})
    if changes:
        refuse_foreign(changes, "head.model", allowed="_delete_")
        # The merging takes `_delete_` out of what it is given.
        found.merge_from_dict({"model": copy.deepcopy(dict(changes))})
    return found.model


def _absent_config(toolkit: str, folder: Path, name: str) -> str:
    shipped = sorted(path.stem for path in (base_configs(toolkit) / "models").glob("*.py"))
    own = folder / name.partition("/")[0]
    if "/" in name and ".." not in name and own.is_dir():
        shipped = sorted(f"{own.name}/{path.stem}" for path in own.glob("*.py"))
    return f"{toolkit} ships no model config {name!r}; it has {', '.join(shipped)}"


def base_configs(toolkit: str) -> Path:
    """The folder of the base configs that an installed toolkit ships.

    mmengine.hub.get_config would pip-install the original mmsegmentation over our fork of it.
    """
    package = importlib.import_module(toolkit)
    return Path(str(package.__file__)).parent / ".mim" / "configs" / "_base_"


def build_model(toolkit: str, config: Any, backbone: Backbone, *, typed: bool = False) -> nn.Module:
    """Build a toolkit's model around a backbone that already exists.

    mmengine's ``build`` takes any callable as type, so the backbone goes in as it is, with its
    weights, and nothing of ours has to be registered with the toolkit.

    Args:
        toolkit: "mmdet" or "mmseg".
        config: The toolkit's, with the parts around the backbone.
        backbone: Ours.
        typed: Whether a user has changed the config; what the toolkit raises is then about that.

    Raises:
        ValueError: A part that the toolkit does not have, or a typed value that it does not take.
    """
    from mmengine.registry import DefaultScope

    importlib.import_module(f"{toolkit}.models")  # registers the toolkit's modules
    config.pop("pretrained", None)
    config.backbone = None
    refuse_unregistered(toolkit, config)
    config.backbone = {"type": lambda: backbone}
    # Heads and necks start from the toolkit's own initialisation; a Backbone has no init_weights
    # and keeps its weights.
    with BUILDING, quiet(), DefaultScope.overwrite_default_scope(toolkit):
        models = importlib.import_module(f"{toolkit}.registry").MODELS
        try:
            model: nn.Module = models.build(copy.deepcopy(config))  # builders change what they get
        except Exception as error:  # builders raise whatever a typed value makes of them
            if not typed:
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(
                f"{toolkit} cannot build a model with head.options: {reason}"
            ) from error
        # What is built on the meta device is counted: it has no values.
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.init_weights()  # type: ignore[operator]
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out the toolkits' remarks, of which initialisation makes one per parameter."""
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(disabled)


def check_least(**options: float | None) -> None:
    """Refuse sizes and numbers below 1, or a scale that is not above 0, if they are given."""
    for name, value in options.items():
        if value is not None and (value < 1 if isinstance(value, int) else value <= 0):
            raise ValueError(f"head.{name}={value} is too low")


def check_pyramid(backbone: Backbone, head: str) -> list[int]:
    """Channels of the four maps that dense heads read.

    Raises:
        ValueError: The backbone was not built for dense prediction, or has other strides.
    """
    strides = tuple(info.stride for info in backbone.feature_info)
    if not backbone.dense or strides != STRIDES:
        raise ValueError(
            f"{head} reads normalised maps at strides {STRIDES}; "
            f"build the backbone with create_backbone({backbone.name!r}, dense=True)"
        )
    return [info.channels for info in backbone.feature_info]


def freeze_unread(backbone: Backbone, read: Collection[int]) -> None:
    """Freeze what only maps that are not ``read`` need, as DDP waits for all gradients."""
    for index, prefix in enumerate(backbone.map_keys):
        if index not in read:
            backbone.get_submodule(prefix.removesuffix(".")).requires_grad_(False)


def set_classes(config: Any, num_classes: int) -> None:
    """Set the number of classes everywhere, and the weights of each class and of no object."""
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
    """Put a norm in the place of every SyncBN and BatchNorm that a config names."""
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
    """Set values of a toolkit's config that it has already.

    Args:
        config: Changed in place.
        options: Nested as the config is, with names joined by dots where that is shorter, such as
            ``{"rpn_head.anchor_generator": {"scales": [4]}}``; items of a list go by their number.

    Raises:
        ValueError: A key that the config does not have, or what ``refuse_foreign`` refuses.
    """
    refuse_foreign(options)
    for dotted, value in options.items():
        *parents, last = (int(name) if name.isdigit() else name for name in str(dotted).split("."))
        node = config
        for name in parents:
            node = node[name] if _has(node, name) else None
        if not _has(node, last):
            known = range(len(config)) if isinstance(config, list) else sorted(config)
            raise ValueError(
                f"the toolkit's model config has no '{dotted}' there, but "
                f"{', '.join(map(str, known))}"
            )
        if isinstance(value, Mapping) and isinstance(node[last], dict | list):
            override(node[last], value)
        else:
            node[last] = value


def refuse_foreign(options: Any, group: str = "head.options", allowed: str = "") -> None:
    """Refuse options that would have a toolkit import or read what is none of its own.

    Args:
        options: Nested dicts and lists.
        group: What they are called where they are typed.
        allowed: One of ``FOREIGN`` that may be there.

    Raises:
        ValueError: Names the option.
    """
    if isinstance(options, list | tuple):
        for item in options:
            refuse_foreign(item, group, allowed)
    elif isinstance(options, Mapping):
        for key, value in options.items():
            last = str(key).rpartition(".")[2]
            if last in FOREIGN and last != allowed:
                raise ValueError(
                    f"{group}: {key} is refused, as nothing from elsewhere is read; options "
                    "are values of the toolkit's own parts"
                )
            refuse_foreign(value, group, allowed)


def refuse_unregistered(toolkit: str, config: Any) -> None:
    """Refuse a config with a ``type`` that is no part of a toolkit, whose modules are imported.

    mmengine imports and calls whatever another name leads to.

    Raises:
        ValueError: Names the type, and those that are near to it.
    """
    known = {*UNREGISTERED, *_parts(toolkit), *_parts("mmengine")}

    def check(value: Any) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                check(item)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if key == "type" and not isinstance(item, Mapping) and not is_known(item):
                    raise ValueError(
                        f"head.options: type={item} is refused: "
                        + unknown(f"part of {toolkit}", str(item), known, "see its documentation.")
                    )
                check(item)

    def is_known(name: Any) -> bool:
        scope, _, part = str(name).partition(".")
        return name in known or (scope in SCOPES and part in _parts(scope))

    check(config)


def _parts(package: str) -> set[str]:
    """All names in the registries of a toolkit or of mmengine."""
    from mmengine.registry import Registry

    if package in SCOPES:
        importlib.import_module(f"{package}.models")  # registers the toolkit's modules
    registries = vars(importlib.import_module(f"{package}.registry")).values()
    return {name for one in registries if isinstance(one, Registry) for name in one.module_dict}


def _has(node: Any, name: str | int) -> bool:
    if isinstance(node, list):
        return isinstance(name, int) and name < len(node)
    return isinstance(node, dict) and name in node
