"""Puts modules of a package into one source file: only what is reached from given statements.

Statements keep their source, comments included. Imports among the modules are taken out, other
imports are gathered at the top, and where two modules give one name to different things, one of
them is renamed (as the scopes of Python tell names apart).
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Merger:
    """Collects statements of a package's modules.

    Attributes:
        package: Top-level package whose imports are followed.
        allowed: Other packages that may be imported, besides Python's own.
    """

    package: str
    allowed: frozenset[str]
    reached: dict[str, set[ast.stmt]] = field(default_factory=dict)
    order: list[Module] = field(default_factory=list)

    def add(self, module: str, wanted: Callable[[ast.stmt], bool]) -> None:
        """Take the statements of a module that ``wanted`` chooses, and all that they need."""
        for statement in load(module, self.package).body:
            if wanted(statement):
                self._reach(load(module, self.package), statement)

    def add_name(self, module: str, name: str) -> None:
        """Take what a module calls by a name, and all that it needs."""
        home = load(module, self.package)
        self._reach(home, home.defined_by[name])

    def _reach(self, module: Module, statement: ast.stmt) -> None:
        statements = self.reached.setdefault(module.name, set())
        if statement in statements:
            return
        statements.add(statement)
        for name in sorted(used_names(statement)):
            home, original = module.names.get(name, (None, ""))
            if home:
                other = load(home, self.package)
                if original not in other.defined_by:
                    raise ValueError(f"{module.name} uses the module {home} as a value, {name}")
                self._reach(other, other.defined_by[original])

    def source(self, title: str) -> str:
        """All statements in one module.

        Raises:
            ValueError: They import a package that is not allowed.
        """
        modules = self._sorted()
        flat = self._flat_names(modules)
        imports = sorted({text for home, text in flat if not home})
        for line in imports:
            top = re.split(r"[ .]", line)[1]
            if top not in self.allowed and top not in sys.stdlib_module_names:
                raise ValueError(f"a module of its own cannot hold what has {line!r} in it")
        head = [f'"""{title}"""', "from __future__ import annotations", _import_block(imports)]
        parts = ["\n\n".join(head)]
        for module in modules:
            heading = [module.name.replace(".", "/"), *module.docstring.strip().splitlines()]
            parts.append("\n".join(f"# {line}".rstrip() for line in heading))
            parts += self._texts(module, flat)
        return "\n\n\n".join(parts) + "\n"

    def _sorted(self) -> list[Module]:
        """The reached modules, each behind those that it needs."""
        done: dict[str, Module] = {}

        def visit(name: str) -> None:
            if name in done:
                return
            module = load(name, self.package)
            needed = {
                module.names[used][0]
                for statement in self.reached[name]
                for used in used_names(statement)
                if used in module.names
            }
            for other in sorted(needed - {"", name}):
                visit(other)
            done[name] = module

        for name in sorted(self.reached):
            visit(name)
        return list(done.values())

    def _flat_names(self, modules: list[Module]) -> dict[Entity, str]:
        """What each entity is called in the one module."""
        flat: dict[Entity, str] = {}
        taken = set(dir(builtins))
        for outside in (True, False):
            for module in modules:
                for name in self._bound_and_used(module):
                    entity = module.names[name]
                    if entity in flat or outside != (not entity[0]):
                        continue
                    if entity[0] not in ("", module.name):
                        continue  # named where it is defined
                    own = name
                    while own in taken:
                        own = f"{'_' * own.startswith('_')}{_stem(module)}_{own.lstrip('_')}"
                    if outside and own != name:
                        raise ValueError(f"two imports are called {name}: {entity[1]}")
                    flat[entity] = own
                    taken.add(own)
        return flat

    def _bound_and_used(self, module: Module) -> list[str]:
        statements = self.reached[module.name]
        used = {name for statement in statements for name in used_names(statement)}
        bound = {name for name, statement in module.defined_by.items() if statement in statements}
        return sorted((used | bound) & module.names.keys())

    def _texts(self, module: Module, flat: dict[Entity, str]) -> Iterator[str]:
        new = {
            name: flat[entity]
            for name, entity in module.names.items()
            if entity in flat and flat[entity] != name
        }
        lines = list(module.lines)
        edits = [
            edit
            for statement in self.reached[module.name]
            for edit in Renaming(module.lines, new).of(statement)
        ]
        for row, start, end, text in sorted(edits, reverse=True):
            line = lines[row].encode()  # ast counts bytes
            lines[row] = (line[:start] + text.encode() + line[end:]).decode()
        short: list[str] = []
        for statement in module.body:
            if statement not in self.reached[module.name]:
                continue
            first, last = first_line(module, statement), statement.end_lineno
            text = "\n".join(lines[first:last])
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                short.append(text)
                continue
            if short:
                yield "\n".join(short)
            short = []
            yield text
        if short:
            yield "\n".join(short)


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
    for statement in tree.body:
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


def _import_block(lines: Sequence[str]) -> str:
    """Import statements, those from one module joined."""
    joined: dict[str, list[str]] = {}
    for line in lines:
        module, _, name = line.partition(" import ")
        joined.setdefault(module, []).append(name)
    statements = []
    for module, names in joined.items():
        listed = ", ".join(names)
        line = f"{module} import {listed}" if listed else module
        if len(line) > 100:
            rows = "".join(f"    {name},\n" for name in names)
            line = f"{module} import (\n{rows})"
        statements.append(line)
    return "\n".join(statements)


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


class Renaming(ast.NodeVisitor):
    """Finds where a statement means a top-level name of its module, and not a local one."""

    def __init__(self, lines: list[str], new: dict[str, str]) -> None:
        self.lines, self.new = lines, new
        self.scopes: list[tuple[bool, set[str]]] = []  # whether a class's, and its names
        self.edits: list[tuple[int, int, int, str]] = []

    def of(self, statement: ast.stmt) -> list[tuple[int, int, int, str]]:
        """Line from 0, first and last byte, new text."""
        if self.new:
            self.visit(statement)
        return self.edits

    def visit_Name(self, node: ast.Name) -> None:  # noqa: D102
        if node.id in self.new and not self._is_local(node.id):
            self._edit(node.lineno - 1, node.col_offset, node.id)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:  # noqa: D102
        self._define(node)
        outer = [*node.decorator_list, *_annotations(node.args), *_defaults(node.args)]
        self._visit_all([*outer, *([node.returns] if node.returns else [])])
        self._within(False, _arguments(node.args) | bound_names(node.body), node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:  # noqa: D102
        self._visit_all(_defaults(node.args))
        self._within(False, _arguments(node.args), [node.body])

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: D102
        self._define(node)
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._within(True, bound_names(node.body), node.body)

    def generic_visit(self, node: ast.AST) -> None:
        """Comprehensions have a scope of their own; everything else has not."""
        if isinstance(node, COMPREHENSIONS):
            targets = bound_names([generator.target for generator in node.generators])
            self._within(False, targets, list(ast.iter_child_nodes(node)))
        else:
            super().generic_visit(node)

    def _visit_all(self, nodes: list[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _within(self, of_class: bool, names: set[str], nodes: list) -> None:  # type: ignore[type-arg]
        self.scopes.append((of_class, names))
        self._visit_all(nodes)
        self.scopes.pop()

    def _is_local(self, name: str) -> bool:
        # Functions do not see the names of the class around them.
        visible = [
            names
            for depth, (of_class, names) in enumerate(self.scopes)
            if not of_class or depth == len(self.scopes) - 1
        ]
        return any(name in names for names in visible)

    def _define(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        if node.name in self.new and not self.scopes:
            word = "class" if isinstance(node, ast.ClassDef) else "def"
            self._edit(node.lineno - 1, node.col_offset + len(word) + 1, node.name)

    def _edit(self, row: int, start: int, name: str) -> None:
        self.edits.append((row, start, start + len(name.encode()), self.new[name]))


def _all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    more = [arg for arg in (arguments.vararg, arguments.kwarg) if arg]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *more]


def _arguments(arguments: ast.arguments) -> set[str]:
    return {argument.arg for argument in _all_arguments(arguments)}


def _annotations(arguments: ast.arguments) -> list[ast.AST]:
    return [arg.annotation for arg in _all_arguments(arguments) if arg.annotation]


def _defaults(arguments: ast.arguments) -> list[ast.AST]:
    return [node for node in (*arguments.defaults, *arguments.kw_defaults) if node]


def _stem(module: Module) -> str:
    parts = module.name.split(".")
    return parts[-2] if parts[-1] in ("host", "parts", "names") else parts[-1]
