"""Every backbone as a model of timm: ``import backbones.timm_models``, then timm's own functions.

    timm.create_model("swin_t_afbo", num_classes=10)
    timm.create_model("swin_t_afbo", features_only=True, out_indices=(1, 3))

timm knows a backbone by its name. Where timm has a model of that name itself, timm's stays and ours
is ``mixerlab_<name>`` (``mixerlab_poolformer_s12``); ``timm_name`` tells. The registration happens
once, at import; call ``register`` again after registering further mixers.

Weights: ``pretrained=True, pretrained_cfg_overlay={"file": path}`` takes whatever
``create_backbone(pretrained=path)`` does, also weights of the plain host around a new mixer, and
refuses any other difference by its keys. timm reads files with ``weights_only``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._pretrained import PretrainedCfg
from torch import Tensor, nn

from backbones import Backbone, create_backbone, list_backbones
from backbones.checkpoints.adoption import CLASSIFIER, adopt, convert
from backbones.checkpoints.opening import in_memory
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone

PREFIX = "mixerlab_"
SOURCES = ("file", "url", "hf_hub_id", "state_dict")
Indices = int | Sequence[int] | None


class TimmModel(nn.Module):
    """A backbone and its classifier behind the methods that timm's tools call.

    State-dict keys are those of the tasks' linear classifier: ``backbone.*``, ``classifier.*``.
    The norm and the pooling are the host's own and belong to ``forward_features``.

    Args:
        name: Of the backbone, ours.
        num_classes: Width of the logits K; 0 gives the embedding instead.
        in_chans: Only 3.
        global_pool: None for the host's own; "" (with ``num_classes=0``) gives the last map.
        drop_rate: Dropout before the classifier.
        backbone: It, where it is built already; else it is built by its name and options.
        **options: Of ``create_backbone``. With ``dense=True`` there are maps only.

    Attributes:
        feature_info: One dictionary per map, as timm has it.

    Raises:
        ValueError: An option that the backbone does not have, or a combination that cannot be.
    """

    def __init__(
        self,
        name: str,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str | None = None,
        drop_rate: float = 0.0,
        backbone: Backbone | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if in_chans != 3:
            raise ValueError(f"{name} takes images of 3 channels, got in_chans={in_chans}")
        self.backbone = create_backbone(name, **options) if backbone is None else backbone
        self.dense, self.in_chans = self.backbone.dense, in_chans
        self.num_features = self.head_hidden_size = self.backbone.num_features
        self.feature_info = [
            {"num_chs": info.channels, "reduction": info.stride, "module": f"backbone.{index}"}
            for index, info in enumerate(self.backbone.feature_info)
        ]
        self.drop_rate = drop_rate
        self.pretrained_cfg: dict[str, Any] = {}  # timm fills it in
        self.reset_classifier(0 if self.dense else num_classes, global_pool)

    def get_classifier(self) -> nn.Module:
        """The classifier, or an identity without classes."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Make a new classifier.

        Raises:
            ValueError: Another pooling than the host's, or classes without pooling.
        """
        if global_pool not in (None, "") or (global_pool == "" and num_classes):
            raise ValueError(
                f"{self.backbone.name} has its own pooling, got global_pool={global_pool!r} with "
                f"num_classes={num_classes}; leave global_pool out, or pass global_pool='' with "
                "num_classes=0 for the last map"
            )
        if self.dense and num_classes:
            raise ValueError(
                f"{self.backbone.name} was built with dense=True and classifies nothing; "
                "build it with dense=False"
            )
        self.num_classes = num_classes
        self.global_pool = "" if self.dense else global_pool
        self.classifier: nn.Module = nn.Identity()
        if num_classes:
            self.classifier = self.backbone.classifier(num_classes, self.drop_rate)

    def forward_features(self, x: Tensor) -> Any:
        """(B, 3, H, W) -> the embedding (B, num_features); the last map if ``global_pool=''``.

        With classes it is what the host's classifier reads, which is more than that for LVT.
        """
        if self.global_pool == "":
            return self.backbone(x)[-1]
        return self.backbone.features(x) if self.num_classes else self.backbone.embed(x)

    def forward_head(self, x: Any, pre_logits: bool = False) -> Any:
        """What ``forward_features`` gives -> logits (B, K), or what they are made from."""
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor) -> Any:
        """(B, 3, H, W) -> logits (B, K); without classes what ``forward_features`` gives."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: Indices = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The backbone's maps, for ``forward_head`` also what ``forward_features`` gives.

        Args:
            x: (B, 3, H, W).
            indices: Of the maps, or the number of last ones; all by default.
            norm: The maps are what the backbone gives; True is refused unless ``dense=True``, which
                has a norm per map.
            stop_early: No map can be had without the ones before it; ignored as in other models of
                timm that cannot stop.
            output_fmt: Only "NCHW".
            intermediates_only: Leave out the features, which cost another pass here.

        Returns:
            Features and the list of maps, or only this list.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"maps are NCHW, got output_fmt={output_fmt!r}")
        if norm and not self.dense:
            raise ValueError(
                f"{self.backbone.name} has one norm per map with dense=True only; pass norm=False"
            )
        take, _ = feature_take_indices(len(self.feature_info), _listed(indices))
        maps = self.backbone(x)
        intermediates = [maps[index] for index in take]
        return intermediates if intermediates_only else (self.forward_features(x), intermediates)

    def prune_intermediate_layers(
        self, indices: Indices = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Leave out what the maps do not need: classifier and, where it is apart, the last norm."""
        take, _ = feature_take_indices(len(self.feature_info), _listed(indices))
        if prune_head:
            self.reset_classifier(0, "")
        if prune_norm and isinstance(self.backbone, HierarchicalBackbone) and not self.dense:
            for key in self.backbone.classification_keys:
                part = getattr(self.backbone, key.rstrip("."), None)
                if part is not None:  # a module, or LVT's class token
                    left = nn.Identity() if isinstance(part, nn.Module) else None
                    setattr(self.backbone, key.rstrip("."), left)
        return list(take)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Layer of a parameter for timm's layer decay: stem, each block, then the classifier."""

        def layer(name: str) -> int:
            if not name.startswith("backbone."):
                return self.backbone.num_layers - 1
            return self.backbone.layer_id(name.removeprefix("backbone."))

        return layer

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute every block again in the backward pass instead of keeping what it computes."""
        self.backbone.set_grad_checkpointing(enable)

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def no_weight_decay(self) -> set[str]:
        """Parameters that the host's authors train without weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay}


def timm_name(name: str) -> str:
    """What timm calls a backbone: its name, with ``mixerlab_`` where timm has another of it."""
    return name if _is_free(name) else PREFIX + name


def register() -> list[str]:
    """Register every backbone that timm does not have yet, and return their names in timm."""
    module, added = sys.modules[__name__], []
    for name in list_backbones():
        entry = timm_name(name)
        if not timm.is_model(entry):
            default_cfgs.update(generate_default_cfgs({entry: _config()}))
            setattr(module, entry, _entry_point(entry, name))
            register_model(getattr(module, entry))
            added.append(entry)
    return added


def around(backbone: Backbone, options: Mapping[str, Any]) -> TimmModel:
    """The model of a backbone that is built already, as ``timm.create_model`` describes it.

    Args:
        backbone: Becomes part of the model.
        options: Those of ``TimmModel`` and ``create_backbone`` that say how to build it anew.
    """
    given = {key: value for key, value in options.items() if value is not None}
    kind = partial(TimmModel, backbone.name, backbone=backbone)
    model: TimmModel = build_model_with_cfg(kind, timm_name(backbone.name), False, **given)
    return model


def _is_free(name: str) -> bool:
    """Whether timm has no model of this name but ours."""
    return not timm.is_model(name) or timm.model_entrypoint(name).__module__ == __name__


def _config() -> dict[str, Any]:
    """How timm describes the input: what evaluation does here (PaperAugmentation)."""
    return {"crop_pct": 0.9, "interpolation": "bicubic", "classifier": "classifier"}


def _entry_point(entry: str, name: str) -> Callable[..., nn.Module]:
    """The function that timm calls by a name."""

    def build(pretrained: bool = False, **options: Any) -> nn.Module:
        if pretrained:
            _check_source(entry, options)
        return build_model_with_cfg(
            partial(TimmModel, name),
            entry,
            pretrained,
            pretrained_filter_fn=_adapt,
            feature_cfg={"feature_cls": "getter", "out_indices": None},
            **options,
        )

    build.__name__ = build.__qualname__ = entry
    build.__doc__ = f"{name} with a classifier; options of ``TimmModel``."
    return build


def _check_source(entry: str, options: dict[str, Any]) -> None:
    """Refuse ``pretrained=True`` that does not say which weights."""
    config = options.get("pretrained_cfg")
    given = dict(vars(config) if isinstance(config, PretrainedCfg) else {})
    if isinstance(config, dict):
        given |= config
    given |= options.get("pretrained_cfg_overlay") or {}
    if not any(given.get(key) for key in SOURCES):
        raise ValueError(
            f"nobody publishes weights of {entry} for timm; pass "
            "pretrained_cfg_overlay={'file': <checkpoint>}, or pretrained=False"
        )


def _adapt(state_dict: dict[str, Tensor], model: TimmModel) -> dict[str, Tensor]:
    """The weights of a file as those of a model, new mixers at their initialisation.

    Raises:
        ValueError: Weights of another model; the keys are listed.
    """
    backbone, source = model.backbone, str(model.pretrained_cfg.get("file") or "the checkpoint")
    tensors = {key: value for key, value in state_dict.items() if isinstance(value, Tensor)}
    converted = convert(in_memory(tensors, source), backbone)
    adopt(backbone, converted)
    classifier = {}
    # Of another number of classes timm itself leaves out one layer only, and LVT's has two.
    if model.num_classes == model.pretrained_cfg.get("num_classes"):
        classifier = {k: v for k, v in converted.tensors.items() if k.startswith(CLASSIFIER)}
    return {f"backbone.{key}": value for key, value in backbone.state_dict().items()} | classifier


def _listed(indices: Indices) -> Any:
    return indices if indices is None or isinstance(indices, int) else list(indices)


default_cfgs: dict[str, Any] = {}
register()
