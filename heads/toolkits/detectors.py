"""MMDetection's detectors with our backbones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from backbones import Backbone
from backbones.options import remembering
from heads.toolkits.float32 import compute_boxes_in_float32
from heads.toolkits.toolkit import (
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

TARGETS = ("build_detector",)

# Merging of several views in MMDetection's own configs (configs/retinanet).
MERGE = {"nms": {"type": "nms", "iou_threshold": 0.5}, "max_per_img": 100}
# Names that work without ``base``, and MMDetection's model configs for them.
DETECTORS = {
    "mask_rcnn": "mask-rcnn_r50_fpn",
    "cascade_mask_rcnn": "cascade-mask-rcnn_r50_fpn",
    "retinanet": "retinanet_r50_fpn",
}


class Detector(ToolkitModel):
    """A detector of MMDetection; its DetTTAModel merges the boxes of several views."""

    def merge_views(self, views: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return the boxes of all views after undoing the views and per-class NMS."""
        from mmdet.models.test_time_augs import DetTTAModel
        from mmengine import ConfigDict

        self.check_merges()
        predictions = [self.predict_once(view) for view in views]
        merger = DetTTAModel(tta_cfg=ConfigDict(MERGE), module=self.model)
        merged: list[Any] = merger.merge_preds(
            [list(views) for views in zip(*predictions, strict=True)]
        )
        return merged

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the losses as the base class does; see ``_query_errors`` for errors."""
        with self._query_errors():
            return super().loss(batch)

    def predict_once(self, batch: Mapping[str, Any]) -> list[Any]:
        """Predict as the base class does; see ``_query_errors`` for errors."""
        with self._query_errors():
            return super().predict_once(batch)

    def network_size(self, image: Tensor) -> tuple[int, int]:
        """Return the (H, W) that MMDetection pads an image to; heads read each image's own size."""
        divisor = getattr(self.model.data_preprocessor, "pad_size_divisor", 1)
        height, width = (-(-side // divisor) * divisor for side in image.shape[-2:])
        return height, width

    @contextlib.contextmanager
    def _query_errors(self) -> Iterator[None]:
        """Reword the error of a DETR with more queries than positions in its maps."""
        try:
            yield
        except RuntimeError as error:
            queries = getattr(self.model, "num_queries", None)
            if queries is None or "selected index k out of range" not in str(error):
                raise
            raise ValueError(
                f"the images are too small: their maps have fewer positions than the {queries} "
                "queries of this detector; pass a lower head.num_proposals, or larger images"
            ) from error

    def check_merges(self) -> None:
        """Reject several views for detectors of masks, which MMDetection cannot merge.

        Raises:
            ValueError: The detector predicts masks.
        """
        if getattr(self.model, "with_mask", False):
            raise ValueError(
                "MMDetection merges only the boxes of several views, not masks: leave out "
                "data.test_scales and data.test_flip, or pass a box detector, such as "
                "head=retinanet"
            )


@remembering
def build_detector(
    backbone: Backbone,
    num_classes: int,
    *,
    name: str = "mask_rcnn",
    base: str | None = None,
    model: Mapping[str, Any] | None = None,
    num_rois: int | None = None,
    num_proposals: int | None = None,
    mask_size: int | None = None,
    anchor_scale: float | None = None,
    group_norm: bool = False,
    options: Mapping[str, Any] | None = None,
) -> ToolkitModel:
    """Build a detector of MMDetection from its own config.

    The named options are the few that small images and small machines change; None keeps the
    config's value. One-stage detectors ignore RoIs, proposals and masks. The config selects the
    backbone's maps for the neck.

    Args:
        backbone: Backbone built with ``dense=True``.
        num_classes: Number of object classes, without background.
        name: One of ``DETECTORS``, or any name together with ``base``.
        base: MMDetection config to start from; see ``base_config``.
        model: Changes of it; see ``base_config``.
        num_rois: RoIs per image that train the second stage (512).
        num_proposals: Proposals per image that the second stage sees (1000), or queries of a DETR.
        mask_size: Side of the predicted masks (28); their RoIs have half of it.
        anchor_scale: Side of the finest anchors over its stride (8 in two stages, 4 in RetinaNet).
        group_norm: GroupNorm in neck and convolutional heads, as in MMDetection's configs for
            training from random weights.
        options: Further values of MMDetection's model config; see ``override``.

    Raises:
        ValueError: A name or option is unknown, MMDetection is missing, or the backbone lacks four
            maps.
    """
    check_least(
        num_rois=num_rois,
        num_proposals=num_proposals,
        mask_size=mask_size,
        anchor_scale=anchor_scale,
    )
    config, maps = base_detector(backbone, name, base, model)
    first = _first_neck(config).get("start_level", 0)
    freeze_unread(backbone, maps[first:])
    set_classes(config, num_classes)
    _resize(config, num_rois, num_proposals, mask_size, anchor_scale)
    _cap_detections(config, num_classes)
    if group_norm:
        _set_group_norm(config)
    # SyncBN needs CUDA; trainer.sync_batchnorm=true turns BatchNorm back into it.
    replace_batch_norms(config, {"type": "BN", "requires_grad": True})
    override(config, options or {})
    detector: Any = build_model("mmdet", config, backbone, is_changed=bool(options or model))
    if len(maps) < len(backbone.feature_info):
        detector.neck.register_forward_pre_hook(functools.partial(_select_maps, maps))
    compute_boxes_in_float32(detector)
    optimisation = base_optimisation("mmdet", base or DETECTORS[name])
    return Detector(detector, config, optimisation, maps)


def base_detector(
    backbone: Backbone,
    name: str,
    base: str | None = None,
    model: Mapping[str, Any] | None = None,
) -> tuple[Any, tuple[int, ...]]:
    """Return MMDetection's config of a detector, fitted to a backbone, and its neck's input maps.

    The config leaves the backbone itself out.

    Raises:
        ValueError: The name is unknown, MMDetection is missing, the backbone lacks four maps, or
            the detector reads other inputs than a pyramid.
    """
    check_preset("detector", name if base is None else None, DETECTORS)
    channels = check_pyramid(backbone, name)
    config = base_config("mmdet", base or DETECTORS[name], model)
    maps = tuple(config.get("backbone", {}).get("out_indices", range(len(channels))))
    if not config.get("neck") or not maps or not set(maps) <= set(range(len(channels))):
        raise ValueError(
            f"{base or name} of MMDetection reads maps {maps} without a neck over them; pass a "
            "config as head.base that has a neck over maps 0 to 3 of strides 4 to 32"
        )
    _first_neck(config).in_channels = [channels[index] for index in maps]
    if "data_preprocessor" in config:
        config.data_preprocessor.pad_size_divisor = backbone.size_divisor
    return config, maps


def _first_neck(config: Any) -> Any:
    return config.neck[0] if isinstance(config.neck, list) else config.neck


def _select_maps(
    maps: tuple[int, ...], neck: nn.Module, inputs: tuple[Sequence[Tensor]]
) -> tuple[tuple[Tensor, ...]]:
    """Return the backbone's maps that the neck's config selects."""
    return (tuple(inputs[0][index] for index in maps),)


def _resize(
    config: Any,
    num_rois: int | None,
    num_proposals: int | None,
    mask_size: int | None,
    anchor_scale: float | None,
) -> None:
    if anchor_scale is not None:
        _scale_anchors(config.get("rpn_head") or config.bbox_head, anchor_scale)
    if num_proposals is not None and "num_queries" in config:
        config.num_queries = num_proposals
    if "roi_head" not in config:
        return
    if num_proposals is not None:
        _set_proposals(config, num_proposals)
    stages = (
        config.train_cfg.rcnn
        if isinstance(config.train_cfg.rcnn, list)
        else [config.train_cfg.rcnn]
    )
    for stage in stages:
        if num_rois is not None:
            stage.sampler.num = num_rois
        if mask_size is not None:
            stage.mask_size = mask_size
    if mask_size is not None and config.roi_head.get("mask_roi_extractor"):
        config.roi_head.mask_roi_extractor.roi_layer.output_size = mask_size // 2


def _set_proposals(config: Any, num_proposals: int) -> None:
    if "num_proposals" in config.rpn_head:  # learnt, as in Sparse R-CNN
        config.rpn_head.num_proposals = num_proposals
        return
    for stage in (config.train_cfg.rpn_proposal, config.test_cfg.rpn):
        stage.update(nms_pre=2 * num_proposals, max_per_img=num_proposals)


def _cap_detections(config: Any, num_classes: int) -> None:
    """Cap the detections of a query detector at its number of (query, class) pairs."""
    if "num_proposals" in config.get("rpn_head", {}):
        rcnn = config.test_cfg.rcnn
        rcnn.max_per_img = min(rcnn.max_per_img, config.rpn_head.num_proposals * num_classes)
    if "num_queries" not in config or "max_per_img" not in config.get("test_cfg", {}):
        return
    per_class = config.bbox_head.get("loss_cls", {}).get("use_sigmoid", False)
    most = config.num_queries * (num_classes if per_class else 1)
    config.test_cfg.max_per_img = min(config.test_cfg.max_per_img, most)


def _scale_anchors(head: Any, scale: float) -> None:
    generator = head.get("anchor_generator", {})
    for key, value in (("scales", [scale]), ("octave_base_scale", scale)):
        if key in generator:
            generator[key] = value
            return
    raise ValueError(f"head.anchor_scale={scale} needs a detector with anchors; leave it null")


def _set_group_norm(config: Any) -> None:
    """Set GroupNorm in the neck and every convolutional head."""
    group_norm = {"type": "GN", "num_groups": 32, "requires_grad": True}
    if _first_neck(config).type == "FPN":
        _first_neck(config).norm_cfg = group_norm
    roi_head = config.get("roi_head", {})
    for name in ("bbox_head", "mask_head"):
        heads = roi_head.get(name) or ()
        for head in heads if isinstance(heads, list) else [heads] if heads else []:
            if head.type.endswith("MaskHead") or "norm_cfg" in head:
                head.norm_cfg = group_norm
    if "anchor_generator" in config.get("bbox_head", {}):
        config.bbox_head.norm_cfg = group_norm
