"""What is registered, known to the commands without importing torch.

The registry's answers are kept in a file of the user's cache, together with the names, sizes and
times of the files under backbones/ that they were read from. Where any of these differs, as with a
mixer that was just added, the registry itself is asked and the file is written anew.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from backbones.options import unknown, unknown_backbone
from tasks.engine.plain_files import read_json
from tools.cli.paths import ROOT

PACKAGE = ROOT / "backbones"
MOST_BYTES, MOST_ENTRIES = 2**26, 2_000_000  # of the cache


@dataclass(frozen=True)
class Catalogue:
    """The registry's answers, in plain values.

    Attributes:
        backbones: Name -> host, options with their defaults, whether one may name a token mixer,
            and the options by which the host has no class tokens; in the registry's order.
        hosts: Names.
        mixers: Name -> kind, source, options with their defaults and meanings, what it computes,
            whether it takes class tokens.
        unfit: Names of pairs that do not exist -> why.
    """

    backbones: Mapping[str, Mapping[str, Any]]
    hosts: Sequence[str]
    mixers: Mapping[str, Mapping[str, Any]]
    unfit: Mapping[str, str]

    def list_backbones(self, pattern: str = "*") -> list[str]:
        """Names that fit a shell pattern."""
        return [name for name in self.backbones if fnmatch.fnmatchcase(name, pattern)]

    def list_mixers(self, kind: Literal["channel", "token"]) -> list[str]:
        """Names of the mixers of a kind."""
        return [name for name, mixer in self.mixers.items() if mixer["kind"] == kind]

    def schema(self, backbone: str) -> dict[str, Any]:
        """Every option of a backbone with its default, as ``backbones.backbone_schema``.

        Raises:
            ValueError: Unknown name, or a pair that does not fit.
        """
        return {**self._find(backbone)["schema"], "name": backbone}

    def beside_token_mixer(self, backbone: str, token_mixer: str | None) -> dict[str, Any]:
        """The options on class tokens that a backbone has by default beside a token mixer.

        Args:
            backbone: Its name.
            token_mixer: The name that is typed; None where there is none.

        Raises:
            ValueError: Unknown name, or a pair that does not fit.
        """
        found = self._find(backbone)
        without = found["without_prefix"]
        mixer = self.mixers.get(token_mixer or "")
        if mixer is not None and not mixer["takes_prefix"]:
            return dict(without)
        return {option: found["schema"][option] for option in without}

    def host_of(self, backbone: str) -> str:
        """The host in a backbone's name.

        Raises:
            ValueError: Unknown name, or a pair that does not fit.
        """
        return str(self._find(backbone)["host"])

    def mixer(self, name: str) -> Mapping[str, Any]:
        """Kind, source and options of a mixer.

        Raises:
            ValueError: Unknown name.
        """
        if name not in self.mixers:
            raise ValueError(unknown("mixer", name, self.mixers))
        return self.mixers[name]

    def _find(self, name: str) -> Mapping[str, Any]:
        plain = name.removesuffix("_ffn")  # the host's own FFN, as a suffix
        found = self.backbones.get(name)
        if found is None and plain in self.hosts:
            return self.backbones[plain]
        if found is None and name in self.unfit:
            raise ValueError(self.unfit[name])
        if found is None:
            mixers = [mixer for mixer in self.list_mixers("channel") if mixer != "ffn"]
            known = {one: entry["takes_token_mixer"] for one, entry in self.backbones.items()}
            tokens = self.list_mixers("token")
            raise ValueError(unknown_backbone(name, known, self.hosts, mixers, tokens))
        return found


def catalogue() -> Catalogue:
    """What is registered now: from the cache, or from the registry where that is loaded anyway."""
    if "backbones.registry" in sys.modules:
        return of_registry()
    return _cached()


def of_registry() -> Catalogue:
    """The registry's answers."""
    from backbones import registry

    return _of_entries(tuple(registry.hosts().values()), tuple(registry.mixers().values()))


@functools.lru_cache(maxsize=1)
def _of_entries(hosts: tuple[Any, ...], mixers: tuple[Any, ...]) -> Catalogue:
    """What follows from the entries, which only tests and trials change within a process."""
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
            }
            for name in list_backbones()
        },
        hosts=[host.name for host in hosts],
        mixers={
            one.name: {
                "kind": one.kind, "source": one.source, "options": mixer_options(one.name),
                "takes_prefix": one.takes_prefix, "about": summary(one.build),
                "meanings": meanings(built_class(one.build, Mixer), one.build),
            }
            for one in sorted(mixers, key=lambda entry: entry.name)
        },
        unfit=unfit_pairs(),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _cached() -> Catalogue:
    return refreshed()


def refreshed() -> Catalogue:
    """The catalogue in the cache, which is made anew if files under backbones/ have changed."""
    state = fingerprint()
    file = cache_file()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # none, or a damaged one
        content = read_json(file, MOST_BYTES, MOST_ENTRIES)
        known = content["catalogue"]
        if content["fingerprint"] == state and content["digest"] == _digest(known):
            return Catalogue(**known)
    found = of_registry()
    known = asdict(found)
    text = json.dumps({"fingerprint": state, "digest": _digest(known), "catalogue": known})
    with contextlib.suppress(OSError):  # without a cache the next command asks the registry again
        _write(file, text)
    return found


def _digest(known: Any) -> str:
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def fingerprint() -> list[Any]:
    """What the answers depend on: this Python, and name, size and time of each source file."""
    files = [*sorted(PACKAGE.rglob("*.py")), Path(__file__)]
    states = [(file, file.stat()) for file in files]
    return [
        sys.version,
        *([str(file), state.st_size, state.st_mtime_ns] for file, state in states),
    ]


def cache_file() -> Path:
    """The file of this checkout."""
    root = Path(os.environ.get("MIXERLAB_CACHE") or "~/.cache/mixerlab").expanduser()
    return root / f"registry-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:16]}.json"


def _write(file: Path, text: str) -> None:
    """Write a file whole, beside other processes that do so as well."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
        Path(name).replace(file)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
