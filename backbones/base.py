"""Contract of hosts: the base class of all backbones, and the maps that they declare.

The contracts of mixers are in ``mixer``, of the places that they fill in ``slots``; this module
offers the public names of both as well.

Axes: B images, H W map, N = H * W tokens, C channels, P prefix (class) tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from backbones.layers.declared_shapes import check_embedding, check_maps, with_cast, with_check
from backbones.layers.recomputation import keep_activations, recompute
from backbones.mixer import Mixer, PointwiseMixer, PrefixMixing, SequenceMixer, takes_prefix
from backbones.parameters.freezing import freeze_stages, keep_in_evaluation
from backbones.parameters.layer_ids import USUAL, LayerIds, LayerNames, count_depths, list_blocks
from backbones.replace import replace
from backbones.slots import HostConfig, MixerFactory, Slot, fill, hidden_width

if TYPE_CHECKING:
    from backbones.layers.classifier import Classifier

__all__ = [
    "Backbone",
    "FeatureInfo",
    "HostConfig",
    "Layout",
    "Mixer",
    "MixerFactory",
    "PointwiseMixer",
    "PrefixMixing",
    "SequenceMixer",
    "Slot",
    "fill",
    "hidden_width",
    "takes_prefix",
]
Layout = Literal["nhwc", "nchw", "tokens"]


@dataclass(frozen=True)
class FeatureInfo:
    """Channels of a map that a backbone returns, and its stride in input pixels."""

    channels: int
    stride: int


class Backbone(nn.Module):
    """Network from images to feature maps, the type that heads, tasks and exporters work with.

    It lacks ``init_weights`` on purpose: mmengine would call it and overwrite loaded weights.
    A host of another modality declares it in ``register_host``, and takes inputs of its own shape,
    as ``example_inputs`` returns them.

    Attributes:
        name: Registered name.
        modality: Modality of its inputs, such as "image" or "signal".
        made_by: Arguments of ``create_backbone``.
        record: Options that it was created with, as checkpoints keep them; see
            ``checkpoints/equations``.
        feature_info: One entry per map of ``forward``, fine to coarse.
        num_features: Channels of the embedding.
        size_divisor: Detectors pad their batches to a multiple of it. Sides of 64 pixels and more
            run, and of 32 and more with a smaller patch_size than the published one.
        dense: True if it was built for dense prediction.
        classification_keys: Prefixes of state-dict keys that only the classification network has.
        map_keys: Per map, the prefix of the keys for that map alone, in dense prediction.
        no_weight_decay: Names of parameters that the host's authors train without weight decay.
        layer_names: Names of its parts, which assign parameters to layers.
        merges_end_stages: True if downsampling belongs to the stage before it.
        frozen_stages: Last frozen stage, see ``freeze_stages``.
        norm_eval: True if BatchNorm keeps its running statistics in training.
        block_layout: Layout of the blocks' outputs: "nhwc" (B, H, W, C), "nchw" (B, C, H, W), or
            "tokens" (B, P + H * W, C) where they are called with the tokens and (H, W).
        token_slots: Names of the token mixers within a block; a block may lack some.
        channel_slots: Names of the channel mixers within a block.
        num_prefix_tokens: Prefix tokens P of the blocks.
        had_prefix: True if the model has prefix tokens that an option can leave out.
        partly: Shares of modules that mixers replace, if below all, such as "1 of 23 token mixers".
        img_size: Build resolution (H, W); (1, L) for signals.
        in_chans: Channels of the images.
        input_keys: Names of the weights that read the images, if ``in_chans`` is not 3.
        pretrained_cfg: ``mean``, ``std``, ``interpolation`` and ``crop_pct`` that timm declares for
            the published weights; empty for a host that timm lacks.
        pooling: Source of the embedding in words: the mean of the last map, or the class token.
        create: ``create_backbone``, if it built the network.
        probed_side: Largest side of ``example_inputs``.
    """

    name: str = ""
    modality: str = "image"
    record: Mapping[str, Any] = MappingProxyType({})
    made_by: Mapping[str, Any] = MappingProxyType({})
    feature_info: tuple[FeatureInfo, ...]
    num_features: int
    size_divisor: int = 32
    dense: bool = False
    classification_keys: tuple[str, ...] = ()
    map_keys: tuple[str, ...] = ()
    no_weight_decay: frozenset[str] = frozenset()
    layer_names: LayerNames = USUAL
    merges_end_stages: bool = False
    frozen_stages: int = -1
    norm_eval: bool = False
    block_layout: Layout = "nhwc"
    token_slots: tuple[str, ...] = ("attn",)
    channel_slots: tuple[str, ...] = ("mlp",)
    num_prefix_tokens: int = 0
    had_prefix: bool = True
    partly: tuple[str, ...] = ()
    img_size: tuple[int, int] = (224, 224)
    in_chans: int = 3
    input_keys: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    pretrained_cfg: Mapping[str, Any] = MappingProxyType({})
    pooling: str = "mean of the map"
    create: Callable[..., Backbone] | None = None
    probed_side: int = 64

    def __init_subclass__(cls, **options: Any) -> None:
        """Cast the inputs of each pass, and compare maps and embedding with the declarations."""
        super().__init_subclass__(**options)
        for name, check in (("forward", check_maps), ("embed", check_embedding)):
            if name in cls.__dict__:
                setattr(cls, name, with_check(cls.__dict__[name], check))
        if "features" in cls.__dict__:
            cls.features = with_cast(cls.__dict__["features"])  # type: ignore[method-assign]

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_compute_buffers)  # type: ignore[no-untyped-call]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return a map per ``feature_info`` entry, fine to coarse.

        The maps are contiguous: mmcv's RoIAlign reads memory as NCHW and ignores strides.

        Shape: (B, 3, H, W) -> (B, C_i, ceil(H / s_i), ceil(W / s_i)).
        """
        raise NotImplementedError

    def cast_input(self, images: Tensor) -> Tensor:
        """Return inputs in the type of the weights; integers stay as they are."""
        weight = next(self.parameters(), None)
        if weight is None or weight.dtype == images.dtype or not images.is_floating_point():
            return images
        return images.to(weight.dtype)

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return small random arguments of ``forward``."""
        sides = (min(side, self.probed_side) for side in self.img_size)
        return (torch.rand(2, self.in_chans, *sides),)

    def map_shapes(self, images: Tensor) -> list[tuple[int, ...]]:
        """Return the shapes that ``feature_info`` declares for the maps of these inputs."""
        sides = images.shape[2:]
        return [
            (len(images), info.channels, *(-(-side // info.stride) for side in sides))
            for info in self.feature_info
        ]

    def embed(self, images: Tensor) -> Tensor:
        """Return the embedding by the host's final norm and pooling.

        Shape: (B, 3, H, W) -> (B, num_features).

        >>> from backbones import create_backbone
        >>> create_backbone("deit_t", img_size=64).embed(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 192])
        """
        raise NotImplementedError

    def features(self, images: Tensor) -> Any:
        """Return the input of the published network's classifier: the embedding.

        In training it may have more parts than in evaluation, for the losses.
        """
        return self.embed(images)

    def classifier(self, num_classes: int, drop: float = 0.0) -> Classifier:
        """Build a classifier of ``features``: the published one, usually a single linear layer."""
        from backbones.layers.classifier import Classifier

        return Classifier(self.num_features, num_classes, drop)

    def check_embeds(self) -> None:
        """Check that the backbone has the final norm, which dense prediction omits.

        Raises:
            ValueError: The backbone was built with dense=True.
        """
        if self.dense:
            raise ValueError(
                f"{self.name or type(self).__name__} was built with dense=True and lacks the norm "
                "of the embedding; build it with dense=False"
            )

    def train(self, mode: bool = True) -> Self:
        """Set the mode; frozen stages, and BatchNorm with ``norm_eval``, stay in evaluation."""
        super().train(mode)
        keep_in_evaluation(self)
        return self

    def freeze_stages(self, frozen_stages: int) -> None:
        """Freeze the first stages; see ``freezing.freeze_stages``."""
        freeze_stages(self, frozen_stages)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block in the backward pass instead of keeping its activations."""
        convert = recompute if enable else keep_activations
        for name in self.block_names():
            replace(self, name, convert(self.get_submodule(name)))

    @property
    def num_layers(self) -> int:
        """Number of ids of ``layer_id``: the stem, every block, and one for the rest."""
        return self.layer_ids.num_layers

    def layer_id(self, name: str) -> int:
        """Return the depth of a parameter for layer-wise learning rates: 0 for the stem."""
        return self.layer_ids.layer(name)

    @functools.cached_property
    def layer_ids(self) -> LayerIds:
        """Layers and stages by names of parameters.

        Raises:
            ValueError: The network lacks blocks under the names of the rule.
        """
        depths = count_depths((name for name, _ in self.named_parameters()), self.layer_names)
        if not depths or not all(depths):
            raise ValueError(
                f"{self.name or type(self).__name__} lacks blocks under a name that "
                f"{'its layer_names declares' if self.layer_names != USUAL else 'is known'}: name "
                "its parts stages.N.blocks.M, counted from 0, or declare their names in its "
                "attribute layer_names (backbones/parameters/layer_ids.py)"
            )
        maps = self.map_keys if len(self.map_keys) == len(depths) else ()
        return LayerIds(
            depths, maps, self.classification_keys, self.merges_end_stages, self.layer_names
        )

    def block_names(self) -> tuple[str, ...]:
        """Return the names of the blocks in order of depth."""
        return list_blocks([name for name, _ in self.named_parameters()], self.layer_names)

    def block_map(self, output: Tensor, *inputs: Any) -> Tensor:
        """Return a block's output, or its gradient, as a map (B, C, H, W) without prefix tokens.

        Args:
            output: In the ``block_layout``.
            *inputs: Inputs of the block.
        """
        if self.block_layout == "nchw":
            return output
        if self.block_layout == "tokens":
            output = output[:, self.num_prefix_tokens :].unflatten(1, inputs[1])
        return output.permute(0, 3, 1, 2)

    def block_tensor(self, output: Any) -> Tensor:
        """Return the tensor of a block's output that ``block_map`` reads."""
        tensor: Tensor = output
        return tensor

    def gathered(self, x: Tensor) -> Tensor | None:
        """Return a tensor of windows or units as a map (B, C, h, w); None for other tensors."""
        return None

    def place_attention(
        self, mixer: str, weights: Tensor, images: int
    ) -> tuple[Tensor, float, int] | None:
        """Return a token mixer's attention with tokens row by row, and the distance between them.

        Args:
            mixer: Name of the token mixer.
            weights: (B * windows, heads, N, K) as computed.
            images: B.

        Returns:
            The weights, the distance of neighbouring tokens of a window in places of the map, and
            the number of prefix tokens; None for attention between channels.
        """
        return weights, 1.0, self.num_prefix_tokens

    def cam_layer(self, block: str) -> str:
        """Return the module whose map is weighted in class activation maps: the block."""
        return block

    def token_mixers(self) -> dict[str, nn.Module]:
        """Return the token mixers, original or replaced, by name and in order of depth."""
        return self._in_slots(self.token_slots)

    def channel_mixers(self) -> dict[str, nn.Module]:
        """Return the channel mixers, original or replaced, by name and in order of depth."""
        return self._in_slots(self.channel_slots)

    def _in_slots(self, slots: tuple[str, ...]) -> dict[str, nn.Module]:
        modules = dict(self.named_modules())
        names = (f"{block}.{slot}" for block in self.block_names() for slot in slots)
        return {name: modules[name] for name in names if name in modules}

    def channel_places(self) -> list[str]:
        """Return the names of modules that channel mixers may replace or have replaced.

        Raises:
            TypeError: The class fills a place that is missing from its slots.
        """
        places = []
        for parent, module in self.named_modules():
            for name in getattr(module, "filled", ()):
                place = f"{parent}.{name}"
                if any(f".{slot}." in f"{place}." for slot in self.channel_slots):
                    places.append(place)
                elif not place.endswith(tuple(f".{slot}" for slot in self.token_slots)):
                    raise TypeError(
                        f"{type(self).__name__} fills {place}, which is missing from its "
                        f"token_slots {self.token_slots} and channel_slots {self.channel_slots}; "
                        "add it to one of them"
                    )
        return places

    def mixers(self) -> dict[str, Mixer]:
        """Return the mixers that replaced parts of the host, by the prefix of their keys."""
        return {
            f"{name}.": module
            for name, module in self.named_modules()
            if isinstance(module, Mixer) and module.replaced is not None
        }

    def set_in_chans(self, in_chans: int, *, keep_weights: bool = True) -> None:
        """Take images of another number of channels; see ``layers.input_channels``."""
        from backbones.layers.input_channels import adapt_input

        self.input_keys = adapt_input(self, in_chans, keep_weights=keep_weights)
        self.in_chans = in_chans

    def adapt_input(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with weights for images of 3 channels adapted to ``in_chans``."""
        from backbones.layers.input_channels import adapt_tensors

        return adapt_tensors(state_dict, self.input_keys, self.in_chans)

    def has_source_names(self, names: Collection[str]) -> bool:
        """Return True for names of a whole source model, of which no part is a wrapper."""
        return False

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Map timm's or the authors' names and table sizes to ours; ours pass unchanged.

        The classifier, which lies outside the backbone, is renamed to ``classifier.*``.
        """
        return state_dict


def _compute_buffers(backbone: nn.Module, loaded: object) -> None:
    """Compute the non-persistent buffers, such as tables of indices, of a network from "meta"."""
    for module in backbone.modules():
        for name in module._non_persistent_buffers_set:
            buffer, first = getattr(module, name), next(module.parameters(), None)
            if first is not None and buffer is not None and buffer.is_meta != first.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=first.device))
        compute: Any = getattr(module, "init_non_persistent_buffers", None)  # timm's name for it
        if compute is not None:
            compute()
