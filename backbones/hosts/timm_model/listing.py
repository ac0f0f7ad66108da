"""Which models of timm take mixers, found by building each on the meta device.

``models.json`` keeps the result for the documentation and for suggestions of names, which must not
import torch. ``python tools/timm_slots.py write=true`` makes it again after an update of timm.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("models.json")


@dataclass(frozen=True)
class Listed:
    """What a model of timm takes.

    Attributes:
        family: timm's file that it lies in.
        parameters: Number of its parameters, timm's classifier included.
        size: Side or (H, W) of its images.
        strides: Strides of its maps.
        channel: Number of feed-forward networks that channel mixers may replace.
        token: Number of token mixers that others may replace.
        layouts: Layouts of the slots.
        kept: Names of parts that keep their own module, with numbers as *, and the reason.
        error: Why the model cannot be built; empty if it can.
    """

    family: str
    parameters: int = 0
    size: tuple[int, int] = (0, 0)
    strides: tuple[int, ...] = ()
    channel: int = 0
    token: int = 0
    layouts: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


def read_list() -> dict[str, Listed]:
    """Return the stored list."""
    return {
        name: _read_entry(entry) for name, entry in json.loads(FILE.read_text())["models"].items()
    }


def _read_entry(entry: dict[str, Any]) -> Listed:
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return Listed(**{**entry, **lists})


def write_list(records: Mapping[str, Listed]) -> None:
    """Store a list of all models."""
    import timm

    lines = [f"{json.dumps(name)}: {json.dumps(_brief(entry))}" for name, entry in records.items()]
    models = ",\n".join(lines)
    FILE.write_text(f'{{"timm": {json.dumps(timm.__version__)}, "models": {{\n{models}\n}}}}\n')


def _brief(entry: Listed) -> dict[str, object]:
    return {key: value for key, value in asdict(entry).items() if value or key == "family"}


def find_models(patterns: Iterable[str] = ("*",)) -> list[str]:
    """Return the models of timm that match shell patterns."""
    import timm

    from backbones.hosts.timm_model.facts import is_of_timm

    names = filter(is_of_timm, timm.list_models())
    return [model for model in names if any(fnmatch.fnmatchcase(model, p) for p in patterns)]


def family_of(model: str) -> str:
    """Return the name of timm's file that a model lies in."""
    import timm

    return timm.model_entrypoint(model).__module__.rpartition(".")[2]


def try_models(names: Iterable[str]) -> Iterator[tuple[str, Listed]]:
    """Build models on the meta device, one after another, and yield what they take."""
    for name in names:
        yield name, try_model(name)


def try_model(model: str) -> Listed:
    """Build a model on the meta device, and return what it takes."""
    from backbones.hosts.timm_model.facts import find_facts, own_size
    from backbones.hosts.timm_model.layouts import Frame
    from backbones.hosts.timm_model.slots import find_slots

    family = family_of(model)
    size = own_size(model)
    try:
        facts = find_facts(model, {}, size, 3, class_token=True)
    except Exception as error:  # timm's models raise all kinds; the list has every model
        return Listed(family, size=size, error=str(error) or type(error).__name__)
    network: Any = facts.network
    slots = find_slots(network, facts.calls, facts.padded, Frame(facts.padded))
    reasons: dict[str, str] = {}
    counts: Counter[str] = Counter(re.sub(r"\d+", "*", name) for name in slots.reasons)
    for name, why in slots.reasons.items():
        brief = re.sub(r"\d+", "*", name)
        reasons.setdefault(brief, f"{counts[brief]}x {why}" if counts[brief] > 1 else why)
    return Listed(
        family=family,
        parameters=sum(item.numel() for item in network.parameters()),
        size=size,
        strides=tuple(item.stride for item in facts.maps),
        channel=len(slots.of("channel")),
        token=len(slots.of("token")),
        layouts=tuple(sorted({type(item.layout).__name__ for item in slots.places})),
        kept=reasons,
    )


def smallest_of_families(models: Mapping[str, Listed]) -> dict[str, str]:
    """Return the smallest model with the most kinds of slots of each family."""
    best: dict[str, tuple[int, int, str]] = {}
    for name, entry in models.items():
        if entry.error:
            continue
        rank = (-(entry.channel > 0) - (entry.token > 0), entry.parameters, name)
        best[entry.family] = min(best.get(entry.family, rank), rank)
    return {family: best_of_family[2] for family, best_of_family in sorted(best.items())}


@dataclass(frozen=True)
class Family:
    """Numbers of a family's models, and of those that take mixers of each kind."""

    family: str
    models: int
    channel: int
    token: int
    example: str


def count_families(models: Mapping[str, Listed]) -> list[Family]:
    """Return the families by name, with their smallest model with the most kinds of slots."""
    families: dict[str, list[Listed]] = {}
    for entry in models.values():
        families.setdefault(entry.family, []).append(entry)
    examples = smallest_of_families(models)
    return [
        Family(
            name,
            len(entries),
            sum(entry.channel > 0 for entry in entries),
            sum(entry.token > 0 for entry in entries),
            examples.get(name, ""),
        )
        for name, entries in sorted(families.items())
    ]
