"""Read the figures that papers report from configs/published; its README.md lists the fields."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from typing import Any

from tools.cli.paths import CONFIGS
from tools.cli.typed_network import network_label
from tools.cli.yaml_files import read_yaml
from tools.papers.paper_training import Training, row_training
from tools.papers.row_names import row_names

PUBLISHED = CONFIGS / "published"
# Counts as papers print them; a delta is relative to the row's base.
COUNTS = ("params", "flops", "params_delta", "flops_delta")
UNITS = {"params": "M", "flops": "G"}
# Reasons why a count differs from ours; "by" names the rule of count_macs that reproduces it.
CAUSES = (
    "misprint", "rounding", "quoted", "counting", "counting by fvcore", "counting by torchprofile",
)  # fmt: skip


class Printed(float):
    """A count with the digits that a paper prints, such as "5.70".

    Raises:
        ValueError: The text is not a decimal number.
    """

    text: str

    def __new__(cls, text: str) -> Printed:
        """Store the text with the number."""
        if not isinstance(text, str) or not re.fullmatch(r"[+-]?\d+(\.\d+)?", text):
            raise ValueError(f'must be text with the printed digits, such as "5.70"; got {text!r}')
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        """Return the count as printed."""
        return self.text

    def is_printed_for(self, exact: Decimal, *, change: bool = False) -> bool:
        """Return True if an exact count rounds to these digits.

        Args:
            exact: In the unit of the printed count.
            change: The count is a change, which is rounded; other counts may also be truncated.
        """
        printed = Decimal(self.text)
        unit = Decimal(1).scaleb(int(printed.as_tuple().exponent))
        modes = [ROUND_HALF_UP] if change else [ROUND_HALF_UP, ROUND_DOWN]
        return any(exact.quantize(unit, rounding=mode) == printed for mode in modes)


@dataclass(frozen=True)
class Row:
    """One row of a paper's table, with our counts for it.

    ``reported`` has counts as ``Printed``. ``rule`` is the paper's rule for counting ``macs``.
    ``cause`` gives one of ``CAUSES`` for each count that differs for a known reason. ``name`` is
    the value for ``experiment=``, empty for a row without a metric; ``train`` has its training
    settings. ``quoted`` names the source of figures that the paper took from elsewhere: they are
    shown, but not compared.

    Rows of detectors and segmentors have ``macs`` of the whole model for an image of (H, W)
    ``counted_at``. ``head_options`` override the head's file, and ``classes`` the task's usual
    number.
    """

    paper: str
    backbone: str
    table: int
    task: str
    reported: Mapping[str, float]
    params: int
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
    quoted: str = ""
    train: Training = field(default_factory=Training)
    name: str = ""

    def __str__(self) -> str:
        """Format backbone and options as typed: ``deit_t_afbo backbone.mixer.g2=6``."""
        size = [] if self.image_size == 224 else [f"image_size={self.image_size}"]
        return " ".join([network_label((self.backbone, dict(self.options))), *size])

    @property
    def exact_macs(self) -> int | None:
        """Return our multiply-adds as an integer."""
        return None if self.macs is None else round(1e9 * self.macs)

    def changes(
        self, params: int, macs: int | None, base: tuple[int, int | None]
    ) -> dict[str, Decimal]:
        """Return our change relative to the base, in M and G, where the paper prints a change.

        Args:
            params: Our parameters.
            macs: Our multiply-adds, or None if not counted.
            base: The same pair for ``self.base``.
        """
        ours, base_counts = _in_units(params, macs), _in_units(*base)
        return {
            name: value - base_counts[name]
            for name, value in ours.items()
            if f"{name}_delta" in self.reported and name in base_counts
        }

    def residuals(
        self, params: int, macs: int | None, base: tuple[int, int | None] | None = None
    ) -> dict[str, Decimal]:
        """Return ours minus printed, in M and G; of the change where the paper prints one.

        Args:
            params: Our parameters.
            macs: Our multiply-adds, or None if not counted.
            base: The same pair for ``self.base``.
        """
        ours = _in_units(params, macs)
        if base is not None:
            ours |= self.changes(params, macs, base)
        return {
            name: value - Decimal(printed.text)
            for name, value in ours.items()
            if (printed := self.printed(name)) is not None
        }

    def printed(self, name: str) -> Printed | None:
        """Return the count to compare ours with: the printed change, else the printed total."""
        figure = self.reported.get(f"{name}_delta", self.reported.get(name))
        return figure if isinstance(figure, Printed) else None

    def mismatches(self, residuals: Mapping[str, Decimal]) -> list[str]:
        """Return the counts whose residuals change the printed digits."""
        return [name for name, value in residuals.items() if not self._agrees(name, value)]

    def verdict(self, residuals: Mapping[str, Decimal], *, as_published: bool = True) -> str:
        """Judge residuals per count: "agrees", "differs by X: cause" or "DIFFERS by X".

        Args:
            residuals: From ``residuals``.
            as_published: Ours are counted by the row's rule, so its causes apply.
        """
        causes = self.cause if as_published else {}
        explanations: list[str] = []
        problems: list[str] = []
        for name in self.mismatches(residuals):
            printed = self.printed(name)
            assert printed is not None
            decimals = len(printed.text.partition(".")[2])
            amount = f"by {residuals[name]:+.{max(2, decimals + 1)}f} {UNITS[name]}"
            if name in causes:
                explanations.append(f"differs {amount}: {causes[name]}")
            else:
                problems.append(f"DIFFERS {amount}")
        return "; ".join([*problems, *explanations]) or "agrees"

    def _agrees(self, name: str, residual: Decimal) -> bool:
        printed = self.printed(name)
        assert printed is not None
        change = f"{name}_delta" in self.reported
        return printed.is_printed_for(Decimal(printed.text) + residual, change=change)


def _in_units(params: int, macs: int | None) -> dict[str, Decimal]:
    """Return parameters in M and multiply-adds in G, exactly."""
    exact = {"params": Decimal(params) / 10**6}
    return exact if macs is None else exact | {"flops": Decimal(macs) / 10**9}


def _parse_reported(reported: Mapping[str, Any]) -> dict[str, float]:
    """Parse the reported figures; counts keep their digits."""
    figures = {}
    for name, value in reported.items():
        try:
            figures[name] = Printed(value) if name in COUNTS else float(value)
        except ValueError as error:
            raise ValueError(f"reported.{name} {error}") from None
    return figures


def list_papers() -> list[str]:
    """List the names that ``load_rows`` takes."""
    return sorted(path.stem for path in PUBLISHED.glob("*.yaml"))


def load_rows(paper: str, task: str | None = None) -> list[Row]:
    """Load the rows of a paper in file order; only those of one task if given.

    Raises:
        ValueError: The paper is unknown, or a row lacks a field or has an unknown one.
    """
    if paper not in list_papers():
        raise ValueError(f"paper must be one of {', '.join(list_papers())}; got {paper!r}")
    path = PUBLISHED / f"{paper}.yaml"
    content = read_yaml(path)
    tables = content.get("tables", {})
    rows = []
    for number, entry in enumerate(content["rows"], start=1):
        try:
            shared = tables.get(entry.get("table"), {})
            words = network_label(("", entry.get("options", {}))).strip()
            train = row_training(entry.get("backbone", ""), words, shared, entry.pop("train", {}))
            entry |= {"train": train, "reported": _parse_reported(entry.get("reported", {}))}
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
    named_rows = [replace(row, name=name) for row, name in zip(rows, row_names(rows), strict=True)]
    return [row for row in named_rows if task in (None, row.task)]
