"""MMSegmentation's segmentors around our backbones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from backbones import Backbone
from heads.mm_adapter import (
    ToolkitModel,
    base_config,
    build_model,
    check_least,
    check_pyramid,
    override,
    set_everywhere,
)

# Our head names and the model configs that MMSegmentation ships for them.
SEGMENTORS = {"upernet": "upernet_r50"}


class Segmentor(ToolkitModel):
    """A segmentor of MMSegmentation; it predicts images of several sizes one after the other."""

    def predict(self, batch: Mapping[str, Any]) -> list[Any]:
        """The toolkit's data samples with predictions at the original image size."""
        images, samples = batch["inputs"], batch["data_samples"]
        if len({image.shape for image in images}) == 1:
            return super().predict(batch)
        predictions = []
        for image, sample in zip(images, samples, strict=True):
            predictions += super().predict({"inputs": [image], "data_samples": [sample]})
        return predictions


def build_segmentor(
    backbone: Backbone,
    num_classes: int,
    *,
    name: str = "upernet",
    channels: int | None = None,
    group_norm: bool = False,
    class_weights: Sequence[float] | None = None,
    options: Mapping[str, Any] | None = None,
) -> ToolkitModel:
    """Build a segmentor of MMSegmentation from its own base config.

    Its SyncBN becomes BatchNorm, which runs on any device; ``trainer.sync_batchnorm=true`` turns it
    back where several GPUs train.

    Args:
        backbone: Built with ``dense=True``.
        num_classes: Classes that are scored, the ignored label not counted.
        name: One of ``SEGMENTORS``.
        channels: Width of the decode head (512) and, halved, of the auxiliary one; None keeps both.
        group_norm: GroupNorm in place of BatchNorm, for batches of a few small images: where maps
            are pooled to 1x1, two images leave two values to normalise by, evaluation has others.
        class_weights: Weight of each class in both losses, where one class fills most pixels.
            MMSegmentation divides by the weights of a process's own pixels, so that of several
            processes the loss is the mean of weighted means, not the weighted mean over all.
        options: Further values of MMSegmentation's model config; see ``override``.

    Raises:
        ValueError: Unknown name or option, MMSegmentation absent, or a backbone without four maps.
    """
    check_least(channels=channels)
    config = base_segmentor(backbone, name)
    if channels is not None:
        config.decode_head.channels, config.auxiliary_head.channels = channels, channels // 2
    set_everywhere(config, "num_classes", num_classes)
    norm = {"type": "GN", "num_groups": 32} if group_norm else {"type": "BN"}
    set_everywhere(config, "norm_cfg", norm | {"requires_grad": True})
    if class_weights is not None:
        _weight_classes(config, list(class_weights), num_classes)
    override(config, options or {})
    return Segmentor(build_model("mmseg", config, backbone, typed=bool(options)), config)


def base_segmentor(backbone: Backbone, name: str) -> Any:
    """MMSegmentation's own config of a segmentor, fitted to a backbone, which is not in it.

    Raises:
        ValueError: Unknown name, MMSegmentation absent, or a backbone without four maps.
    """
    if name not in SEGMENTORS:
        raise ValueError(f"there is no segmentor called {name!r}; known: {', '.join(SEGMENTORS)}")
    widths = check_pyramid(backbone, name)
    config = base_config("mmseg", SEGMENTORS[name])
    config.pretrained = None
    config.decode_head.in_channels = widths
    config.auxiliary_head.in_channels = widths[config.auxiliary_head.in_index]
    divisor = backbone.size_divisor
    config.data_preprocessor.update(size_divisor=divisor, test_cfg={"size_divisor": divisor})
    return config


def _weight_classes(config: Any, weights: list[float], num_classes: int) -> None:
    if len(weights) != num_classes:
        raise ValueError(
            f"head.class_weights has {len(weights)} entries, but the data has {num_classes} classes"
        )
    for head in (config.decode_head, config.auxiliary_head):
        head.loss_decode.class_weight = weights
