"""Small members of every host family on their way out."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from backbones import create_backbone
from tools.exporters import TARGETS, ExportRequest


def shorten(network):
    """Keep the first two of equal blocks in a row; both kinds of window blocks are among them."""
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


def request(name, to, folder, *, small=True, size=(64, 96), ckpt=None, **settings):
    """A request as the command makes it."""
    made = SmallRequest if small else ExportRequest
    settings = {**TARGETS[to].settings, **settings}
    return made(to, name, {"img_size": size}, ckpt, None, Path(folder), size, settings)


__all__ = ["create_backbone", "request", "shorten"]
