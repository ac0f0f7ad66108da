"""Goals and extent of the checks, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
PASS, FAIL, ABSENT, MEASURED = "pass", "fail", "absent", "measured"  # measured: without a goal
HOSTS = {"swin_t": 128, "poolformer_s12": 128, "edgevit_xxs": 128, "deit_t": 512}
# The slowest token mixers over attention, whose launches or recurrences a compiler may help.
TWELVE = (
    "lstm2d", "gated_delta", "bi_wkv", "ss2d", "aggregated", "mlstm", "neighborhood", "mlla",
    "ttt", "polaformer", "csa", "outlook",
)  # fmt: skip


@dataclass(frozen=True)
class Goals:
    """Largest values that pass.

    Attributes:
        errors: Relative error of outputs against float64, by precision.
        gradient: Factor on ``errors`` for gradients.
        forward: Time of AFBO's and IFFN's host over the plain host's.
        training: The same of a training step.
        memory: The same of a training step's peak memory.
        attention: Time of a compiled training step over attention's, on the largest map.
    """

    errors: Mapping[str, float] = field(
        default_factory=lambda: {"float32": 1e-4, "tf32": 0.01, "bfloat16": 0.05, "float16": 0.01}
    )
    gradient: float = 2.0
    forward: float = 1.3
    training: float = 1.45
    memory: float = 1.3
    attention: float = 5.0


@dataclass(frozen=True)
class Extent:
    """Amount of work.

    Attributes:
        seconds: Limit of all checks; None for no limit.
        ready: Seconds in which a timed process must have compiled its networks; None likewise.
        jobs: Processes side by side, besides the timed ones, which wait for each other.
        steps: Training steps of a task.
        rounds: Timed steps of a mixer.
        host_rounds: Timed steps of a network.
        hosts: Batch of each host.
        compiled_hosts: Hosts that are also timed compiled.
        compiled_mixers: Token mixers that are also timed compiled; None for all.
        image_size: Side of the hosts' images.
        batch: Images of a step of token mixers.
        dim: Channels of single mixers.
        sides: Sides of the maps of token mixers.
        side: Side of the maps for numbers.
        only: Mixers to check; None for all.
        goals: Largest values that pass.
    """

    seconds: float | None = 900
    ready: int | None = 420
    jobs: int = 8
    steps: int = 20
    rounds: int = 20
    host_rounds: int = 20
    hosts: Mapping[str, int] = field(default_factory=lambda: HOSTS)
    compiled_hosts: tuple[str, ...] = ("swin_t",)
    compiled_mixers: tuple[str, ...] | None = TWELVE
    image_size: int = 224
    batch: int = 128
    dim: int = 64
    sides: tuple[int, ...] = (14, 28, 56)
    side: int = 14
    only: tuple[str, ...] | None = None
    goals: Goals = Goals()


EXTENTS = {
    "quick": Extent(),
    "full": Extent(
        seconds=None, ready=None, steps=200, host_rounds=50, compiled_hosts=tuple(HOSTS),
        compiled_mixers=None,
    ),
    # To try the command itself, on a CPU too.
    "tiny": Extent(
        seconds=None, ready=None, jobs=2, steps=1, rounds=2, host_rounds=2,
        hosts={"poolformer_s12": 2}, compiled_hosts=(), compiled_mixers=("pooling",),
        image_size=32, batch=2, dim=16, sides=(4, 7), side=7,
        only=("afbo", "attention", "nonlinear_sum", "pooling"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Device ("cpu" or "cuda"), extent, and folder for logs and runs of the checks."""

    device: str
    extent: Extent
    folder: Path


def judge(figures: Mapping[str, float], limits: Mapping[str, float]) -> Record:
    """Return the verdict on figures, and a note with those above their limit; NaN fails."""
    over = [
        f"{key} {figures[key]:.3g} > {limit:g}"
        for key, limit in limits.items()
        if key in figures and not figures[key] <= limit
    ]
    return {"verdict": FAIL if over else PASS, "note": "; ".join(over), **figures}


def describe_error(error: BaseException) -> str:
    """Return type and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
