"""The one registry: hosts and mixers enter here, backbones and mixers come out.

A backbone name is a host (``swin_t``) or a host with a channel mixer (``swin_t_afbo``); it is
looked up in the table of all fitting pairs, never cut at underscores. ``import backbones`` is the
only act that registers, so nothing can be forgotten.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from backbones.base import Backbone, HostConfig, Mixer, MixerFactory, Slot
from backbones.options import check_arguments, keywords, unknown
from backbones.weights import load_backbone_weights

Kind = Literal["channel", "token"]
F = TypeVar("F", bound=Callable[..., Any])

FROM_SLOT = ("grid", "slot")  # besides hidden_ratio, which is an option as well
OWN_FFN = "ffn"  # as a suffix it names the host's own FFN, so swin_t_ffn is swin_t


@dataclass(frozen=True)
class MixerEntry:
    """A registered mixer; see ``register_mixer`` for the fields."""

    name: str
    kind: Kind
    build: Callable[..., Mixer]
    source: str
    hidden_scale: float = 1.0
    host_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published_on: Collection[str] = ()
    host_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unfit_for: Mapping[str, str] = field(default_factory=dict)
    named_on: Collection[str] = ()


@dataclass(frozen=True)
class HostEntry:
    """A registered host; see ``register_host`` for the fields."""

    name: str
    build: Callable[..., Backbone]
    slots: Collection[Kind]
    source: str


_HOSTS: dict[str, HostEntry] = {}
_MIXERS: dict[str, MixerEntry] = {}


def register_host(
    name: str, *, slots: Collection[Kind] = ("channel", "token"), source: str
) -> Callable[[F], F]:
    """Register a host builder ``(config: HostConfig, **own_options) -> Backbone``.

    Args:
        name: Short lower-case name, as users type it.
        slots: What can be replaced in it.
        source: Paper, or paper and table.

    Raises:
        ValueError: The name is taken.
    """

    def register(build: F) -> F:
        _refuse_taken(name, build, {n: e.build for n, e in _HOSTS.items()})
        _HOSTS[name] = HostEntry(name, build, tuple(slots), source)
        return build

    return register


def register_mixer(
    name: str,
    *,
    kind: Kind,
    source: str,
    hidden_scale: float = 1.0,
    host_options: Mapping[str, Mapping[str, Any]] | None = None,
    published_on: Collection[str] = (),
    host_defaults: Mapping[str, Mapping[str, Any]] | None = None,
    unfit_for: Mapping[str, str] | None = None,
    named_on: Collection[str] = (),
) -> Callable[[F], F]:
    """Register a mixer class or function ``(dim, *, [hidden_ratio], [grid], **options) -> Mixer``.

    The module maps (B, H, W, C) to the same shape; subclass ``backbones.Mixer`` (or
    ``PointwiseMixer``) to serve hosts with class tokens too. ``hidden_ratio``, ``grid`` and
    ``slot`` (the ``Slot`` itself) are filled in when the signature has them; every other keyword is
    an option of the user's.

    Args:
        name: Short lower-case name, written out; it becomes the suffix of backbone names.
        kind: "channel" replaces an FFN, "token" replaces attention or pooling.
        source: Paper, section and equation.
        hidden_scale: Hidden width relative to the host's FFN (a gated unit takes 2/3 to keep its
            size).
        host_options: Option defaults that the paper sets for single hosts; keys may be patterns.
        published_on: Hosts (or patterns) for which a paper reports this pair.
        host_defaults: Defaults of the hosts' own options beside this mixer, such as
            ``{"deit_*": {"class_token": False}}``; keys may be patterns. Channel mixers only.
        unfit_for: Hosts (or patterns) that it cannot serve, with the reason; these pairs do not
            exist.
        named_on: Hosts (or patterns) whose names take a token mixer as a suffix, as all do with a
            channel mixer.

    Raises:
        ValueError: The name is taken.
    """

    def register(build: F) -> F:
        _refuse_taken(name, build, {n: e.build for n, e in _MIXERS.items()})
        _MIXERS[name] = MixerEntry(
            name,
            kind,
            build,
            source,
            hidden_scale,
            dict(host_options or {}),
            tuple(published_on),
            dict(host_defaults or {}),
            dict(unfit_for or {}),
            tuple(named_on),
        )
        return build

    return register


def list_mixers(kind: Kind | None = None) -> list[str]:
    """Names of all mixers, or of one kind ("channel" or "token")."""
    return sorted(name for name, entry in _MIXERS.items() if kind in (None, entry.kind))


def list_hosts() -> list[str]:
    """Names of all hosts, in the order of their families."""
    return list(_HOSTS)


def list_backbones(pattern: str = "*", published: bool | None = None) -> list[str]:
    """Names that ``create_backbone`` takes: every host, and every host with every fitting mixer.

    Whole models have names with some token mixers as well (``named_on`` of these).

    Args:
        pattern: Shell pattern, for example ``"swin_*"``.
        published: True keeps only what a paper reports, False only what none does.
    """
    return [
        name
        for name, (host, mixer) in _table().items()
        if fnmatch.fnmatchcase(name, pattern)
        and published in (None, _is_published(_HOSTS[host], mixer))
    ]


def backbone_schema(name: str) -> dict[str, Any]:
    """Every option of a backbone with its default: what ``backbone.<option>=<value>`` may set."""
    host, mixer = _look_up(name)
    channel, token = _of_kind("channel", mixer), _of_kind("token", mixer)
    options = {
        "name": name,
        "pretrained": None,
        "img_size": None,
        "drop_path_rate": 0.0,
        "dense": False,
        "mixer": mixer_options(channel or OWN_FFN, host=host.name),
        "token_mixer": mixer_options(token, host=host.name) if token else None,
    }
    return {**options, **keywords(host.build), **_host_defaults(host, mixer)}


def mixer_options(name: str, host: str | None = None) -> dict[str, Any]:
    """Options of a mixer with their defaults, for one host if its paper sets them by host.

    ``hidden_ratio`` is None where it follows the host.
    """
    entry = _find_mixer(name)
    options = keywords(entry.build)
    for name_of_slot in FROM_SLOT:
        options.pop(name_of_slot, None)
    if "hidden_ratio" in options:
        options["hidden_ratio"] = None
    return {**options, **_first_match(entry.host_options, host)}


def create_mixer(name: str, dim: int, *, grid: tuple[int, int] = (14, 14), **options: Any) -> Mixer:
    """Build one mixer: (B, H, W, dim) -> (B, H, W, dim).

    Args:
        name: One of ``list_mixers()``.
        dim: Channels C.
        grid: Map size (H, W) at the build resolution, for mixers whose tables depend on it.
        **options: The mixer's own, see ``mixer_options(name)``.

    Raises:
        ValueError: Unknown name or option, or a value that the mixer refuses.
    """
    entry = _find_mixer(name)
    return _build_mixer(entry, None, Slot(dim, 4.0, grid, stage=0, block=0), options)


def create_backbone(
    name: str,
    *,
    pretrained: bool | str | Path | None = None,
    img_size: int | tuple[int, int] | None = None,
    drop_path_rate: float = 0.0,
    mixer: Mapping[str, Any] | None = None,
    token_mixer: Mapping[str, Any] | str | None = None,
    dense: bool = False,
    **host_kwargs: Any,
) -> Backbone:
    """Build a registered backbone.

    Args:
        name: One of ``list_backbones()``.
        pretrained: True for timm's published weights (needs network once), or the path of a
            .pth/.ckpt/.safetensors file of ours, timm's or the authors'. A swapped-in mixer that
            the file does not have keeps its initialisation; any other difference is an error.
        img_size: Build resolution (side or (H, W)); 224 by default. Other sizes run too.
        drop_path_rate: Stochastic depth of the last block, in [0, 1).
        mixer: Options of the channel mixer, such as ``{"g2": 6}``. On a plain host they rebuild
            its FFN, such as ``{"hidden_ratio": 3}``.
        token_mixer: Name, or options with "name", of what replaces attention or pooling.
        dense: False gives the published classification network, to the parameter. True adds what
            only dense prediction needs (a norm per output map, DeiT's feature pyramid) and leaves
            out what only classification needs; a classification checkpoint loads into it.
        **host_kwargs: The host's own options, see ``backbone_schema(name)``.

    Raises:
        ValueError: Unknown name or option, a value out of range, or weights of another model.
    """
    host, mixer_name = _look_up(name)
    known = keywords(host.build)
    for option in host_kwargs:
        if option not in known:
            raise ValueError(unknown(f"option of {host.name}", option, known))
    check_arguments(host.build, host_kwargs, "backbone")
    if not 0 <= drop_path_rate < 1:
        raise ValueError(f"drop_path_rate must be in [0, 1), got {drop_path_rate}")
    config = HostConfig(
        img_size=_image_size(img_size),
        drop_path_rate=drop_path_rate,
        pretrained=pretrained is True,
        dense=dense,
        channel_mixer=_factory(host, "channel", _of_kind("channel", mixer_name), mixer),
        token_mixer=_token_factory(host, _of_kind("token", mixer_name), token_mixer),
    )
    backbone = host.build(config, **{**_host_defaults(host, mixer_name), **host_kwargs})
    backbone.name = name
    if isinstance(pretrained, str | Path):
        load_backbone_weights(backbone, pretrained)
    return backbone


def _table() -> dict[str, tuple[str, str | None]]:
    """Backbone name -> (host, the mixer in its name or None for a plain host)."""
    table: dict[str, tuple[str, str | None]] = {host: (host, None) for host in _HOSTS}
    for host, entry in _HOSTS.items():
        for mixer in list_mixers():
            name = f"{host}_{mixer}"
            if mixer == OWN_FFN or not _is_named(entry, _MIXERS[mixer]) or _why_unfit(host, mixer):
                continue
            if name in table:
                raise ValueError(
                    f"two pairs are called {name!r}: {table[name]} and {(host, mixer)}"
                )
            table[name] = (host, mixer)
    order = {host: position for position, host in enumerate(_HOSTS)}
    return dict(sorted(table.items(), key=lambda item: order[item[1][0]]))


def _is_named(host: HostEntry, mixer: MixerEntry) -> bool:
    """Whether the pair has a name: every channel mixer has one, a token mixer where it says so."""
    if mixer.kind not in host.slots:
        return False
    patterns = ["*"] if mixer.kind == "channel" else mixer.named_on
    return any(fnmatch.fnmatchcase(host.name, pattern) for pattern in patterns)


def _of_kind(kind: Kind, mixer: str | None) -> str | None:
    """The mixer in a backbone's name, if it is of this kind."""
    return mixer if mixer and _MIXERS[mixer].kind == kind else None


def _look_up(name: str) -> tuple[HostEntry, str | None]:
    table = _table()
    plain = name.removesuffix(f"_{OWN_FFN}")
    if name not in table and plain in _HOSTS:
        name = plain
    if name not in table:
        _refuse_unfit(name)
        raise ValueError(unknown("backbone", name, table) + " list_backbones() has them all.")
    host, mixer = table[name]
    return _HOSTS[host], mixer


def _why_unfit(host: str, mixer: str) -> str:
    """Why a mixer cannot serve a host; empty if it can."""
    reasons = _MIXERS[mixer].unfit_for.items()
    return next((why for pattern, why in reasons if fnmatch.fnmatchcase(host, pattern)), "")


def _refuse_unfit(name: str) -> None:
    """Refuse a pair that does not exist because its mixer cannot serve its host."""
    hosts = [host for host, entry in _HOSTS.items() if "channel" in entry.slots]
    for host in hosts:
        mixer = name.removeprefix(f"{host}_")
        if mixer in list_mixers("channel") and _why_unfit(host, mixer):
            fitting = [other for other in hosts if not _why_unfit(other, mixer)]
            raise ValueError(
                f"there is no {name}: {mixer} does not serve {host}, because "
                f"{_why_unfit(host, mixer)}; it serves {', '.join(fitting)}"
            )


def _find_mixer(name: str, kind: Kind | None = None) -> MixerEntry:
    if name not in _MIXERS or kind not in (None, _MIXERS[name].kind):
        raise ValueError(unknown(f"{kind or ''} mixer".strip(), name, list_mixers(kind)))
    return _MIXERS[name]


def _factory(
    host: HostEntry, kind: Kind, name: str | None, options: Mapping[str, Any] | None
) -> MixerFactory | None:
    """What fills a host's slots, or None where the host keeps its own."""
    given = dict(options or {})
    if name is None:
        defaults = mixer_options(OWN_FFN, host=host.name) if kind == "channel" else {}
        if all(key in defaults and defaults[key] == value for key, value in given.items()):
            return None
        name = OWN_FFN
    if kind not in host.slots:
        raise ValueError(f"{host.name} has no {kind}-mixer slot; it has {sorted(host.slots)}")
    entry = _find_mixer(name, kind)
    return lambda slot: _build_mixer(entry, host.name, slot, given)


def _token_factory(
    host: HostEntry, named: str | None, token_mixer: Mapping[str, Any] | str | None
) -> MixerFactory | None:
    if token_mixer is None and named is None:
        return None
    options = {"name": token_mixer} if isinstance(token_mixer, str) else dict(token_mixer or {})
    if named is not None and options.setdefault("name", named) != named:
        raise ValueError(
            f"{host.name}_{named} has {named} in its token slot; name {host.name} to put "
            f"{options['name']} there"
        )
    if "name" not in options:
        raise ValueError(f"token_mixer needs a name, one of {list_mixers('token')}; got {options}")
    return _factory(host, "token", options.pop("name"), options)


def _build_mixer(
    entry: MixerEntry, host: str | None, slot: Slot, given: Mapping[str, Any]
) -> Mixer:
    known = keywords(entry.build)
    for option in given:
        if option not in known:
            raise ValueError(unknown(f"option of mixer {entry.name}", option, known))
    chosen = {key: value for key, value in given.items() if value is not None}
    check_arguments(entry.build, chosen, "mixer" if entry.kind == "channel" else "token_mixer")
    options = dict(_first_match(entry.host_options, host))
    if "hidden_ratio" in known:
        options["hidden_ratio"] = slot.hidden_ratio * entry.hidden_scale
    options |= {"grid": slot.grid} if "grid" in known else {}
    options |= {"slot": slot} if "slot" in known else {}
    options.update(chosen)
    mixer = entry.build(slot.dim, **options)
    if not isinstance(mixer, Mixer):
        raise ValueError(
            f"mixer {entry.name!r} builds a {type(mixer).__name__}; derive it from "
            "backbones.Mixer, or from backbones.PointwiseMixer if it treats every token alike"
        )
    return mixer


def _host_defaults(host: HostEntry, mixer: str | None) -> Mapping[str, Any]:
    return {} if mixer is None else _first_match(_MIXERS[mixer].host_defaults, host.name)


def _first_match(by_host: Mapping[str, Mapping[str, Any]], host: str | None) -> Mapping[str, Any]:
    for pattern, options in by_host.items():
        if host is not None and fnmatch.fnmatchcase(host, pattern):
            return options
    return {}


def _is_published(host: HostEntry, mixer: str | None) -> bool:
    if mixer is None:
        return True
    return any(fnmatch.fnmatchcase(host.name, pattern) for pattern in _MIXERS[mixer].published_on)


def _image_size(size: int | tuple[int, int] | None) -> tuple[int, int]:
    height, width = (size or 224, size or 224) if isinstance(size, int | None) else size
    if min(height, width) < 64:
        raise ValueError(f"img_size must be at least 64 in both directions, got {(height, width)}")
    return int(height), int(width)


def _refuse_taken(
    name: str, build: Callable[..., Any], taken: Mapping[str, Callable[..., Any]]
) -> None:
    if name in taken:
        first, second = (f"{b.__module__}.{b.__qualname__}" for b in (taken[name], build))
        raise ValueError(f"the name {name!r} is taken by {first}; give {second} another one")
