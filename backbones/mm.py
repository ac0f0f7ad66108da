"""Every registered backbone in MMDetection, MMSegmentation, MMPretrain and whatever has mmengine.

    custom_imports = dict(imports=["backbones.mm"])
    model = dict(backbone=dict(type="swin_t_afbo", out_indices=(0, 1, 2, 3), frozen_stages=1,
                               init_cfg=dict(type="Pretrained", checkpoint="swin_t_afbo.pth")))

Importing this module registers the names with mmengine's root registry, of which those of the
toolkits are children: they resolve in every scope, whatever is imported first.

The layer-decay constructors of MMDetection and MMSegmentation know a few networks by the names of
their classes and refuse all others; they are extended here so that one of our backbones is asked
for its own ``layer_id``. MMPretrain's asks every backbone by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from mmengine import fileio
from mmengine.logging import print_log
from mmengine.model import BaseModule, PretrainedInit
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from torch import Tensor

from backbones import create_backbone, list_backbones
from backbones.base import Backbone
from backbones.checkpoints.adoption import LoadReport, adopt
from backbones.checkpoints.earlier_forms import take_earlier_forms
from backbones.checkpoints.opening import open_checkpoint
from backbones.options.values import check_value
from backbones.parameters.layer_decay import layer_decay_groups
from backbones.replace import share_state

OutType = Literal["featmap", "embedding"]
LAYER_DECAY = ("LearningRateDecayOptimizerConstructor", "LayerDecayOptimizerConstructor")


class ToolkitBackbone(BaseModule):  # type: ignore[misc]
    """Mixin that adds a toolkit's interface to the class of a backbone.

    As a mixin, it keeps our parameter names behind ``backbone.`` in a toolkit's checkpoints, so
    ``create_backbone`` loads them.
    """

    out_indices: tuple[int, ...]
    out_type: OutType
    init_cfg: Any

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, H, W) -> the maps (B, C_i, h_i, w_i) of ``out_indices``, or the embedding."""
        if self.out_type == "embedding":
            return (self._backbone.embed(images),)
        maps = super().forward(images)
        return tuple(maps[index] for index in self.out_indices)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made when a backbone is built: another process makes it again.
        return _bare, (type(self).__bases__[1],), self.__dict__

    @property
    def _backbone(self) -> Backbone:
        return self

    def freeze_unread(self) -> None:
        """Stop the gradients of what no output reads, as DDP waits for all."""
        if self.out_type != "featmap":
            return
        ids, last = self._backbone.layer_ids, max(self.out_indices)
        # What merges after the last map that is read is not read either.
        order = dataclasses.replace(ids, merges_end_stages=False) if ids.merges_end_stages else ids
        unread = [key for i, key in enumerate(self._backbone.map_keys) if i not in self.out_indices]
        of_maps = len(ids.depths) == len(self._backbone.feature_info)
        for name, parameter in self.named_parameters():
            behind = of_maps and last + 1 < order.stage(name) <= len(ids.depths)
            if behind or name.startswith(tuple(unread)):
                parameter.requires_grad_(False)

    def init_weights(self) -> None:
        """Initialise as ``init_cfg`` says; its weights have to fit, the report goes to the log.

        Raises:
            ValueError: Weights of another model; the keys that differ are listed.
        """
        entries = self.init_cfg
        configs = entries if isinstance(entries, Sequence) else [entries] if entries else []
        again, self.init_cfg = self.is_init, [c for c in configs if not _is_pretrained(c)] or None
        super().init_weights()
        self.init_cfg = entries
        for config in configs:
            if _is_pretrained(config) and not again:
                report = self.load_weights(config["checkpoint"], config.get("prefix"))
                print_log(str(report), logger="current")

    def load_weights(self, checkpoint: str, prefix: str | None = None) -> LoadReport:
        """Load a file of ours, timm's, the authors' or a toolkit's; no code in it is ever run.

        Args:
            checkpoint: A path, or an address that a file client of mmengine reads (https, s3, ...).
            prefix: Takes the keys behind it only; by default ``backbone.`` where there is one.

        Raises:
            ValueError: No such file, or weights of another model.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(checkpoint)
            if "://" in checkpoint:
                path = Path(folder) / checkpoint.rpartition("/")[2]
                try:
                    path.write_bytes(fileio.get(checkpoint))
                except KeyError:  # mmengine lacks a client for it
                    raise ValueError(
                        f"init_cfg.checkpoint={checkpoint} has an unsupported address; download it "
                        "and pass its path, or pass one that begins with http:// or https://"
                    ) from None
            opened = open_checkpoint(path)
            tensors = opened.state_dict if prefix is None else opened.tensors
        if prefix is not None:
            start = f"{prefix.removesuffix('.')}."
            inside = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
            if not inside:
                tops = sorted({key.partition(".")[0] for key in tensors})
                raise ValueError(
                    f"{checkpoint} has no keys behind init_cfg.prefix={prefix!r}; it has "
                    f"{', '.join(tops[:8])}"
                )
            tensors = inside
        take_earlier_forms(self._backbone, tensors)
        return adopt(self._backbone, dataclasses.replace(opened, path=checkpoint, weights=tensors))

    def get_layer_depth(self, param_name: str, prefix: str = "") -> tuple[int, int]:
        """Layer of a parameter and number of layers, as MMPretrain's layer decay asks for them."""
        num_layers = self._backbone.num_layers
        if not param_name.startswith(prefix):
            return num_layers - 1, num_layers
        return self._backbone.layer_id(param_name.removeprefix(prefix)), num_layers


def build_toolkit_backbone(
    name: str,
    *,
    out_indices: Sequence[int] | None = None,
    out_type: OutType = "featmap",
    init_cfg: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> Backbone:
    """Build a backbone that behaves as those of the toolkits do.

    Args:
        name: Registered name.
        out_indices: Maps to return; all by default.
        out_type: "featmap", or "embedding" for MMPretrain's linear heads without a neck: one
            vector (B, num_features), the host's own norm and pooling.
        init_cfg: mmengine's; of type "Pretrained" it takes every file that ``create_backbone``
            takes.
        **options: Of ``create_backbone``, ``frozen_stages`` and ``norm_eval`` among them.

    Raises:
        ValueError: A value out of range, or an option that belongs elsewhere.
    """
    for option, instead in (("pretrained", "init_cfg"), ("dense", "out_type")):
        if option in options:
            raise ValueError(f"backbone.{option} is not for a toolkit's config; use {instead}")
    check_value("backbone.out_type", out_type, OutType)
    dense = out_type == "featmap"
    if name.partition("_")[0] == "timm":  # earlier exports lack the word
        options = {"partial": True, **options}
    built = create_backbone(name, dense=dense, **{k: _plain_value(v) for k, v in options.items()})
    kind: Any = type(built)
    backbone: Any = share_state(built, _toolkit_class(kind))
    num_maps = len(backbone.feature_info)
    indices = tuple(range(num_maps)) if out_indices is None else tuple(out_indices)
    if not indices or not set(indices) <= set(range(num_maps)):
        raise ValueError(f"backbone.out_indices={indices}: {name} has maps 0 to {num_maps - 1}")
    backbone.out_indices, backbone.out_type = indices, out_type
    backbone.init_cfg, backbone.is_init = _plain_value(init_cfg), False
    backbone.register_load_state_dict_pre_hook(_take_earlier_forms)
    backbone.freeze_unread()
    _extend_layer_decay()
    return cast("Backbone", backbone)


def _take_earlier_forms(
    backbone: Any, state_dict: dict[str, Tensor], prefix: str, *rest: Any
) -> None:
    """Take the forms of mixers that a toolkit's checkpoint has, before it is loaded."""
    inside = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
    take_earlier_forms(backbone, inside)


@functools.cache
def _toolkit_class(host: Any) -> type[Backbone]:
    attributes = {"__module__": __name__, "__doc__": host.__doc__}
    return type(f"Toolkit{host.__name__}", (ToolkitBackbone, host), attributes)


def _bare(host: Any) -> Backbone:
    kind = _toolkit_class(host)
    return kind.__new__(kind)


def _plain_value(value: Any) -> Any:
    """Values of mmengine's configs as what they are made of."""
    if isinstance(value, Mapping):
        return {key: _plain_value(item) for key, item in value.items()}
    return [_plain_value(item) for item in value] if isinstance(value, list) else value


def _is_pretrained(config: Mapping[str, Any]) -> bool:
    kind = config["type"]  # perhaps with a scope, as in "mmengine.Pretrained"
    return kind is PretrainedInit or str(kind).rpartition(".")[2] == "Pretrained"


def _extend_layer_decay() -> None:
    """Let the constructors of the toolkits that are imported by now ask our backbones."""
    for registry in list(OPTIM_WRAPPER_CONSTRUCTORS.children.values()):  # imports add to them
        registry.import_from_location()
        for name in LAYER_DECAY:
            constructor = registry.module_dict.get(name)
            if constructor is not None and not hasattr(constructor.add_params, "asks_backbone"):
                # In the class itself, which a config may name instead of its place in a registry.
                constructor.add_params = _asking(constructor.add_params)


def _asking(add_params: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add_params)
    def add(self: Any, params: list[dict[str, Any]], module: Any, **kwargs: Any) -> None:
        if isinstance(getattr(module, "backbone", None), ToolkitBackbone):
            rate, decay = self.base_lr, self.base_wd or 0.0
            params += layer_decay_groups(module, self.paramwise_cfg, rate, decay)
        else:
            add_params(self, params, module, **kwargs)

    cast("Any", add).asks_backbone = True
    return add


def register(names: Iterable[str]) -> None:
    """Make names known to mmengine.

    Raises:
        ValueError: A name is taken by something other than our backbones.
    """
    for name in names:
        existing = MODELS.module_dict.get(name)
        if existing is not None and not hasattr(existing, "backbone_name"):
            raise ValueError(
                f"mmengine's registry has a {name} from {existing.__module__} already; import "
                "backbones.mm without it"
            )
        build: Any = functools.partial(build_toolkit_backbone, name)
        build.backbone_name = build.__name__ = name
        MODELS.register_module(name, force=True, module=build)


register(list_backbones(modality="image"))
