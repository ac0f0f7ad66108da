"""How deep in its network a parameter lies, which layer decay and the freezing of stages ask.

The rule reads the names that hosts give their parts: a stem, stages of blocks, what lies between
stages, and what follows the last block. One list of blocks without stages counts as stages of one
block each, as in MMPretrain's vision transformer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

STEM = ("stem.", "patch_embed.", "pos_embed", "cls_token")
BLOCK = re.compile(r"(?:(?:layers|stages)\.(?P<stage>\d+)\.(?:blocks\.)?|blocks\.)(?P<block>\d+)\.")
# Leads into the stage of that number, or out of it.
INTO = re.compile(r"(?:layers|stages)\.(\d+)\.downsample\.")
OUT_OF = re.compile(r"downsamples\.(\d+)\.")


@dataclass(frozen=True)
class Depth:
    """The stages of a backbone, and what belongs to them.

    Attributes:
        depths: Blocks per stage.
        map_keys: Prefixes of what only one map needs, see ``Backbone``; empty if no stage's.
        end_keys: Prefixes of what follows the last block.
        merges_end_stages: Whether downsampling belongs to the stage before it.
    """

    depths: tuple[int, ...]
    map_keys: tuple[str, ...]
    end_keys: tuple[str, ...]
    merges_end_stages: bool

    @property
    def num_layers(self) -> int:
        """Stem, blocks, and what follows them as one more."""
        return sum(self.depths) + 2

    def layer(self, name: str) -> int:
        """0 for the stem, 1 for the first block, and so on; ``num_layers - 1`` behind the last."""
        place = self._place(name)
        if place is None:
            return 0 if name.startswith(STEM) else self.num_layers - 1
        stage, block = place
        return sum(self.depths[:stage]) + block + 1

    def stage(self, name: str) -> int:
        """0 for the stem, 1 for the first stage with the norm of its map, and so on.

        What follows the last block is of the last stage; what is no part of the published network
        (a pyramid) is of none, one number higher.
        """
        place = self._place(name)
        if place is not None:
            return place[0] + 1
        if name.startswith(STEM):
            return 0
        for index, prefix in enumerate(self.map_keys):
            if name.startswith(prefix):
                return index + 1
        return len(self.depths) + (0 if name.startswith(self.end_keys) else 1)

    def _place(self, name: str) -> tuple[int, int] | None:
        """Stage and block, from 0; None outside the stages."""
        found = BLOCK.match(name)
        if found:
            return _numbers(found)
        into, out_of = INTO.match(name), OUT_OF.match(name)
        if not (into or out_of):
            return None
        stage = int(into[1]) if into else int(out_of[1]) + 1  # type: ignore[index]
        if self.merges_end_stages and stage:
            return stage - 1, self.depths[stage - 1] - 1
        return stage, 0


def depths_of(names: Iterable[str]) -> tuple[int, ...]:
    """Blocks per stage, out of the names of a network's parameters."""
    places = {_numbers(found) for found in map(BLOCK.match, names) if found}
    stages = [stage for stage, _ in places]
    return tuple(stages.count(stage) for stage in range(max(stages, default=-1) + 1))


def _numbers(found: re.Match[str]) -> tuple[int, int]:
    if found["stage"] is None:  # one list: each block is a stage
        return int(found["block"]), 0
    return int(found["stage"]), int(found["block"])
