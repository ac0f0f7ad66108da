"""The contracts of every model file: what a backbone returns, what a mixer maps, what a slot tells.

Axes: B images, H W map, N = H * W tokens, C channels, P prefix (class) tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from backbones.layers.classifier import Classifier
from backbones.layers.declared_shapes import check_embedding, check_maps, with_check
from backbones.layers.eager import in_graph
from backbones.layers.grid_tables import common_source, grid_of, resize_table
from backbones.layers.recomputation import keep_activations, recompute
from backbones.parameters.freezing import freeze_stages, keep_in_evaluation
from backbones.parameters.layer_ids import USUAL, LayerIds, LayerNames, blocks_of, depths_of
from backbones.replace import replace

Layout = Literal["nhwc", "nchw", "tokens"]
PrefixMixing = Literal["joint", "pooled", "none"]
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)  # whose weights sum over their second axis


@dataclass(frozen=True)
class FeatureInfo:
    """One map a backbone returns: its channels and its stride in input pixels."""

    channels: int
    stride: int


class Backbone(nn.Module):
    """Image to feature maps, the one type that heads, tasks and exporters see.

    There is deliberately no ``init_weights``: mmengine would call it and overwrite loaded weights.

    Attributes:
        name: The registered name it was created by.
        made_by: The arguments of ``create_backbone``.
        record: By what options it was created, as checkpoints keep it; see
            ``checkpoints/equations``.
        feature_info: One entry per map of ``forward``, fine to coarse.
        num_features: Width of what ``embed`` returns.
        size_divisor: Detectors pad their batches to a multiple of it; any size from 64 on runs, and
            from 32 on if it was built with a smaller patch_size than the published one.
        dense: Whether it was built for dense prediction.
        classification_keys: Prefixes of state-dict keys that only the classification network has.
        map_keys: Per map, the prefix of what only that map needs; dense prediction alone has these.
        no_weight_decay: Names of parameters that the host's authors train without weight decay.
        layer_names: Names of its parts, which tell the layers of parameters.
        merges_end_stages: Whether downsampling belongs to the stage before it.
        frozen_stages: The last stage that does not learn, see ``freeze_stages``.
        norm_eval: Whether BatchNorm keeps its running statistics in training.
        block_layout: What blocks give: "nhwc" (B, H, W, C), "nchw" (B, C, H, W), or "tokens"
            (B, P + H * W, C) where they are called with the tokens and (H, W).
        token_slots: Names, within a block, of what mixes its tokens; a block may lack some.
        channel_slots: Names, within a block, of what mixes its channels alone.
        num_prefix_tokens: P of the blocks' tokens.
        img_size: Build resolution (H, W).
        pooling: What the embedding is read from, in words: the mean of the last map, or the class
            token.
    """

    name: str = ""
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
    img_size: tuple[int, int] = (224, 224)
    pooling: str = "mean of the map"

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a host's maps and embedding be compared with what it declares, at every pass."""
        super().__init_subclass__(**options)
        for name, check in (("forward", check_maps), ("embed", check_embedding)):
            if name in cls.__dict__:
                setattr(cls, name, with_check(cls.__dict__[name], check))

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_compute_buffers)  # type: ignore[no-untyped-call]

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, H, W) -> a map (B, C_i, ceil(H / s_i), ceil(W / s_i)) per ``feature_info`` entry.

        The maps are contiguous: mmcv's RoIAlign reads memory as NCHW whatever the strides say.
        """
        raise NotImplementedError

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, num_features), by the host's own final norm and pooling."""
        raise NotImplementedError

    def features(self, images: Tensor) -> Any:
        """(B, 3, H, W) -> what the classifier of the published network reads: the embedding.

        In training it may be more than in evaluation, for what its losses need.
        """
        return self.embed(images)

    def classifier(self, num_classes: int, drop: float = 0.0) -> Classifier:
        """A new classifier of ``features``: one linear layer, unless the published has more."""
        return Classifier(self.num_features, num_classes, drop)

    def check_embeds(self) -> None:
        """Refuse to embed where dense prediction has taken the final norm's place.

        Raises:
            ValueError: The backbone was built with dense=True.
        """
        if self.dense:
            raise ValueError(
                f"{self.name or type(self).__name__} was built with dense=True and has no "
                "embedding of an image; build it with dense=False"
            )

    def train(self, mode: bool = True) -> Self:
        """Switch the mode; frozen stages, and BatchNorm with ``norm_eval``, stay in evaluation."""
        super().train(mode)
        keep_in_evaluation(self)
        return self

    def freeze_stages(self, frozen_stages: int) -> None:
        """Let the first stages learn nothing from now on; see ``freezing.freeze_stages``."""
        freeze_stages(self, frozen_stages)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute every block again in the backward pass instead of keeping what it computes."""
        for name in self.block_names():
            (recompute if enable else keep_activations)(self.get_submodule(name))

    @property
    def num_layers(self) -> int:
        """How many ids ``layer_id`` gives: the stem, every block, and what follows them."""
        return self.layer_ids.num_layers

    def layer_id(self, name: str) -> int:
        """How deep a parameter lies, for layer-wise learning rates: 0 for the stem."""
        return self.layer_ids.layer(name)

    @functools.cached_property
    def layer_ids(self) -> LayerIds:
        """The rule that gives layers and stages to the names of parameters.

        Raises:
            ValueError: The network has no blocks under the names that the rule knows.
        """
        depths = depths_of((name for name, _ in self.named_parameters()), self.layer_names)
        if not depths or not all(depths):
            raise ValueError(
                f"{self.name or type(self).__name__} has no blocks under a name that "
                f"{'its layer_names declares' if self.layer_names != USUAL else 'is known'}: name "
                "its parts such as stages.N.blocks.M from 0 on, or declare their names in its "
                "attribute layer_names (backbones/parameters/layer_ids.py)"
            )
        maps = self.map_keys if len(self.map_keys) == len(depths) else ()
        return LayerIds(
            depths, maps, self.classification_keys, self.merges_end_stages, self.layer_names
        )

    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks as modules, in order of depth."""
        return blocks_of((name for name, _ in self.named_parameters()), self.layer_names)

    def block_map(self, output: Tensor, *inputs: Any) -> Tensor:
        """What a block gives, or its gradient, as a map (B, C, H, W) without prefix tokens.

        Args:
            output: In the ``block_layout``.
            *inputs: What the block was called with.
        """
        if self.block_layout == "nchw":
            return output
        if self.block_layout == "tokens":
            output = output[:, self.num_prefix_tokens :].unflatten(1, inputs[1])
        return output.permute(0, 3, 1, 2)

    def cam_layer(self, block: str) -> str:
        """The module whose map class activation maps of a block weight: the block itself."""
        return block

    def token_mixers(self) -> dict[str, nn.Module]:
        """What mixes tokens, the host's own or swapped in, by name and in order of depth."""
        return self._in_slots(self.token_slots)

    def channel_mixers(self) -> dict[str, nn.Module]:
        """What mixes channels alone, the host's own or swapped in, by name, in order of depth."""
        return self._in_slots(self.channel_slots)

    def _in_slots(self, slots: tuple[str, ...]) -> dict[str, nn.Module]:
        modules = dict(self.named_modules())
        names = (f"{block}.{slot}" for block in self.block_names() for slot in slots)
        return {name: modules[name] for name in names if name in modules}

    def channel_places(self) -> list[str]:
        """Names of the modules that a channel mixer takes the place of, whatever is there now.

        Raises:
            TypeError: The class fills a place that it names in neither of its slots.
        """
        found = []
        for parent, module in self.named_modules():
            for name in getattr(module, "filled", ()):
                place = f"{parent}.{name}"
                if any(f".{slot}." in f"{place}." for slot in self.channel_slots):
                    found.append(place)
                elif not place.endswith(tuple(f".{slot}" for slot in self.token_slots)):
                    raise TypeError(
                        f"{type(self).__name__} fills {place}, but neither token_slots "
                        f"{self.token_slots} nor channel_slots {self.channel_slots} has it"
                    )
        return found

    def mixers(self) -> dict[str, Mixer]:
        """Swapped-in mixers by the prefix of their state-dict keys; the host's own are none."""
        return {
            f"{name}.": module
            for name, module in self.named_modules()
            if isinstance(module, Mixer) and module.replaced is not None
        }

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Map timm's or the authors' names and table sizes to ours; ours pass unchanged.

        The classifier, which is no part of a backbone, is renamed to ``classifier.*``.
        """
        return state_dict


def _compute_buffers(backbone: nn.Module, loaded: object) -> None:
    """Make what no checkpoint holds, such as tables of indices, for a network built on "meta"."""
    for module in backbone.modules():
        for name in module._non_persistent_buffers_set:
            buffer, first = getattr(module, name), next(module.parameters(), None)
            if first is not None and buffer is not None and buffer.is_meta != first.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=first.device))
        compute: Any = getattr(module, "init_non_persistent_buffers", None)  # timm's name for it
        if compute is not None:
            compute()


class Mixer(nn.Module):
    """A channel or token mixer: (B, H, W, C) -> (B, H, W, C) at any H and W.

    A subclass writes ``mix``. Norm, residual, layer scale and drop path stay in the host's block.

    Attributes:
        prefix_mixing: How prefix (class) tokens take part. "joint": ``mix_joint`` mixes the map and
            the prefix tokens together, as attention does. "pooled": each prefix token is given the
            mean of the mixed map. "none": not at all, so that a host is built without prefix tokens
            and pools its map. A channel mixer of "none" that writes ``mix_prefix`` treats them
            apart from the map.
        kind: "token" or "channel", as it is registered; None for a mixer that is built directly.
        replaced: Keys and shapes of the host's module that stood in its place; None for a mixer
            that is the host's own.
        is_related: Whether that module was a mixer of the same class, so that its tensors may fit.
        value_layer: Name of the part that sums values by coefficients, such as an FFN's second
            layer; what it reads are the mixer's coefficients. Empty where there is none.
        channel_mappings: Names of the parts that map C to hidden channels; what two of them give is
            multiplied.
        grid_axes: Axes of the parameters whose shapes follow the map size, by name, such as
            ``{"filter": "H F C 2"}``; see ``layers/grid_tables``. ``at_size`` reads them.
        built_for: Map size (H, W) that it was built for; None outside a factory.
    """

    prefix_mixing: PrefixMixing = "none"
    kind: Literal["channel", "token"] | None = None
    replaced: Mapping[str, torch.Size] | None = None
    is_related: bool = False
    value_layer: str = ""
    channel_mappings: tuple[str, ...] = ()
    grid_axes: Mapping[str, str] = MappingProxyType({})
    built_for: tuple[int, int] | None = None

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Mix the map ``x`` (B, H, W, C) and, when given, the prefix tokens (B, P, C) beside it.

        "pooled" gives every prefix token the mean of the mixed map, which the host's residual adds:
        class attention with equal weights over the map.

        Source: class attention is that of CaiT (Touvron et al., "Going deeper with Image
        Transformers", ICCV 2021, https://arxiv.org/abs/2103.17239).

        Raises:
            ValueError: The subclass gives another shape, which a residual might broadcast, or
                takes no prefix tokens.
        """
        if prefix is not None and self.prefix_mixing == "joint":
            return _checked_pair(self.mix_joint(x, prefix), x, prefix, self)
        mixed = _of_shape(x, self.mix(x), self)
        if prefix is None:
            return mixed
        if self.prefix_mixing == "pooled":
            return mixed, mixed.mean(dim=(1, 2)).unsqueeze(1).expand_as(prefix)
        return mixed, _of_shape(prefix, self.mix_prefix(prefix), self)

    def mix(self, x: Tensor) -> Tensor:
        """Mix a map: (B, H, W, C) -> (B, H, W, C); by default as ``mix_joint`` without prefix."""
        return self.mix_joint(x, x.new_empty(x.shape[0], 0, x.shape[-1]))[0]

    def mix_joint(self, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Mix map and prefix tokens together: (B, H, W, C) and (B, P, C) -> both, P from 0 on."""
        raise NotImplementedError

    def at_size(self, name: str, size: tuple[int, int]) -> Tensor:
        """Return a parameter of ``grid_axes`` for a map of ``size`` (H, W), interpolated.

        Raises:
            ValueError: ``grid_axes`` lacks it, or gives it axes that its shape does not have.
        """
        table, axes = self.get_parameter(name), self.grid_axes.get(name)
        if axes is None:
            raise ValueError(
                f"{type(self).__name__} does not say which axes of {name} follow the map size; add "
                f'{name!r} to its grid_axes, such as {{{name!r}: "H W C"}}'
            )
        return resize_table(table, axes, grid_of(table.shape, axes, self.built_for), size)

    def to_own_size(
        self, tensors: dict[str, Tensor], source: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Interpolate tables of another map size to the one that the mixer was built for.

        Parameters that ``grid_axes`` does not have are recognised by their shapes. Buffers are
        computed from the map size, so the mixer's own stay.

        Args:
            tensors: By their names in the mixer, in any sizes.
            source: Map size (H, W) that they belong to, where the file says so.

        Returns:
            Those that changed.
        """
        own = self.state_dict()
        shapes = {
            key: (own[key].shape, value.shape)
            for key, value in tensors.items()
            if key in own and (own[key].shape != value.shape or (source and key in self.grid_axes))
        }
        if self.built_for is None or not shapes or source == self.built_for:
            return {}
        reads = {f"{name}.weight" for name, m in self.named_modules() if isinstance(m, LAYERS)}
        found = common_source(shapes, self.built_for, self.grid_axes, reads, source)
        if found is None:
            return {}
        parameters = dict(self.named_parameters())
        return {
            key: resize_table(tensors[key], axes, found[0], self.built_for)
            if key in parameters or key in self.grid_axes
            else own[key]
            for key, axes in found[1].items()
        }

    def convert_state_dict(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Map the authors' names to ours; tables of another map size may stay as they are.

        Args:
            tensors: By their names in the mixer, or the authors'; all others stay as they are.

        Returns:
            All tensors; a name that is no longer among them is taken to be renamed.
        """
        return tensors

    def is_dead(self, key: str, value: Tensor) -> bool:
        """Whether a checkpoint's tensor, which has no place here, would change nothing if it had.

        Args:
            key: By its name in the mixer.
            value: What the file has.
        """
        return False

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens apart from the map, in a channel mixer: (B, P, C) -> (B, P, C).

        These are the pointwise parts of the mixer, its spatial parts left out.
        """
        raise ValueError(no_prefix(type(self).__name__))


def takes_prefix(mixer: type[Mixer], kind: str | None) -> bool:
    """Return True if a mixer in a slot of this kind may be given prefix tokens.

    A token mixer that treats them apart from the map would leave a class token that never sees the
    image, so that ``mix_prefix`` counts for channel mixers only.
    """
    apart = kind != "token" and mixer.mix_prefix is not Mixer.mix_prefix
    return mixer.prefix_mixing != "none" or apart


def no_prefix(mixer: str) -> str:
    """Say that a mixer takes no prefix tokens, and what to do."""
    return (
        f"{mixer} takes no class tokens (prefix_mixing='none'); build the host without them, such "
        "as deit_t with class_token=False, or declare prefix_mixing='joint' or 'pooled' in the "
        "mixer's class"
    )


def _checked_pair(mixed: object, x: Tensor, prefix: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor]:
    """Check the map and the prefix tokens that ``mix_joint`` returned."""
    if not isinstance(mixed, tuple) or len(mixed) != 2:
        raise ValueError(
            f"{type(mixer).__name__}.mix_joint returned {type(mixed).__name__}; return the mixed "
            "map and the mixed prefix tokens, (x, prefix)"
        )
    return _of_shape(x, mixed[0], mixer), _of_shape(prefix, mixed[1], mixer)


def _of_shape(given: Tensor, mixed: Tensor, mixer: Mixer) -> Tensor:
    """What a mixer has made of a tensor, unless it has another shape."""
    # To compilers and tracers each comparison is one more thing that sizes have to satisfy.
    if in_graph() or (shape := getattr(mixed, "shape", None)) == given.shape:
        return mixed
    made = type(mixed).__name__ if shape is None else tuple(shape)
    raise ValueError(
        f"{type(mixer).__name__} made {made} of {tuple(given.shape)}; a mixer returns what it is "
        "given in the same shape"
    )


class PointwiseMixer(Mixer):
    """A mixer that treats all tokens alike: any (..., C) will do, and prefix tokens are tokens."""

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens as any other token: (B, P, C) -> (B, P, C)."""
        return self.mix(prefix)


@dataclass(frozen=True)
class Slot:
    """A place in a host that a mixer fills, with all it needs to size itself.

    Attributes:
        dim: Channels C.
        hidden_ratio: Hidden width of the host's own FFN over C.
        grid: Map size (H, W) there at the build resolution.
        stage: Stage index, from 0.
        block: Block index within the stage, from 0.
        dense: Whether the host is built for dense prediction.
        num_prefix_tokens: Class tokens beside the map.
    """

    dim: int
    hidden_ratio: float
    grid: tuple[int, int]
    stage: int
    block: int
    dense: bool
    num_prefix_tokens: int = 0


MixerFactory = Callable[[Slot], Mixer]


def fill(block: nn.Module, name: str, factory: MixerFactory | None, slot: Slot) -> None:
    """Put a mixer in place of a block's FFN or attention; without factory the host's own stays.

    The block remembers the place in either case, see ``Backbone.channel_places``.

    Raises:
        ValueError: The host has class tokens, and the mixer does not take them.
    """
    cast("Any", block).filled = (*getattr(block, "filled", ()), name)
    if factory is None:
        return
    mixer = factory(slot)
    if slot.num_prefix_tokens and not takes_prefix(type(mixer), mixer.kind):
        raise ValueError(no_prefix(type(mixer).__name__))
    own = block.get_submodule(name)
    mixer.replaced = {key: value.shape for key, value in own.state_dict().items()}
    mixer.is_related = type(own) is type(mixer)
    replace(block, name, mixer)


@dataclass(frozen=True)
class HostConfig:
    """What every host builder is given.

    Attributes:
        img_size: Build resolution (H, W); other sizes run too.
        drop_path_rate: Stochastic depth of the last block, rising linearly from 0.
        pretrained: Whether timm shall load its published weights (needs network once).
        dense: Build for dense prediction (see ``create_backbone``).
        patch_size: Stride of the first map.
        channel_mixer: Makes what replaces an FFN; None keeps the host's own.
        token_mixer: Makes what replaces attention or pooling; None keeps the host's own.
    """

    img_size: tuple[int, int]
    drop_path_rate: float = 0.0
    pretrained: bool = False
    dense: bool = False
    patch_size: int = 4
    channel_mixer: MixerFactory | None = None
    token_mixer: MixerFactory | None = None

    def grid(self, stride: int) -> tuple[int, int]:
        """Size (H, W) of the map of a stride at the build resolution."""
        height, width = self.img_size
        return -(-height // stride), -(-width // stride)


def hidden_width(dim: int, ratio: float) -> int:
    """Hidden channels of a ratio over ``dim``, rounded down.

    8/3 of 96 is 256, whatever floats say.

    Raises:
        ValueError: Not a single hidden channel.
    """
    hidden = int(dim * ratio + 1e-6)
    if hidden < 1:
        raise ValueError(
            f"hidden_ratio must leave at least one hidden channel of {dim}, got {ratio}"
        )
    return hidden
