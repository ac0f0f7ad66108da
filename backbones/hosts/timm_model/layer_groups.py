"""Layers and stages of a timm model's parameters, by its ``group_matcher`` where it has one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping


class LayerGroups:
    """Numbers of layers and stages by names of parameters, as ``layer_ids.LayerIds`` has them.

    Args:
        layers: Layer of each parameter of timm's model with its classifier, which is in the last.
        stages: Coarse groups, which are stages, or blocks where a model lacks stages.
        prefix: Prefix of timm's names.

    Attributes:
        depths: Layers per stage.
        merges_end_stages: False: downsampling belongs to the stage after it.
        tail: See ``layer_ids.LayerNames``; without ``group_matcher`` all, as there were no layers.
    """

    merges_end_stages = False

    def __init__(self, layers: Mapping[str, int], stages: Mapping[str, int], prefix: str) -> None:
        self._layers, self._stages, self._prefix = layers, stages, prefix
        self._last = max(layers.values(), default=1)
        self._last_stage = max(stages.values(), default=1)
        self.tail = () if stages else (prefix,)
        inside: dict[int, set[int]] = defaultdict(set)
        for name, stage in stages.items():
            if 0 < stage and 0 < layers[name] < self._last:
                inside[stage].add(layers[name])
        self.depths = tuple(len(inside[stage]) for stage in sorted(inside))

    @property
    def num_layers(self) -> int:
        """Number of layers, the classifier's included."""
        return self._last + 1

    def layer(self, name: str) -> int:
        """Return 0 for the stem, ..., ``num_layers - 1`` for the classifier."""
        return self._find(name, self._layers, self._last)

    def stage(self, name: str) -> int:
        """Return 0 for the stem, 1 for the first stage, and so on."""
        stage = self._find(name, self._stages, self._last_stage + 1)
        return min(stage, len(self.depths)) if stage <= self._last_stage else stage

    def stage_of_layer(self, layer: int) -> int:
        """Return the stage, from 0, of a layer."""
        stages = [self._stages[name] for name, number in self._layers.items() if number == layer]
        return max(min(stages) - 1, 0)

    def _find(self, name: str, numbers: Mapping[str, int], default: int) -> int:
        """Return a parameter's number; for a module's name with a dot, the largest inside."""
        if not name.startswith(self._prefix):
            return default
        name = name.removeprefix(self._prefix)
        while name and name not in numbers:
            inside = [number for key, number in numbers.items() if key.startswith(f"{name}.")]
            if name.endswith("."):
                inside = [number for key, number in numbers.items() if key.startswith(name)]
            if inside:
                return max(inside)
            name = name.rstrip(".").rpartition(".")[0]
        return numbers.get(name, default)
