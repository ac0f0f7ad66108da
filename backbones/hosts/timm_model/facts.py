"""Facts on a timm model that its maps, slots and layers follow from, found on the meta device.

Axes: B images, H W map, C channels.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.models import group_parameters
from timm.optim import auto_group_layers
from torch import nn

from backbones.hosts.timm_model.layouts import Size
from backbones.hosts.timm_model.probing import BATCH, ModuleCall, record_calls

TWO_TOKENS = ("VisionTransformerDistilled", "PoolingVisionTransformer")
STRIDE_ERROR = 0.25  # largest relative difference between a map's stride and the stated one
ANY_SIZE = "dynamic_img_size"  # option for images of any size


@dataclass(frozen=True)
class Map:
    """A map that a model's feature interface returns.

    Attributes:
        index: Its index there.
        channels: C.
        size: (h, w) for images of the build resolution.
        stride: Input pixels per row.
    """

    index: int
    channels: int
    size: Size
    stride: int


@dataclass(frozen=True, eq=False)
class Facts:
    """What a model is like, built with some options for some image size.

    Attributes:
        key: Arguments by which they are found again, instead of copied or pickled.
        size: Build resolution (H, W).
        network: The model with timm's classifier, without values.
        options: All options for ``timm.create_model``, those for the size included.
        is_fixed: True if it takes images of this size only.
        padded: Size of the images of ``calls``, a multiple of ``multiple``.
        multiple: Number of pixels that sides are padded to multiples of.
        calls: Calls of its modules in a pass.
        maps: Maps of its feature interface, fine to coarse, one per stride.
        num_maps: Number of maps of that interface.
        num_features: Channels of its pooled features.
        has_pooling: True if it pools its map; False for encoders without classifier.
        prefix: Prefix tokens of its blocks.
        layers: Number of each parameter's layer, by ``group_matcher`` or timm's automatic layers.
        stages: The same in coarse groups; empty without ``group_matcher``.
        classifier: Names of timm's classifiers.
        has_mlp_head: True if its classifier has a hidden layer.
        has_two_tokens: True if it has classifiers of a class and a distillation token.
    """

    key: tuple[Any, ...]
    size: Size
    network: nn.Module
    options: Mapping[str, Any]
    is_fixed: bool
    padded: Size
    multiple: int
    calls: Mapping[str, list[ModuleCall]]
    maps: tuple[Map, ...]
    num_maps: int
    num_features: int
    has_pooling: bool
    prefix: int
    layers: Mapping[str, int]
    stages: Mapping[str, int]
    classifier: tuple[str, ...]
    has_mlp_head: bool
    has_two_tokens: bool

    def __deepcopy__(self, memo: Any) -> Facts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _find, self.key


def own_size(model: str, options: Mapping[str, Any] | None = None) -> Size:
    """Return the size (H, W) of images that a model is made for."""
    side = (options or {}).get("img_size")
    if side is not None:
        return (side, side) if isinstance(side, int) else (int(side[0]), int(side[1]))
    config = timm.get_pretrained_cfg(check_model(model))
    return (224, 224) if config is None else (config.input_size[1], config.input_size[2])


def check_model(model: str) -> str:
    """Return the name of a model of timm.

    Raises:
        ValueError: timm lacks it.
    """
    name = model.partition(".")[0]
    if not is_of_timm(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() has them all"
        raise ValueError(f"timm has no model {model!r}; {hint}")
    return model


def is_of_timm(name: str) -> bool:
    """Return True for a model of timm itself, not for one that was registered there."""
    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("timm.")


def find_facts(
    model: str, options: Mapping[str, Any], size: Size, in_chans: int, class_token: bool
) -> Facts:
    """Return the facts on a model; the same arguments are looked up once.

    Raises:
        ValueError: The model or an option is unknown, or the model refuses the size.
    """
    text = json.dumps(options, sort_keys=True, default=str)
    return _find(check_model(model), text, size, in_chans, class_token)


@functools.lru_cache(maxsize=64)
def _find(model: str, text: str, size: Size, in_chans: int, class_token: bool) -> Facts:
    typed_options = json.loads(text)
    bare: Any = create_on_meta(model, {})  # with timm's classifier, the last of its layers
    parameters = inspect.signature(type(bare).__init__).parameters
    config = timm.get_pretrained_cfg(model)
    options: dict[str, Any] = {}
    if size != own_size(model) and "img_size" in parameters:
        options["img_size"] = size[0] if size[0] == size[1] else list(size)
    if ANY_SIZE in parameters:
        options[ANY_SIZE] = True
    has_tokens = bool(getattr(bare, "num_prefix_tokens", None))
    if has_tokens and not class_token:
        options |= _without_tokens(model, parameters)
    options |= {"in_chans": in_chans} if in_chans != 3 else {}
    rate = typed_options.pop("drop_path_rate", 0.0)
    if rate or "drop_path_rate" in parameters:
        typed_options["drop_path_rate"] = rate
    options |= typed_options
    fixed_size = config is not None and bool(config.fixed_input_size)
    is_fixed = fixed_size and not options.get("dynamic_img_size")
    if is_fixed and size != own_size(model) and "img_size" not in parameters:
        raise ValueError(
            f"{model} takes images of {'x'.join(map(str, own_size(model)))} pixels only, got "
            f"{'x'.join(map(str, size))}; pass this size as img_size"
        )
    differs = {key: value for key, value in options.items() if key != "drop_path_rate" or value}
    network: Any = create_on_meta(model, options) if differs else bare
    multiple = 1 if is_fixed or not _pads(network, parameters) else _multiple(network)
    if any(side % multiple for side in own_size(model)):
        multiple = 1  # it is made for sizes that its strides do not divide
    if not is_fixed and ANY_SIZE not in parameters:
        found_multiple = _needed_multiple(network, in_chans, size, own_size(model), multiple)
        multiple, is_fixed = found_multiple or 1, found_multiple is None
    padded = -(-size[0] // multiple) * multiple, -(-size[1] // multiple) * multiple
    images = torch.zeros(BATCH, in_chans, *padded, device="meta")
    results: dict[str, Any] = {}

    def run(*, reads_maps: bool = True) -> None:
        with torch.no_grad(), torch.device("meta"):
            if reads_maps:
                features, maps = network.forward_intermediates(images)
                results["maps"] = [tuple(entry_.shape[1:]) for entry_ in maps]
            else:
                features, results["maps"] = (
                    network.forward_features(images),
                    _stated(network, padded),
                )
            # Encoders lack a head, or have one without features before the logits.
            with contextlib.suppress(RuntimeError, NotImplementedError, TypeError):
                results["embedding"] = network.forward_head(features, pre_logits=True)

    calls = _run_checked(model, size, lambda: _record(network, run))
    maps = _last_of_strides(
        results["maps"], padded, [int(entry["reduction"]) for entry in feature_info(network)]
    )
    embedding = results.get("embedding")
    names = network.pretrained_cfg.get("classifier") or ()
    return Facts(
        (model, text, size, in_chans, class_token),
        size,
        network,
        options,
        is_fixed,
        padded,
        multiple,
        calls,
        maps,
        len(results["maps"]),
        maps[-1].channels if embedding is None else embedding.shape[-1],
        embedding is not None,
        getattr(network, "num_prefix_tokens", 0),
        _groups(network, coarse=False),
        _groups(network, coarse=True),
        (names,) if isinstance(names, str) else tuple(names),
        embedding is not None and hasattr(network.get_classifier(), "fc2"),
        type(network).__name__ in TWO_TOKENS and getattr(network, "head_dist", None) is not None,
    )


def create_on_meta(model: str, options: Mapping[str, Any]) -> nn.Module:
    """Return a model without values, in evaluation mode.

    Raises:
        ValueError: timm refuses an option.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return create(model, options).eval()


def create(model: str, options: Mapping[str, Any], **more: Any) -> nn.Module:
    """Return a model of timm.

    Raises:
        ValueError: timm refuses an option.
    """
    try:
        # Python refuses a second value for these, which would build another network.
        flags: dict[str, Any] = {"pretrained": False, "checkpoint_path": "", "features_only": False}
        return timm.create_model(model, **flags, **options, **more)
    except Exception as error:
        words = ", ".join(f"{key}={value}" for key, value in options.items())
        reason = str(error) or type(error).__name__
        raise ValueError(f"timm refuses {model} with {words}: {reason}") from error


def _without_tokens(model: str, model_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a model without class and register tokens."""
    if not {"class_token", "global_pool"} <= model_options.keys():
        raise ValueError(
            f"{model} cannot be built without its class token, which the mixer refuses; use a "
            "mixer that takes class tokens, or a model that has none"
        )
    options: dict[str, Any] = {"class_token": False, "global_pool": "avg"}
    if "reg_tokens" in model_options:
        options["reg_tokens"] = 0
    if "num_reg_tokens" in model_options:
        options["num_reg_tokens"] = 0
    return options


def _run_checked(model: str, size: Size, run: Any) -> Any:
    try:
        return run()
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"{model} refuses images of {'x'.join(map(str, size))} pixels: {reason}; pass another "
            f"img_size, such as {own_size(model)[0]}"
        ) from error


def _multiple(network: Any) -> int:
    """Return the least common multiple of a model's strides."""
    strides = [entry["reduction"] for entry in feature_info(network)]
    embedding = getattr(network, "patch_embed", None)
    patch = getattr(getattr(embedding, "proj", None), "stride", None)
    if patch is None:
        patch = getattr(embedding, "patch_size", ())
    return math.lcm(*map(int, strides), *(patch if isinstance(patch, tuple) else ()))


def _pads(network: nn.Module, options: Mapping[str, Any]) -> bool:
    """Return True if sides that the strides do not divide are refused or cut off."""
    cuts = any(
        isinstance(module, nn.Conv2d)
        and max(module.stride) > 1
        and not isinstance(module.padding, str)
        and 2 * max(module.padding) < max(module.kernel_size) - 1
        and "Same" not in type(module).__name__
        for module in network.modules()
    )
    return cuts or "img_size" in options


def _needed_multiple(
    network: Any, in_chans: int, size: Size, model_size: Size, multiple: int
) -> int | None:
    """Return the number that sides must be multiples of, which a guess divides.

    None means that the model takes its own size only.
    """
    if multiple == 1 and _runs_at(network, in_chans, (size[0] + 11, size[1] + 27)):
        return 1
    least = _multiple(network)
    for tried in (least * factor for factor in (1, 2, 4, 8)):
        if any(side % tried for side in model_size):
            return None
        height = (size[0] // tried + 1) * tried
        if _runs_at(network, in_chans, (height, height + tried)):
            return tried
    return None


def _runs_at(network: Any, in_chans: int, size: Size) -> bool:
    images = torch.zeros(1, in_chans, *size, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            network.forward_intermediates(images, intermediates_only=True)
    except (RuntimeError, AssertionError, ValueError, IndexError) as error:
        return "meta" in str(error)  # its maps read values
    return True


def _record(network: Any, run: Any) -> dict[str, list[ModuleCall]]:
    try:
        return record_calls(network, run)
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
    # Its maps read values, which tensors on the meta device lack.
    return record_calls(network, lambda: run(reads_maps=False))


def _stated(network: Any, size: Size) -> list[tuple[int, ...]]:
    """Return the shapes (C, h, w) of the maps that timm states."""
    return [
        (entry["num_chs"], *(-(-side // entry["reduction"]) for side in size))
        for entry in feature_info(network)
    ]


def feature_info(network: Any) -> list[dict[str, Any]]:
    """Return timm's description of a model's maps."""
    info = network.feature_info
    return list(info.info if hasattr(info, "info") else info)


def _last_of_strides(
    shapes: list[tuple[int, ...]], size: Size, stated: list[int]
) -> tuple[Map, ...]:
    """Return the last map of each stride, fine to coarse.

    Strides are those that timm states. Sizes alone would give others where convolutions without
    padding cut the borders off, or where a stride does not divide the image.
    """
    by_stride: dict[int, Map] = {}
    strides = stated if len(stated) == len(shapes) else [0] * len(shapes)
    for index, (channels, height, width) in enumerate(shapes):
        stride = round(size[0] / height)
        if abs(strides[index] - stride) <= STRIDE_ERROR * stride:
            stride = strides[index]
        by_stride[stride] = Map(index, channels, (height, width), stride)
    return tuple(sorted(by_stride.values(), key=lambda stage: stage.stride))


def _groups(network: Any, *, coarse: bool) -> dict[str, int]:
    """Return the number of the group of each parameter.

    A model without ``group_matcher`` has timm's automatic layers, and no stages.
    """
    matcher = getattr(network, "group_matcher", None)
    if matcher is None:
        return {} if coarse else auto_group_layers(network)  # type: ignore[no-untyped-call]
    try:
        groups = matcher(coarse=coarse)
    except AssertionError:  # a family has fine groups only
        groups = matcher(coarse=False)
    numbers: dict[str, int] = group_parameters(network, groups, reverse=True)
    return numbers
