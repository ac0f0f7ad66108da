"""The plan of a comparison: typed words or a yaml file, checked before anything else happens."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from backbones.options import unknown
from backbones.options.schemas import validate
from tasks.engine.family import Family, find_family
from tasks.engine.run_folder.bounded_reading import read_yaml
from tools.cli.catalogue import catalogue
from tools.cli.grammar import key_of
from tools.cli.nested_config import flatten
from tools.cli.typed_network import split_outside_brackets
from tools.config.hydra_options import check_hydra, is_hydra_option

Kind = Literal["channel", "token"]
LISTS = ("mixer", "host", "data", "rates")
OWN, PLAIN_FFN, AGAIN = "own", "ffn", "again"
CONTROLS = ("identity", "random")  # channel mixers of these names end in _ffn
AGAIN_SEED = 100  # first seed of the baseline's second row
TUNING_SEED = 1_000
PERCENT = "%"  # in the title of a metric
POINTS = 0.5  # region of equivalence of a metric in percent
# Options that the comparison sets, or that would choose an epoch by the split that is reported.
SET_HERE = (
    "task", "backbone", "data", "seed", "output_dir", "start", "held_out", "checkpoints", "mode",
    "ckpt", "resume", "input", "paper", "experiment", "callbacks.early_stopping.patience",
    "data.split_seed",
)  # fmt: skip
MIXER_OPTIONS = ("backbone.mixer.", "backbone.token_mixer.")
TIMM, MODEL = "timm", "backbone.model"  # a host of timm, and the option that names it
FIXED = "fixed"  # entry of plan.yaml with what followed from the plan
PUBLISHED = "published"  # entry of a leaderboard's plan.yaml
REGISTERED = "registered.json"  # beside the plan.yaml of a comparison that has begun


class Plan(BaseModel):
    """A comparison as it is typed: each key is an entry of the file or a word.

    Attributes:
        mixer: Names, lists per stage such as "[ffn,afbo,afbo,ffn]", each with options of its own
            after a space, as in "glu backbone.mixer.match=params".
        host: Backbones, with options likewise: "timm backbone.model=convnextv2_tiny".
        data: Files of configs/data, with options likewise: "folder data.root=/data/pets".
        task: Task family.
        baseline: One of the mixers, which all others are compared with.
        kind: Kind of the mixers, where a name has both.
        seeds: Runs per mixer and cell.
        first_seed: Seed of the first of them.
        budget: What all mixers get alike.
        rates: Factors of the learning rate, of which each mixer and cell gets the best on a part of
            the training samples; 1 alone leaves the recipe's rate.
        tuned_on: The data set whose cells choose the rates of all; None lets each cell choose.
        metric: The primary metric.
        equivalence: Differences up to this size count as none, in the metric's unit.
        held_out: Share of the training samples that chooses the rate.
        deviation: Expected deviation of a seed, in the metric's unit, for the smallest difference.
        jobs: Runs side by side, or in a cluster's queue.
        launcher: Words that choose Hydra's launcher and its options.
        name: Of the folder in <output_dir>/comparisons.
        output_dir: Where runs are looked for, and the folder is.
        options: Words of run.py for all runs.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    mixer: Annotated[list[str], Field(min_length=1)]
    host: Annotated[list[str], Field(min_length=1)]
    data: Annotated[list[str], Field(min_length=1)]
    task: str = "classification"
    baseline: str
    kind: Kind | None = None
    seeds: Annotated[int, Field(ge=2, le=AGAIN_SEED)] = 2
    first_seed: Annotated[int, Field(ge=0)] = 0
    budget: Literal["steps", "macs", "params", "seconds"] = "steps"
    rates: Annotated[list[float], Field(min_length=1)] = [0.25, 1.0, 4.0]
    tuned_on: str | None = None
    metric: str | None = None
    equivalence: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.2
    deviation: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    jobs: Annotated[int, Field(ge=1)] = 1
    launcher: list[str] = []
    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")] = "comparison"
    output_dir: str = "outputs"
    options: list[str] = []

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for group in ("mixer", "host", "data", "rates"):
            values = getattr(self, group)
            if len(set(values)) < len(values):
                raise ValueError(f"{group} names an entry twice")
        if self.baseline not in self.mixer:
            raise ValueError(
                f"baseline={self.baseline} must be one of mixer={','.join(self.mixer)}"
            )
        if len(self.mixer) < 2 and self.mixer[0] in (OWN, PLAIN_FFN):
            raise ValueError("mixer needs a mixer besides the baseline")
        if not all(0 < rate < math.inf for rate in self.rates) or 1.0 not in self.rates:
            raise ValueError("rates must be factors above 0, with 1 among them, such as 0.25,1,4")
        check_hydra(self.launcher)
        self._check_words()
        return self

    def _check_words(self) -> None:
        """Refuse words that the comparison sets, and those of a mixer that change its terms.

        Raises:
            ValueError: Names the word.
        """
        words = [w for item in (*self.host, *self.data) for w in _split(item)[1:]]
        for word in (*self.options, *words):
            if "=" not in word:
                raise ValueError(f"cannot read {word!r}; options are key=value")
            if key_of(word) in SET_HERE:
                raise ValueError(f"{word} is set by the comparison itself; leave it out")
        for item in self.mixer:
            for word in _split(item)[1:]:
                if not key_of(word).startswith(MIXER_OPTIONS):
                    raise ValueError(
                        f"mixer={item}: {word} would change the terms of this row alone; options "
                        f"of a mixer begin with {' or '.join(MIXER_OPTIONS)}"
                    )

    @property
    def folder(self) -> Path:
        """Return the folder of the comparison."""
        return Path(self.output_dir).expanduser() / "comparisons" / self.name

    @property
    def family(self) -> Family:
        """Return the task family."""
        return find_family(self.task)

    def chooses_rates(self, data: str) -> bool:
        """Return True if rates are chosen in the cells of a data set."""
        return len(self.rates) > 1 and self.tuned_on in (None, data)

    @property
    def run_seeds(self) -> range:
        """Return the seeds of each mixer's runs in a cell."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def primary(self) -> str:
        """Return the name of the primary metric."""
        return self.metric or self.family.table_metric

    @property
    def sign(self) -> int:
        """Return 1 if a higher metric is better, else -1."""
        return 1 if self.family.direction(self.primary) == "max" else -1

    @property
    def region(self) -> float:
        """Return the region of equivalence.

        Raises:
            ValueError: The metric is not in percent, so that the region must be typed.
        """
        if self.equivalence is not None:
            return self.equivalence
        if self._most is not None:
            return POINTS * self._most / 100
        raise ValueError(
            f"{self.primary} is not in percent: pass equivalence=<the largest difference of "
            f"{self.primary} that counts as none>"
        )

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the lowest and the highest value of the primary metric."""
        if self._most is None:
            return -math.inf, math.inf
        return self.family.metric(self.primary).lowest, self._most

    @property
    def _most(self) -> float | None:
        """Return 100 for a primary metric in percent, 1 for one that is published so, or None."""
        metric = self.family.metric(self.primary)
        return 100.0 if PERCENT in metric.title else 1.0 if metric.scale == 100 else None

    def entries(self) -> dict[str, Any]:
        """Return the plan as plain values, without its folder and the runs side by side."""
        return self.model_dump(exclude={"name", "output_dir", "jobs", "launcher"})


@dataclass(frozen=True)
class Entry:
    """One mixer, host or data set of a plan.

    Attributes:
        label: Its name in tables.
        words: Words of run.py that choose it.
        control: What a row shows besides; empty for the plan's own mixers.
        later: Seeds that its runs come after the others'; 0 except for the baseline's second row.
    """

    label: str
    words: tuple[str, ...]
    control: str = ""
    later: int = 0


def read_plan(arguments: Sequence[str]) -> Plan:
    """Return the plan of a command: ``plan=FILE``, and typed words, which override its entries.

    Raises:
        ValueError: A word or the file is wrong.
    """
    content = _read_words(arguments)
    keys = ("mixer", "host", "data", "baseline")
    missing = [key for key in keys if not any(content.get(key) or ())]
    if missing:
        example = "mixer=ffn,glu host=deit_t data=sample_classification baseline=ffn"
        raise ValueError(f"{missing[0]}= is missing; a plan has at least {example}")
    try:
        plan = validate(Plan, content)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("the content ")) from None
    names = [metric.name for metric in plan.family.metrics]
    if plan.primary not in names:
        raise ValueError(f"metric: {unknown('metric', plan.primary, names)}")
    if plan.first_seed + plan.seeds > AGAIN_SEED:
        raise ValueError(
            f"first_seed={plan.first_seed}: seeds from {AGAIN_SEED} on are those of the baseline's "
            f"second row and of rates; pass first_seed=0 to {AGAIN_SEED - plan.seeds}"
        )
    plan.region  # noqa: B018 - refuses a metric whose unit is open
    for entries in (host_entries(plan), data_entries(plan)):
        labels = [entry.label for entry in entries]
        twice = [label for label in labels if labels.count(label) > 1]
        if twice:
            raise ValueError(f"host and data must name each entry once; {twice[0]} is there twice")
    if plan.tuned_on is not None and plan.tuned_on not in labels:
        raise ValueError(f"tuned_on: {unknown('data set', plan.tuned_on, labels)}")
    return plan


def _read_words(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the entries that are typed, with those of the file."""
    content: dict[str, Any] = {}
    lists: dict[str, list[str]] = {"options": [], "launcher": []}
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"cannot read {word!r}; arguments are key=value; see --help")
        if key == "plan":
            content = _read_file(Path(value)) | content
        elif key == "hydra.launcher.n_jobs":  # joblib's runs are those of jobs=
            content["jobs"] = _value("jobs", value)
        elif is_hydra_option(word):
            lists["launcher"].append(word)
        elif key in Plan.model_fields and key not in lists:
            content[key] = _value(key, value)
        else:
            lists["options"].append(word)
    for key, words in lists.items():
        before = content.get(key) or []
        before = _split(before) if isinstance(before, str) else before
        # The last word of an option counts, as it does for run.py.
        content[key] = [*{key_of(word): word for word in [*before, *words]}.values()]
    return content


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise ValueError(f"plan={path} does not exist") from None
    if not isinstance(content, dict):
        raise ValueError(f"plan={path} must hold entries such as mixer: [ffn, glu]")
    content.pop(PUBLISHED, None)
    parent = path.resolve().parent
    if FIXED in content and (parent / REGISTERED).exists():  # it continues in its folder
        content |= {"name": parent.name, "output_dir": str(parent.parent.parent)}
    content.pop(FIXED, None)
    content.setdefault("name", re.sub(r"[^\w.-]+", "_", path.stem))
    for key in content:
        if key not in Plan.model_fields:
            raise ValueError(f"plan={path}: {unknown('entry', str(key), Plan.model_fields)}")
    lists = {key: _value(key, content[key]) for key in LISTS if key in content}
    return content | lists


def _value(key: str, value: Any) -> Any:
    """Return a value of the plan's type; a text may stand for a list."""
    if key in LISTS:
        items = split_outside_brackets(value, ",") if isinstance(value, str) else value
        items = items if isinstance(items, list) else [items]
        items = [item.strip() if isinstance(item, str) else item for item in items]
        return [_value("rate", item) for item in items] if key == "rates" else items
    if not isinstance(value, str) and key != "rate":
        return value
    if key in ("seeds", "first_seed", "jobs", "equivalence", "held_out", "deviation", "rate"):
        try:
            return int(value) if key in ("seeds", "first_seed", "jobs") else float(value)
        except (TypeError, ValueError):
            name = "rates" if key == "rate" else key
            raise ValueError(f"{name}={value} must be a number") from None
    return value


def mixer_kind(plan: Plan) -> Kind:
    """Return the kind of the plan's mixers.

    Raises:
        ValueError: A name is unknown, or the mixers have different kinds.
    """
    listing, kinds = catalogue(), set(["channel", "token"] if plan.kind is None else [plan.kind])
    names: dict[Kind, set[str]] = {
        "channel": {*listing.list_mixers("channel")}, "token": {*listing.list_mixers("token")},
    }  # fmt: skip
    for item in plan.mixer:
        for name in _names(item.partition(" ")[0]):
            name_kinds = {kind for kind in names if {name, _counterpart(name, kind)} & names[kind]}
            if not name_kinds:
                raise ValueError(
                    unknown("mixer", name, sorted({*names["channel"], *names["token"]}))
                )
            kinds &= name_kinds
            if not kinds:
                raise ValueError(
                    f"mixer={','.join(plan.mixer)} has channel and token mixers; compare mixers of "
                    "one kind"
                )
    return "channel" if "channel" in kinds else "token"


def _counterpart(name: str, kind: Kind) -> str:
    """Return the registered name of a mixer of a kind, where a token mixer has the short one."""
    return f"{name}_{PLAIN_FFN}" if kind == "channel" else name


def _names(text: str) -> list[str]:
    """Return the mixers that a name or a list per stage names, without the host's own."""
    parts = text.strip("[]").split(",")
    return [part.strip() for part in parts if part.strip() not in ("", "null", OWN)]


def mixer_entries(plan: Plan) -> list[Entry]:
    """Return the rows of the table: the plan's mixers, then the controls."""
    kind = mixer_kind(plan)
    option = "backbone.mixer" if kind == "channel" else "backbone.token_mixer"
    _check_choices(option, plan)
    entries = [Entry(item, _mixer_words(item, option, plan)) for item in plan.mixer]
    names: dict[tuple[str, ...], str] = {}
    for entry in entries:
        if names.setdefault(entry.words, entry.label) != entry.label:
            raise ValueError(f"mixer: {names[entry.words]} and {entry.label} are the same mixer")
    plain_names = {OWN, PLAIN_FFN} if kind == "channel" else {OWN}
    registered_names = catalogue().list_mixers(kind)
    for name in CONTROLS:
        registered = {name, _counterpart(name, kind)} & {*registered_names}
        if registered and not {name, *registered} & {*plan.mixer}:
            entries.append(Entry(name, (f"{option}.name={min(registered)}",), "control"))
    if not plain_names & set(plan.mixer):
        entries.append(Entry(OWN, (), "the host's own mixer"))
    baseline = next(entry for entry in entries if entry.label == plan.baseline)
    again = Entry(
        f"{plan.baseline} {AGAIN}", baseline.words, "the baseline, other seeds", AGAIN_SEED
    )
    return [*entries, again]


def _check_choices(option: str, plan: Plan) -> None:
    """Raise ValueError if a word chooses the mixer of all rows, or that of a row anew."""
    items = [*plan.mixer, *plan.host, *plan.data]
    for word in (*plan.options, *(word for item in items for word in _split(item)[1:])):
        if key_of(word) in (option, f"{option}.name"):
            raise ValueError(f"{word} chooses a mixer, which mixer= does; leave it out")


def _split(item: str) -> list[str]:
    """Return a name and its options."""
    return split_outside_brackets(item, " ")


def _mixer_words(item: str, option: str, plan: Plan) -> tuple[str, ...]:
    name, *words = _split(item)
    if name == OWN or (name == PLAIN_FFN and option == "backbone.mixer"):
        return tuple(words)
    is_list = name.startswith("[")
    choice = [f"{option}={name}" if is_list else f"{option}.name={name}"]
    match = f"{option}.match"
    if plan.budget in ("macs", "params") and (is_list or _has_width(name, option)):
        words += [] if any(key_of(word) == match for word in words) else [f"{match}={plan.budget}"]
    return (*choice, *words)


def _has_width(name: str, option: str) -> bool:
    from backbones.analysis.matching import WIDTHS

    listing = catalogue()
    registered = listing.channel_mixer(name) if option == "backbone.mixer" else name
    return any(width in listing.mixer(registered)["options"] for width in WIDTHS)


def host_entries(plan: Plan) -> list[Entry]:
    """Return the hosts of the plan.

    Raises:
        ValueError: A host of timm lacks the name of its model.
    """
    hosts = _group_entries("backbone", plan.host)
    for host in hosts:
        keys = {key_of(word) for word in (*host.words, *plan.options)}
        if host.words[0] == f"backbone={TIMM}" and MODEL not in keys:
            raise ValueError(
                f"host={TIMM} lacks its model; type host='{TIMM} {MODEL}=convnextv2_tiny'"
            )
    return hosts


def data_entries(plan: Plan) -> list[Entry]:
    """Return the data sets of the plan."""
    return _group_entries("data", plan.data)


def _group_entries(group: str, items: Sequence[str]) -> list[Entry]:
    """Return entries with short labels: the name, and what tells entries of one name apart."""
    parts = [_split(item) for item in items]
    options = [dict(word.partition("=")[::2] for word in words) for _, *words in parts]
    names = [values.get(MODEL, name) for (name, *_), values in zip(parts, options, strict=True)]
    labels = []
    for name, values in zip(names, options, strict=True):
        namesakes = [o for namesake, o in zip(names, options, strict=True) if namesake == name]
        telling = (
            _own_end(value, [o.get(key, "") for o in namesakes])
            for key, value in values.items()
            if len({o.get(key) for o in namesakes}) == len(namesakes)
        )
        more = next(telling, " ".join(map("=".join, values.items()))) if namesakes[1:] else ""
        labels.append(f"{name} {more}".strip())
    return [
        Entry(label, (f"{group}={name}", *words))
        for label, (name, *words) in zip(labels, parts, strict=True)
    ]


def _own_end(path: str, paths: Sequence[str]) -> str:
    """Return the shortest end of a path that is an end of no further one."""
    parts, candidates = Path(path).parts, [Path(candidate).as_posix() for candidate in paths]
    for length in range(1, len(parts) + 1):
        end = "/".join(parts[-length:])
        if sum(f"/{candidate}".endswith(f"/{end}") for candidate in candidates) == 1:
            return end
    return path.rstrip("/")


def plan_text(plan: Plan, entries: Mapping[str, Any]) -> str:
    """Return the text of plan.yaml."""
    return yaml.safe_dump(
        json.loads(json.dumps({**plan.entries(), FIXED: entries})), sort_keys=False, width=100
    )


def plan_hash(text: str) -> str:
    """Return the hash of a plan's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_changes(before: str, after: str) -> list[str]:
    """Return the entries in which two texts of a plan differ, with both values."""
    entries_before, entries_now = (flatten(yaml.safe_load(text) or {}) for text in (before, after))
    return [
        f"{key}: {entries_before.get(key)} before, {entries_now.get(key)} now"
        for key in [*entries_now, *(key for key in entries_before if key not in entries_now)]
        if entries_before.get(key) != entries_now.get(key)
    ]
