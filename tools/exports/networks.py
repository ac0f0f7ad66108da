"""What a checkpoint is of, and the network that is exported for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn

from backbones import Backbone
from backbones.checkpoints.adoption import CLASSIFIER, Conversion, adopt, convert
from backbones.checkpoints.opening import Checkpoint
from heads.linear import LinearClassifier
from tools.exports import NUM_CLASSES, ExportRequest, seeded
from tools.exports.class_lists import class_names

Content = Literal["classifier", "maps", "dense"]


class Maps(nn.Module):
    """A backbone's maps, fine to coarse, as outputs of a program."""

    num_classes = 0  # there is no classifier

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, H, W) -> maps (B, C_i, h_i, w_i)."""
        return cast("tuple[Tensor, ...]", self.backbone(images))


@dataclass(frozen=True)
class Held:
    """What is exported: a checkpoint under the names of a backbone, or random weights.

    Attributes:
        content: A classifier, a backbone of one, or one for dense prediction.
        backbone: Without the checkpoint's weights until ``network`` is asked for.
        converted: The checkpoint; None leaves the weights random.
    """

    content: Content
    backbone: Backbone
    converted: Conversion | None

    @functools.cached_property
    def network(self) -> LinearClassifier | Maps:
        """The network in evaluation mode, with its weights.

        Raises:
            ValueError: Weights of another model; the keys that differ are listed.
        """
        if self.converted is None:
            return LinearClassifier(self.backbone, NUM_CLASSES).eval()
        self.converted.check(trained=True)
        if self.content != "classifier":
            adopt(self.backbone, self.converted, trained=True)
            return Maps(self.backbone).eval()
        with seeded():
            network = LinearClassifier(self.backbone, self.converted.num_classes)
        adopt(network, self.converted)
        return network.eval()


def held_by(request: ExportRequest) -> Held:
    """What the checkpoint holds; without checkpoint a classifier with random weights.

    Raises:
        ValueError: No weights, or a table that cannot be brought to the network's size.
    """
    with seeded():
        if request.checkpoint is None:
            held = Held("classifier", request.build_backbone(dense=False), None)
            held.network  # noqa: B018 - its classifier is drawn right after the backbone
            return held
        dense = _looks_dense(request.checkpoint)
        converted = convert(request.checkpoint, request.build_backbone(dense=dense))
        content = content_of(converted)
        if dense != (content == "dense"):
            converted = convert(request.checkpoint, request.build_backbone(dense=not dense))
    return Held(content, converted.backbone, converted)


def content_of(converted: Conversion) -> Content:
    """What the tensors of a checkpoint are, by their names in a backbone."""
    backbone, keys = converted.backbone, converted.tensors.keys()
    if f"{CLASSIFIER}weight" in keys:
        return "classifier"
    if backbone.dense:  # which has no parts of a classification network to look for
        parts = backbone.classification_keys
        return "maps" if not parts or any(key.startswith(parts) for key in keys) else "dense"
    mixers = tuple(backbone.mixers())  # which the file need not have
    own = {key for key in backbone.state_dict() if not key.startswith(mixers)}
    of_classes = {key for key in own if key.startswith(backbone.classification_keys)}
    return "maps" if of_classes <= keys else "dense"


def _looks_dense(checkpoint: Checkpoint) -> bool:
    """Whether the backbone is probably one for dense prediction, so that no other is built first.

    The names of a norm per map and of DeiT's pyramid tell it of ours; those of others may not.
    """
    keys = checkpoint.state_dict.keys()
    return any(key.startswith(("norm0.", "pyramid.")) for key in keys)


def outputs_of(network: LinearClassifier | Maps, images: Tensor) -> list[Tensor]:
    """Logits, or maps, as a list."""
    outputs = network(images)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def names_of(
    request: ExportRequest, parts: Mapping[str, LinearClassifier | Maps]
) -> tuple[str, ...]:
    """Return the names of the classes if a classifier is among the parts, else none."""
    network = parts.get("classifier")
    return class_names(request, network.num_classes if network else 0)


def parts_of(request: ExportRequest) -> dict[str, LinearClassifier | Maps]:
    """The networks to record by their file names: ``classifier``, ``maps`` or ``dense``.

    By default all that the checkpoint holds: of a classifier also the maps of its backbone, which
    both of them share.

    Raises:
        ValueError: A part that the checkpoint does not hold, or weights of another model.
    """
    asked = _asked(request.settings)
    if request.checkpoint is None and asked == "dense":
        return {"dense": Maps(request.create_backbone(dense=True)).eval()}
    held = held_by(request)
    holds = ("classifier", "maps") if held.content == "classifier" else (held.content,)
    if asked != "all" and asked not in holds:
        raise ValueError(
            f"{request.ckpt} holds no {asked}; pass what={'|'.join(holds)}, or leave it out"
        )
    parts: dict[str, LinearClassifier | Maps] = {
        held.content: held.network,
        "maps": Maps(held.network.backbone).eval(),
    }
    return {part: parts[part] for part in (holds if asked == "all" else (asked,))}


def _asked(settings: Mapping[str, str]) -> str:
    """Read ``what``, or ``network`` as it was called before: a part, or "all".

    Raises:
        ValueError: Both are typed, and differ.
    """
    what, network = settings.get("what", ""), settings.get("network", "")
    what = "all" if what == "both" else what
    if what and network and what != network:
        raise ValueError(
            f"what={settings['what']} and network={network} contradict each other; pass what= alone"
        )
    return what or network or "all"
