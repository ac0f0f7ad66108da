"""Length of a training and its limits on batches, in the forms that Lightning takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backbones.options import check_value

LIMITS = ("limit_train_batches", "limit_val_batches")
OVERFIT = "overfit_batches"


def fill_lengths(options: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
    """Replace null among a trainer's lengths by the number that it means.

    ``overfit_batches`` becomes both limits; the run itself fixes the order of the batches.

    Raises:
        ValueError: The training is endless, or ``overfit_batches`` is out of range.
    """
    options = dict(options)
    for name in LIMITS:
        if options[name] is None:
            options[name] = 1.0
    overfit = options.get(OVERFIT)
    if overfit is not None:
        check_value(f"trainer.{OVERFIT}", overfit, int | float)
        if overfit < 0 or (isinstance(overfit, float) and overfit > 1):
            raise ValueError(
                f"trainer.{OVERFIT}={overfit} must be a number of batches from 1 up or a share up "
                "to 1.0; 0 is off"
            )
        options |= dict.fromkeys(LIMITS, overfit) if overfit else {}
    for name in ("max_epochs", "max_steps"):
        if options[name] is None:
            options[name] = -1
    if training and options["max_epochs"] == options["max_steps"] == -1:
        raise ValueError(
            "trainer.max_epochs=-1 and trainer.max_steps=-1 train forever, but the schedule needs "
            "a length; pass trainer.max_epochs=<epochs> or trainer.max_steps=<steps>"
        )
    return options
