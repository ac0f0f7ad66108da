"""Find out what a checkpoint contains, and build the network to export."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn

from backbones import Backbone
from backbones.checkpoints.adoption import CLASSIFIER, Conversion, adopt, convert
from backbones.checkpoints.opening import Checkpoint
from backbones.lora import merge_adapters
from heads.linear import LinearClassifier
from tasks.engine.loading import open_task
from tools.exports.class_lists import class_names
from tools.exports.requests import NUM_CLASSES, ExportRequest, seeded

Content = Literal["classifier", "maps", "dense"]


class Maps(nn.Module):
    """Returns a backbone's maps, fine to coarse, as the outputs of a program."""

    num_classes = 0  # without a classifier

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, H, W) -> maps (B, C_i, h_i, w_i)."""
        return cast("tuple[Tensor, ...]", self.backbone(images))


@dataclass(frozen=True)
class ExportNetwork:
    """Network to export: a checkpoint with the names of a backbone, or random weights.

    Attributes:
        content: A classifier, a classifier's backbone, or a backbone for dense prediction.
        backbone: Gets the checkpoint's weights when ``network`` is first used.
        converted: The checkpoint; None leaves the weights random.
    """

    content: Content
    backbone: Backbone
    converted: Conversion | None

    @functools.cached_property
    def network(self) -> LinearClassifier | Maps:
        """Return the network in evaluation mode with its weights.

        Raises:
            ValueError: The weights are another model's; the message lists the differing keys.
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


def build_export_network(request: ExportRequest) -> ExportNetwork:
    """Return the network of the checkpoint; without one, a classifier with random weights.

    Raises:
        ValueError: The file lacks weights, or a table cannot be resized for the network.
    """
    with seeded():
        if request.checkpoint is None:
            exported = ExportNetwork("classifier", request.build_backbone(dense=False), None)
            exported.network  # noqa: B018 - draws the classifier right after the backbone, for reproducibility
            return exported
        if request.run is not None and request.exported_part == "backbone":
            # Of a detector or segmentor; a timm model may have the same tensors in both forms.
            converted = convert(request.checkpoint, request.build_backbone(dense=True))
            return ExportNetwork("dense", converted.backbone, converted)
        dense = _looks_dense(request.checkpoint)
        converted = convert(request.checkpoint, request.build_backbone(dense=dense))
        content = classify_content(converted)
        if dense != (content == "dense"):
            converted = convert(request.checkpoint, request.build_backbone(dense=not dense))
    return ExportNetwork(content, converted.backbone, converted)


def classify_content(converted: Conversion) -> Content:
    """Return what a checkpoint contains, from the names of its tensors in a backbone."""
    backbone, keys = converted.backbone, converted.tensors.keys()
    if f"{CLASSIFIER}weight" in keys:
        return "classifier"
    if backbone.dense:  # it lacks the parts of a classification network
        parts = backbone.classification_keys
        return "maps" if not parts or any(key.startswith(parts) for key in keys) else "dense"
    mixers = tuple(backbone.mixers())  # may be missing in the file
    host_keys = {key for key in backbone.state_dict() if not key.startswith(mixers)}
    classifier_keys = {key for key in host_keys if key.startswith(backbone.classification_keys)}
    return "maps" if classifier_keys <= keys else "dense"


def _looks_dense(checkpoint: Checkpoint) -> bool:
    """Guess whether a checkpoint is for dense prediction, which saves building a backbone twice.

    The norms per map and DeiT's pyramid identify ours; other checkpoints may look different.
    """
    keys = checkpoint.state_dict.keys()
    return any(key.startswith(("norm0.", "pyramid.")) for key in keys)


def list_outputs(network: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return logits, maps or enlarged images as a list."""
    outputs = network(*inputs)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def export_class_names(request: ExportRequest, parts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names if a classifier is among the parts, else an empty tuple."""
    network = parts.get("classifier")
    return class_names(request, network.num_classes if network else 0)


def build_parts(request: ExportRequest) -> dict[str, Any]:
    """Return the networks to record by their file names: ``classifier``, ``maps`` or ``dense``.

    By default these are all parts of the checkpoint; a classifier also provides the maps of its
    backbone. Families that export their models whole give ``model`` alone.

    Raises:
        ValueError: The checkpoint lacks the part, or its weights are another model's.
    """
    requested = _requested_part(request.settings)
    if request.exported_part == "model":
        assert request.ckpt is not None, "a run has a checkpoint"
        model = open_task(request.ckpt).model
        if isinstance(getattr(model, "backbone", None), Backbone):
            merge_adapters(model.backbone)
        return {"model": model.eval()}
    if request.checkpoint is None and requested == "dense":
        return {"dense": Maps(request.create_backbone(dense=True)).eval()}
    exported = build_export_network(request)
    available = ("classifier", "maps") if exported.content == "classifier" else (exported.content,)
    if requested != "all" and requested not in available:
        raise ValueError(
            f"{request.ckpt} lacks the part {requested}; pass what={'|'.join(available)}, or leave "
            "it out"
        )
    parts: dict[str, LinearClassifier | Maps] = {
        exported.content: exported.network,
        "maps": Maps(exported.network.backbone).eval(),
    }
    return {part: parts[part] for part in (available if requested == "all" else (requested,))}


def _requested_part(settings: Mapping[str, str]) -> str:
    """Read ``what``, or its older name ``network``: a part, or "all".

    Raises:
        ValueError: Both are given and differ.
    """
    part, network = settings.get("what", ""), settings.get("network", "")
    part = "all" if part == "both" else part
    if part and network and part != network:
        raise ValueError(
            f"what={settings['what']} and network={network} contradict each other; pass what= alone"
        )
    return part or network or "all"
