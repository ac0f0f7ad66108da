"""Variants of builders with some options fixed, so that a family states its options once."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Origin:
    """Origin of a variant.

    Attributes:
        build: The builder that it calls.
        options: Options with unchanged defaults.
    """

    build: Callable[..., Any]
    options: frozenset[str]


def variant_of(
    build: Callable[..., T],
    *,
    fixed: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> Callable[[Callable[[], None]], Callable[..., T]]:
    """Derive a builder from another; the decorated function gives its name and docstring.

        @variant_of(afbo, fixed={"cm_a": "gccm"}, without=("g2", "window"))
        def scfbo_gc() -> None:
            '''GCCM on both branches.'''

    The signature is that of ``build`` without the options that are fixed or left out; the
    descriptions of the others are added to the docstring. If ``build`` is a registered mixer, the
    variant inherits its defaults for single hosts (``register_mixer``).

    Args:
        build: A function or class; its keyword-only parameters are its options.
        fixed: Options that the variant fixes, with their values.
        defaults: Options with other defaults.
        without: Options without effect in the variant, which it leaves out.

    Raises:
        TypeError: ``build`` lacks one of the options.
    """
    fixed, defaults = dict(fixed or {}), dict(defaults or {})
    gone = {*fixed, *without}
    call = build.__init__ if inspect.isclass(build) else build
    hints = typing.get_type_hints(call)
    result = build if inspect.isclass(build) else hints.get("return", Any)
    params = inspect.signature(build).parameters
    for name in (*gone, *defaults):
        if name not in params or params[name].kind is not inspect.Parameter.KEYWORD_ONLY:
            raise TypeError(f"{build.__qualname__} has no option {name!r}; it has {list(params)}")
    parameters = [
        p.replace(default=defaults.get(name, p.default), annotation=hints.get(name, Any))
        for name, p in params.items()
        if name not in gone
    ]
    signature = inspect.Signature(parameters)

    def derive(declaration: Callable[[], None]) -> Callable[..., T]:
        @functools.wraps(declaration)
        def variant(*args: Any, **options: Any) -> T:
            arguments = signature.bind(*args, **options)
            return build(*arguments.args, **{**defaults, **arguments.kwargs, **fixed})

        variant.__signature__ = signature  # type: ignore[attr-defined]
        origin = Origin(build, frozenset(params) - {*gone, *defaults})
        variant.origin = origin  # type: ignore[attr-defined]
        variant.__annotations__ = {p.name: p.annotation for p in parameters}
        variant.__annotations__["return"] = result
        variant.__doc__ = _docstring(declaration, build, gone)
        return variant

    return derive


def _docstring(
    declaration: Callable[[], None], build: Callable[..., Any], gone: Collection[str]
) -> str:
    """Return a variant's docstring with the descriptions of its options."""
    text, source = inspect.getdoc(declaration) or "", inspect.getdoc(build) or ""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?)+)", source, re.MULTILINE)
    if section is None:
        return text
    options = re.findall(r"^[ ]{4}(\w+):.*\n?(?:[ ]{5,}.*\n?)*", section[1], re.MULTILINE)
    lines = re.split(r"^(?=[ ]{4}\w)", section[1], flags=re.MULTILINE)[1:]
    descriptions = [part for name, part in zip(options, lines, strict=True) if name not in gone]
    return f"{text.rstrip()}\n\nArgs:\n{''.join(descriptions).rstrip()}"
