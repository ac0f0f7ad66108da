"""Any model of timm as a host, with mixers in its feed-forward networks and token mixers.

Its blocks keep timm's code. A mixer in a slot gets the map (B, h, w, C), whatever the layout of the
block. The maps are those of timm's feature interface. Where they lack strides 4, 8, 16 and 32,
dense prediction gets the simple pyramid of plain ViTs from the map next to stride 16.

Source: Wightman, "PyTorch Image Models", 2019, https://github.com/huggingface/pytorch-image-models.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.base import Backbone, FeatureInfo
from backbones.hosts.scaffolds.timm_source import create_pretrained, read_source
from backbones.hosts.timm_model.classifiers import convert_classifier
from backbones.hosts.timm_model.facts import Facts, Map, create, feature_info, find_facts, own_size
from backbones.hosts.timm_model.layer_groups import LayerGroups
from backbones.hosts.timm_model.layouts import Frame, PatchPositions, Permuted, Size, Windows
from backbones.hosts.timm_model.placed import Placed, without_windows
from backbones.hosts.timm_model.probing import ModuleCall
from backbones.hosts.timm_model.slots import Found, Kind, Slots, find_slots
from backbones.layers.classifier import Classifier
from backbones.layers.eager import is_recording
from backbones.layers.feature_pyramid import (
    PYRAMID_CHANNELS,
    PYRAMID_STRIDES,
    SimpleFeaturePyramid,
)
from backbones.layers.graph_sizes import ceil_div, crop, missing, same_size
from backbones.layers.input_channels import COLOURS, input_layers
from backbones.mixer import Mixer, class_name, no_prefix, takes_prefix
from backbones.registry import register_host
from backbones.replace import replace
from backbones.slots import HostConfig, MixerFactory, Slot, factory_at

logger = logging.getLogger(__name__)
MODEL = "vit_tiny_patch16_224"
PATCH_SIZE = 16
NETWORK = "network."
MOST_PADDING = 4  # padded places over places of a map, at most
# Their logits are not linear in pooled features: VOLO adds the maximum over the tokens.
WITHOUT_CLASSIFIER = ("VOLO",)
READ_PARTS = ("CrossVit", "EfficientViM", "EfficientViMDistilled")


class TimmBackbone(Backbone):
    """A model of timm, with or without mixers.

    Attributes:
        network: timm's model without classifier.
        model: Its name.
        facts: Facts on it.
        slots: Places for mixers, and why others keep their own module.
    """

    size_divisor = PYRAMID_STRIDES[-1]

    def __init__(
        self,
        network: nn.Module,
        model: str,
        facts: Facts,
        config: HostConfig,
        *,
        partial: bool = True,
    ) -> None:
        super().__init__()
        self.network: Any = network
        self.pretrained_cfg = read_source(network)
        self.model, self.facts, self.dense = model, facts, config.dense
        self.num_features = facts.num_features
        self.frame = Frame(facts.padded, facts.is_fixed)
        self.slots: Slots = find_slots(network, facts.calls, facts.padded, self.frame)
        _declare_layers(network, facts.calls, self.slots)
        prefixes = [slot.layout.prefix for slot in self.slots.places]
        self.num_prefix_tokens = max([facts.prefix, *prefixes])
        self.in_chans = config.in_chans
        if config.in_chans != COLOURS:
            self.input_keys = tuple(
                f"{name}.weight" for name in input_layers(self, config.in_chans)
            )
        self.pooling = _pooling(network)
        self._set_maps(config)
        self.had_prefix = "class_token" in facts.options
        self._fill("channel", config.channel_mixer, config, partial)
        self._fill("token", config.token_mixer, config, partial)
        exempt = {f"{NETWORK}{name}" for name in getattr(network, "no_weight_decay", set)()}
        self.no_weight_decay = frozenset(
            name
            for name, _ in self.named_parameters()
            if name in exempt or name.endswith(("pos_embed", "position_bias_table"))
        )

    def _dense_maps(self) -> tuple[Map, ...]:
        """Return timm's maps of strides 4, 8, 16 and 32, or else the one next to stride 16."""
        maps = self.facts.maps
        usual = tuple(map_ for map_ in maps if map_.stride in PYRAMID_STRIDES)
        if [map_.stride for map_ in usual] == list(PYRAMID_STRIDES):
            return usual
        return (min(maps, key=lambda map_: abs(map_.stride - PYRAMID_STRIDES[2])),)

    def _set_maps(self, config: HostConfig) -> None:
        dense_maps = self._dense_maps()
        has_pyramid = len(dense_maps) == len(PYRAMID_STRIDES)
        self.taken = dense_maps if config.dense or has_pyramid else self.facts.maps
        self.pyramid: SimpleFeaturePyramid | None = None
        if config.dense and not has_pyramid:
            self.pyramid = SimpleFeaturePyramid(self.taken[0].channels)
            self.feature_info = tuple(FeatureInfo(PYRAMID_CHANNELS, s) for s in PYRAMID_STRIDES)
            self.map_keys = tuple(f"pyramid.scales.{i}." for i in range(len(PYRAMID_STRIDES)))
        else:
            self.feature_info = tuple(
                FeatureInfo(map_.channels, map_.stride) for map_ in self.taken
            )
            self.size_divisor = self.feature_info[-1].stride
        self._indices = [map_.index for map_ in self.taken]
        if self.taken[-1].index == self.facts.num_maps - 1:  # from the end
            self._indices = [index - self.facts.num_maps for index in self._indices]
        network: Any = self.network if config.dense else copy.deepcopy(self.facts.network)
        keys = set(self.network.state_dict())
        indices = [map_.index for map_ in (self.taken if config.dense else self._dense_maps())]
        network.prune_intermediate_layers(indices, prune_norm=True, prune_head=True)
        left_out = keys - set(network.state_dict())
        self.classification_keys = tuple(f"{NETWORK}{name}" for name in sorted(left_out))

    def _fill(
        self, kind: Kind, factory: MixerFactory | None, config: HostConfig, partial: bool
    ) -> None:
        """Put mixers into the slots of a kind.

        Raises:
            ValueError: The network lacks them, has class tokens that the mixer refuses, or has
                slots for less than half of its modules and ``partial`` is false.
        """
        if factory is None:
            return
        present = {name for name, _ in self.network.named_modules()}
        places = [place for place in self.slots.of(kind) if place.name in present]
        noun = {"channel": "feed-forward network", "token": "token mixer"}[kind]
        if not places:
            reasons = "; ".join(
                f"{name}: {why}" for name, why in list(self.slots.reasons.items())[:3]
            )
            raise ValueError(
                f"{self.model} has no {noun} that a mixer could replace"
                + f" ({reasons})" * bool(reasons)
                + "; python -m backbones.hosts.timm_model.listing shows which models have"
            )
        total = len(present.intersection(self.slots.names_alike[kind]))
        if len(places) < total:
            share = f"{len(places)} of {total} {noun}s"
            if 2 * len(places) < total and not partial:
                raise ValueError(
                    f"a mixer replaces {share} of {self.model} ({places[0].name}); pass "
                    "backbone.partial=true to accept that, or use another model"
                )
            self.partly = (*self.partly, share)
            logger.info("a mixer replaces %s of %s", share, self.model)
        for place, slot in zip(places, _slots(places, config, self.facts), strict=True):
            make = factory_at(factory, slot)
            if make is not None:
                self.fill_slot(place, make(slot))
        reasons_of_blocks = [f"{name} ({why})" for name, why in self.slots.reasons.items()]
        if reasons_of_blocks:
            rest = f" and {len(reasons_of_blocks) - 3} more" * (len(reasons_of_blocks) > 3)
            logger.info("%s keeps %s%s", self.model, ", ".join(reasons_of_blocks[:3]), rest)

    def fill_slot(self, slot: Found, mixer: Mixer) -> None:
        """Put a mixer into a slot."""
        if slot.layout.prefix and not takes_prefix(type(mixer), mixer.kind):
            raise ValueError(no_prefix(class_name(mixer)))
        module = self.network.get_submodule(slot.name)
        placed = Placed(mixer, slot.layout, slot.shortcut)
        placed.replaced = {key: value.shape for key, value in module.state_dict().items()}
        replace(self.network, slot.name, placed)
        if slot.method:
            parent = slot.name.rpartition(".")[0]
            block = self.network.get_submodule(parent)
            replace(self.network, parent, without_windows(block, slot.method))

    # Maps and embedding

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return timm's maps, or four maps of 256 channels from the pyramid."""
        height, width = images.shape[-2:]
        if _is_empty(images):
            return tuple(images.new_empty(shape) for shape in self.map_shapes(images))
        padded = self._padded(images)
        maps = self.network.forward_intermediates(
            padded, indices=self._indices, intermediates_only=True
        )
        padded_size = padded.shape[-2], padded.shape[-1]
        if self.pyramid is not None:
            middle = PYRAMID_STRIDES[2]
            x = _resized(
                maps[0], (ceil_div(padded_size[0], middle), ceil_div(padded_size[1], middle))
            )
            return self.pyramid.crop(x.contiguous(), (height, width))
        return tuple(
            self._cropped(x, info.stride, padded_size, (height, width))
            for x, info in zip(maps, self.feature_info, strict=True)
        )

    def _cropped(self, x: Tensor, stride: int, image_size: Size, size: Size) -> Tensor:
        x = _resized(x, (ceil_div(image_size[0], stride), ceil_div(image_size[1], stride)))
        sides = ceil_div(size[0], stride), ceil_div(size[1], stride)
        return (x if same_size(x.shape[-2:], sides) else crop(x, *sides)).contiguous()

    def _padded(self, images: Tensor) -> Tensor:
        """Return images padded with zeros to multiples of the strides, and note their size.

        Raises:
            ValueError: The model takes images of another size only.
        """
        height, width = images.shape[-2:]
        if self.facts.is_fixed and (height, width) != self.facts.size:
            option = height if height == width else f"[{height},{width}]"
            raise ValueError(
                f"{self.model} was built for images of {'x'.join(map(str, self.facts.size))} "
                f"pixels and takes no others, got {height}x{width}; pass img_size={option}, in a "
                f"command backbone.img_size={option}"
            )
        more = missing(height, self.facts.multiple), missing(width, self.facts.multiple)
        if self.facts.multiple > 1 and more != (0, 0):
            images = F.pad(images, (0, more[1], 0, more[0]))
        self.frame.image = images.shape[-2], images.shape[-1]
        return images

    def embed(self, images: Tensor) -> Tensor:
        """Return timm's pooled features, the input of its classifier: (B, num_features)."""
        return self._pooled(images, self.num_features, pre_logits=True)

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the last linear layer of timm's classifier.

        Those are the class and distillation tokens, one after another, of a network that has both.
        """
        if self.facts.has_two_tokens and not _is_empty(images):
            self.check_embeds()
            tokens: Tensor = self.network.forward_features(self._padded(images))
            return tokens[:, :2].flatten(1)
        return self._pooled(images, self._width(), pre_logits=not self.facts.has_mlp_head)

    def _pooled(self, images: Tensor, width: int, *, pre_logits: bool) -> Tensor:
        self.check_embeds()
        if _is_empty(images):
            return images.new_empty(0, width)
        if not self.facts.has_pooling:
            return self(images)[-1].mean(dim=(2, 3))
        features = self.network.forward_features(self._padded(images))
        pooled: Tensor = self.network.forward_head(features, pre_logits=pre_logits)
        return pooled

    def classifier(self, num_classes: int, drop: float = 0.0) -> Classifier:
        """Build one linear layer on ``features``."""
        return Classifier(self._width(), num_classes, drop)

    def has_one_linear_classifier(self) -> bool:
        """Return True if timm's classifier is one linear layer on ``features``, as ours is."""
        facts = self.facts
        return (
            len(facts.classifier) == 1
            and not facts.has_mlp_head
            and facts.has_pooling
            and type(self.network).__name__ not in (*WITHOUT_CLASSIFIER, *READ_PARTS)
            and isinstance(facts.network.get_submodule(facts.classifier[0]), nn.Linear | nn.Conv2d)
        )

    def _width(self) -> int:
        """Return the channels of ``features``."""
        if self.facts.has_mlp_head:
            return int(self.network.get_classifier().fc1.out_features)
        return self.num_features * (2 if self.facts.has_two_tokens else 1)

    # Blocks, slots and layers

    def block_names(self) -> tuple[str, ...]:
        """Return the blocks with slots, or without slots the stages, in order of depth."""
        blocks = dict.fromkeys(f"{NETWORK}{place.block}" for place in self.slots.places)
        if not blocks:
            modules = dict(self.network.named_modules())
            stages = [str(info["module"]) for info in feature_info(self.network)]
            blocks = {f"{NETWORK}{name}": None for name in stages if name in modules}
        present = {name for name, _ in self.named_modules()}
        return tuple(name for name in blocks if name in present)

    def block_tensor(self, output: Any) -> Tensor:
        """Return the tensor of a block's output that is a map, such as the first of branches."""
        if isinstance(output, Tensor):
            return output
        tensors = [item for item in output if isinstance(item, Tensor)]
        maps = [
            x
            for x in tensors
            if x.ndim == 4 or any(item.layout.fits(x.shape) for item in self.slots.places)
        ]
        return next(iter(maps or tensors))

    def block_map(self, output: Any, *inputs: Any) -> Tensor:
        """Return a block's output, or its gradient, as a map (B, C, h, w).

        Raises:
            ValueError: The order of its tokens is unknown.
        """
        output = self.block_tensor(output)
        map_ = self.gathered(output)
        if map_ is not None:
            return map_
        if output.ndim == 4:
            height, width = self.frame.image
            ratio = abs(output.shape[2] * width - output.shape[3] * height)
            channels_last = abs(output.shape[1] * width - output.shape[2] * height) < ratio
            return output.permute(0, 3, 1, 2) if channels_last else output
        for place in self.slots.places:
            if place.layout.fits(output.shape):
                return place.layout.fold(output)[0].permute(0, 3, 1, 2)
        raise ValueError(
            f"{self.model}: a block returns {tuple(output.shape)}, which is not a known order of "
            "the places of a map; analyses of its maps need another model"
        )

    def gathered(self, x: Tensor) -> Tensor | None:
        """Return windows, units or the positions of patches as a map (B, C, h, w)."""
        for place in self.slots.places:
            if isinstance(place.layout, Windows | PatchPositions | Permuted):
                if place.layout.fits(x.shape):
                    return place.layout.fold(x)[0].permute(0, 3, 1, 2)
        return None

    def place_attention(
        self, mixer: str, weights: Tensor, images: int
    ) -> tuple[Tensor, float, int] | None:
        """Put windows into the batch axis, and their tokens into rows and columns.

        Attention between channels has fewer rows than the map has places.
        """
        place = next(
            candidate for candidate in self.slots.places if f"{NETWORK}{candidate.name}" == mixer
        )
        layout, grid = place.layout, place.layout.place.grid_of_images()
        if weights.ndim == 5:  # (B, heads, windows, N, N)
            weights = weights.transpose(1, 2).flatten(0, 1)
        tokens = weights.shape[0] // images * weights.shape[2]
        if not math.prod(grid) <= tokens <= MOST_PADDING * math.prod(grid):
            return None
        if isinstance(layout, Permuted):
            windows = weights.shape[0] // images
            places = torch.argsort(layout.order).unflatten(0, (-1, windows))[:, 0]
            order = places.argsort().to(weights.device)
            return weights[..., order, :][..., order], 1.0, 0
        block: Any = self.network.get_submodule(place.name.rpartition(".")[0])
        step = 1.0
        if isinstance(layout, PatchPositions):
            step = float(layout.side[0])
        elif not getattr(block, "partition_block", True):  # MaxViT's grid attention
            step = grid[0] / block.partition_size[0]
        return weights, step, layout.prefix

    def cam_layer(self, block: str) -> str:
        """Return the block, or with prefix tokens its first norm.

        After the last attention only the class token is read, and the map's gradient is zero.
        """
        norm = f"{block}.norm1"
        has_norm = norm in dict(self.named_modules())
        return norm if self.num_prefix_tokens and has_norm else block

    def token_mixers(self) -> dict[str, nn.Module]:
        """Return the token mixers, timm's or replaced ones, by name and in order of depth."""
        return self._mixers_of("token")

    def channel_mixers(self) -> dict[str, nn.Module]:
        """Return the feed-forward networks, timm's or replaced ones."""
        return self._mixers_of("channel")

    def _mixers_of(self, kind: Kind) -> dict[str, nn.Module]:
        modules = dict(self.network.named_modules())
        mixers: dict[str, nn.Module] = {}
        for place in self.slots.of(kind):
            module = modules.get(place.name)
            if isinstance(module, Placed):
                mixers[f"{NETWORK}{place.name}.mixer"] = module.mixer
            elif module is not None:
                mixers[f"{NETWORK}{place.name}"] = module
        return mixers

    def channel_places(self) -> list[str]:
        """Return the names of modules that channel mixers may replace or have replaced."""
        present = dict(self.network.named_modules())
        names = [place.name for place in self.slots.of("channel") if place.name in present]
        return [f"{NETWORK}{name}" for name in names]

    def mixers(self) -> dict[str, Any]:
        """Return the modules around the mixers, by the prefix of their keys."""
        return {
            f"{name}.": module
            for name, module in self.named_modules()
            if isinstance(module, Placed)
        }

    @functools.cached_property
    def layer_ids(self) -> Any:
        """Layers and stages of the parameters, by timm's ``group_matcher``."""
        return LayerGroups(self.facts.layers, self.facts.stages, NETWORK)

    # Checkpoints

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename timm's tensors, fit its tables, and fold its classifier to one linear layer."""
        if self.has_source_names(state_dict):
            return self._of_timm(state_dict)
        inside = {
            key.removeprefix(NETWORK): value
            for key, value in state_dict.items()
            if key.startswith(NETWORK)
        }
        if not inside:
            return self._of_timm(state_dict)
        beside = {key: value for key, value in state_dict.items() if not key.startswith(NETWORK)}
        state = self.network.state_dict()
        if all(
            key not in state or state[key].shape == tensor.shape for key, tensor in inside.items()
        ):
            if not any(
                key.startswith(self.facts.classifier) for key in inside.keys() - state.keys()
            ):
                return state_dict
        return self._of_timm(inside) | beside

    def has_source_names(self, names: Collection[str]) -> bool:
        """Return True if most names are those of timm's model."""
        keys = self.facts.network.state_dict().keys()
        return 2 * len(keys & set(names)) > len(names)

    def _reads_parts(self) -> bool:
        """Return True if each of timm's classifiers reads its own part of the features."""
        return self.facts.has_two_tokens or type(self.network).__name__ in READ_PARTS

    def _of_timm(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        if getattr(self.facts.network, "cls_token", state_dict) is None:
            state_dict = _without_class_token(state_dict, self.facts.network)
        filter_fn = getattr(inspect.getmodule(type(self.network)), "checkpoint_filter_fn", None)
        if filter_fn is not None:  # it reads tables that a mixer may have replaced here
            state_dict = filter_fn(state_dict, self.facts.network)
        state_dict, classifier = convert_classifier(
            state_dict, self.facts.classifier, joint=self._reads_parts()
        )
        if type(self.network).__name__ in WITHOUT_CLASSIFIER:
            classifier = {}
        return {f"{NETWORK}{key}": value for key, value in state_dict.items()} | classifier


def _without_class_token(tensors: dict[str, Tensor], network: Any) -> dict[str, Tensor]:
    """Return timm's tensors for a network without class token, which normalises its mean."""
    tensors = dict(tensors)
    table, token = tensors.get("pos_embed"), tensors.pop("cls_token", None)
    if token is not None and table is not None and not getattr(network, "no_embed_class", False):
        tensors["pos_embed"] = table[:, token.shape[1] :]
    state = network.state_dict()
    moved = {"norm.weight": "fc_norm.weight", "norm.bias": "fc_norm.bias"}
    return {
        moved[key] if key in moved and key not in state and moved[key] in state else key: value
        for key, value in tensors.items()
    }


def _declare_layers(
    network: nn.Module, calls: Mapping[str, list[ModuleCall]], slots: Slots
) -> None:
    """State the first and last layers of feed-forward networks, as mixers do, for analyses."""
    for place in slots.of("channel"):
        module: Any = network.get_submodule(place.name)
        layers = [
            name.removeprefix(f"{place.name}.")
            for name, calls_of_module in calls.items()
            if name.startswith(f"{place.name}.")
            and isinstance(network.get_submodule(name), nn.Linear | nn.Conv2d)
            and calls_of_module[0].layers[0].is_pointwise
        ]
        if len(layers) > 1:
            module.channel_mappings, module.value_layer = (layers[0],), layers[-1]


def _pooling(network: Any) -> str:
    """Return the name of a network's pooling, which it or its head states."""
    for part in (network, getattr(network, "head", None)):
        pool = getattr(part, "global_pool", None)
        name = getattr(pool, "pool_type", pool)
        if isinstance(name, str) and name:
            return name
    return "timm's own pooling"


def _slots(places: list[Found], config: HostConfig, facts: Facts) -> list[Slot]:
    """Return a description of each slot for its mixer; a stage ends where the map changes."""
    slots: list[Slot] = []
    stage, block, previous = -1, 0, None
    for place in places:
        key = (place.layout.place.size, place.dim)
        stage, block = (stage, block + 1) if key == previous else (stage + 1, 0)
        previous = key
        slots.append(
            Slot(
                place.dim, place.hidden_ratio, place.layout.place.size, stage, block, config.dense,
                place.layout.prefix,
            )
        )  # fmt: skip
    return slots


def _is_empty(images: Tensor) -> bool:
    """Return True for a batch of no images, which many of timm's models cannot reshape."""
    return not is_recording() and images.shape[0] == 0


def _resized(x: Tensor, size: Size) -> Tensor:
    if same_size(x.shape[-2:], size):
        return x
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def build(
    config: HostConfig,
    *,
    model: str = MODEL,
    options: Mapping[str, Any] | None = None,
    class_token: bool = True,
    partial: bool = False,
) -> TimmBackbone:
    """Build a model of timm.

    Args:
        config: Options of every host.
        model: Its name in timm, with or without a tag of weights (``name.tag``).
        options: timm's own options, such as ``{"dynamic_img_size": True}``.
        class_token: False builds a model with class tokens without them, so that it pools its map.
        partial: Accept mixers in less than half of the feed-forward networks or token mixers.
    """
    timm_options = dict(options or {})
    if config.patch_size != PATCH_SIZE:
        timm_options["patch_size"] = config.patch_size
    timm_options["drop_path_rate"] = config.drop_path_rate
    facts = find_facts(model, timm_options, config.img_size, config.in_chans, class_token)
    record = {"num_classes": 1 if facts.has_mlp_head else 0, **facts.options}
    if config.pretrained:
        network = create_pretrained(model, record)
    else:
        network = create(model, record)
    if facts.has_mlp_head:
        classifier: Any = network
        classifier.get_classifier().fc2 = nn.Identity()
    return TimmBackbone(network, model, facts, config, partial=partial)


def usual_size(options: Mapping[str, Any]) -> Size:
    """Return the size (H, W) that a model is made for."""
    return own_size(options["model"], options["options"])


register_host(
    "timm",
    source="PyTorch Image Models",
    plain_ffn=False,
    patch_size=PATCH_SIZE,
    without_prefix={"class_token": False},
    usual_size=usual_size,
)(build)
