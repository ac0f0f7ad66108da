"""Reads what papers report from configs/published; README.md there explains the fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.command_line.typed_network import label
from tools.command_line.yaml_files import read_yaml
from tools.comparing.row_names import row_names
from tools.comparing.training import Training, training_of

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "published"
ROUNDING = 0.005  # residuals and tolerances are written with two decimals
# Why a figure is further off than its file's tolerance.
CAUSES = ("misprint", "rounding", "quoted", "counting", "unexplained")


@dataclass(frozen=True)
class Row:
    """One row of a table of a paper, with what ours counts for it.

    ``usual_tolerance`` is the file's; ``tolerance`` is the same with the row's own values in it.
    ``rule`` is the file's too: how ``macs`` are counted, since the paper counts them so. ``cause``
    has one of ``CAUSES`` for each figure that is further off than usual. ``name`` is what
    ``experiment=`` takes, empty for a row without a metric, and ``train`` what it then trains with.

    A dense row has ``macs`` of the whole model for an image of (H, W) ``counted_at``, with
    ``head_options`` in place of those of its head's file and, if they are not its task's usual
    ones, so many ``classes``.
    """

    paper: str
    backbone: str
    table: int
    task: str
    reported: Mapping[str, float]
    params: int
    residual: Mapping[str, float]
    usual_tolerance: Mapping[str, float]
    tolerance: Mapping[str, float]
    options: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    base: str | None = None
    head: str | None = None
    macs: float | None = None
    image_size: int = 224
    counted_at: Sequence[int] = ()
    head_options: Mapping[str, Any] = field(default_factory=dict)
    classes: int | None = None
    note: str = ""
    rule: str = "macs"
    cause: Mapping[str, str] = field(default_factory=dict)
    variant: str = ""
    train: Training = field(default_factory=Training)
    name: str = ""

    def __str__(self) -> str:
        """Backbone and options as they are typed: ``deit_t_afbo backbone.mixer.g2=6``."""
        size = [] if self.image_size == 224 else [f"image_size={self.image_size}"]
        return " ".join([label((self.backbone, dict(self.options))), *size])

    def changes(self, params: float, macs: float, base: tuple[float, float]) -> dict[str, float]:
        """Our change against the base, in M and G, of the figures that a paper prints a change of.

        Args:
            params: Our parameters in M.
            macs: Our multiply-adds in G.
            base: The same two of ``self.base``.
        """
        ours = {"params": params - base[0], "flops": macs - base[1]}
        return {name: value for name, value in ours.items() if f"{name}_delta" in self.reported}

    def residuals(
        self, params: float, macs: float, base: tuple[float, float] | None = None
    ) -> dict[str, float]:
        """Ours minus reported, in M and G; of the change against the base where one is printed.

        Args:
            params: Our parameters in M.
            macs: Our multiply-adds in G.
            base: The same two of ``self.base``.
        """
        ours = {"params": params, "flops": macs}
        changes = self.changes(params, macs, base) if base else {}
        found = {}
        for name in ("params", "flops"):
            if f"{name}_delta" in self.reported:
                found[name] = changes[name] - self.reported[f"{name}_delta"]
            elif name in self.reported:
                found[name] = ours[name] - self.reported[name]
        return found

    def far(self, found: Mapping[str, float]) -> list[str]:
        """Which of these residuals are beyond the file's tolerance."""
        return [name for name, value in found.items() if not self._within(name, value)]

    def verdict(self, found: Mapping[str, float]) -> str:
        """Judge residuals: "agrees" by the file's tolerance, "known: why" by the row's, "DIFFERS".

        Why is what ``cause`` says of the figures that are beyond the file's tolerance.
        """
        far = self.far(found)
        if not far:
            return "agrees"
        limits = self.tolerance
        if any(abs(found[name]) >= limits[name] + ROUNDING for name in far):
            return "DIFFERS"
        return f"known: {', '.join(dict.fromkeys(self.cause[name] for name in far))}"

    def _within(self, name: str, value: float) -> bool:
        return abs(value) < self.usual_tolerance[name] + ROUNDING


def list_papers() -> list[str]:
    """Names that ``load_rows`` takes."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_rows(paper: str, task: str | None = None) -> list[Row]:
    """Rows of one paper, in the order of its file; of one task, if given.

    Raises:
        ValueError: There is no such paper, or a row lacks a field or has one that is not known.
    """
    if paper not in list_papers():
        raise ValueError(f"paper must be one of {', '.join(list_papers())}; got {paper!r}")
    path = FOLDER / f"{paper}.yaml"
    content = read_yaml(path)
    tables = content.get("tables", {})
    usual = content["tolerance"]
    rows = []
    for number, entry in enumerate(content["rows"], start=1):
        tolerance = usual | entry.pop("tolerance", {})
        try:
            shared = tables.get(entry.get("table"), {})
            typed = label(("", entry.get("options", {}))).strip()
            train = training_of(entry.get("backbone", ""), typed, shared, entry.pop("train", {}))
            entry |= {"usual_tolerance": usual, "tolerance": tolerance, "train": train}
            rows.append(Row(paper=paper, rule=content.get("rule", "macs"), **entry))
        except (TypeError, ValueError) as error:
            problem = (
                str(error).removeprefix("Row.__init__() ").removeprefix("Training.__init__() ")
            )
            raise ValueError(f"{path}, row {number}: {problem}") from None
        for cause in rows[-1].cause.values():
            if cause not in CAUSES:
                raise ValueError(
                    f"{path}, row {number}: cause must be one of {', '.join(CAUSES)}; got {cause!r}"
                )
    named = [replace(row, name=name) for row, name in zip(rows, row_names(rows), strict=True)]
    return [row for row in named if task in (None, row.task)]
