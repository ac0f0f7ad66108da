"""MMSegmentation's segmentors with our backbones, and our decode heads in MMSegmentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backbones import Backbone
from backbones.layers.bounds import check_range
from backbones.layers.precision import at_least_float32
from backbones.options import remembering
from heads.toolkits.ffnet_seg import FFNetSegDecoder
from heads.toolkits.float32 import compute_logits_in_float32
from heads.toolkits.toolkit import (
    BUILDING,
    ToolkitModel,
    base_config,
    base_optimisation,
    build_model,
    check_least,
    check_preset,
    check_pyramid,
    freeze_unread,
    override,
    replace_batch_norms,
    set_classes,
)

TARGETS = ("build_segmentor",)

# Names that work without ``base``, and MMSegmentation's model configs for them.
SEGMENTORS = {"upernet": "upernet_r50"}
# Our decode heads, by their names in configs.
DECODE_HEADS = ("FFNetSegHead",)
GROUPS = 32  # of GroupNorm


class Segmentor(ToolkitModel):
    """A segmentor of MMSegmentation; probabilities of several views are averaged."""

    def _prepare(self, batch: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
        """Prepare a batch as the base class does, for sliding windows in float32 or wider.

        Their sums have the images' type. ``pad_shape`` goes: it is the size of the whole image, to
        which Mask2Former's head would resize each window.
        """
        data = super()._prepare(batch, training=training)
        if not training and self.model.test_cfg.get("mode") == "slide":
            data["inputs"] = at_least_float32(data["inputs"])
            for sample in data["data_samples"]:
                sample.pop("pad_shape", None)
        return data

    def merge_views(self, views: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return predictions from the views' mean probabilities, as MMSegmentation's SegTTAModel.

        ``seg_logits`` are the logarithms of the means. Views are processed one by one, as the
        logits of a large image with many classes fill a GPU.
        """
        samples: list[Any] = []
        means: list[Tensor] = []
        count = 0
        for view in views:
            predictions = self.predict_once(view)
            maps = [sample.seg_logits.data.softmax(dim=0) for sample in predictions]
            if count:
                for mean, map_ in zip(means, maps, strict=True):
                    mean += map_
            else:
                samples, means = predictions, maps
            count += 1
        for sample, mean in zip(samples, means, strict=True):
            mean /= count
            sample.pred_sem_seg.data = mean.argmax(dim=0, keepdim=True)
            sample.seg_logits.data = mean.log()
        return samples


def register_decode_heads() -> None:
    """Register our decode heads with MMSegmentation; later calls return at once."""
    with BUILDING:
        _register_decode_heads()


def _register_decode_heads() -> None:
    from mmseg.models.decode_heads.decode_head import BaseDecodeHead
    from mmseg.registry import MODELS

    if DECODE_HEADS[0] in MODELS.module_dict:
        return

    class FFNetSegHead(BaseDecodeHead):  # type: ignore[misc]
        """FFNet_seg's decoder in MMSegmentation; see ``FFNetSegDecoder`` for its options."""

        def __init__(
            self,
            *,
            width: int = 256,
            depth: int = 3,
            expansion: int = 4,
            drop_path_rate: float = 0.1,
            fused: bool = False,
            **options: Any,
        ) -> None:
            super().__init__(input_transform="multiple_select", **options)
            self.decoder = FFNetSegDecoder(
                self.in_channels,
                self.channels,
                width=width,
                depth=depth,
                expansion=expansion,
                drop_path_rate=drop_path_rate,
                fused=fused,
            )

        def forward(self, inputs: Sequence[Tensor]) -> Tensor:
            """Map the backbone's maps to logits (B, classes, H / 8, W / 8)."""
            logits: Tensor = self.cls_seg(self.decoder(self._transform_inputs(inputs)))
            return logits

    MODELS.register_module(module=FFNetSegHead)


@remembering
def build_segmentor(
    backbone: Backbone,
    num_classes: int,
    *,
    name: str = "upernet",
    base: str | None = None,
    model: Mapping[str, Any] | None = None,
    channels: int | None = None,
    group_norm: bool = False,
    class_weights: Sequence[float] | None = None,
    test_crop: int | Sequence[int] | None = None,
    test_stride: int | Sequence[int] | None = None,
    pad_to: int | Sequence[int] | None = None,
    dropout: float | None = None,
    auxiliary_weight: float | None = None,
    options: Mapping[str, Any] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> ToolkitModel:
    """Build a segmentor of MMSegmentation from its own config.

    SyncBN is replaced by BatchNorm, which runs on any device. For several GPUs
    ``trainer.sync_batchnorm=true`` restores it.

    Args:
        backbone: Backbone built with ``dense=True``.
        num_classes: Number of scored classes, without the ignored label.
        name: One of ``SEGMENTORS``, or any name together with ``base``.
        base: MMSegmentation config to start from; see ``base_config``.
        model: Changes of it; see ``base_config``.
        channels: Width of the decode head (512) and, halved, of the auxiliary one; None keeps both.
            Heads of masks and heads read by others keep their own.
        group_norm: GroupNorm instead of BatchNorm, for batches of a few small images. Where maps
            are pooled to 1x1, two images leave BatchNorm two values, unlike in evaluation.
        class_weights: Weight per class in both losses, for data that one class dominates.
            MMSegmentation divides by the weights of a process's own pixels. With several processes
            the loss is therefore the mean of weighted means, unlike the weighted mean over all.
            Heads of masks ignore the weights.
        test_crop: Height and width of a window that slides over the image in evaluation; None for
            whole images.
        test_stride: Step of the window; None means two thirds of it, rounded up.
        pad_to: Side or (H, W) that training images are padded to, with 255 in their masks, as the
            crop in mmseg's own pipelines does; None pads to the largest of a batch.
        dropout: Share of channels that decode heads drop before their last layer (0.1).
        auxiliary_weight: Weight of an auxiliary head's loss (0.4), if the config has one.
        options: Further values of MMSegmentation's model config; see ``override``.
        mean: Mean per band of images of bands, subtracted; None for BGR images, with ImageNet's.
        std: Standard deviation per band, divided by.

    Raises:
        ValueError: A name or option is unknown, MMSegmentation is missing, or the backbone lacks
            four maps.
    """
    check_least(channels=channels)
    check_range("num_classes of a segmentor", num_classes, 2)
    config = base_segmentor(backbone, name, base, model)
    freeze_unread(backbone, find_read_maps(config))
    if channels is not None:
        _set_width(config, channels)
    set_classes(config, num_classes)
    widths = [head.channels for head in _heads(config) if "channels" in head]
    if group_norm and any(width % GROUPS for width in widths):
        raise ValueError(
            f"head.group_norm makes {GROUPS} groups of channels, and heads with head.channels="
            f"{channels} have {' and '.join(map(str, widths))}; pass a multiple of {2 * GROUPS}"
        )
    norm = {"type": "GN", "num_groups": GROUPS} if group_norm else {"type": "BN"}
    replace_batch_norms(config, norm | {"requires_grad": True})
    if class_weights is not None:
        _weight_classes(config, list(class_weights), num_classes)
    _set_sliding(config, test_crop, test_stride)
    for head in _heads(config):
        if dropout is not None and "dropout_ratio" in head and head is config.decode_head:
            head.dropout_ratio = dropout
        if auxiliary_weight is not None and head is not config.decode_head:
            head.loss_decode.loss_weight = auxiliary_weight
    _set_preprocessor(config.data_preprocessor, mean, std, pad_to)
    override(config, options or {})
    built = build_model("mmseg", config, backbone, is_changed=bool(options or model))
    if mean is not None and std is not None:
        prepared: Any = built.data_preprocessor
        prepared.mean = torch.tensor(mean).view(-1, 1, 1)
        prepared.std = torch.tensor(std).view(-1, 1, 1)
    compute_logits_in_float32(built)
    return Segmentor(built, config, base_optimisation("mmseg", base or SEGMENTORS[name]))


def _set_preprocessor(
    config: Any,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    pad_to: int | Sequence[int] | None,
) -> None:
    """Set statistics and padding; see ``build_segmentor``."""
    if mean is not None and std is not None:
        # MMEngine takes those of 1 or 3 bands alone; other numbers are set after the building.
        statistics = {"mean": [*mean], "std": [*std]} if len(mean) in (1, 3) else {}
        config.update({**statistics, "bgr_to_rgb": False})
    if pad_to is not None:
        config.pop("size_divisor")
        config.size = (pad_to, pad_to) if isinstance(pad_to, int) else tuple(pad_to)


def base_segmentor(
    backbone: Backbone,
    name: str,
    base: str | None = None,
    model: Mapping[str, Any] | None = None,
) -> Any:
    """Return MMSegmentation's config of a segmentor, fitted to a backbone and without it.

    Raises:
        ValueError: The name is unknown, MMSegmentation is missing, or the backbone lacks four maps.
    """
    check_preset("segmentor", name if base is None else None, SEGMENTORS)
    widths = check_pyramid(backbone, name, dilated=True)
    config = base_config("mmseg", base or SEGMENTORS[name], model)
    register_decode_heads()
    config.pretrained = None
    if config.get("neck"):  # the heads read its output
        config.neck.in_channels = widths
    else:
        for head in _heads(config):
            index = head.get("in_index", range(len(widths)))
            several = not isinstance(index, int)
            head.in_channels = [widths[place] for place in index] if several else widths[index]
    divisor = backbone.size_divisor
    config.data_preprocessor.pop("size", None)
    config.data_preprocessor.update(size_divisor=divisor, test_cfg={"size_divisor": divisor})
    return config


def _set_sliding(
    config: Any, crop: int | Sequence[int] | None, stride: int | Sequence[int] | None
) -> None:
    """Set prediction in sliding windows, with logits averaged where windows overlap."""
    if crop is None:
        if stride is not None:
            raise ValueError(f"head.test_stride={stride} needs a window; pass head.test_crop, too")
        return
    window = _pair("test_crop", crop)
    thirds = [-(-2 * side // 3) for side in window]
    steps = thirds if stride is None else _pair("test_stride", stride)
    if any(step > side for step, side in zip(steps, window, strict=True)):
        raise ValueError(
            f"head.test_stride={stride} leaves gaps between windows of head.test_crop={crop}; "
            "pass a smaller stride"
        )
    config.test_cfg.update(mode="slide", crop_size=tuple(window), stride=tuple(steps))


def _pair(name: str, value: int | Sequence[int]) -> list[int]:
    pair = [value, value] if isinstance(value, int) else [int(side) for side in value]
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"head.{name} must be one positive number or [height,width], got {value}")
    return pair


def find_read_maps(config: Any) -> set[int]:
    """Return the indices of the backbone's maps that the neck or heads of a config read."""
    if config.get("neck"):
        return {0, 1, 2, 3}
    read: set[int] = set()
    for head in _heads(config):
        index = head.get("in_index", (0, 1, 2, 3))
        read |= {index % 4} if isinstance(index, int) else set(index)
    return read


def _heads(config: Any) -> Iterator[Any]:
    """Yield the decode heads of a config and its auxiliary heads."""
    for key in ("decode_head", "auxiliary_head"):
        parts = config.get(key) or ()
        yield from parts if isinstance(parts, list | tuple) else [parts]


def _set_width(config: Any, channels: int) -> None:
    for head in _heads(config):
        if "channels" in head:
            head.channels = channels if head is config.decode_head else channels // 2


def _weight_classes(config: Any, weights: list[float], num_classes: int) -> None:
    if len(weights) != num_classes:
        raise ValueError(
            f"head.class_weights has {len(weights)} entries, but the data has {num_classes} classes"
        )
    for head in _heads(config):
        if "loss_decode" in head:
            head.loss_decode.class_weight = weights
