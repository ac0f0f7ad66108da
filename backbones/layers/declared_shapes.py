"""Cast what a host reads, and compare what it returns with the shapes that it declares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from backbones.layers.eager import is_recording
from backbones.options.suggestions import plural


class Info(Protocol):
    """Channels and stride that a host declares for a map."""

    @property
    def channels(self) -> int:
        """Return the channels of the map."""

    @property
    def stride(self) -> int:
        """Return the input pixels per row and column of the map."""


def check_maps(host: Any, images: Tensor, maps: object) -> None:
    """Refuse maps that differ from a host's ``feature_info``.

    Raises:
        ValueError: Another number of maps, or another shape; says what was declared.
    """
    name, infos = _name(host), cast("Sequence[Info]", host.feature_info)
    if not isinstance(maps, tuple) or len(maps) != len(infos):
        result = f"{len(maps)} maps" if isinstance(maps, tuple) else type(maps).__name__
        raise ValueError(
            f"forward of {name} returned {result}; return a tuple with a map for each of the "
            f"{len(infos)} entries of feature_info"
        )
    size = "x".join(map(str, images.shape[2:]))
    shapes = host.map_shapes(images)
    for place, (map_, info, declared) in enumerate(zip(maps, infos, shapes, strict=True)):
        if getattr(map_, "shape", None) != declared:
            raise ValueError(
                f"map {place} of {name} is {_shape(map_)} for {plural(host.modality)} of {size}; "
                f"feature_info declares {info.channels} channels at stride {info.stride}, which "
                f"is {declared}; correct either"
            )


def check_embedding(host: Any, images: Tensor, embedding: object) -> None:
    """Refuse an embedding that differs from a host's ``num_features``.

    Raises:
        ValueError: Another shape.
    """
    declared = (len(images), host.num_features)
    if getattr(embedding, "shape", None) != declared:
        raise ValueError(
            f"embed of {_name(host)} returned {_shape(embedding)}; num_features declares "
            f"{declared}; correct either"
        )


def with_check(
    method: Callable[..., Any], check: Callable[[Any, Tensor, Any], None]
) -> Callable[..., Any]:
    """Wrap a host's method as ``with_cast``, and check what it returns in each eager pass.

    A class that calls the method of its base changes what that returns, so only the outermost one
    is checked.
    """

    @functools.wraps(method)
    def checked(self: Any, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = method(self, self.cast_input(images), *args, **kwargs)
        # To compilers and tracers each comparison is one more thing that sizes have to satisfy.
        if not is_recording() and _outermost(type(self), method.__name__) is checked:
            check(self, images, result)
        return result

    return checked


def with_cast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a host's method so that its inputs have the type of the weights."""

    @functools.wraps(method)
    def cast_first(self: Any, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        return method(self, self.cast_input(images), *args, **kwargs)

    return cast_first


def _outermost(kind: type, name: str) -> object:
    """Return the first method of this name that is checked, in the order of the base classes."""
    definitions = (part.__dict__[name] for part in kind.__mro__ if name in part.__dict__)
    return next((method for method in definitions if hasattr(method, "__wrapped__")), None)


def _name(host: Any) -> str:
    return host.name or type(host).__name__


def _shape(value: object) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__
