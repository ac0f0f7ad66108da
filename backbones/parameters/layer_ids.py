"""Depth of parameters in a network, for layer decay and freezing.

The rules read the names of a host's parts: a stem, stages of blocks, parts between stages, and
parts after the last block. In one list of blocks without stages each block counts as a stage, as
in MMPretrain's vision transformer.
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
    """Pattern of the beginning of names, with the numbers of stage and block.

    Attributes:
        pattern: Regular expression with one or two groups of digits.
        first: Number of stage 0.
        step: Difference between the numbers of successive stages.
        first_block: Number of a stage's first block.
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
# Parts before and after the blocks of a stage.
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

    For example, blocks ``encoder.level1.unit0.*`` after ``encoder.down2.*``:
    ``LayerNames(blocks=(Rule(r"encoder\.level(\d+)\.unit(\d+)\.", first=1),),
    beginnings=(Rule(r"encoder\.down(\d+)\.", first=1),), stem=("encoder.stem.",))``.

    Attributes:
        blocks: Rules of blocks.
        beginnings: Rules of parts before a stage's blocks, such as downsampling.
        ends: Rules of parts after a stage's blocks.
        stem: Prefixes of parts before the first block.
        downsampling: The ``beginnings`` that ``merges_end_stages`` assigns to the previous stage.
        tail: Prefixes of ``stem`` that earlier releases trained as parts after the last block, so
            that their runs resume as they began.
    """

    blocks: tuple[Rule, ...] = BLOCKS
    beginnings: tuple[Rule, ...] = BEGINNINGS
    ends: tuple[Rule, ...] = ENDS
    stem: tuple[str, ...] = (*STEM, *FIRST_EMBEDS)
    downsampling: tuple[Rule, ...] = (DOWNSAMPLING,)
    tail: tuple[str, ...] = ()


USUAL = LayerNames()


@dataclass(frozen=True)
class LayerIds:
    """Layers and stages of a network's parameters, by their names.

    Attributes:
        depths: Blocks per stage.
        map_keys: Prefixes of parts for one map only, see ``Backbone``; empty if shared by stages.
        end_keys: Prefixes of parts after the last block.
        merges_end_stages: True if downsampling belongs to the stage before it.
        names: Names of the parts.
    """

    depths: tuple[int, ...]
    map_keys: tuple[str, ...]
    end_keys: tuple[str, ...]
    merges_end_stages: bool
    names: LayerNames = USUAL

    @property
    def tail(self) -> tuple[str, ...]:
        """Prefixes of the stem that earlier releases trained as parts after the last block."""
        return self.names.tail

    @property
    def num_layers(self) -> int:
        """Number of layers: stem, blocks, and one for all parts after them."""
        return sum(self.depths) + 2

    def layer(self, name: str) -> int:
        """Return 0 for the stem, 1 for the first block, ..., ``num_layers - 1`` after the last."""
        place = self._place(name)
        if place is None:
            return 0 if self._in_stem(name) else self.num_layers - 1
        stage, block = place
        return sum(self.depths[:stage]) + block + 1

    def stage_of_layer(self, layer: int) -> int:
        """Return the stage, from 0, of a block's layer."""
        ends = accumulate(self.depths)
        return next(stage for stage, end in enumerate(ends) if layer <= end)

    def stage(self, name: str) -> int:
        """Return 0 for the stem, 1 for the first stage with the norm of its map, and so on.

        Parts after the last block belong to the last stage. Parts outside the published network (a
        pyramid) get one number more.
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
        # A class token belongs to the stem, or to class blocks at the end.
        return name.startswith(self.names.stem) and not name.startswith(self.end_keys)

    def _place(self, name: str) -> tuple[int, int] | None:
        """Return stage and block, from 0; None outside the stages."""
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


def count_depths(names: Iterable[str], rules: LayerNames = USUAL) -> tuple[int, ...]:
    """Count the blocks per stage from the names of a network's parameters.

    Returns:
        Empty if the numbers of stages begin below the rules' first one.
    """
    blocks = {_block(name, rules.blocks) for name in names if not name.startswith(rules.stem)}
    places = [place for place in blocks if place is not None]
    if any(min(place) < 0 for place in places):
        return ()
    stages = [stage for stage, _ in places]
    return tuple(stages.count(stage) for stage in range(max(stages, default=-1) + 1))


def list_blocks(names: Iterable[str], rules: LayerNames = USUAL) -> tuple[str, ...]:
    """Return the names of a network's blocks by depth, from the names of its parameters."""
    places: dict[str, tuple[int, int]] = {}
    for name in names:
        for rule in rules.blocks:
            match = re.match(rule.pattern, name)
            if match:
                places[match[0].removesuffix(".")] = _numbers(match, rule)
                break
    return tuple(sorted(places, key=lambda name: places[name]))


def _block(name: str, rules: Iterable[Rule]) -> tuple[int, int] | None:
    for rule in rules:
        match = re.match(rule.pattern, name)
        if match:
            return _numbers(match, rule)
    return None


def _numbers(match: re.Match[str], rule: Rule) -> tuple[int, int]:
    """Return stage and block; in a list of blocks, with one number, each block is a stage."""
    block = (match[2] if match.re.groups > 1 else "") or rule.first_block
    return (int(match[1]) - rule.first) // rule.step, int(block) - rule.first_block


def _stage(name: str, rules: Iterable[Rule]) -> int | None:
    for rule in rules:
        match = re.match(rule.pattern, name)
        if match:
            return (int(match[1]) - rule.first) // rule.step
    return None
