"""What datamodules tell the user, once however many processes run."""

from __future__ import annotations

import logging

from lightning.pytorch.utilities import rank_zero_only

# Not Lightning's own logger, whose remarks a run keeps quiet.
say = rank_zero_only(logging.getLogger(__name__).info)
