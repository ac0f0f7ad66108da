"""A module's source as its top-level statements, and what each of its names means."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A name bound at the top of a module, or a name imported from elsewhere ("", its import statement).
Entity = tuple[str, str]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, eq=False)
class Module:
    """A module's source, and what its top-level names mean.

    Attributes:
        name: Dotted.
        lines: Of the source.
        body: Top-level statements but imports and docstring.
        names: What each top-level name is.
        defined_by: The statement that binds a name of the module's own.
    """

    name: str
    lines: list[str]
    docstring: str
    body: list[ast.stmt]
    names: dict[str, Entity]
    defined_by: dict[str, ast.stmt]


@functools.cache
def load(name: str, package: str) -> Module:
    """Parse a module."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    tree = ast.parse(source)
    names: dict[str, Entity] = {}
    defined_by: dict[str, ast.stmt] = {}
    body = []
    for statement in _door(tree) if spec.submodule_search_locations else tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names |= _imported(statement, package)
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        body.append(statement)
        for bound in bound_at_top(statement):
            names[bound] = (name, bound)
            defined_by[bound] = statement
    return Module(name, source.splitlines(), ast.get_docstring(tree) or "", body, names, defined_by)


def _door(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a package; one that loads its names late says for checkers whose they are."""
    for statement in tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from statement.body
        else:
            yield statement


def _imported(statement: ast.Import | ast.ImportFrom, package: str) -> dict[str, Entity]:
    found: dict[str, Entity] = {}
    for alias in statement.names:
        bound = alias.asname or alias.name
        rest = f" as {alias.asname}" if alias.asname else ""
        if isinstance(statement, ast.Import):
            text = f"import {alias.name}{rest}"
            found[bound.partition(".")[0]] = ("", text)
        elif statement.module == "__future__":
            continue
        elif str(statement.module).partition(".")[0] == package:
            found[bound] = _origin(str(statement.module), alias.name, package)
        else:
            found[bound] = ("", f"from {statement.module} import {alias.name}{rest}")
    return found


def _origin(module: str, name: str, package: str) -> Entity:
    """Where a name of the package is defined, behind however many modules that pass it on."""
    if importlib.util.find_spec(module) is None or _is_module(f"{module}.{name}"):
        return f"{module}.{name}", ""
    home, original = load(module, package).names[name]
    return (home, original) if home in ("", module) else _origin(home, original, package)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def bound_at_top(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement binds in its module."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return bound_names([statement])


def bound_names(body: list[ast.stmt] | list[ast.expr]) -> set[str]:
    """Names bound by statements, scopes within them left out."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        if not isinstance(node, (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)):
            found |= bound_names(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]
    return found


def first_line(module: Module, statement: ast.stmt) -> int:
    """Where a statement begins (from 0), with its decorators and the comments right above."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(node.lineno for node in decorators)]) - 1
    while first and module.lines[first - 1].startswith("#"):
        first -= 1
    return first


def used_names(statement: ast.stmt) -> set[str]:
    """Every name that a statement reads; some may be local to a function in it."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
