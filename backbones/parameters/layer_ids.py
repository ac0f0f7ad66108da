"""How deep in its network a parameter lies, which layer decay and the freezing of stages ask.

The rule reads the names that hosts give their parts: a stem, stages of blocks, what lies between
stages, and what follows the last block. One list of blocks without stages counts as stages of one
block each, as in MMPretrain's vision transformer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

STEM = ("stem.", "patch_embed.", "pos_embed", "cls_token", "conv1.", "bn1.")
FIRST_EMBEDS = ("stages.0.embed.", "patch_embeds.0.")


class Rule(NamedTuple):
    """A pattern of a name's beginning, with the number of a stage and, of blocks, that of a block.

    Attributes:
        pattern: A regular expression with one or two groups of digits.
        first: The number of stage 0.
        step: How much more the number of the next stage is.
        first_block: The number of a stage's first block.
    """

    pattern: str
    first: int = 0
    step: int = 1
    first_block: int = 0


BLOCKS = (
    Rule(r"(?:layers|stages)\.(\d+)\.(?:blocks\.)?(\d+)\."),
    Rule(r"blocks\.(\d+)\.(\d+)\."),
    Rule(r"network\.(\d+)\.(\d+)\.", step=2),  # transitions have the odd numbers
    Rule(r"layer(\d+)\.(\d+)\.", first=1),
    Rule(r"blocks\.(\d+)()\."),  # one list: each block is a stage
)
DOWNSAMPLING = Rule(r"(?:layers|stages)\.(\d+)\.downsample\.")
# What leads into a stage, and what ends it.
BEGINNINGS = (
    DOWNSAMPLING,
    Rule(r"(?:layers|stages)\.(\d+)\.(?:embed|global_block|global_norm)\."),
    Rule(r"patch_embeds\.(\d+)\."),
    Rule(r"downsamples\.(\d+)\.", first=-1),
    Rule(r"network\.(\d+)\.", first=-1, step=2),
)
ENDS = (Rule(r"(?:layers|stages)\.(\d+)\.norm\."),)


@dataclass(frozen=True)
class LayerNames:
    r"""Names of a network's parts; a host with unusual names declares its own.

    For example, blocks ``encoder.level1.unit0.*`` behind ``encoder.down2.*``:
    ``LayerNames(blocks=(Rule(r"encoder\.level(\d+)\.unit(\d+)\.", first=1),),
    beginnings=(Rule(r"encoder\.down(\d+)\.", first=1),), stem=("encoder.stem.",))``.

    Attributes:
        blocks: Of blocks.
        beginnings: Of what leads into a stage, such as downsampling.
        ends: Of what ends a stage.
        stem: Prefixes of what stands before the first block.
        downsampling: Of ``beginnings``, what ``merges_end_stages`` counts to the stage before it.
    """

    blocks: tuple[Rule, ...] = BLOCKS
    beginnings: tuple[Rule, ...] = BEGINNINGS
    ends: tuple[Rule, ...] = ENDS
    stem: tuple[str, ...] = (*STEM, *FIRST_EMBEDS)
    downsampling: tuple[Rule, ...] = (DOWNSAMPLING,)


USUAL = LayerNames()


@dataclass(frozen=True)
class LayerIds:
    """Layers and stages of a network's parameters, by their names.

    Attributes:
        depths: Blocks per stage.
        map_keys: Prefixes of what only one map needs, see ``Backbone``; empty if no stage's.
        end_keys: Prefixes of what follows the last block.
        merges_end_stages: Whether downsampling belongs to the stage before it.
        names: Names of the parts.
    """

    depths: tuple[int, ...]
    map_keys: tuple[str, ...]
    end_keys: tuple[str, ...]
    merges_end_stages: bool
    names: LayerNames = USUAL

    @property
    def num_layers(self) -> int:
        """Stem, blocks, and what follows them as one more."""
        return sum(self.depths) + 2

    def layer(self, name: str) -> int:
        """0 for the stem, 1 for the first block, and so on; ``num_layers - 1`` behind the last."""
        place = self._place(name)
        if place is None:
            return 0 if self._in_stem(name) else self.num_layers - 1
        stage, block = place
        return sum(self.depths[:stage]) + block + 1

    def stage_of_layer(self, layer: int) -> int:
        """The stage, from 0, of a block's number from ``layer``."""
        ends = accumulate(self.depths)
        return next(stage for stage, end in enumerate(ends) if layer <= end)

    def stage(self, name: str) -> int:
        """0 for the stem, 1 for the first stage with the norm of its map, and so on.

        What follows the last block is of the last stage; what is no part of the published network
        (a pyramid) is of none, one number higher.
        """
        place = self._place(name)
        if place is not None:
            return place[0] + 1
        if self._in_stem(name):
            return 0
        for index, prefix in enumerate(self.map_keys):
            if name.startswith(prefix):
                return index + 1
        return len(self.depths) + (0 if name.startswith(self.end_keys) else 1)

    def _in_stem(self, name: str) -> bool:
        # A class token is of the stem, or of class blocks at the end.
        return name.startswith(self.names.stem) and not name.startswith(self.end_keys)

    def _place(self, name: str) -> tuple[int, int] | None:
        """Stage and block, from 0; None outside the stages."""
        if name.startswith(self.names.stem):
            return None
        place = _block(name, self.names.blocks)
        if place is not None:
            return place
        ended = _stage(name, self.names.ends)
        if ended is not None:
            return ended, self.depths[ended] - 1
        stage = _stage(name, self.names.beginnings)
        merged = _stage(name, self.names.downsampling) is not None
        if stage and self.merges_end_stages and merged:
            return stage - 1, self.depths[stage - 1] - 1
        return None if stage is None else (stage, 0)


def depths_of(names: Iterable[str], rules: LayerNames = USUAL) -> tuple[int, ...]:
    """Blocks per stage, out of the names of a network's parameters.

    Returns:
        Nothing where the numbers of stages or blocks do not begin where the rules say.
    """
    found = {_block(name, rules.blocks) for name in names if not name.startswith(rules.stem)}
    places = [place for place in found if place is not None]
    if any(min(place) < 0 for place in places):
        return ()
    stages = [stage for stage, _ in places]
    return tuple(stages.count(stage) for stage in range(max(stages, default=-1) + 1))


def blocks_of(names: Iterable[str], rules: LayerNames = USUAL) -> tuple[str, ...]:
    """Names of a network's blocks in order of depth, out of the names of its parameters."""
    places: dict[str, tuple[int, int]] = {}
    for name in names:
        found = next((m for r in rules.blocks if (m := re.match(r.pattern, name))), None)
        place = _block(name, rules.blocks)
        if found is not None and place is not None:
            places[found[0].removesuffix(".")] = place
    return tuple(sorted(places, key=lambda name: places[name]))


def _block(name: str, rules: Iterable[Rule]) -> tuple[int, int] | None:
    for rule in rules:
        found = re.match(rule.pattern, name)
        if found:  # a pattern with one number is of a list of blocks, which are stages of one block
            block = (found[2] if found.re.groups > 1 else "") or rule.first_block
            return (int(found[1]) - rule.first) // rule.step, int(block) - rule.first_block
    return None


def _stage(name: str, rules: Iterable[Rule]) -> int | None:
    for rule in rules:
        found = re.match(rule.pattern, name)
        if found:
            return (int(found[1]) - rule.first) // rule.step
    return None
