"""What a checkpoint is of, and the network that is exported for it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from backbones import Backbone
from backbones.checkpoints.loading import read_state_dict
from heads.linear import LinearClassifier
from tools.exporters import ExportRequest

Content = Literal["classifier", "maps", "dense"]


class Maps(nn.Module):
    """A backbone's maps, fine to coarse, as outputs of a program."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, H, W) -> maps (B, C_i, h_i, w_i)."""
        return cast("tuple[Tensor, ...]", self.backbone(images))


def content_of(request: ExportRequest) -> Content:
    """What a checkpoint holds: a classifier, a backbone of one, or one for dense prediction.

    Without checkpoint it is a classifier with random weights.
    """
    if request.ckpt is None:
        return "classifier"
    state_dict = read_state_dict(request.ckpt)
    backbone = request.create_backbone(dense=False, random=True)
    keys = backbone.convert_state_dict(dict(state_dict)).keys()
    if "classifier.weight" in keys:
        return "classifier"
    mixers = tuple(backbone.mixers())  # which the file need not have
    own = {k for k in backbone.state_dict() if not k.startswith(mixers)}
    of_classes = {k for k in own if k.startswith(backbone.classification_keys)}
    return "maps" if of_classes <= keys else "dense"


def network_of(request: ExportRequest, content: Content) -> LinearClassifier | Maps:
    """The network in evaluation mode with the checkpoint's weights.

    Raises:
        ValueError: Weights of another model; the keys that differ are listed.
    """
    if content == "classifier":
        return request.create_classifier()
    return Maps(request.create_backbone(dense=content == "dense")).eval()


def class_names(path: Path | None) -> tuple[str, ...]:
    """The classes that a checkpoint of ours names; none of other people's files."""
    if path is None or path.suffix != ".ckpt":
        return ()
    content = torch.load(path, map_location="cpu", weights_only=True)
    return tuple(content.get("class_names", ())) if isinstance(content, dict) else ()


def outputs_of(network: LinearClassifier | Maps, images: Tensor) -> list[Tensor]:
    """Logits, or maps, as a list."""
    outputs = network(images)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def parts_of(request: ExportRequest) -> dict[str, LinearClassifier | Maps]:
    """The networks to record by their file names: ``classifier``, ``maps`` or ``dense``.

    By default all that the checkpoint holds: of a classifier also the maps of its backbone.

    Raises:
        ValueError: A part that the checkpoint does not hold, or weights of another model.
    """
    content, asked = content_of(request), request.settings.get("network", "all")
    held: dict[Content, tuple[Content, ...]] = {
        "classifier": ("classifier", "maps"),
        "maps": ("maps",),
        "dense": ("dense",),
    }
    holds = ("classifier", "maps", "dense") if request.ckpt is None else held[content]
    if asked != "all" and asked not in holds:
        raise ValueError(
            f"{request.ckpt} holds no {asked}; pass network={'|'.join(holds)}, or leave it out"
        )
    parts = held[content] if asked == "all" else (cast("Content", asked),)
    return {part: network_of(request, part) for part in parts}
