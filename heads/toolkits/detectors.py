"""MMDetection's detectors around our backbones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from backbones import Backbone
from backbones.options import remembering
from heads.toolkits.toolkit import (
    ToolkitModel,
    base_config,
    build_model,
    check_least,
    check_pyramid,
    freeze_unread,
    override,
    replace_batch_norms,
    set_classes,
)

TARGETS = ("build_detector",)

# How MMDetection's own configs merge the detections of several views (configs/retinanet).
MERGE = {"nms": {"type": "nms", "iou_threshold": 0.5}, "max_per_img": 100}
# Names that need no ``base``, with the model configs that MMDetection ships for them.
DETECTORS = {
    "mask_rcnn": "mask-rcnn_r50_fpn",
    "cascade_mask_rcnn": "cascade-mask-rcnn_r50_fpn",
    "retinanet": "retinanet_r50_fpn",
}


class Detector(ToolkitModel):
    """A detector of MMDetection; the boxes of several views are merged by its DetTTAModel."""

    def merged(self, views: Iterable[Mapping[str, Any]]) -> list[Any]:
        """The boxes of all views, turned back, after a suppression of doubles for each class."""
        from mmdet.models.test_time_augs import DetTTAModel
        from mmengine import ConfigDict

        self.check_merges()
        found = [self.predict_once(view) for view in views]
        merger = DetTTAModel(tta_cfg=ConfigDict(MERGE), module=self.model)
        merged: list[Any] = merger.merge_preds([list(views) for views in zip(*found, strict=True)])
        return merged

    def loss(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """As in the base class; see ``_enough_places`` for errors."""
        with self._enough_places():
            return super().loss(batch)

    def predict_once(self, batch: Mapping[str, Any]) -> list[Any]:
        """As in the base class; see ``_enough_places`` for errors."""
        with self._enough_places():
            return super().predict_once(batch)

    def network_size(self, image: Tensor) -> tuple[int, int]:
        """Return the (H, W) that MMDetection pads an image to; heads read each image's own size."""
        divisor = getattr(self.model.data_preprocessor, "pad_size_divisor", 1)
        height, width = (-(-side // divisor) * divisor for side in image.shape[-2:])
        return height, width

    @contextlib.contextmanager
    def _enough_places(self) -> Iterator[None]:
        """Say in words that a DETR has more queries than its maps have places to begin at."""
        try:
            yield
        except RuntimeError as error:
            queries = getattr(self.model, "num_queries", None)
            if queries is None or "selected index k out of range" not in str(error):
                raise
            raise ValueError(
                f"the images are so small that their maps have fewer places than the {queries} "
                "queries of this detector; pass a lower head.num_proposals, or larger images"
            ) from error

    def check_merges(self) -> None:
        """Refuse several views where masks are predicted, which MMDetection does not merge.

        Raises:
            ValueError: The detector predicts masks.
        """
        if getattr(self.model, "with_mask", False):
            raise ValueError(
                "MMDetection merges the boxes of several views, not their masks: leave out "
                "data.test_scales and data.test_flip, or pass a detector without masks, such as "
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
    config's value, and a detector of one stage has no RoIs, proposals or masks to change. The
    config says which maps of the backbone the neck gets.

    Args:
        backbone: Built with ``dense=True``.
        num_classes: Object classes, background not counted.
        name: One of ``DETECTORS`` or, with ``base``, any.
        base: The config of MMDetection's that it begins as; see ``base_config``.
        model: What differs from it; see ``base_config``.
        num_rois: RoIs per image that train the second stage (512).
        num_proposals: Proposals per image that the second stage sees (1000), or queries of a DETR.
        mask_size: Side of the predicted masks (28); their RoIs are half of it.
        anchor_scale: Side of the finest anchors over its stride (8 in two stages, 4 in RetinaNet).
        group_norm: GroupNorm in neck and convolutional heads, as in MMDetection's configs for
            training from random weights.
        options: Further values of MMDetection's model config; see ``override``.

    Raises:
        ValueError: Unknown name or option, MMDetection absent, or a backbone without four maps.
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
        _normalise(config)
    # SyncBN runs on CUDA alone; trainer.sync_batchnorm=true turns BatchNorm back into it.
    replace_batch_norms(config, {"type": "BN", "requires_grad": True})
    override(config, options or {})
    detector: Any = build_model("mmdet", config, backbone, typed=bool(options or model))
    if len(maps) < len(backbone.feature_info):
        detector.neck.register_forward_pre_hook(functools.partial(_choose, maps))
    _keep_operators_in_float(detector)
    return Detector(detector, config, maps)


def base_detector(
    backbone: Backbone,
    name: str,
    base: str | None = None,
    model: Mapping[str, Any] | None = None,
) -> tuple[Any, tuple[int, ...]]:
    """MMDetection's own config of a detector, fitted to a backbone, and the maps its neck gets.

    The backbone itself is not in the config.

    Raises:
        ValueError: Unknown name, MMDetection absent, a backbone without four maps, or a detector
            that reads no pyramid.
    """
    if base is None and name not in DETECTORS:
        raise ValueError(
            f"there is no detector called {name!r}; known: {', '.join(DETECTORS)}, and any config "
            "of MMDetection's as head.base"
        )
    channels = check_pyramid(backbone, name)
    config = base_config("mmdet", base or DETECTORS[name], model)
    maps = tuple(config.get("backbone", {}).get("out_indices", range(len(channels))))
    if not config.get("neck") or not maps or not set(maps) <= set(range(len(channels))):
        raise ValueError(
            f"{base or name} of MMDetection reads maps {maps} without or beside a neck; a detector "
            "here has a neck over maps 0 to 3 of strides 4 to 32: name such a config as head.base"
        )
    _first_neck(config).in_channels = [channels[index] for index in maps]
    if "data_preprocessor" in config:
        config.data_preprocessor.pad_size_divisor = backbone.size_divisor
    return config, maps


def _first_neck(config: Any) -> Any:
    return config.neck[0] if isinstance(config.neck, list) else config.neck


def _choose(
    maps: tuple[int, ...], neck: nn.Module, inputs: tuple[Sequence[Tensor]]
) -> tuple[tuple[Tensor, ...]]:
    """Give a neck those of the backbone's maps that its config asks for."""
    return (tuple(inputs[0][index] for index in maps),)


def _keep_operators_in_float(model: nn.Module) -> None:
    """Let a detector train in bfloat16, which mmcv's RoIAlign and NMS do not take.

    Features enter the RoI extractors in single precision, and scores and boxes leave the heads
    in it; all layers with weights keep the precision that the run asks for. Where that is the
    weights' own, pooled features turn back to it.
    """
    from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
    from mmdet.models.roi_heads.bbox_heads import BBoxHead
    from mmdet.models.roi_heads.mask_heads import FCNMaskHead
    from mmdet.models.roi_heads.roi_extractors import BaseRoIExtractor

    for module in model.modules():
        if isinstance(module, BaseRoIExtractor):
            module.register_forward_pre_hook(lambda _, inputs: _float(inputs))
        if isinstance(module, BBoxHead | FCNMaskHead):
            module.register_forward_pre_hook(_like_weights)
        if isinstance(module, BaseDenseHead | BBoxHead | FCNMaskHead):
            module.register_forward_hook(lambda *call: _float(call[-1]))


def _like_weights(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = next(head.parameters()).dtype
    return tuple(item.to(dtype) for item in inputs)


def _float(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_float(item) for item in value)
    return value.float() if isinstance(value, Tensor) else value


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
        _propose(config, num_proposals)
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


def _propose(config: Any, num_proposals: int) -> None:
    if "num_proposals" in config.rpn_head:  # learnt, as in Sparse R-CNN
        config.rpn_head.num_proposals = num_proposals
        return
    for stage in (config.train_cfg.rpn_proposal, config.test_cfg.rpn):
        stage.update(nms_pre=2 * num_proposals, max_per_img=num_proposals)


def _cap_detections(config: Any, num_classes: int) -> None:
    """Let a detector of queries keep no more detections than it has pairs of query and class."""
    if "num_proposals" in config.get("rpn_head", {}):
        kept = config.test_cfg.rcnn
        kept.max_per_img = min(kept.max_per_img, config.rpn_head.num_proposals * num_classes)
    if "num_queries" not in config or "max_per_img" not in config.get("test_cfg", {}):
        return
    of_pairs = config.bbox_head.get("loss_cls", {}).get("use_sigmoid", False)
    most = config.num_queries * (num_classes if of_pairs else 1)
    config.test_cfg.max_per_img = min(config.test_cfg.max_per_img, most)


def _scale_anchors(head: Any, scale: float) -> None:
    generator = head.get("anchor_generator", {})
    for key, value in (("scales", [scale]), ("octave_base_scale", scale)):
        if key in generator:
            generator[key] = value
            return
    raise ValueError(f"head.anchor_scale={scale} is for detectors with anchors; leave it null")


def _normalise(config: Any) -> None:
    """GroupNorm in the neck and in every convolutional head, in place of what norms there are."""
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
