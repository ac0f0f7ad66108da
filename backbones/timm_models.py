"""All image backbones as timm models: ``import backbones.timm_models``, then use timm as usual.

    timm.create_model("swin_t_afbo", num_classes=10)
    timm.create_model("swin_t_afbo", features_only=True, out_indices=(1, 3))

timm uses the backbone's name. If timm has its own model of that name, ours is called
``mixerlab_<name>`` (``mixerlab_poolformer_s12``); ``timm_name`` returns it. Models are registered
at import; call ``register`` again after registering further mixers.

Weights: ``pretrained=True, pretrained_cfg_overlay={"file": path}`` loads the same files as
``create_backbone(pretrained=path)``, including weights of the plain host for a new mixer, and
lists the keys of any other difference. timm reads files with ``weights_only``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm import is_model, model_entrypoint
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models._pretrained import PretrainedCfg
from torch import Tensor, nn

from backbones import Backbone, create_backbone, list_backbones
from backbones.checkpoints.adoption import CLASSIFIER, adopt, convert
from backbones.checkpoints.earlier_forms import take_earlier_forms
from backbones.checkpoints.opening import in_memory
from backbones.hosts.scaffolds.hierarchical import HierarchicalBackbone
from backbones.parameters.decay import without_decay
from backbones.registry import host_modality, look_up

PREFIX = "mixerlab_"
SOURCES = ("file", "url", "hf_hub_id", "state_dict")
Indices = int | Sequence[int] | None


class TimmModel(nn.Module):
    """Backbone and classifier with the methods that timm's tools call.

    State-dict keys are those of the tasks' linear classifier: ``backbone.*``, ``classifier.*``.
    ``forward_features`` includes the host's own norm and pooling.

    Args:
        name: Our name of the backbone.
        num_classes: Number of classes K; 0 returns the embedding instead of logits.
        in_chans: Channels of the images, 1 to 12.
        global_pool: None for the host's own; "" (with ``num_classes=0``) returns the last map;
            another text is the host's option of that name.
        drop_rate: Dropout before the classifier.
        backbone: Built backbone; by default it is built from its name and options.
        **options: Options of ``create_backbone``. ``dense=True`` returns maps only.

    Attributes:
        feature_info: One dictionary per map, in timm's form.

    Raises:
        ValueError: Unknown option, or options that exclude each other.
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
        if backbone is None:
            if look_up(name)[0].name == "timm":  # earlier exports lack the word
                options = {"partial": True, **options}
            if global_pool:
                options = {"global_pool": global_pool, **options}
            backbone = create_backbone(name, in_chans=in_chans, **options)
        self.backbone = backbone
        self.dense, self.in_chans = self.backbone.dense, self.backbone.in_chans
        self.num_features = self.head_hidden_size = self.backbone.num_features
        self.feature_info = [
            {"num_chs": info.channels, "reduction": info.stride, "module": f"backbone.{index}"}
            for index, info in enumerate(self.backbone.feature_info)
        ]
        self.drop_rate = drop_rate
        self.pretrained_cfg: dict[str, Any] = {}  # timm fills it in
        self.reset_classifier(0 if self.dense else num_classes, global_pool)

    def get_classifier(self) -> nn.Module:
        """Return the classifier, an identity if there are 0 classes."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Build a new classifier.

        Raises:
            ValueError: Another pooling than the host's, or classes without pooling.
        """
        pooling = getattr(self.backbone, "global_pool", None)
        if global_pool not in (None, "", pooling) or (global_pool == "" and num_classes):
            raise ValueError(
                f"{self.backbone.name} has its own pooling, got global_pool={global_pool!r} with "
                f"num_classes={num_classes}; leave global_pool out, or pass global_pool='' with "
                "num_classes=0 for the last map"
            )
        if self.dense and num_classes:
            raise ValueError(
                f"{self.backbone.name} was built with dense=True, which excludes a classifier; "
                "build it with dense=False"
            )
        self.num_classes = num_classes
        self.global_pool = "" if self.dense else global_pool
        self.classifier: nn.Module = nn.Identity()
        if num_classes:
            self.classifier = self.backbone.classifier(num_classes, self.drop_rate)

    def forward_features(self, x: Tensor) -> Any:
        """Return the classifier's input, without classes the embedding (B, num_features).

        ``global_pool=''`` returns the last map. LVT's classifier reads more than the embedding.
        """
        if self.global_pool == "":
            return self.backbone(x)[-1]
        return self.backbone.features(x) if self.num_classes else self.backbone.embed(x)

    def forward_head(self, x: Any, pre_logits: bool = False) -> Any:
        """Return logits (B, K) of the features, or the features with ``pre_logits``."""
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor) -> Any:
        """Return logits (B, K) of images (B, 3, H, W), the features if there are 0 classes."""
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
        """Return the features and the backbone's maps.

        Args:
            x: (B, 3, H, W).
            indices: Indices of the maps, or the number of last ones; all by default.
            norm: True needs ``dense=True``, which has a norm per map.
            stop_early: Ignored, as in other models of timm that cannot stop.
            output_fmt: Only "NCHW".
            intermediates_only: Return maps only, which saves a second pass.

        Returns:
            Features and the list of maps, or only this list.
        """
        if output_fmt != "NCHW" or (norm and not self.dense):
            raise ValueError(
                f"{self.backbone.name} gives maps as output_fmt='NCHW', with norm=True if it was "
                f"built with dense=True; got output_fmt={output_fmt!r}, norm={norm}"
            )
        take, _ = feature_take_indices(len(self.feature_info), _as_list(indices))
        maps = self.backbone(x)
        intermediates = [maps[index] for index in take]
        return intermediates if intermediates_only else (self.forward_features(x), intermediates)

    def prune_intermediate_layers(
        self, indices: Indices = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove the classifier and, with ``prune_norm``, a last norm that no map reads."""
        take, _ = feature_take_indices(len(self.feature_info), _as_list(indices))
        if prune_head:
            self.reset_classifier(0, "")
        if prune_norm and isinstance(self.backbone, HierarchicalBackbone) and not self.dense:
            for key in self.backbone.classification_keys:
                part = getattr(self.backbone, key.rstrip("."), None)
                if part is not None:  # a module, or LVT's class token, a parameter
                    replacement = nn.Identity() if isinstance(part, nn.Module) else None
                    setattr(self.backbone, key.rstrip("."), replacement)
        return list(take)

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """Return the layer of a parameter for timm's layer decay: stem, blocks, classifier."""

        def layer(name: str) -> int:
            if not name.startswith("backbone."):
                return self.backbone.num_layers - 1
            return self.backbone.layer_id(name.removeprefix("backbone."))

        return layer

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass instead of keeping its activations."""
        self.backbone.set_grad_checkpointing(enable)

    @torch.jit.ignore  # type: ignore[untyped-decorator]
    def no_weight_decay(self) -> set[str]:
        """Return the parameters of several axes that are exempt from weight decay."""
        names = {name for name, parameter in self.named_parameters() if parameter.ndim > 1}
        return names & without_decay(self)


def timm_name(name: str) -> str:
    """Return timm's name of a backbone: its own, prefixed by ``mixerlab_`` if timm has another."""
    return name if _is_free(name) else PREFIX + name


def register() -> list[str]:
    """Register all image backbones that timm lacks, and return their names in timm."""
    module, names = sys.modules[__name__], []
    for name in list_backbones():
        entry = timm_name(name)
        if not is_model(entry) and host_modality(name) == "image":
            default_cfgs.update(generate_default_cfgs({entry: _config()}))
            setattr(module, entry, _entry_point(entry, name))
            register_model(getattr(module, entry))
            names.append(entry)
    return names


def around(backbone: Backbone, options: Mapping[str, Any]) -> TimmModel:
    """Return the timm model of a built backbone, described as by ``timm.create_model``.

    Args:
        backbone: Becomes part of the model.
        options: Options of ``TimmModel`` and ``create_backbone`` that build the same model.
    """
    typed_options = {key: value for key, value in options.items() if value is not None}
    kind = partial(TimmModel, backbone.name, backbone=backbone)
    model: TimmModel = build_model_with_cfg(kind, timm_name(backbone.name), False, **typed_options)
    return model


def _is_free(name: str) -> bool:
    """Return True if timm itself lacks a model of this name."""
    if name == "timm":  # would hide the library in this module
        return False
    return not is_model(name) or model_entrypoint(name).__module__ == __name__


def _config() -> dict[str, Any]:
    """Return timm's description of the input: that of our evaluation (PaperAugmentation)."""
    return {"crop_pct": 0.9, "interpolation": "bicubic", "classifier": "classifier"}


def _entry_point(entry: str, name: str) -> Callable[..., nn.Module]:
    """Return the function that timm registers under a name."""

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
    """Check that ``pretrained=True`` names its weights."""
    config = options.get("pretrained_cfg")
    source = dict(vars(config) if isinstance(config, PretrainedCfg) else {})
    if isinstance(config, dict):
        source |= config
    source |= options.get("pretrained_cfg_overlay") or {}
    if not any(source.get(key) for key in SOURCES):
        raise ValueError(
            f"no pretrained weights of {entry} exist for timm; pass "
            "pretrained_cfg_overlay={'file': <checkpoint>}, or pretrained=False"
        )


def _adapt(state_dict: dict[str, Tensor], model: TimmModel) -> dict[str, Tensor]:
    """Return a file's weights under a model's names; new mixers keep their initialisation.

    Raises:
        ValueError: Weights of another model; the message lists the keys.
    """
    backbone, source = model.backbone, str(model.pretrained_cfg.get("file") or "the checkpoint")
    tensors = {key: value for key, value in state_dict.items() if isinstance(value, Tensor)}
    checkpoint = in_memory(tensors, source)
    take_earlier_forms(backbone, checkpoint.state_dict)
    converted = convert(checkpoint, backbone)
    adopt(backbone, converted)
    classifier = {}
    # timm drops a classifier of another size as one layer, but LVT's has two.
    if model.num_classes == model.pretrained_cfg.get("num_classes"):
        classifier = {k: v for k, v in converted.tensors.items() if k.startswith(CLASSIFIER)}
    return {f"backbone.{key}": value for key, value in backbone.state_dict().items()} | classifier


def _as_list(indices: Indices) -> Any:
    return indices if indices is None or isinstance(indices, int) else list(indices)


default_cfgs: dict[str, Any] = {}
register()
