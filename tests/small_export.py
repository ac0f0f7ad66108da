"""Requests of exports with networks of few blocks."""

from dataclasses import dataclass
from pathlib import Path

from tests.families import shorten
from tools.exporters import TARGETS, ExportRequest


@dataclass(frozen=True)
class SmallRequest(ExportRequest):
    """A request whose networks have two blocks where the real ones have many."""

    def build_backbone(self, *, dense):
        return shorten(super().build_backbone(dense=dense))


def small_request(name, to, folder, size=(64, 96), **settings):
    """What the command asks of an exporter, for random weights."""
    settings = {**TARGETS[to].settings, **settings}
    return SmallRequest(to, name, {"img_size": size}, None, None, Path(folder), size, settings)
