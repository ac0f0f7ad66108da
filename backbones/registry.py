"""Registry of hosts and mixers, and the names of all backbones built from them.

A backbone's name is a host (``swin_t``) or a host with a channel mixer (``swin_t_afbo``). It is
looked up among the names of hosts and mixers, never split at underscores. The files of hosts/ and
mixers/ register themselves; looking a name up imports its file alone.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from backbones.base import Backbone, Mixer, takes_prefix
from backbones.importing import import_file, import_files, read_declarations
from backbones.options import (
    Origin,
    built_class,
    check_builder,
    check_value,
    listed,
    unknown,
    unknown_backbone,
)
from backbones.plugins import load_plugins

Kind = Literal["channel", "token"]
F = TypeVar("F", bound=Callable[..., Any])

NAME = r"[a-z][a-z0-9_]*"
FILLED = ("hidden_ratio", "grid", "slot")  # keywords that the slot sets if a mixer has them
OWN_FFN = "ffn"  # as a suffix the host's own FFN: swin_t_ffn is swin_t


@dataclass(frozen=True, eq=False)  # compared by identity
class MixerEntry:
    """Registered mixer; see ``register_mixer`` for the fields."""

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
    base: MixerEntry | None  # the registered mixer of which it is a variant
    every_order: bool | None
    inherits: Collection[str]  # options whose values for single hosts are the base's

    def options_for(self, host: str | None) -> dict[str, Any]:
        """Return the option defaults of the paper for a host; a variant's override its base's."""
        base = {} if self.base is None else self.base.options_for(host)
        inherited = {key: value for key, value in base.items() if key in self.inherits}
        return {**inherited, **first_match(self.options_on, host)}

    @property
    def takes_prefix(self) -> bool:
        """Support for class tokens, declared by the class that it builds."""
        return takes_prefix(built_class(self.build, Mixer), self.kind)

    @property
    def ignores_order(self) -> bool:
        """True if the order of tokens changes only the order of its outputs."""
        if self.every_order is not None:
            return self.every_order
        return built_class(self.build, Mixer).ignores_order


@dataclass(frozen=True, eq=False)  # compared by identity
class HostEntry:
    """Registered host; see ``register_host`` for the fields."""

    name: str
    build: Callable[..., Backbone]
    slots: Collection[Kind]
    source: str
    plain_ffn: bool
    patch_size: int
    without_prefix: Mapping[str, Any]
    modality: str = "image"
    img_size: int | tuple[int, int] = 224
    ordered: bool = True
    usual_size: Callable[[Mapping[str, Any]], tuple[int, int]] | None = None
    own_token_mixer: str | None = None


_HOSTS: dict[str, HostEntry] = {}
_MIXERS: dict[str, MixerEntry] = {}
ENTRIES: dict[str, dict[str, Any]] = {"hosts": _HOSTS, "mixers": _MIXERS}  # by folder
_COMPLETE: set[str] = set()  # folders whose files and plugins are all imported
# A call at the start of a line, such as ``@register_mixer("afbo"``.
DECLARATION = r"^@?_?register\w*\(\s*\"(\w+)\""


def hosts() -> dict[str, HostEntry]:
    """Return all hosts by name, in the order of their families; imports all."""
    _import_all("hosts")
    return {name: _HOSTS[name] for name in (*declared_modules("hosts"), *_HOSTS) if name in _HOSTS}


def mixers() -> dict[str, MixerEntry]:
    """Return all mixers by name, sorted, those of installed packages included; imports all."""
    _import_all("mixers")
    return dict(sorted(_MIXERS.items()))


def _import_all(folder: str) -> None:
    """Import all files of hosts/ or mixers/ and those of installed packages."""
    if folder in _COMPLETE:
        return
    _COMPLETE.add(folder)  # first, as a module may look up mixers
    try:
        import_files(f"backbones.{folder}")
        load_plugins(folder)
    except BaseException:
        _COMPLETE.remove(folder)
        raise


def is_complete() -> bool:
    """Return True if all hosts and mixers are imported."""
    return {"hosts", "mixers"} <= _COMPLETE


def registered_names() -> set[str]:
    """Return the names of the hosts and mixers that are imported."""
    return {*_HOSTS, *_MIXERS}


def declared_modules(folder: str) -> dict[str, str]:
    """Return name -> module of the hosts or mixers that the files of a folder register."""
    pairs = read_declarations(f"backbones.{folder}", DECLARATION)
    return {name: module for module, name in pairs}


def _find(folder: str, name: str) -> Any:
    """Return a host or mixer, whose file or plugin is imported now; None if the name is unknown."""
    entries = ENTRIES[folder]
    if name not in entries and name in declared_modules(folder):
        import_file(declared_modules(folder)[name])
    if name not in entries:
        load_plugins(folder, name)
    if name not in entries:
        _import_all(folder)
    return entries.get(name)


def register_host(
    name: str,
    *,
    slots: Collection[Kind] = ("channel", "token"),
    source: str,
    plain_ffn: bool = True,
    patch_size: int = 4,
    without_prefix: Mapping[str, Any] | None = None,
    modality: str = "image",
    img_size: int | tuple[int, int] = 224,
    ordered: bool = True,
    usual_size: Callable[[Mapping[str, Any]], tuple[int, int]] | None = None,
    own_token_mixer: str | None = None,
) -> Callable[[F], F]:
    """Register a host builder ``(config: HostConfig, **own_options) -> Backbone``.

    Args:
        name: Short lower-case name, as users type it.
        slots: Kinds of mixers that can be replaced in it.
        source: Paper, or paper and table.
        plain_ffn: True if its FFN is W2 act(W1 x), so that ``ffn`` with other options may replace
            it.
        patch_size: Stride of the first map of the published network; for small images users may
            choose a smaller one.
        without_prefix: Options that build a host with class tokens without them, so that it pools
            its map; they apply with mixers that refuse prefix tokens.
        modality: Its inputs in the singular, such as "image" or "signal"; tasks of another
            modality reject the host.
        img_size: Side or length that it is built for by default; (H, W) for maps of another
            modality, where a typed side means a square.
        ordered: False if its tokens are unordered, as variables are; only mixers whose class
            declares ``ignores_order`` fit.
        usual_size: Function from the host's own options to (H, W), for a host with a default size
            that depends on them.
        own_token_mixer: Name of a mixer that, typed without options, keeps the host's own one.

    Raises:
        ValueError: The name is invalid or taken, a slot's kind is unknown, or an option lacks a
            default that can be typed.

    >>> @register_host("two_maps", source="an example")
    ... def two_maps(config) -> Backbone:
    ...     raise NotImplementedError
    >>> "two_maps_afbo" in list_backbones()
    True
    """
    _check_name(name)
    _check_name(modality)
    for kind in slots:
        check_value("slots", kind, Kind)

    def register(build: F) -> F:
        _refuse_taken("hosts", name, build)
        check_builder(build, f"host {name}")
        _HOSTS[name] = HostEntry(
            name, build, tuple(slots), source, plain_ffn, patch_size, dict(without_prefix or {}),
            modality, img_size, ordered, usual_size, own_token_mixer,
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
    ignores_order: bool | None = None,
) -> Callable[[F], F]:
    """Register a mixer class or function ``(dim, *, [hidden_ratio], [grid], **options) -> Mixer``.

    The module maps (B, H, W, C) to the same shape. Its class declares the treatment of class
    tokens (``Mixer.prefix_mixing``); a function names that class as its return type. The slot sets
    ``hidden_ratio``, ``grid`` and ``slot`` (the ``Slot`` itself) if the signature has them. Every
    other keyword is an option for users, with a default that can be typed.
    ``options.variant_of`` derives a mixer from another with options fixed. It inherits
    ``options_on``, and ``hidden_scale``, ``host_overrides`` and ``unfit_for`` unless it sets them.

    Args:
        name: Short name of lower-case letters, digits and _, written out; it becomes the suffix of
            backbone names.
        kind: "channel" replaces an FFN, "token" replaces attention or pooling.
        source: Paper, section and equation.
        hidden_scale: Hidden width relative to the host's FFN (a gated unit takes 2/3 to keep its
            size); 1 by default.
        options_on: Option defaults of the paper for single hosts; keys may be patterns.
        published_on: Hosts (or patterns) for which a paper reports this pair.
        host_overrides: Defaults of the hosts' own options with this mixer, such as
            ``{"deit_*": {"class_token": False}}``; keys may be patterns. Channel mixers only.
        unfit_for: Hosts (or patterns) without this mixer, with the reason.
        named_on: Hosts (or patterns) with names that take this token mixer as a suffix, as all
            names do with a channel mixer.
        ignores_order: In place of its class's, for a variant without the parts that read order.

    Raises:
        ValueError: The name is invalid or taken, the kind is unknown, or an option lacks a default
            that can be typed.

    >>> from torch import nn
    >>> from backbones import PointwiseMixer
    >>> @register_mixer("one_layer", kind="channel", source="an example")
    ... class OneLayer(PointwiseMixer):
    ...     def __init__(self, dim, *, bias=True):
    ...         super().__init__()
    ...         self.layer = nn.Linear(dim, dim, bias=bias)
    ...
    ...     def mix(self, x):
    ...         return self.layer(x)
    >>> "swin_t_one_layer" in list_backbones()
    True
    """
    _check_name(name)
    check_value("kind", kind, Kind)

    def register(build: F) -> F:
        _refuse_taken("mixers", name, build)
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
            every_order=ignores_order,
            inherits=inherits,
        )
        return build

    return register


@contextlib.contextmanager
def temporary_registrations() -> Iterator[None]:
    """Remove hosts and mixers that were registered inside the context, for trials and tests."""
    hosts_before, mixers_before = dict(hosts()), dict(mixers())
    try:
        yield
    finally:
        _HOSTS.clear()
        _HOSTS.update(hosts_before)
        _MIXERS.clear()
        _MIXERS.update(mixers_before)


def list_mixers(kind: Kind | None = None) -> list[str]:
    """Return the names of all mixers, or of one kind ("channel" or "token").

    >>> "attention" in list_mixers("token")
    True
    """
    return [name for name, entry in mixers().items() if kind in (None, entry.kind)]


def list_hosts(modality: str | None = None) -> list[str]:
    """Return the names of all hosts, or of one modality, in the order of their families."""
    return [name for name, entry in hosts().items() if modality in (None, entry.modality)]


def host_modality(name: str) -> str:
    """Return the modality of a backbone's inputs, such as "image".

    Raises:
        ValueError: Unknown name, or a pair that does not fit.
    """
    return look_up(name)[0].modality


def list_backbones(
    pattern: str = "*", published: bool | None = None, modality: str | None = None
) -> list[str]:
    """Return the names for ``create_backbone``: all hosts, alone and with every fitting mixer.

    Published models with a token mixer have names as well (``named_on`` of the mixer).

    Args:
        pattern: Shell pattern, for example ``"swin_*"``.
        published: True keeps the names that a paper reports, False all others.
        modality: Keep the hosts of one modality, such as "image"; None keeps all.

    >>> list_backbones("posmlp_t_*")
    ['posmlp_t_glrpe', 'posmlp_t_lrpe', 'posmlp_t_lrpe_m', 'posmlp_t_sgu']
    """
    return [
        name
        for name, (host, mixer) in _table().items()
        if fnmatch.fnmatchcase(name, pattern)
        and modality in (None, _HOSTS[host].modality)
        and published in (None, _is_published(_HOSTS[host], mixer))
    ]


def _table() -> dict[str, tuple[str, str | None]]:
    """Return backbone name -> (host, the mixer in its name or None for a plain host)."""
    return _table_of(tuple(hosts().values()), tuple(mixers().values()))


@functools.lru_cache(maxsize=1)
def _table_of(
    hosts: tuple[HostEntry, ...], mixers: tuple[MixerEntry, ...]
) -> dict[str, tuple[str, str | None]]:
    table: dict[str, tuple[str, str | None]] = {host.name: (host.name, None) for host in hosts}
    for host in hosts:
        for mixer in mixers:
            name = f"{host.name}_{mixer.name}"
            if mixer.name == OWN_FFN or not _is_named(host, mixer) or why_unfit(host, mixer):
                continue
            if name in table:
                raise ValueError(
                    f"two pairs are called {name!r}: {table[name]} and {(host.name, mixer.name)}; "
                    "rename a host or mixer"
                )
            table[name] = (host.name, mixer.name)
    order = {host.name: position for position, host in enumerate(hosts)}
    return dict(sorted(table.items(), key=lambda item: order[item[1][0]]))


def _is_named(host: HostEntry, mixer: MixerEntry) -> bool:
    """Return True if the pair has a name, as all channel mixers have."""
    if mixer.kind not in host.slots:
        return False
    patterns = ["*"] if mixer.kind == "channel" else mixer.named_on
    return any(fnmatch.fnmatchcase(host.name, pattern) for pattern in patterns)


def look_up(name: str) -> tuple[HostEntry, str | None]:
    """Return the host of a backbone's name, and the mixer in that name.

    Raises:
        ValueError: Unknown name, or a pair that does not fit.
    """
    if not is_complete():
        pairs = _pairs(name)
        if not pairs:
            load_plugins("hosts")
            load_plugins("mixers")
            pairs = _pairs(name)
        if len(pairs) == 1:
            return pairs[0]
    table = _table()  # imports all, and refuses two pairs of one name
    host_name = name.removesuffix(f"_{OWN_FFN}")
    if name not in table and host_name in _HOSTS:
        name = host_name
    if name not in table:
        _refuse_unfit(name)
        channel = [mixer for mixer in list_mixers("channel") if mixer != OWN_FFN]
        names = {
            name: takes_token_mixer(_HOSTS[host], mixer) for name, (host, mixer) in table.items()
        }
        tokens = list_mixers("token")
        images_first = sorted(list_hosts(), key=lambda host: _HOSTS[host].modality != "image")
        raise ValueError(unknown_backbone(name, names, images_first, channel, tokens))
    host, mixer = table[name]
    return _HOSTS[host], mixer


def _pairs(name: str) -> list[tuple[HostEntry, str | None]]:
    """Return the fitting pairs of this name, of which it has the files imported."""
    hosts = {**declared_modules("hosts"), **_HOSTS}
    mixers = {**declared_modules("mixers"), **_MIXERS}
    for host_name in (name, name.removesuffix(f"_{OWN_FFN}")):
        if host_name in hosts:
            return [(find_host(host_name), None)]
    pairs: list[tuple[HostEntry, str | None]] = []
    for host in hosts:
        mixer = name.removeprefix(f"{host}_")
        if mixer != name and mixer in mixers:
            entry, mixer_entry = find_host(host), find_mixer(mixer)
            if _is_named(entry, mixer_entry) and not why_unfit(entry, mixer_entry):
                pairs.append((entry, mixer))
    return pairs


def takes_token_mixer(host: HostEntry, mixer: str | None) -> bool:
    """Return True if the option ``token_mixer`` may add one to the mixer in the name."""
    return "token" in host.slots and (mixer is None or find_mixer(mixer).kind == "channel")


def why_unfit(host: HostEntry, mixer: MixerEntry) -> str:
    """Return the reason why a mixer cannot serve a host; empty if it can."""
    if not host.ordered and not mixer.ignores_order:
        return "its tokens have no order, which the mixer depends on"
    reasons = mixer.unfit_for.items()
    return next((why for pattern, why in reasons if fnmatch.fnmatchcase(host.name, pattern)), "")


def _refuse_unfit(name: str) -> None:
    """Refuse a pair with a mixer that cannot serve the host."""
    reason = unfit_pairs().get(name)
    if reason:
        raise ValueError(reason)


def unfit_pairs() -> dict[str, str]:
    """Return the names of pairs with channel mixers that cannot serve the host, with the reason."""
    able = [host for host in hosts().values() if "channel" in host.slots]
    pairs = {}
    for mixer in mixers().values():
        unfit = {host.name: why_unfit(host, mixer) for host in able if mixer.kind == "channel"}
        for host, why in unfit.items():
            if why:
                modality = host_modality(host)
                host_names = listed(
                    h for h, no in unfit.items() if not no and host_modality(h) == modality
                )
                pairs[f"{host}_{mixer.name}"] = (
                    f"there is no {host}_{mixer.name}: {mixer.name} does not serve {host}, because "
                    f"{why}; it serves {host_names or 'hosts of other inputs'}"
                )
    return pairs


def find_host(name: str) -> HostEntry:
    """Return the host of this name.

    Raises:
        ValueError: Unknown name.
    """
    entry = _find("hosts", name)
    if entry is None:
        raise ValueError(unknown("host", name, list_hosts()))
    return entry


def find_mixer(name: str, kind: Kind | None = None) -> MixerEntry:
    """Return the mixer of this name, and of this kind if one is given.

    Where a channel mixer is asked for, the name of a token mixer stands for its counterpart:
    "identity" for "identity_ffn".

    Raises:
        ValueError: Unknown name.
    """
    check_value("a mixer's name", name, str)
    entry = _find("mixers", name)
    if entry is not None and kind == "channel" != entry.kind:
        entry = _find("mixers", f"{name}_{OWN_FFN}")
    if entry is None or kind not in (None, entry.kind):
        raise ValueError(unknown(f"{kind or ''} mixer".strip(), name, list_mixers(kind)))
    return entry


def host_overrides_of(host: HostEntry, mixer: str | None) -> dict[str, Any]:
    """Return the defaults of a host's own options with a mixer."""
    overrides = {} if mixer is None else first_match(find_mixer(mixer).host_overrides, host.name)
    return {**overrides, **without_prefix(host, mixer)}


def without_prefix(host: HostEntry, *mixers: str | None) -> Mapping[str, Any]:
    """Return a host's options without class tokens if one of these mixers refuses them."""
    takes_prefix = all(find_mixer(name).takes_prefix for name in mixers if name is not None)
    return {} if takes_prefix else host.without_prefix


def first_match(by_host: Mapping[str, Mapping[str, Any]], host: str | None) -> Mapping[str, Any]:
    """Return the options of the first pattern that matches the host's name."""
    for pattern, options in by_host.items():
        if host is not None and fnmatch.fnmatchcase(host, pattern):
            return options
    return {}


def _is_published(host: HostEntry, mixer: str | None) -> bool:
    if mixer is None:
        return True
    return any(fnmatch.fnmatchcase(host.name, pattern) for pattern in _MIXERS[mixer].published_on)


def _base_of(build: Callable[..., Any]) -> tuple[MixerEntry | None, frozenset[str]]:
    """Return the registered mixer that a builder is a variant of, and their common options."""
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
            f"{name!r} is not a valid name for a host, mixer or modality; use lower-case letters, "
            "digits and _, and begin with a letter"
        )


def _refuse_taken(folder: str, name: str, build: Callable[..., Any]) -> None:
    """Refuse a name of another host or mixer, whose file is imported now."""
    entries = ENTRIES[folder]
    module = declared_modules(folder).get(name, build.__module__)
    if name not in entries and module != build.__module__:
        import_file(module)
    if name not in entries:
        return
    holder = entries[name].build
    first, second = (f"{b.__module__}.{b.__qualname__}" for b in (holder, build))
    # A notebook's cell may run again, and a file may be imported again after a failure.
    if holder is build or first != second or "<" in first:
        raise ValueError(f"the name {name!r} is taken by {first}; give {second} another one")
