"""Boxes of a detector and logits of a segmentor in float32 beside half precision.

The toolkits compute them in the precision of autocast, so this is our deviation. bfloat16 has steps
of 2 pixels beyond 256 and of 8 beyond 1,024; its rounded logits make classes equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.layers.precision import at_least_float32, without_autocast
from backbones.replace import replace, share_state

# Parts of MMDetection's heads and decoders that predict boxes or move reference points.
REGRESSIONS = {"reg_branches", "fc_reg", "reg_ffn", "ref_point_head", "reference_points_fc"}
# Last layers of MMSegmentation's heads.
CLASSIFIERS = ("conv_seg", "fc_seg")


class Float32Linear(nn.Linear):
    """Linear layer that computes in float32 whatever the precision of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b: (..., C) -> (..., O)."""
        bias = None if self.bias is None else self.bias.float()
        with without_autocast(x.device):
            return F.linear(x.float(), self.weight.float(), bias)


class Float32Integral(nn.Module):
    """Mean of MMDetection's distributions over 0 to n (``Integral``) in float32."""

    reg_max: int
    project: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the means of the softmax: (N, 4 (n + 1)) -> (N, 4)."""
        shares = x.float().reshape(-1, self.reg_max + 1).softmax(1)
        with without_autocast(x.device):
            return F.linear(shares, self.project.float()).reshape(-1, 4)


def compute_boxes_in_float32(model: nn.Module) -> None:
    """Compute in float32 what a detector of any precision makes of its features.

    Features enter RoI extractors, outputs leave prediction layers and heads, and DETRs move their
    reference points in float32. Other layers with weights keep the run's precision. If the weights
    have another type, pooled features are cast back to it.
    """
    _replace_regressions(model)
    _cast_between_parts(model)


def _replace_regressions(model: nn.Module) -> None:
    """Put layers in float32 in the places of those that compute boxes, under the same names."""
    from mmdet.models.dense_heads.gfl_head import Integral
    from mmdet.models.layers import CdnQueryGenerator

    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Linear) and REGRESSIONS & set(name.split(".")):
            replace(model, name, share_state(module, Float32Linear))
        elif isinstance(module, CdnQueryGenerator):  # it writes them into a float32 tensor
            module.label_embedding.register_forward_hook(lambda *call: call[-1].float())
        elif isinstance(module, Integral):
            replace(model, name, share_state(module, Float32Integral))


def _cast_between_parts(model: nn.Module) -> None:
    from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
    from mmdet.models.dense_heads.detr_head import DETRHead
    from mmdet.models.roi_heads.bbox_heads import BBoxHead
    from mmdet.models.roi_heads.mask_heads import FCNMaskHead
    from mmdet.models.roi_heads.roi_extractors import BaseRoIExtractor

    for name, module in model.named_modules():
        if isinstance(module, BaseRoIExtractor):
            module.register_forward_pre_hook(lambda _, inputs: _to_float(inputs))
        if isinstance(module, BBoxHead | FCNMaskHead):
            module.register_forward_pre_hook(_cast_to_weights)
        if isinstance(module, nn.LayerNorm) and not name.startswith("backbone."):
            module.register_forward_pre_hook(_cast_to_half)
        if isinstance(module, BaseDenseHead | BBoxHead | DETRHead | FCNMaskHead):
            module.register_forward_hook(lambda *call: _to_float(call[-1]))
        if isinstance(module, BaseDenseHead):
            for layer in _prediction_layers(module):
                layer.register_forward_hook(lambda *call: at_least_float32(call[-1]))


def compute_logits_in_float32(model: nn.Module) -> None:
    """Return a segmentor's logits in float32, which resizes them and sums windows and masks."""
    windows: Any = model.backbone
    windows.register_forward_pre_hook(_cast_to_weights)
    for name, module in model.named_modules():
        if name.endswith(CLASSIFIERS):
            module.register_forward_hook(lambda *call: at_least_float32(call[-1]))
        if any(base.__name__ == "MaskFormerHead" for base in type(module).__mro__):
            module.register_forward_hook(
                lambda *call: tuple([tensor.float() for tensor in part] for part in call[-1])
            )
            module.predict = partial(_sum_masks, module)


def _sum_masks(
    head: nn.Module, maps: Sequence[Tensor], images: Sequence[Mapping[str, Any]], _: Any
) -> Tensor:
    """Return a MaskFormer's sum of masks by class as its ``predict``, without autocast."""
    from mmseg.structures import SegDataSample

    size = images[0].get("pad_shape", images[0]["img_shape"])
    samples = [SegDataSample(metainfo={**meta, "batch_input_shape": size}) for meta in images]
    classes, masks = head(maps, samples)
    with without_autocast(masks[-1].device):
        masks = F.interpolate(masks[-1], size=size, mode="bilinear").sigmoid()
        return torch.einsum("bqc,bqhw->bchw", classes[-1].softmax(-1)[..., :-1], masks)


def _prediction_layers(head: nn.Module) -> Iterator[nn.Module]:
    """Yield a dense head's convolutions outside of its blocks, whose outputs may enter exp."""
    from mmcv.cnn import ConvModule

    blocks = [part for part in head.modules() if isinstance(part, ConvModule)]
    inner = {id(conv) for block in blocks for conv in block.modules()}
    for layer in head.modules():
        if isinstance(layer, nn.Conv2d) and id(layer) not in inner:
            yield layer


def _cast_to_weights(head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(head.parameters()).dtype
    return tuple(item.to(dtype) if isinstance(item, Tensor) else item for item in inputs)


def _cast_to_half(norm: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast to weights of half precision, which CPUs do not normalise float32 with."""
    weight = next(norm.parameters(), None)
    is_half = weight is not None and weight.dtype.itemsize == 2
    return _cast_to_weights(norm, inputs) if is_half else inputs


def _to_float(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_to_float(item) for item in value)
    return value.float() if isinstance(value, Tensor) else value
