"""The one registry: hosts and mixers enter here, and the names of all backbones follow.

A backbone name is a host (``swin_t``) or a host with a channel mixer (``swin_t_afbo``); it is
looked up in the table of all fitting pairs, never cut at underscores. Whoever asks for an entry has
all files of hosts/ and mixers/ imported first, which register themselves; nothing can be forgotten.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from backbones.base import Backbone, Mixer, takes_prefix
from backbones.options import (
    Origin,
    built_class,
    check_builder,
    check_value,
    listed,
    unknown,
    unknown_backbone,
)

Kind = Literal["channel", "token"]
F = TypeVar("F", bound=Callable[..., Any])

NAME = r"[a-z][a-z0-9_]*"
FILLED = ("hidden_ratio", "grid", "slot")  # what a mixer is given if its signature has it
OWN_FFN = "ffn"  # as a suffix it names the host's own FFN, so swin_t_ffn is swin_t


@dataclass(frozen=True, eq=False)  # told apart by identity
class MixerEntry:
    """A registered mixer; see ``register_mixer`` for the fields."""

    name: str
    kind: Kind
    build: Callable[..., Mixer]
    source: str
    hidden_scale: float
    options_on: Mapping[str, Mapping[str, Any]]
    published_on: Collection[str]
    host_overrides: Mapping[str, Mapping[str, Any]]
    unfit_for: Mapping[str, str]
    named_on: Collection[str]
    base: MixerEntry | None  # the registered mixer that it is a variant of
    inherits: Collection[str]  # options whose values for single hosts are the base's

    def options_for(self, host: str | None) -> dict[str, Any]:
        """Option defaults that the paper sets for a host, a variant's own before its base's."""
        base = {} if self.base is None else self.base.options_for(host)
        inherited = {key: value for key, value in base.items() if key in self.inherits}
        return {**inherited, **first_match(self.options_on, host)}

    @property
    def takes_prefix(self) -> bool:
        """True if it serves a host with class tokens, by the class that it builds."""
        return takes_prefix(built_class(self.build, Mixer), self.kind)


@dataclass(frozen=True, eq=False)  # told apart by identity
class HostEntry:
    """A registered host; see ``register_host`` for the fields."""

    name: str
    build: Callable[..., Backbone]
    slots: Collection[Kind]
    source: str
    plain_ffn: bool
    patch_size: int
    without_prefix: Mapping[str, Any]
    modality: str = "image"


_HOSTS: dict[str, HostEntry] = {}
_MIXERS: dict[str, MixerEntry] = {}


def hosts() -> dict[str, HostEntry]:
    """All hosts by name, in the order of their families."""
    _import_rooms("mixers", "hosts")
    return _HOSTS


def mixers() -> dict[str, MixerEntry]:
    """All mixers by name."""
    _import_rooms("mixers")
    return _MIXERS


def _import_rooms(*rooms: str) -> None:
    # A module that an export cut out of this source has what it needs, and no rooms beside it.
    there = getattr(sys.modules["backbones"], "REGISTERING", ())
    for room in rooms:
        if room in there:
            importlib.import_module(f"backbones.{room}")


def register_host(
    name: str,
    *,
    slots: Collection[Kind] = ("channel", "token"),
    source: str,
    plain_ffn: bool = True,
    patch_size: int = 4,
    without_prefix: Mapping[str, Any] | None = None,
    modality: str = "image",
) -> Callable[[F], F]:
    """Register a host builder ``(config: HostConfig, **own_options) -> Backbone``.

    Args:
        name: Short lower-case name, as users type it.
        slots: What can be replaced in it.
        source: Paper, or paper and table.
        plain_ffn: Whether its own FFN is W2 act(W1 x), so that ``ffn`` with other options may take
            its place.
        patch_size: Stride of the first map of the published network; for small images users may
            choose a smaller one.
        without_prefix: Its own options by which it has no class tokens and pools its map, for a
            host that has such tokens; they hold beside mixers that do not take prefix tokens.
        modality: What it takes, in the singular; tasks of another modality refuse it.

    Raises:
        ValueError: The name is none or taken by another one, a slot is of no kind, or an option
            cannot be typed.
    """
    _check_name(name)
    for kind in slots:
        check_value("slots", kind, Kind)

    def register(build: F) -> F:
        _refuse_taken(name, build, {n: e.build for n, e in hosts().items()})
        check_builder(build, f"host {name}")
        _HOSTS[name] = HostEntry(
            name, build, tuple(slots), source, plain_ffn, patch_size, dict(without_prefix or {}),
            modality,
        )  # fmt: skip
        return build

    return register


def register_mixer(
    name: str,
    *,
    kind: Kind,
    source: str,
    hidden_scale: float | None = None,
    options_on: Mapping[str, Mapping[str, Any]] | None = None,
    published_on: Collection[str] = (),
    host_overrides: Mapping[str, Mapping[str, Any]] | None = None,
    unfit_for: Mapping[str, str] | None = None,
    named_on: Collection[str] = (),
) -> Callable[[F], F]:
    """Register a mixer class or function ``(dim, *, [hidden_ratio], [grid], **options) -> Mixer``.

    The module maps (B, H, W, C) to the same shape. Its class says how class tokens take part
    (``Mixer.prefix_mixing``); a function names the class as what it returns. ``hidden_ratio``,
    ``grid`` and ``slot`` (the ``Slot`` itself) are filled in when the signature has them; every
    other keyword is an option of the user's, with a default that can be typed.
    ``options.variant_of`` makes a mixer out of another with options fixed; it inherits
    ``options_on``, and ``hidden_scale``, ``host_overrides`` and ``unfit_for`` unless it has its
    own.

    Args:
        name: Short name of lower-case letters, digits and _, written out; it becomes the suffix of
            backbone names.
        kind: "channel" replaces an FFN, "token" replaces attention or pooling.
        source: Paper, section and equation.
        hidden_scale: Hidden width relative to the host's FFN (a gated unit takes 2/3 to keep its
            size); 1 by default.
        options_on: Option defaults that the paper sets for single hosts; keys may be patterns.
        published_on: Hosts (or patterns) for which a paper reports this pair.
        host_overrides: Defaults of the hosts' own options beside this mixer, such as
            ``{"deit_*": {"class_token": False}}``; keys may be patterns. Channel mixers only.
        unfit_for: Hosts (or patterns) that it cannot serve, with the reason; these pairs do not
            exist.
        named_on: Hosts (or patterns) whose names take a token mixer as a suffix, as all do with a
            channel mixer.

    Raises:
        ValueError: The name is none or taken by another one, there is no such kind, or an option
            cannot be typed.
    """
    _check_name(name)
    check_value("kind", kind, Kind)

    def register(build: F) -> F:
        _refuse_taken(name, build, {n: e.build for n, e in mixers().items()})
        check_builder(build, f"mixer {name}", FILLED)
        base, inherits = _base_of(build)
        _MIXERS[name] = MixerEntry(
            name=name,
            kind=kind,
            build=build,
            source=source,
            hidden_scale=_first(hidden_scale, base and base.hidden_scale, 1.0),
            options_on=dict(options_on or {}),
            published_on=tuple(published_on),
            host_overrides=dict(_first(host_overrides, base and base.host_overrides, {})),
            unfit_for=dict(_first(unfit_for, base and base.unfit_for, {})),
            named_on=tuple(named_on),
            base=base,
            inherits=inherits,
        )
        return build

    return register


@contextlib.contextmanager
def temporary_registrations() -> Iterator[None]:
    """Forget at the end which hosts and mixers were registered inside, for trials and tests."""
    hosts_before, mixers_before = dict(hosts()), dict(mixers())
    try:
        yield
    finally:
        _HOSTS.clear()
        _HOSTS.update(hosts_before)
        _MIXERS.clear()
        _MIXERS.update(mixers_before)


def list_mixers(kind: Kind | None = None) -> list[str]:
    """Names of all mixers, or of one kind ("channel" or "token")."""
    return sorted(name for name, entry in mixers().items() if kind in (None, entry.kind))


def list_hosts() -> list[str]:
    """Names of all hosts, in the order of their families."""
    return list(hosts())


def host_modality(name: str) -> str:
    """Return what a backbone takes, such as "image".

    Raises:
        ValueError: Unknown name, or a pair that does not fit.
    """
    return look_up(name)[0].modality


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


def _table() -> dict[str, tuple[str, str | None]]:
    """Backbone name -> (host, the mixer in its name or None for a plain host)."""
    return _table_of(tuple(hosts().values()), tuple(mixers().values()))


@functools.lru_cache(maxsize=1)
def _table_of(
    hosts: tuple[HostEntry, ...], mixers: tuple[MixerEntry, ...]
) -> dict[str, tuple[str, str | None]]:
    table: dict[str, tuple[str, str | None]] = {host.name: (host.name, None) for host in hosts}
    for host in hosts:
        for mixer in sorted(mixers, key=lambda entry: entry.name):
            name = f"{host.name}_{mixer.name}"
            if mixer.name == OWN_FFN or not _is_named(host, mixer) or why_unfit(host, mixer):
                continue
            if name in table:
                raise ValueError(
                    f"two pairs are called {name!r}: {table[name]} and {(host.name, mixer.name)}"
                )
            table[name] = (host.name, mixer.name)
    order = {host.name: position for position, host in enumerate(hosts)}
    return dict(sorted(table.items(), key=lambda item: order[item[1][0]]))


def _is_named(host: HostEntry, mixer: MixerEntry) -> bool:
    """Whether the pair has a name: every channel mixer has one, a token mixer where it says so."""
    if mixer.kind not in host.slots:
        return False
    patterns = ["*"] if mixer.kind == "channel" else mixer.named_on
    return any(fnmatch.fnmatchcase(host.name, pattern) for pattern in patterns)


def look_up(name: str) -> tuple[HostEntry, str | None]:
    """The host of a backbone's name, and the mixer in that name.

    Raises:
        ValueError: Unknown name, or a pair that does not fit.
    """
    table = _table()
    plain = name.removesuffix(f"_{OWN_FFN}")
    if name not in table and plain in _HOSTS:
        name = plain
    if name not in table:
        _refuse_unfit(name)
        channel = [mixer for mixer in list_mixers("channel") if mixer != OWN_FFN]
        known = {
            name: takes_token_mixer(_HOSTS[host], mixer) for name, (host, mixer) in table.items()
        }
        tokens = list_mixers("token")
        raise ValueError(unknown_backbone(name, known, list_hosts(), channel, tokens))
    host, mixer = table[name]
    return _HOSTS[host], mixer


def takes_token_mixer(host: HostEntry, mixer: str | None) -> bool:
    """Whether the option ``token_mixer`` may name one, beside the mixer in a backbone's name."""
    return "token" in host.slots and (mixer is None or _MIXERS[mixer].kind == "channel")


def why_unfit(host: HostEntry, mixer: MixerEntry) -> str:
    """Why a mixer cannot serve a host; empty if it can."""
    reasons = mixer.unfit_for.items()
    return next((why for pattern, why in reasons if fnmatch.fnmatchcase(host.name, pattern)), "")


def _refuse_unfit(name: str) -> None:
    """Refuse a pair that does not exist because its mixer cannot serve its host."""
    reason = unfit_pairs().get(name)
    if reason:
        raise ValueError(reason)


def unfit_pairs() -> dict[str, str]:
    """Names of hosts with channel mixers that cannot serve them, and why."""
    able = [host for host in hosts().values() if "channel" in host.slots]
    pairs = {}
    for mixer in mixers().values():
        unfit = {host.name: why_unfit(host, mixer) for host in able if mixer.kind == "channel"}
        fitting = listed(host for host, why in unfit.items() if not why)
        for host, why in unfit.items():
            if why:
                pairs[f"{host}_{mixer.name}"] = (
                    f"there is no {host}_{mixer.name}: {mixer.name} does not serve {host}, because "
                    f"{why}; it serves {fitting}"
                )
    return pairs


def find_host(name: str) -> HostEntry:
    """The host of this name, which is the name of a backbone without a mixer in it.

    Raises:
        ValueError: Unknown name.
    """
    if name not in hosts():
        raise ValueError(unknown("host", name, list_hosts()))
    return _HOSTS[name]


def find_mixer(name: str, kind: Kind | None = None) -> MixerEntry:
    """The mixer of this name, and of this kind if one is given.

    Raises:
        ValueError: Unknown name.
    """
    if name not in mixers() or kind not in (None, _MIXERS[name].kind):
        raise ValueError(unknown(f"{kind or ''} mixer".strip(), name, list_mixers(kind)))
    return _MIXERS[name]


def host_overrides_of(host: HostEntry, mixer: str | None) -> dict[str, Any]:
    """Defaults of a host's own options beside a mixer."""
    own = {} if mixer is None else first_match(find_mixer(mixer).host_overrides, host.name)
    return {**own, **without_prefix(host, mixer)}


def without_prefix(host: HostEntry, *mixers: str | None) -> Mapping[str, Any]:
    """Options by which a host has no class tokens, if one of these mixers does not take them."""
    taken = all(find_mixer(name).takes_prefix for name in mixers if name is not None)
    return {} if taken else host.without_prefix


def first_match(by_host: Mapping[str, Mapping[str, Any]], host: str | None) -> Mapping[str, Any]:
    """What the first pattern that fits the host's name holds."""
    for pattern, options in by_host.items():
        if host is not None and fnmatch.fnmatchcase(host, pattern):
            return options
    return {}


def _is_published(host: HostEntry, mixer: str | None) -> bool:
    if mixer is None:
        return True
    return any(fnmatch.fnmatchcase(host.name, pattern) for pattern in _MIXERS[mixer].published_on)


def _base_of(build: Callable[..., Any]) -> tuple[MixerEntry | None, frozenset[str]]:
    """The registered mixer that a builder is a variant of, and the options they share."""
    shared: frozenset[str] | None = None
    origin: Origin | None = getattr(build, "origin", None)
    while origin is not None:
        shared = origin.options if shared is None else shared & origin.options
        for entry in _MIXERS.values():
            if entry.build is origin.build:
                return entry, shared
        origin = getattr(origin.build, "origin", None)
    return None, frozenset()


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise ValueError(
            f"{name!r} is no name for a host or mixer; write lower-case letters, digits and _, a "
            "letter first"
        )


def _refuse_taken(
    name: str, build: Callable[..., Any], taken: Mapping[str, Callable[..., Any]]
) -> None:
    if name not in taken:
        return
    first, second = (f"{b.__module__}.{b.__qualname__}" for b in (taken[name], build))
    # What is defined again takes its own place: a notebook's cell, or a file whose import failed.
    if taken[name] is build or first != second or "<" in first:
        raise ValueError(f"the name {name!r} is taken by {first}; give {second} another one")
