"""Where a statement means a top-level name of its module, told apart by the scopes of Python."""

from __future__ import annotations

import ast

from tools.exporters.parsed_modules import COMPREHENSIONS, bound_names


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
