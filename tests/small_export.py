"""Requests of exports with networks of few blocks."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tests.families import SMALLEST
from tools.exporters import TARGETS, ExportRequest

# One of every host's family, and mixers that work in different ways.
FAMILIES = (
    *SMALLEST,
    "deit_t_afbo",
    "poolformer_s12_scheme_12",
    "sbm_t_convglu",
    "swin_t_iffn",
)


def shorten(network):
    """Keep the first two of equal blocks in a row; shifted and plain windows are among them."""
    for module in list(network.modules()):
        for name, blocks in list(module.named_children()):
            if isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks) > 2:
                shapes = [{k: v.shape for k, v in b.state_dict().items()} for b in blocks]
                if shapes[0] and all(shape == shapes[0] for shape in shapes):
                    setattr(module, name, blocks[:2])
    return network


@dataclass(frozen=True)
class SmallRequest(ExportRequest):
    """A request whose networks have two blocks where the real ones have many."""

    def create_backbone(self, *, dense, random=False):
        return shorten(super().create_backbone(dense=dense, random=random))

    def create_classifier(self):
        network = super().create_classifier()
        shorten(network.backbone)
        return network


def small_request(name, to, folder, size=(64, 96), **settings):
    """What the command asks of an exporter, for random weights."""
    settings = {**TARGETS[to].settings, **settings}
    return SmallRequest(to, name, {"img_size": size}, None, None, Path(folder), size, settings)
