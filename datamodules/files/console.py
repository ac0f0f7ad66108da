"""Log of the datamodules, written by the first process alone."""

from __future__ import annotations

import logging

from lightning.pytorch.utilities import rank_zero_only

# A logger of our own: a run silences Lightning's.
log = rank_zero_only(logging.getLogger(__name__).info)
