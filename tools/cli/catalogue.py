"""Names, options and sources of the registered backbones and mixers, without importing torch.

A file in the user's cache holds the registry's content, with names, sizes and times of the source
files under backbones/. When any of them changes, such as by a new mixer, the cache is rebuilt.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from backbones.options import unknown, unknown_backbone
from backbones.plugins import describe_plugins
from tasks.engine.run_folder.atomic_writes import write_whole
from tools.cli.paths import ROOT

PACKAGE = ROOT / "backbones"


@dataclass(frozen=True)
class Catalogue:
    """The registry's content in plain values.

    Attributes:
        backbones: Name -> host, options with defaults, True if it takes a token mixer, the
            options that switch off the host's class tokens, and the modality of its inputs; in
            the registry's order.
        hosts: Names.
        mixers: Name -> kind, source, options with defaults and meanings, summary, and True if it
            takes class tokens.
        unfit: Names of pairs that do not fit -> reason.
    """

    backbones: Mapping[str, Mapping[str, Any]]
    hosts: Sequence[str]
    mixers: Mapping[str, Mapping[str, Any]]
    unfit: Mapping[str, str]

    def list_backbones(self, pattern: str = "*", modality: str = "") -> list[str]:
        """List the names that match a shell pattern, of one modality or of all."""
        return [
            name
            for name, entry in self.backbones.items()
            if fnmatch.fnmatchcase(name, pattern) and modality in ("", entry["modality"])
        ]

    def hosts_for(self, modality: str) -> list[str]:
        """List the hosts of a modality."""
        return [name for name in self.hosts if self.backbones[name]["modality"] == modality]

    def modality(self, backbone: str) -> str:
        """Return the modality of a backbone's inputs, such as "image".

        Raises:
            ValueError: The name is unknown, or the pair does not fit.
        """
        return str(self._find(backbone)["modality"])

    def list_mixers(self, kind: Literal["channel", "token"]) -> list[str]:
        """List the mixers of a kind."""
        return [name for name, mixer in self.mixers.items() if mixer["kind"] == kind]

    def schema(self, backbone: str) -> dict[str, Any]:
        """Return every option of a backbone with its default, like ``backbones.backbone_schema``.

        Raises:
            The name is unknown, or the pair does not fit.
        """
        return {**self._find(backbone)["schema"], "name": backbone}

    def prefix_options(self, backbone: str, *mixers: str) -> dict[str, Any]:
        """Return the default class-token options of a backbone with given mixers.

        Raises:
            ValueError: The name is unknown, or the pair does not fit.
        """
        entry = self._find(backbone)
        without = entry["without_prefix"]
        if not all(self.mixers[name]["takes_prefix"] for name in mixers if name in self.mixers):
            return dict(without)
        schemas = [
            self.backbones.get(f"{entry['host']}_{name}", entry)["schema"] for name in mixers
        ]
        base = entry["schema"]
        return {
            option: next((s[option] for s in schemas if s[option] != base[option]), base[option])
            for option in without
        }

    def host_of(self, backbone: str) -> str:
        """Return the host in a backbone's name.

        Raises:
            The name is unknown, or the pair does not fit.
        """
        return str(self._find(backbone)["host"])

    def mixer(self, name: str) -> Mapping[str, Any]:
        """Return kind, source and options of a mixer.

        Raises:
            The name is unknown.
        """
        if name not in self.mixers:
            raise ValueError(unknown("mixer", name, self.mixers))
        return self.mixers[name]

    def channel_mixer(self, name: str) -> str:
        """Return a channel mixer's name; that of a token mixer stands for its counterpart.

        Raises:
            ValueError: The name is unknown.
        """
        counterpart = f"{name}_ffn"
        is_token = self.mixer(name)["kind"] == "token"
        return counterpart if is_token and counterpart in self.mixers else name

    def _find(self, name: str) -> Mapping[str, Any]:
        host = name.removesuffix("_ffn")  # the host's own FFN, as a suffix
        entry = self.backbones.get(name)
        if entry is None and host in self.hosts:
            return self.backbones[host]
        if entry is None and name in self.unfit:
            raise ValueError(self.unfit[name])
        if entry is None:
            mixers = [mixer for mixer in self.list_mixers("channel") if mixer != "ffn"]
            names = {key: entry["takes_token_mixer"] for key, entry in self.backbones.items()}
            tokens = self.list_mixers("token")
            raise ValueError(unknown_backbone(name, names, self.hosts, mixers, tokens))
        return entry


def catalogue() -> Catalogue:
    """Return what is registered: from the registry if it has more than the cache, or has it all."""
    registry = sys.modules.get("backbones.registry")
    if registry is not None and registry.is_complete():
        return read_registry()
    cached = _cached()
    if registry is not None and registry.registered_names() - {*cached.hosts, *cached.mixers}:
        return read_registry()
    return cached


def read_registry() -> Catalogue:
    """Read the registry."""
    from backbones import registry

    return _build_catalogue(tuple(registry.hosts().values()), tuple(registry.mixers().values()))


@functools.lru_cache(maxsize=1)
def _build_catalogue(hosts: tuple[Any, ...], mixers: tuple[Any, ...]) -> Catalogue:
    """Build the catalogue from the registry's entries; cached, since only tests change them."""
    from backbones import Mixer, backbone_schema, list_backbones, mixer_options
    from backbones.options import built_class
    from backbones.options.meanings import meanings, summary
    from backbones.registry import look_up, takes_token_mixer, unfit_pairs

    return Catalogue(
        backbones={
            name: {
                "host": look_up(name)[0].name, "schema": backbone_schema(name),
                "takes_token_mixer": takes_token_mixer(*look_up(name)),
                "without_prefix": dict(look_up(name)[0].without_prefix),
                "modality": look_up(name)[0].modality,
            }
            for name in list_backbones()
        },
        hosts=[entry.name for entry in sorted(hosts, key=lambda host: host.modality != "image")],
        mixers={
            mixer.name: {
                "kind": mixer.kind, "source": mixer.source, "options": mixer_options(mixer.name),
                "takes_prefix": mixer.takes_prefix, "about": summary(mixer.build),
                "meanings": meanings(built_class(mixer.build, Mixer), mixer.build),
            }
            for mixer in sorted(mixers, key=lambda entry: entry.name)
        },
        unfit=unfit_pairs(),
    )  # fmt: skip


def load_catalogue() -> Catalogue:
    """Load the cached catalogue; rebuild it if files under backbones/ have changed."""
    state = fingerprint()
    file = cache_file()
    missing_or_damaged = (OSError, ValueError, TypeError, KeyError)
    with contextlib.suppress(*missing_or_damaged):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["fingerprint"] == state:
            return Catalogue(**content["catalogue"])
    registry = read_registry()
    text = json.dumps({"fingerprint": state, "catalogue": asdict(registry)})
    with contextlib.suppress(OSError):  # without a cache the next command asks the registry again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)
    return registry


def fingerprint() -> list[Any]:
    """Return what the cache depends on: the Python version and the state of each source file."""
    files = [*sorted(PACKAGE.rglob("*.py")), Path(__file__)]
    states = [(file, file.stat()) for file in files]
    return [
        sys.version,
        *([str(file), state.st_size, state.st_mtime_ns] for file, state in states),
        *describe_plugins(),
    ]


def cache_file() -> Path:
    """Return the cache file of this checkout."""
    root = Path(os.environ.get("MIXERLAB_CACHE") or "~/.cache/mixerlab").expanduser()
    return root / f"registry-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:16]}.json"


_cached = functools.cache(load_catalogue)
