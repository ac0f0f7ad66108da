"""Checks of the numbers that mixers, hosts and heads take as options; each names the option."""

from __future__ import annotations

import math


def check_range(option: str, value: float, least: float, most: float = math.inf) -> None:
    """Check that a number lies from ``least`` to ``most``.

    Raises:
        ValueError: It lies outside.
    """
    if not least <= value <= most:
        limits = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        raise ValueError(f"{option} must be {limits}, got {value}")


def check_share(option: str, value: float) -> None:
    """Check that a rate lies from 0 to below 1.

    Raises:
        ValueError: It lies outside.
    """
    if not 0 <= value < 1:
        raise ValueError(f"{option} must be from 0 to below 1, got {value}")


def check_positive(option: str, value: float) -> None:
    """Check that a number is above 0.

    Raises:
        ValueError: It is 0 or below.
    """
    if not value > 0:
        raise ValueError(f"{option} must be above 0, got {value}")


def check_divisor(option: str, value: int, *widths: int) -> None:
    """Check that a number divides all widths.

    Raises:
        ValueError: It leaves a remainder; the message lists all that divide them.
    """
    if value < 1 or any(width % value for width in widths):
        words = " and ".join(map(str, widths))
        valid = [d for d in range(1, min(widths) + 1) if not any(width % d for width in widths)]
        raise ValueError(f"{option} must divide {words}: one of {valid}, got {value}")


def check_multiple(option: str, value: int, factor: int) -> None:
    """Check that a number is a multiple of another one.

    Raises:
        ValueError: It leaves a remainder.
    """
    if value % factor:
        raise ValueError(f"{option} must be a multiple of {factor}, got {value}")
