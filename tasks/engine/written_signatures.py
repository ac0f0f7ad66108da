"""Signatures as their files write them, read without importing what these import, such as torch."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

UNIONS = {"Union": (), "Optional": (types.NoneType,)}
TYPES = {
    "int": int, "float": float, "str": str, "bool": bool, "list": list, "tuple": tuple,
    "dict": Mapping, "Mapping": Mapping, "Sequence": Sequence, "Path": Path, "Any": Any,
}  # fmt: skip


@dataclass(frozen=True)
class Signature:
    """Parameters of a class or function.

    Attributes:
        types: Type of each.
        required: Keyword-only ones without default.
        takes_more: True if it takes any others.
    """

    types: Mapping[str, Any]
    required: Sequence[str]
    takes_more: bool


ANYTHING = Signature({}, (), takes_more=True)  # of a class that no file defines by name


@functools.cache
def read_signature(name: str) -> Signature:
    """Read the signature of a class or function.

    A class with ``**options`` adds those of its next parent.

    Args:
        name: Its dotted name.

    Returns:
        ``ANYTHING`` for a name that no file of an installed package defines.
    """
    module, _, attribute = name.rpartition(".")
    place = _find(module, attribute)
    signatures = [ANYTHING] if place is None else list(_signatures(*place))
    hints: dict[str, Any] = {}
    for signature in signatures:
        hints |= {name: hint for name, hint in signature.types.items() if name not in hints}
    is_function = place is not None and isinstance(place[1], ast.FunctionDef)
    takes_more = (is_function and signatures[0].takes_more) or ANYTHING in signatures
    required = tuple(name for signature in signatures[:1] for name in signature.required)
    return Signature(hints, required, takes_more)


@functools.cache
def read_definitions(module: str) -> dict[str, ast.stmt | str]:
    """Return the definitions at the top level of a module's file, or where each is imported from.

    An import is the dotted name of what it imports.
    """
    package, *rest = module.split(".")
    if not all(part.isidentifier() for part in (package, *rest)):
        return {}
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or ()
    place = Path(*folders, *rest) if folders else Path((spec and spec.origin) or "", *rest)
    is_package = place.is_dir()
    file = place / "__init__.py" if is_package else place.with_suffix(".py")
    if not file.is_file():
        return {}
    definitions: dict[str, ast.stmt | str] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8"), str(file)).body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            definitions[statement.name] = statement
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            definitions[statement.targets[0].id] = statement
        elif isinstance(statement, ast.Import):
            imports = {a.asname or a.name.partition(".")[0]: a for a in statement.names}
            definitions |= {name: a.name if a.asname else name for name, a in imports.items()}
        elif isinstance(statement, ast.ImportFrom):
            depth = len(package_parts := module.split(".")) - statement.level + is_package
            parents = package_parts[:depth] if statement.level else []
            source = ".".join([*parents, *([statement.module] if statement.module else [])])
            definitions |= {a.asname or a.name: f"{source}.{a.name}" for a in statement.names}
    return definitions


def _find(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Return the module that defines a name, dotted or not, of a module, and the definition."""
    first, *rest = name.split(".")
    definition = read_definitions(module).get(first)
    if isinstance(definition, str):
        source, _, attribute = ".".join([definition, *rest]).rpartition(".")
        is_loop = (source, attribute) == (module, name)  # a package that imports its own module
        return _find(source, attribute) if source and not is_loop else None
    return None if definition is None or rest else (module, definition)


def _signatures(module: str, statement: ast.stmt) -> Iterator[Signature]:
    """Yield the signature of a function, or of a class and of the parents that it adds."""
    if isinstance(statement, ast.FunctionDef):
        yield _function_signature(module, statement)
        return
    if not isinstance(statement, ast.ClassDef):
        yield ANYTHING
        return
    for function in statement.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            signature = _function_signature(module, function)
            yield signature
            if not signature.takes_more:
                return
    if any("dataclass" in ast.unparse(decorator) for decorator in statement.decorator_list):
        fields = [field for field in statement.body if isinstance(field, ast.AnnAssign)]
        hints = {ast.unparse(field.target): _hint(field.annotation, module) for field in fields}
        yield Signature(hints, (), takes_more=True)
    for parent in statement.bases:
        name = ast.unparse(parent.value if isinstance(parent, ast.Subscript) else parent)
        place = _find(module, name)
        if place is not None:
            yield from _signatures(*place)
        elif name not in dir(builtins):
            yield ANYTHING


def _function_signature(module: str, function: ast.FunctionDef) -> Signature:
    arguments = function.args
    parameters = [a for a in (*arguments.args, *arguments.kwonlyargs) if a.arg != "self"]
    return Signature(
        {p.arg: _hint(p.annotation, module) for p in parameters},
        [
            p.arg
            for p, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is None
        ],
        arguments.kwarg is not None,
    )


def _hint(node: ast.expr | None, module: str) -> Any:
    """Return the type that an annotation in a module's file means.

    A class stands for itself by name alone: no plain value is one of its objects.
    """
    if node is None:
        return Any
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _hint(ast.parse(node.value, mode="eval").body, module)
    if isinstance(node, ast.Constant):
        return types.NoneType
    if isinstance(node, ast.BinOp):
        return Union[_hint(node.left, module), _hint(node.right, module)]  # noqa: UP007
    if isinstance(node, ast.Name) and node.id in TYPES:
        return TYPES[node.id]
    place = _find(module, node.id) if isinstance(node, ast.Name) else None
    if place is not None and isinstance(place[1], ast.Assign):
        return _hint(place[1].value, place[0])
    if not isinstance(node, ast.Subscript):
        return type(ast.unparse(node).rpartition(".")[2], (), {})
    origin = ast.unparse(node.value)
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if origin == "Literal":
        return Literal[tuple(map(ast.literal_eval, items))]
    inner = tuple(_hint(item, module) for item in items)
    if origin in UNIONS:
        return Union[(*inner, *UNIONS[origin])]
    generic = _hint(node.value, module)
    return generic[inner] if generic in (list, tuple, Mapping, Sequence) else generic
