"""Build backbones and mixers by their registered names, and list their options."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from backbones.base import Backbone, HostConfig, Mixer, MixerFactory, PrefixMixing, Slot
from backbones.checkpoints.equations import plain_value
from backbones.checkpoints.hub import backbone_options, is_model_source, open_model_folder
from backbones.fast import fast as convert_to_fast
from backbones.layers.pooling import correct_pooling
from backbones.mixer_selection import Choice, Typed, names_of, read_choices, resolve, spread
from backbones.options import check_arguments, check_value, keywords, listed, unknown
from backbones.registry import (
    OWN_FFN,
    HostEntry,
    Kind,
    MixerEntry,
    find_mixer,
    host_overrides_of,
    hosts,
    list_mixers,
    look_up,
    mixers,
    why_unfit,
    without_prefix,
)

if TYPE_CHECKING:
    from backbones.lora import Lora

logger = logging.getLogger(__name__)

# Smallest sides of images, with the published patch size and with a smaller one.
LEAST_SIDE, LEAST_SMALL_SIDE = 64, 32
MOST_CHANNELS = 12  # of an image
KEPT = {"output_stride": "strides", "global_pool": "pooling"}  # in hosts without these options
FROM_SLOT = ("grid", "slot")  # keywords of a mixer that only the slot sets
# What torch and timm raise where they refuse a value.
REFUSALS = (ValueError, TypeError, RuntimeError, AssertionError, ArithmeticError)


def backbone_schema(name: str) -> dict[str, Any]:
    """Return every option of a backbone with its default, as ``backbone.<option>=<value>`` sets."""
    host, mixer = look_up(name)
    channel, token = _of_kind("channel", mixer), _of_kind("token", mixer)
    options = {
        "name": name,
        "pretrained": None,
        "img_size": None,
        **({"in_chans": 3} if host.modality == "image" else {}),
        "drop_path_rate": 0.0,
        "dense": False,
        "patch_size": host.patch_size,
        "grad_checkpointing": False,
        "frozen_stages": -1,
        "norm_eval": None,
        "lora": None,
        "fast": True,
        "mixer": mixer_options(channel or OWN_FFN, host=host.name),
        "token_mixer": mixer_options(token, host=host.name) if token else None,
    }
    return {**options, **keywords(host.build), **host_overrides_of(host, mixer)}


def mixer_options(name: str, host: str | None = None) -> dict[str, Any]:
    """Return the options of a mixer with their defaults.

    Args:
        name: One of ``list_mixers()``.
        host: Its paper's defaults for this host, if there are any. ``hidden_ratio`` is None where
            it follows the host.
    """
    entry = find_mixer(name)
    options = _options(entry)
    if "hidden_ratio" in options:
        options["hidden_ratio"] = None
    return {**options, **entry.options_for(host)}


def create_mixer(
    name: str, dim: int, *, grid: tuple[int, int] = (14, 14), block: int = 0, **options: Any
) -> Mixer:
    """Build one mixer: (B, H, W, dim) -> (B, H, W, dim).

    Args:
        name: One of ``list_mixers()``.
        dim: Channels C.
        grid: Map size (H, W) at the build resolution, for mixers whose tables depend on it. With
            (1, L), for series and text, k x k kernels become 1 x k.
        block: Block index within a stage, for mixers that alternate, such as shifted windows.
        **options: The mixer's own, see ``mixer_options(name)``.

    Raises:
        ValueError: Unknown name or option, or a value out of the mixer's range.

    >>> import torch
    >>> mixer = create_mixer("afbo", 192, g2=6)
    >>> mixer(torch.zeros(1, 7, 7, 192)).shape
    torch.Size([1, 7, 7, 192])
    """
    entry = find_mixer(name)
    check_arguments(create_mixer, {"dim": dim, "grid": grid, "block": block}, name)
    if len(grid) != 2 or min(dim, *grid) < 1 or block < 0:
        raise ValueError(
            "dim and the two sides of grid must be at least 1 and block at least 0, got "
            f"dim={dim}, grid={grid}, block={block}"
        )
    _check_mixer_options(entry, options, "mixer")
    slot = Slot(dim, 4.0, grid, stage=0, block=block, dense=False)
    return _build_mixer(entry, None, slot, options)


def create_backbone(
    name: str,
    *,
    pretrained: bool | str | Path | None = None,
    img_size: int | tuple[int, int] | None = None,
    in_chans: int = 3,
    drop_path_rate: float = 0.0,
    mixer: Mapping[str, Any] | str | Sequence[Any] | None = None,
    token_mixer: Mapping[str, Any] | str | Sequence[Any] | None = None,
    dense: bool = False,
    patch_size: int | None = None,
    grad_checkpointing: bool = False,
    frozen_stages: int = -1,
    norm_eval: bool | None = None,
    lora: Mapping[str, Any] | None = None,
    fast: bool = True,
    **host_kwargs: Any,
) -> Backbone:
    """Build a registered backbone.

    Args:
        name: One of ``list_backbones()``, or the source of a model folder that ``export.py to=hub``
            made: ``hf-hub:owner/name@revision`` or ``local-dir:FOLDER``. Weights and options are
            then the folder's; options that differ from their defaults here override them.
        pretrained: True for timm's published weights (needs network once), or the path of a
            .pth/.ckpt/.safetensors file of ours, timm's or the authors', or a source as for
            ``name``. A replaced mixer that is missing from the file keeps its initialisation; any
            other difference is an error.
        img_size: Build resolution (side or (H, W)), 224 by default; other sizes run too. A host
            for signals takes their length L, which is a grid of (1, L).
        in_chans: Channels of the images, 1 to 12. Weights for 3 are adapted as timm does: summed
            for 1, otherwise repeated and scaled by 3 / in_chans.
        drop_path_rate: Stochastic depth of the last block, in [0, 1).
        mixer: Options of the channel mixer, such as ``{"g2": 6}``. On a plain host they rebuild
            its FFN, such as ``{"hidden_ratio": 3}``, if that is W2 act(W1 x). A name, or options
            with "name", put that mixer in, as the suffix of a host's name does. A list has one
            entry per stage or per block, each a name, options with "name", or None for the host's
            own.
        token_mixer: Name, or options with "name", of the mixer that replaces attention or pooling;
            or a list such as ``["ffnified", "ffnified", "ffnified", "attention"]``.
        dense: False builds the published classification network, equal to the parameter. True adds
            the parts for dense prediction (a norm per output map, DeiT's feature pyramid) and omits
            those for classification; a classification checkpoint loads into it.
        patch_size: Stride of the first map, for classifying images of 32 pixels and more: 4, 2 or 1
            in hosts with maps at strides 4 to 32, and 16, 8, 4 or 2 in hosts with one map. Adjacent
            patches get this size; overlapping kernels keep their size and get a smaller stride.
        grad_checkpointing: In training, recompute every block in the backward pass: the same
            gradients for less memory and more time.
        frozen_stages: Stages without gradient and in evaluation mode: -1 for none, 0 for the stem,
            1 for the first stage with its norm as well, and so on; blocks in a host without stages.
        norm_eval: Keep the running statistics of BatchNorm in training; by default only PosMLP does
            so, in dense prediction.
        lora: Options of ``backbones.lora.Lora``, such as ``{"rank": 8, "targets": ["qkv"]}``:
            freeze the weights and train low-rank products beside those of linear layers, by peft.
            BatchNorm then keeps its statistics, and the network its plain form.
        fast: Convert mixers and layers to their fast forms, which compute the same to rounding and
            share all state with the plain ones; see ``backbones.fast``.
        **host_kwargs: The host's own options, see ``backbone_schema(name)``.

    Raises:
        ValueError: Unknown name or option, a value out of range, or weights of another model.

    >>> import torch
    >>> backbone = create_backbone("deit_t_afbo", img_size=64)
    >>> [tuple(feature_map.shape) for feature_map in backbone(torch.zeros(2, 3, 64, 96))]
    [(2, 192, 4, 6)]
    """
    check_value("name", name, str)
    settings: dict[str, Any] = {
        "pretrained": pretrained, "img_size": img_size, "in_chans": in_chans,
        "drop_path_rate": drop_path_rate,
        "mixer": mixer, "token_mixer": token_mixer, "dense": dense, "patch_size": patch_size,
        "grad_checkpointing": grad_checkpointing, "frozen_stages": frozen_stages,
        "norm_eval": norm_eval, "lora": lora,
    }  # fmt: skip
    if is_model_source(name):
        return _create_described(name, settings | {"fast": fast} | host_kwargs)
    name, mixer = join_mixer(name, mixer)
    settings["mixer"] = mixer
    host, mixer_name = look_up(name)
    name = host.name if mixer_name is None else f"{host.name}_{mixer_name}"
    adapters = _lora_options(lora)
    check_arguments(create_backbone, {**settings, "fast": fast}, "backbone")
    _check_kept(host, host_kwargs)
    _check_names(list(host_kwargs), keywords(host.build), host.name)
    check_arguments(host.build, host_kwargs, "backbone")
    if not 0 <= drop_path_rate < 1:
        raise ValueError(f"drop_path_rate must be in [0, 1), got {drop_path_rate}")
    _check_in_chans(in_chans, host)
    patch = host.patch_size if patch_size is None else patch_size
    if img_size is None and host.usual_size is not None:
        img_size = host.usual_size({**keywords(host.build), **host_kwargs})
    _check_patch_size(host, patch, pretrained, dense)
    channel = read_choices("channel", mixer, _of_kind("channel", mixer_name), host.name)
    token = read_choices("token", token_mixer, _of_kind("token", mixer_name), host.name)
    swapped = [*names_of(channel), *names_of(token)]
    _check_prefix(host, swapped, host_kwargs)
    overrides: dict[str, Any] = {}
    for swapped_name in swapped:
        overrides |= host_overrides_of(host, swapped_name)
    options = {**overrides, **host_kwargs}
    config = HostConfig(
        img_size=_image_size(img_size, host, patch),
        drop_path_rate=drop_path_rate,
        pretrained=pretrained is True,
        dense=dense,
        patch_size=patch,
        in_chans=in_chans,
    )
    config = replace(
        config,
        channel_mixer=_factories(host, "channel", channel, config, options),
        token_mixer=_factories(host, "token", token, config, options),
    )
    defaults = keywords(host.build)
    changes = {key: value for key, value in host_kwargs.items() if value != defaults[key]}
    with _naming(host.name, "backbone", changes, f"img_size={img_size}", host.build.__module__):
        backbone = host.build(config, **options)
    correct_pooling(backbone)
    backbone.name, backbone.img_size, backbone.modality = name, config.img_size, host.modality
    backbone.made_by = {"name": name, **settings, **host_kwargs, "pretrained": None}
    backbone.create = create_backbone
    backbone.record = _record(backbone, host, channel, token, options)
    _log_pooling(backbone, host, swapped)
    if backbone.in_chans != in_chans:
        backbone.set_in_chans(in_chans, keep_weights=config.pretrained)
    untrained: tuple[str, ...] = tuple(backbone.mixers()) if pretrained is True else ()
    if isinstance(pretrained, str | Path):
        untrained = _load_weights(backbone, pretrained)
    if adapters is not None:
        from backbones.lora import add_adapters, warn_of_random_weights

        if not pretrained:
            warn_of_random_weights()
        add_adapters(backbone, adapters, untrained)
        norm_eval, fast = True if norm_eval is None else norm_eval, False
    backbone.freeze_stages(frozen_stages)
    if norm_eval is not None:
        backbone.norm_eval = norm_eval
    backbone.set_grad_checkpointing(grad_checkpointing)
    backbone.train()
    return convert_to_fast(backbone) if fast else backbone


def _create_described(source: str, options: Mapping[str, Any]) -> Backbone:
    """Build the backbone of a model folder; options that differ from the usual ones override."""
    usual = keywords(create_backbone)
    changes = {key: value for key, value in options.items() if value != usual.get(key, ...)}
    return create_backbone(**{**backbone_options(source), **changes})


def _log_pooling(backbone: Backbone, host: HostEntry, swapped: Sequence[str | None]) -> None:
    """Log the mixer that takes the class token away."""
    causes = [m for m in swapped if host_overrides_of(host, m).keys() & host.without_prefix]
    if causes and backbone.had_prefix and not backbone.num_prefix_tokens:
        logger.info("%s with %s lacks the class token and pools the map", host.name, causes[0])


def _load_weights(backbone: Backbone, file: str | Path) -> tuple[str, ...]:
    """Load a file into a backbone; return the keys that it lacks."""
    from backbones.checkpoints.adoption import adopt
    from backbones.checkpoints.opening import open_checkpoint

    report = adopt(backbone, open_checkpoint(file))
    if is_model_source(file):
        source = open_model_folder(str(file)).source
        backbone.record = {**backbone.record, "weights_from": source}
    return report.initialised


def _check_kept(host: HostEntry, options: Mapping[str, Any]) -> None:
    """Refuse dilation or another pooling for a host without the option, and name those with it."""
    for option, noun in KEPT.items():
        if option in options and option not in keywords(host.build):
            able = [entry.name for entry in hosts().values() if option in keywords(entry.build)]
            raise ValueError(
                f"{host.name} keeps its {noun}; {option} is for {', '.join(able)}, and for models "
                f"of timm that take it: backbone=timm, options={{{option}: ...}}"
            )


def _lora_options(options: Mapping[str, Any] | None) -> Lora | None:
    check_value("lora", options, Mapping[str, Any] | None)
    if options is None:
        return None
    from backbones.lora import Lora

    check_arguments(Lora, options, "backbone.lora")
    return Lora(**options)


def join_mixer(name: str, mixer: Typed) -> tuple[str, Typed]:
    """Return a backbone's name with the name of its channel mixer, and the mixer's other options.

    A list of mixers stays as it is.

    Raises:
        ValueError: The backbone's name has another mixer.
    """
    check_value("mixer", mixer, Typed)
    if isinstance(mixer, Sequence) and not isinstance(mixer, str):
        return name, mixer
    options = {"name": mixer} if isinstance(mixer, str) else dict(mixer or {})
    channel_mixer = options.pop("name", None)
    if channel_mixer is None:
        return name, mixer if isinstance(mixer, Mapping) else None
    entry = find_mixer(channel_mixer, "channel")
    host, suffix = look_up(name)
    if suffix is not None and suffix != entry.name:
        raise ValueError(
            f"{name} already has {suffix}; type backbone={host.name} to use {entry.name} instead"
        )
    return f"{host.name}_{entry.name}", options


def _record(
    backbone: Backbone,
    host: HostEntry,
    channel: Choice | tuple[Choice, ...],
    token: Choice | tuple[Choice, ...],
    host_kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Return names and options that a backbone was built with, and the map sizes of its mixers."""
    adapters = _lora_options(backbone.made_by["lora"])
    return {
        "host": host.name,
        "mixer": _resolved(channel, "channel", host),
        "token_mixer": _resolved(token, "token", host),
        "options": plain_value({**keywords(host.build), **host_kwargs}),
        **({} if adapters is None else {"lora": plain_value(vars(adapters))}),
        "grids": {
            name: list(part.built_for)
            for name, part in backbone.named_modules()
            if isinstance(part, Mixer) and part.built_for
        },
    }


def _resolved(choice: Choice | tuple[Choice, ...], kind: Kind, host: HostEntry) -> Any:
    """Return a mixer's name with all its options, or one of both per stage or block."""
    if isinstance(choice, tuple):
        return [_resolved(part, kind, host) for part in choice]
    name = resolve(choice, kind, host)
    if name is None:
        return None
    options = {key: value for key, value in choice.options.items() if value is not None}
    return plain_value({"name": name, **mixer_options(name, host.name), **options})


def _of_kind(kind: Kind, mixer: str | None) -> str | None:
    """Return the mixer in a backbone's name if it is of this kind."""
    return mixer if mixer and find_mixer(mixer).kind == kind else None


def _factories(
    host: HostEntry,
    kind: Kind,
    choices: Choice | tuple[Choice, ...],
    config: HostConfig,
    host_kwargs: Mapping[str, Any],
) -> MixerFactory | None:
    """Return the factory of a host's mixers, which may differ from place to place."""
    if not isinstance(choices, tuple):
        return _factory(host, kind, choices)
    factories = [_factory(host, kind, choice) for choice in choices]
    return spread(factories, kind, host, config, host_kwargs)


def _factory(host: HostEntry, kind: Kind, choice: Choice) -> MixerFactory | None:
    """Return the factory of a host's mixers; None if the host keeps its own."""
    name, options = choice.name, dict(choice.options)
    if name is None or (name == OWN_FFN and host.plain_ffn):
        defaults = mixer_options(OWN_FFN, host=host.name) if kind == "channel" else {}
        if all(key in defaults and defaults[key] == value for key, value in options.items()):
            return None
        name = OWN_FFN
        if kind in host.slots and not host.plain_ffn:
            raise ValueError(
                f"mixer options {options} need a mixer's name: the FFN of {host.name} differs from "
                f"ffn, which they would build; type one, such as {host.name}_afbo"
            )
    if kind not in host.slots:
        raise ValueError(f"{host.name} lacks a slot for {kind} mixers; it has {sorted(host.slots)}")
    entry = find_mixer(name, kind)
    unfit = why_unfit(host, entry)
    if unfit:
        able = [item for item in list_mixers(kind) if not why_unfit(host, find_mixer(item, kind))]
        raise ValueError(
            f"{name} does not serve {host.name}, because {unfit}; {host.name} takes {listed(able)}"
        )
    _check_mixer_options(entry, options, "backbone." + _group(entry))
    return lambda slot: _build_mixer(entry, host.name, slot, options)


def _check_prefix(
    host: HostEntry, swapped: Sequence[str | None], options: Mapping[str, Any]
) -> None:
    """Refuse options with class tokens that a mixer cannot take."""
    prefix_values = without_prefix(host, *swapped)
    for option, value in options.items():
        if option in prefix_values and value != prefix_values[option]:
            entry = next(e for e in map(find_mixer, filter(None, swapped)) if not e.takes_prefix)
            able = [e.name for e in mixers().values() if e.kind == entry.kind and e.takes_prefix]
            raise ValueError(
                f"{option}={value} gives {host.name} class tokens, but {entry.name} refuses them "
                f"(prefix_mixing='none'); leave {option} out to pool the map, or use a "
                f"{entry.kind} mixer that takes them, such as {able[0]}"
            )


def _options(entry: MixerEntry) -> dict[str, Any]:
    """Return the options of a mixer that users may set, with its defaults."""
    return {k: v for k, v in keywords(entry.build).items() if k not in FROM_SLOT}


def _group(entry: MixerEntry) -> str:
    return "mixer" if entry.kind == "channel" else "token_mixer"


def _check_names(names: Sequence[str], valid_names: Collection[str], owner: str) -> None:
    for name in names:
        if name not in valid_names:
            raise ValueError(unknown(f"option of {owner}", name, valid_names))


def _check_mixer_options(entry: MixerEntry, values: Mapping[str, Any], group: str) -> None:
    """Check names and types; None stands for the default."""
    _check_names(list(values), _options(entry), f"mixer {entry.name}")
    options = {key: value for key, value in values.items() if value is not None}
    check_arguments(entry.build, options, group)


def _build_mixer(
    entry: MixerEntry, host: str | None, slot: Slot, values: Mapping[str, Any]
) -> Mixer:
    names = keywords(entry.build)
    typed_options = {key: value for key, value in values.items() if value is not None}
    options = entry.options_for(host)
    if "hidden_ratio" in names:
        options["hidden_ratio"] = slot.hidden_ratio * entry.hidden_scale
    options |= {"grid": slot.grid} if "grid" in names else {}
    options |= {"slot": slot} if "slot" in names else {}
    options.update(typed_options)
    group = ("backbone." if host else "") + _group(entry)
    defaults = {**_options(entry), **entry.options_for(host)}  # a run passes these as well
    changes = {key: value for key, value in typed_options.items() if value != defaults[key]}
    owner = f"mixer {entry.name}"
    with _naming(owner, group, changes, f"{slot.dim} channels", entry.build.__module__):
        mixer = entry.build(slot.dim, **options)
    if not isinstance(mixer, Mixer):
        raise ValueError(
            f"mixer {entry.name!r} builds a {type(mixer).__name__}; derive it from "
            "backbones.Mixer, or from backbones.PointwiseMixer if it treats every token alike"
        )
    _check_methods(entry.name, type(mixer))
    correct_pooling(mixer)
    mixer.kind, mixer.built_for = entry.kind, slot.grid
    if slot.grid[0] == 1 < slot.grid[1]:
        mixer.narrow()
    return mixer


def _check_methods(name: str, mixer: type[Mixer]) -> None:
    """Refuse a mixer's class that lacks a method or declares an unknown ``prefix_mixing``."""
    if mixer.prefix_mixing not in get_args(PrefixMixing):
        raise ValueError(
            f"mixer {name!r} declares prefix_mixing={mixer.prefix_mixing!r}; it must be one of "
            f"{', '.join(get_args(PrefixMixing))}"
        )
    joint = mixer.mix_joint is not Mixer.mix_joint
    if mixer.prefix_mixing == "joint" and not joint:
        raise ValueError(
            f"mixer {name!r} declares prefix_mixing='joint' but lacks the method mix_joint; write "
            "mix_joint(x, prefix), which returns the mixed map and the mixed class tokens"
        )
    if mixer.mix is Mixer.mix and not joint:
        raise ValueError(
            f"mixer {name!r} lacks the method mix: (B, H, W, C) -> (B, H, W, C); write it instead "
            "of forward, which adds the class tokens"
        )


@contextlib.contextmanager
def _naming(
    owner: str, group: str, changes: Mapping[str, Any], otherwise: str, module: str
) -> Iterator[None]:
    """Name the options where a library refuses what is built.

    Args:
        owner: Host or mixer, for the message.
        group: Prefix of its options.
        changes: Its options that differ from the defaults.
        otherwise: What it refuses with all options at their defaults.
        module: The one that builds it.
    """
    try:
        yield
    except REFUSALS as error:
        if _is_own_check(error):
            raise
        options = ", ".join(f"{group}.{key}={value}" for key, value in changes.items())
        reason = _describe(error, module)
        raise ValueError(f"{owner} refuses {options or otherwise}: {reason}") from error


def _is_own_check(error: Exception) -> bool:
    """Return True if a check of this package raised the error, so that its message is complete."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ValueError) and _is_in(frame.f_globals, "backbones")


def _describe(error: Exception, module: str) -> str:
    """Return a library's message, with the file and line if a mixer's code may be wrong."""
    if isinstance(error, ValueError):
        return str(error)
    places = [
        f", {frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals is not globals()
        and (_is_in(frame.f_globals, "backbones") or _is_in(frame.f_globals, module))
    ]
    return f"{error} ({type(error).__name__}{places[-1] if places else ''})"


def _is_in(space: Mapping[str, Any], module: str) -> bool:
    return f"{space.get('__name__')}.".startswith(f"{module}.")


def small_patch_sizes(host: HostEntry) -> list[int]:
    """Return the patch sizes for small images: half, quarter and eighth of the published one."""
    return [size for size in (host.patch_size >> halvings for halvings in (1, 2, 3)) if size]


def _check_in_chans(in_chans: int, host: HostEntry) -> None:
    """Check the number of channels of a host's images."""
    if not 1 <= in_chans <= MOST_CHANNELS:
        raise ValueError(f"in_chans must be from 1 to {MOST_CHANNELS}, got {in_chans}")
    if in_chans != Backbone.in_chans and host.modality != "image":
        raise ValueError(f"in_chans={in_chans} is for images; {host.name} takes {host.modality}")


def _check_patch_size(host: HostEntry, patch_size: int, pretrained: Any, dense: bool) -> None:
    """Check the patch size against those of the host, the task and timm's weights."""
    published = host.patch_size
    if patch_size == published:
        return
    smaller = small_patch_sizes(host)
    if patch_size not in smaller:
        raise ValueError(
            f"patch_size of {host.name} must be {published} or, for small images, "
            f"{', '.join(map(str, smaller))}; got {patch_size}"
        )
    if dense:
        raise ValueError(
            f"patch_size={patch_size} is for classifying small images: detectors and segmentors "
            f"read maps at strides 4, 8, 16 and 32; use patch_size={published}"
        )
    if pretrained is True:
        raise ValueError(
            f"timm's weights of {host.name} are for patch_size={published}, got {patch_size}; "
            "leave out patch_size or pretrained"
        )


def _image_size(
    size: int | tuple[int, int] | None, host: HostEntry, patch_size: int
) -> tuple[int, int]:
    """Return the build resolution (H, W); H is 1 for hosts of series and other signals."""
    size = host.img_size if size is None else size
    is_image = host.modality == "image"
    is_square = is_image or not isinstance(host.img_size, int)
    sides = (size if is_square else 1, size) if isinstance(size, int) else size
    if len(sides) != 2:
        raise ValueError(f"img_size must be a side or (height, width), got {size}")
    height, width = sides
    least = LEAST_SIDE if patch_size == host.patch_size else LEAST_SMALL_SIDE
    if is_image and min(height, width) < least:
        patch = small_patch_sizes(host)[-2]
        remedy = f"; {host.name} takes {LEAST_SMALL_SIDE} and more with patch_size={patch}"
        raise ValueError(
            f"img_size must be at least {least} in both directions, got {(height, width)}"
            + remedy * (least == LEAST_SIDE)
        )
    if min(height, width) < 1:
        raise ValueError(f"img_size must be at least 1, got {size}")
    return int(height), int(width)
