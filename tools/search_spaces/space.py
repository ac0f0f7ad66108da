"""Parse the search space of each setting from Hydra's syntax for sweeps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Number = int | float


@dataclass(frozen=True)
class Space:
    """Values of one setting: a list of choices, or all numbers in an interval.

    Attributes:
        key: The setting, as typed.
        choices: The values, as typed; empty for numbers.
        low: The lowest number.
        high: The highest number.
        step: Distance of whole numbers; None for real numbers.
        log: Draw uniformly on a logarithmic scale.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: Number = 0
    high: Number = 0
    step: int | None = None
    log: bool = False

    def __str__(self) -> str:
        """Format the space as one line of the search's settings file."""
        if self.choices:
            return f"{self.key}={','.join(self.choices)}"
        kind = " log" if self.log else f" step {self.step}" if self.step else ""
        return f"{self.key}=[{self.low}, {self.high}]{kind}"

    @property
    def first(self) -> str:
        """Return the setting with its first value, for a check before the search."""
        return f"{self.key}={self.choices[0] if self.choices else self.low}"

    @property
    def last(self) -> str:
        """Return the setting with its last value."""
        return f"{self.key}={self.choices[-1] if self.choices else self.high}"

    def distribution(self) -> Any:
        """Return the space as a distribution of Optuna's."""
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )

        if self.choices:
            return CategoricalDistribution(self.choices)
        if self.step is not None:
            return IntDistribution(int(self.low), int(self.high), step=self.step)
        return FloatDistribution(self.low, self.high, log=self.log)


def read_spaces(arguments: Sequence[str]) -> tuple[list[Space], list[str]]:
    """Split a run's arguments into search spaces and fixed arguments.

    Raises:
        ValueError: No argument is a search space, or one is empty.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from tools.cli.quoting import quote_arguments

    # Hydra spells a logarithmic interval tag(log, interval(a, b)).
    pattern = r"=interval\(([^,()]+),([^,()]+),\s*log\s*\)$"
    arguments = [re.sub(pattern, r"=tag(log,interval(\1,\2))", item) for item in arguments]
    if any(argument.startswith("-") for argument in arguments):
        raise ValueError("leave -m out: search.py searches each KEY=SPACE")
    arguments = quote_arguments(arguments, sweep=True)
    try:
        parsed = OverridesParser.create().parse_overrides(arguments)
    except HydraException as error:
        raise ValueError(" ".join(str(error).split())) from None
    spaces = [_parse_space(override) for override in parsed if override.is_sweep_override()]
    fixed_words = [str(word.input_line) for word in parsed if not word.is_sweep_override()]
    if not spaces:
        raise ValueError(
            "the search has one candidate: give a setting several values, such as "
            "'optimizer.lr=interval(1e-4,1e-2,log)' or 'optimizer.weight_decay=0.01,0.05'"
        )
    return spaces, fixed_words


def _parse_space(override: Any) -> Space:
    from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, RangeSweep

    key, value = override.get_key_element(), override.value()
    if isinstance(value, ChoiceSweep):
        return Space(key, tuple(override.sweep_string_iterator()))
    if isinstance(value, IntervalSweep):
        low, high, log = value.start, value.end, "log" in value.tags
        assert low is not None  # Hydra's default values
        assert high is not None
        if not low < high or math.isinf(high - low) or (log and low <= 0):
            raise ValueError(
                f"{override.input_line} is empty or endless; the bounds must be finite, the first "
                "the smaller one, and above 0 on a log scale"
            )
        return Space(key, low=low, high=high, log=log)
    if isinstance(value, RangeSweep):
        numbers = list(value.range())
        if not numbers or not all(isinstance(number, int) for number in numbers):
            raise ValueError(
                f"{override.input_line} must be a range of whole numbers; for others type "
                f"{key}=interval(0.1,0.5) or {key}=0.1,0.2,0.5"
            )
        return Space(key, low=min(numbers), high=max(numbers), step=abs(int(value.step)))
    raise ValueError(
        f"{override.input_line} cannot be searched; type interval(a,b), interval(a,b,log), "
        "range(a,b) or comma-separated values"
    )


def format_values(spaces: Sequence[Space], values: Mapping[str, Any]) -> list[str]:
    """Format the chosen values as arguments of a run, exact to the last digit."""
    return [f"{space.key}={values[space.key]}" for space in spaces]
