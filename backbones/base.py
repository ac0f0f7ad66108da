"""Contracts of all model files: backbones, mixers, and the slots that mixers fill.

Axes: B images, H W map, N = H * W tokens, C channels, P prefix (class) tokens.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from backbones.layers.classifier import Classifier
from backbones.layers.declared_shapes import check_embedding, check_maps, with_cast, with_check
from backbones.layers.eager import is_recording
from backbones.layers.grid_tables import common_source, grid_of, resize_table
from backbones.layers.input_channels import adapt_input, adapt_tensors
from backbones.layers.one_row import keep_centre_row
from backbones.layers.recomputation import keep_activations, recompute
from backbones.parameters.freezing import freeze_stages, keep_in_evaluation
from backbones.parameters.layer_ids import USUAL, LayerIds, LayerNames, count_depths, list_blocks
from backbones.replace import replace

Layout = Literal["nhwc", "nchw", "tokens"]
PrefixMixing = Literal["joint", "pooled", "none"]
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)  # whose weights sum over their second axis


@dataclass(frozen=True)
class FeatureInfo:
    """Channels of a map that a backbone returns, and its stride in input pixels."""

    channels: int
    stride: int


class Backbone(nn.Module):
    """Network from images to feature maps, the type that heads, tasks and exporters work with.

    It lacks ``init_weights`` on purpose: mmengine would call it and overwrite loaded weights.
    A host of another modality declares it in ``register_host``, and takes inputs of its own shape.

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
        had_prefix: False if the model has no prefix tokens that an option could leave out.
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
        return list_blocks((name for name, _ in self.named_parameters()), self.layer_names)

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
        found = []
        for parent, module in self.named_modules():
            for name in getattr(module, "filled", ()):
                place = f"{parent}.{name}"
                if any(f".{slot}." in f"{place}." for slot in self.channel_slots):
                    found.append(place)
                elif not place.endswith(tuple(f".{slot}" for slot in self.token_slots)):
                    raise TypeError(
                        f"{type(self).__name__} fills {place}, which is missing from its "
                        f"token_slots {self.token_slots} and channel_slots {self.channel_slots}; "
                        "add it to one of them"
                    )
        return found

    def mixers(self) -> dict[str, Mixer]:
        """Return the mixers that replaced parts of the host, by the prefix of their keys."""
        return {
            f"{name}.": module
            for name, module in self.named_modules()
            if isinstance(module, Mixer) and module.replaced is not None
        }

    def set_in_chans(self, in_chans: int, *, keep_weights: bool = True) -> None:
        """Take images of another number of channels; see ``layers.input_channels``."""
        self.input_keys = adapt_input(self, in_chans, keep_weights=keep_weights)
        self.in_chans = in_chans

    def adapt_input(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with weights for images of 3 channels adapted to ``in_chans``."""
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


class Mixer(nn.Module):
    """A channel or token mixer: (B, H, W, C) -> (B, H, W, C) at any H and W.

    A subclass defines ``mix``. Norm, residual, layer scale and drop path stay in the host's block.

    Attributes:
        prefix_mixing: Treatment of prefix (class) tokens. "joint": ``mix_joint`` mixes the map and
            the prefix tokens together, as attention does. "pooled": each prefix token gets the mean
            of the mixed map. "none": the host is built without prefix tokens and pools its map; a
            channel mixer that defines ``mix_prefix`` treats them apart from the map instead.
        kind: "token" or "channel", as it is registered; None for a mixer that is built directly.
        replaced: Keys and shapes of the host's module that it replaced; None for a host's own.
        is_related: True if that module was a mixer of the same class, so that its tensors may fit.
        value_layer: Name of the part that sums values by coefficients, such as an FFN's second
            layer; its inputs are the mixer's coefficients. Empty without one.
        channel_mappings: Names of the parts that map C to hidden channels; the outputs of two are
            multiplied.
        grid_axes: Axes of the parameters and buffers whose shapes follow the map size, by name,
            such as ``{"filter": "H F C 2"}``; see ``layers/grid_tables``. ``at_size`` reads them.
        built_for: Map size (H, W) that it was built for; None outside a factory.
        ignores_order: True if it treats all orders of the tokens alike, as attention without
            positions does.
        makes_choices: True if it selects parts by the largest scores, so that rounding may turn a
            choice.
        shows_attention: False if its attention is not the weights of tokens for tokens: of
            channels, agents, gathered keys or all heads at once, or the difference of two.
    """

    prefix_mixing: PrefixMixing = "none"
    kind: Literal["channel", "token"] | None = None
    replaced: Mapping[str, torch.Size] | None = None
    is_related: bool = False
    value_layer: str = ""
    channel_mappings: tuple[str, ...] = ()
    grid_axes: Mapping[str, str] = MappingProxyType({})
    built_for: tuple[int, int] | None = None
    ignores_order: bool = False
    makes_choices: bool = False
    shows_attention: bool = True

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Mix the map ``x`` (B, H, W, C) and, if given, the prefix tokens (B, P, C).

        "pooled" returns the mean of the mixed map for every prefix token, which the host's residual
        adds: class attention with equal weights over the map.

        Source: class attention is that of CaiT (Touvron et al., "Going deeper with Image
        Transformers", ICCV 2021, https://arxiv.org/abs/2103.17239).

        Raises:
            ValueError: The subclass returns another shape, which a residual might broadcast, or
                refuses prefix tokens.
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
        """Mix a map: (B, H, W, C) -> (B, H, W, C); by default ``mix_joint`` without prefix."""
        return self.mix_joint(x, x.new_empty(x.shape[0], 0, x.shape[-1]))[0]

    def mix_joint(self, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Mix map and prefix tokens together: (B, H, W, C) and (B, P, C) -> both, P >= 0."""
        raise NotImplementedError

    def at_size(self, name: str, size: tuple[int, int]) -> Tensor:
        """Return a parameter or buffer of ``grid_axes`` for a map of ``size`` (H, W), interpolated.

        Raises:
            ValueError: ``grid_axes`` lacks it, or its axes differ from its shape.
        """
        table: Tensor = operator.attrgetter(name)(self)
        axes = self.grid_axes.get(name)
        if axes is None:
            raise ValueError(
                f"{name} of {class_name(self)} is missing from its grid_axes; add its axes, "
                f'such as {{{name!r}: "H W C"}}'
            )
        return resize_table(table, axes, grid_of(table.shape, axes, self.built_for), size)

    def to_own_size(
        self, tensors: dict[str, Tensor], source: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Interpolate tables of another map size to the one that the mixer was built for.

        Parameters missing from ``grid_axes`` are recognised by their shapes. Buffers are computed
        from the map size, so the mixer keeps its own.

        Args:
            tensors: By their names in the mixer, in any sizes.
            source: Their map size (H, W), if the file states it.

        Returns:
            The tensors that changed.
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
            All tensors; a name that is missing from them counts as renamed.
        """
        return tensors

    def take_earlier_form(
        self, tensors: Mapping[str, Tensor], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Change to an earlier default form if tensors have it; for exports without options.

        Args:
            tensors: By their names in the mixer.
            given: Options that the export names.

        Returns:
            The options that changed; none by default.
        """
        return {}

    def is_dead(self, key: str, value: Tensor) -> bool:
        """Return True if a checkpoint's tensor that the mixer lacks would change no output.

        Args:
            key: Its name in the mixer.
            value: The file's tensor.
        """
        return False

    def narrow(self) -> None:
        """Keep the centre row of each k x k kernel, for maps of one row such as series."""
        keep_centre_row(self)

    def take_penalty(self) -> Tensor | None:
        """Return a loss of the last training pass for the task to add, and forget it."""
        return None

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens by the pointwise parts of a channel mixer: (B, P, C) -> (B, P, C)."""
        raise ValueError(no_prefix(class_name(self)))


def takes_prefix(mixer: type[Mixer], kind: str | None) -> bool:
    """Return True if a mixer in a slot of this kind takes prefix tokens.

    ``mix_prefix`` counts for channel mixers only: under a token mixer that treats prefix tokens
    apart from the map, a class token would never see the image.
    """
    apart = kind != "token" and mixer.mix_prefix is not Mixer.mix_prefix
    return mixer.prefix_mixing != "none" or apart


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class; for a fast form, that of its plain class."""
    return str(module._get_name())


def no_prefix(mixer: str) -> str:
    """Return the message that a mixer refuses prefix tokens."""
    return (
        f"{mixer} takes no class tokens (prefix_mixing='none'); build the host without them, such "
        "as deit_t with class_token=False, or declare prefix_mixing='joint' or 'pooled' in the "
        "mixer's class"
    )


def _checked_pair(mixed: object, x: Tensor, prefix: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor]:
    """Check the map and the prefix tokens that ``mix_joint`` returned."""
    if not isinstance(mixed, tuple) or len(mixed) != 2:
        raise ValueError(
            f"{class_name(mixer)}.mix_joint returned {type(mixed).__name__}; return the mixed "
            "map and the mixed prefix tokens, (x, prefix)"
        )
    return _of_shape(x, mixed[0], mixer), _of_shape(prefix, mixed[1], mixer)


def _of_shape(given: Tensor, mixed: Tensor, mixer: Mixer) -> Tensor:
    """Return a mixed tensor if it has the shape of the given one."""
    # In compilers and tracers each comparison adds a condition on sizes.
    if is_recording() or (shape := getattr(mixed, "shape", None)) == given.shape:
        return mixed
    made = type(mixed).__name__ if shape is None else tuple(shape)
    raise ValueError(
        f"{class_name(mixer)} returned {made} for {tuple(given.shape)}; a mixer must return the "
        "shape of its input"
    )


class PointwiseMixer(Mixer):
    """Mixer of (..., C) that treats all tokens alike, prefix tokens included."""

    ignores_order = True

    def mix_prefix(self, prefix: Tensor) -> Tensor:
        """Mix prefix tokens like all others: (B, P, C) -> (B, P, C)."""
        return self.mix(prefix)


class SequenceMixer(Mixer):
    """Mixer of a row of tokens, among which prefix tokens are the first.

    A subclass defines ``mix_sequence``.
    """

    prefix_mixing = "joint"

    def mix_sequence(self, tokens: Tensor) -> Tensor:
        """Mix all tokens: (B, N, C) -> (B, N, C)."""
        raise NotImplementedError

    def mix(self, x: Tensor) -> Tensor:
        """Mix the tokens of a map: (B, H, W, C) -> the same."""
        return self.mix_sequence(x.flatten(1, 2)).unflatten(1, x.shape[1:3])

    def mix_joint(self, x: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Mix map and prefix tokens in one row: (B, H, W, C) and (B, P, C) -> both."""
        count = prefix.shape[1]
        mixed = self.mix_sequence(torch.cat([prefix, x.flatten(1, 2)], dim=1))
        return mixed[:, count:].unflatten(1, x.shape[1:3]), mixed[:, :count]


@dataclass(frozen=True)
class Slot:
    """Place in a host that a mixer fills, with all that determines the mixer's size.

    Attributes:
        dim: Channels C.
        hidden_ratio: Hidden width of the host's own FFN over C.
        grid: Map size (H, W) at the build resolution.
        stage: Stage index, from 0.
        block: Block index within the stage, from 0.
        dense: True if the host is built for dense prediction.
        num_prefix_tokens: Number P of class tokens.
    """

    dim: int
    hidden_ratio: float
    grid: tuple[int, int]
    stage: int
    block: int
    dense: bool
    num_prefix_tokens: int = 0


MixerFactory = Callable[[Slot], Mixer]


class SlotMixers:
    """Factory of mixers that differ from stage to stage or from block to block.

    Args:
        by_place: Factory per stage and block; None keeps the host's own module. Later stages, such
            as class blocks, take the last one.
    """

    def __init__(self, by_place: Mapping[tuple[int, int], MixerFactory | None]) -> None:
        self.by_place = dict(by_place)

    def at(self, slot: Slot) -> MixerFactory | None:
        """Return the factory of a slot; None if the host keeps its own module there."""
        last = next(reversed(self.by_place.values()))
        return self.by_place.get((slot.stage, slot.block), last)

    def __call__(self, slot: Slot) -> Mixer:
        """Build the mixer of a slot.

        Raises:
            ValueError: The host keeps its own module there.
        """
        factory = self.at(slot)
        if factory is None:
            raise ValueError(f"stage {slot.stage}, block {slot.block} keeps the host's own module")
        return factory(slot)


def factory_at(factory: MixerFactory | None, slot: Slot) -> MixerFactory | None:
    """Return the factory for one slot; None if the host keeps its own module there."""
    return factory.at(slot) if isinstance(factory, SlotMixers) else factory


def fill(block: nn.Module, name: str, factory: MixerFactory | None, slot: Slot) -> None:
    """Replace a block's FFN or attention by a mixer; without factory the host keeps its own.

    The block records the place in either case, see ``Backbone.channel_places``.
    A host fills its slots after all of its own weights are drawn, so that mixers leave them alike.

    Raises:
        ValueError: The host has class tokens that the mixer refuses.
    """
    cast("Any", block).filled = (*getattr(block, "filled", ()), name)
    factory = factory_at(factory, slot)
    if factory is None:
        return
    mixer = factory(slot)
    if slot.num_prefix_tokens and not takes_prefix(type(mixer), mixer.kind):
        raise ValueError(no_prefix(class_name(mixer)))
    own = block.get_submodule(name)
    mixer.replaced = {key: value.shape for key, value in own.state_dict().items()}
    mixer.is_related = type(own) is type(mixer)
    replace(block, name, mixer)


@dataclass(frozen=True)
class HostConfig:
    """Options that every host builder gets.

    Attributes:
        img_size: Build resolution (H, W), (1, L) for signals; other sizes run too.
        drop_path_rate: Stochastic depth of the last block, rising linearly from 0.
        pretrained: True to load timm's published weights (needs network once).
        dense: Build for dense prediction (see ``create_backbone``).
        patch_size: Stride of the first map.
        channel_mixer: Builds the mixer that replaces an FFN; None keeps the host's own.
        token_mixer: Builds the mixer that replaces attention or pooling; None keeps the host's own.
        in_chans: Channels of the images.
    """

    img_size: tuple[int, int]
    drop_path_rate: float = 0.0
    pretrained: bool = False
    dense: bool = False
    patch_size: int = 4
    channel_mixer: MixerFactory | None = None
    token_mixer: MixerFactory | None = None
    in_chans: int = 3

    def grid(self, stride: int) -> tuple[int, int]:
        """Return the size (H, W) of the map with this stride at the build resolution."""
        height, width = self.img_size
        return -(-height // stride), -(-width // stride)


def hidden_width(dim: int, ratio: float) -> int:
    """Return ``ratio`` times ``dim`` hidden channels, rounded down: 256 for 8/3 of 96.

    Raises:
        ValueError: The result is zero.
    """
    hidden = int(dim * ratio + 1e-6)
    if hidden < 1:
        raise ValueError(
            f"hidden_ratio must give at least one hidden channel for {dim} channels, got {ratio}"
        )
    return hidden
