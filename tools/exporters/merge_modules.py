"""Puts modules of a package into one source file: only what is reached from given statements.

Statements keep their source, comments included. Imports among the modules are taken out, other
imports are gathered at the top, and where two modules give one name to different things, one of
them is renamed.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tools.exporters.parsed_modules import Entity, Module, first_line, load, used_names
from tools.exporters.renaming import Renaming


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


def _stem(module: Module) -> str:
    parts = module.name.split(".")
    return parts[-2] if parts[-1] in ("host", "parts", "names") else parts[-1]
