"""Which of a run's processes this one is."""

from __future__ import annotations

import os


def is_first_process() -> bool:
    """Whether this is rank 0 under torchrun or SLURM, or the process that was typed."""
    return all(int(os.environ.get(name, 0)) == 0 for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
