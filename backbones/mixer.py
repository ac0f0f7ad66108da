"""Contract of mixers: modules that take the place of an FFN or an attention.

Axes: B images, H W map, N = H * W tokens, C channels, P prefix (class) tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from backbones.layers.eager import is_recording
from backbones.layers.grid_tables import common_source, grid_of, resize_table
from backbones.layers.one_row import keep_centre_row

PrefixMixing = Literal["joint", "pooled", "none"]
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)  # whose weights sum over their second axis


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
        state = self.state_dict()
        shapes = {
            key: (state[key].shape, value.shape)
            for key, value in tensors.items()
            if key in state
            and (state[key].shape != value.shape or (source and key in self.grid_axes))
        }
        if self.built_for is None or not shapes or source == self.built_for:
            return {}
        reads = {f"{name}.weight" for name, m in self.named_modules() if isinstance(m, LAYERS)}
        source_grid = common_source(shapes, self.built_for, self.grid_axes, reads, source)
        if source_grid is None:
            return {}
        parameters = dict(self.named_parameters())
        return {
            key: resize_table(tensors[key], axes, source_grid[0], self.built_for)
            if key in parameters or key in self.grid_axes
            else state[key]
            for key, axes in source_grid[1].items()
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
        self, tensors: Mapping[str, Tensor], export_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Change to an earlier default form if tensors have it; for exports without options.

        Args:
            tensors: By their names in the mixer.
            export_options: Options that the export names.

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
    has_prefix_method = kind != "token" and mixer.mix_prefix is not Mixer.mix_prefix
    return mixer.prefix_mixing != "none" or has_prefix_method


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


def _of_shape(x: Tensor, mixed: Tensor, mixer: Mixer) -> Tensor:
    """Return a mixed tensor if it has the shape of the given one."""
    # In compilers and tracers each comparison adds a condition on sizes.
    if is_recording() or (shape := getattr(mixed, "shape", None)) == x.shape:
        return mixed
    result = type(mixed).__name__ if shape is None else tuple(shape)
    raise ValueError(
        f"{class_name(mixer)} returned {result} for {tuple(x.shape)}; a mixer must return the "
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
