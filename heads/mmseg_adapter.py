"""MMSegmentation's segmentors around our backbones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

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

    def predict_once(self, batch: Mapping[str, Any]) -> list[Any]:
        """The toolkit's data samples with predictions at the original image size."""
        images, samples = batch["inputs"], batch["data_samples"]
        if len({image.shape for image in images}) == 1:
            return super().predict_once(batch)
        predictions = []
        for image, sample in zip(images, samples, strict=True):
            predictions += super().predict_once({"inputs": [image], "data_samples": [sample]})
        return predictions

    def merged(self, views: Iterable[Mapping[str, Any]]) -> list[Any]:
        """The mean of the views' probabilities, as MMSegmentation's SegTTAModel takes it.

        ``seg_logits`` are the logarithms of the means. One view's logits are held at a time, as
        those of a large image with many classes fill a GPU.
        """
        samples: list[Any] = []
        means: list[Tensor] = []
        count = 0
        for view in views:
            predictions = self.predict_once(view)
            found = [sample.seg_logits.data.softmax(dim=0) for sample in predictions]
            if count:
                for mean, one in zip(means, found, strict=True):
                    mean += one
            else:
                samples, means = predictions, found
            count += 1
        for sample, mean in zip(samples, means, strict=True):
            mean /= count
            sample.pred_sem_seg.data = mean.argmax(dim=0, keepdim=True)
            sample.seg_logits.data = mean.log()
        return samples


def build_segmentor(
    backbone: Backbone,
    num_classes: int,
    *,
    name: str = "upernet",
    channels: int | None = None,
    group_norm: bool = False,
    class_weights: Sequence[float] | None = None,
    test_crop: int | Sequence[int] | None = None,
    test_stride: int | Sequence[int] | None = None,
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
        test_crop: Height and width of a window that slides over the image in evaluation; None for
            whole images.
        test_stride: How far the window moves (two thirds of it, rounded up, as usual).
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
    _slide(config, test_crop, test_stride)
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


def _slide(
    config: Any, crop: int | Sequence[int] | None, stride: int | Sequence[int] | None
) -> None:
    """Predict in windows, whose logits are averaged where they overlap."""
    if crop is None:
        if stride is not None:
            raise ValueError(f"head.test_stride={stride} moves a window: pass head.test_crop, too")
        return
    window = _pair("test_crop", crop)
    thirds = [-(-2 * side // 3) for side in window]
    steps = thirds if stride is None else _pair("test_stride", stride)
    if any(step > side for step, side in zip(steps, window, strict=True)):
        raise ValueError(
            f"head.test_stride={stride} would leave gaps between windows of head.test_crop={crop}"
        )
    config.test_cfg.update(mode="slide", crop_size=tuple(window), stride=tuple(steps))


def _pair(name: str, value: int | Sequence[int]) -> list[int]:
    pair = [value, value] if isinstance(value, int) else [int(side) for side in value]
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"head.{name}={value} is no size; give one number or [height,width]")
    return pair


def _weight_classes(config: Any, weights: list[float], num_classes: int) -> None:
    if len(weights) != num_classes:
        raise ValueError(
            f"head.class_weights has {len(weights)} entries, but the data has {num_classes} classes"
        )
    for head in (config.decode_head, config.auxiliary_head):
        head.loss_decode.class_weight = weights
