"""Draw the data flow of a mixer as SVG, from a trace of its module.

usage: python docs/_ext/dataflow.py MIXER OUT.svg

A box is a part of the mixer or an operator between its parts; an edge is a tensor with its shape.
Operators that only move values, such as a change of axes, are left out.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from backbones import create_mixer

DIM, GRID = 64, (14, 14)
DRAWN_WITH = {"cheby_kan": {"degree": 2}}  # options of pictures that would be too large
# Operators that move values, convert types or do nothing in evaluation.
SILENT = {
    "permute", "transpose", "mT", "flatten", "unflatten", "view", "reshape", "contiguous", "to",
    "expand", "alias", "dropout", "getitem", "slice", "unsqueeze", "unbind", "chunk", "select",
    "split_with_sizes", "_assert_tensor_metadata", "squeeze", "clone", "detach", "ones_like",
}  # fmt: skip
SYMBOLS = {
    "scaled_dot_product_attention": "attention",
    "mul": "×",
    "add": "+",
    "sub": "−",
    "div": "÷",
    "cat": "concatenate",
}
MOST_BOXES = 12
BOX, GAP_X, GAP_Y, MARGIN = (132, 34), 18, 30, 10


@dataclass
class Box:
    """Box of the picture: a part or an operator, with the shape that it gives."""

    title: str
    detail: str = ""
    shape: str = ""
    inputs: list[int] = field(default_factory=list)
    is_point: bool = False  # of a long edge, where it passes a row


def trace(name: str, dim: int = DIM, grid: tuple[int, int] = GRID) -> list[Box]:
    """Return the boxes of a mixer in the order of the computation, input first.

    Parts of several modules are opened as long as the picture stays small.
    """
    mixer = create_mixer(name, dim, grid=grid, **DRAWN_WITH.get(name, {})).eval()
    program = torch.export.export(mixer, (torch.zeros(1, *grid, dim),), strict=False)
    opened: set[str] = set()
    boxes = _boxes(program, mixer, opened)
    for part, module in mixer.named_children():
        if any(module.children()):
            larger = _boxes(program, mixer, opened | {part})
            if len(larger) <= MOST_BOXES:
                opened.add(part)
                boxes = larger
    return boxes


def _boxes(program: Any, mixer: nn.Module, opened: set[str]) -> list[Box]:
    """Return the boxes with some parts opened."""
    boxes: list[Box] = []
    source: dict[str, list[int]] = {}  # node -> boxes whose values it holds
    parameters = {
        spec.arg.name: spec.target or ""
        for spec in program.graph_signature.input_specs
        if spec.kind.name != "USER_INPUT"
    }
    last_part = ""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        shape = _shape(value) if isinstance(value, torch.Tensor) else ""
        found = list(dict.fromkeys(i for one in node.all_input_nodes for i in source[one.name]))
        operator, part = _operator(node), _part(node, opened)
        if node.op == "placeholder" and node.name not in parameters:
            boxes.append(Box("x", shape=shape))
            source[node.name] = [0]
        elif node.op == "output":
            boxes.append(Box("y", shape=boxes[0].shape, inputs=found))
        elif node.op != "call_function" or not found:  # a parameter, or made of parameters
            source[node.name] = found
        elif part and part == last_part and boxes[-1].title == part:
            last = len(boxes) - 1
            source[node.name] = [last]
            boxes[-1].inputs += [i for i in found if i not in (last, *boxes[-1].inputs)]
            boxes[-1].shape = shape or boxes[-1].shape
        elif operator in SILENT:
            source[node.name] = found
        else:
            own = [parameters[one.name] for one in node.all_input_nodes if one.name in parameters]
            detail = _describe(mixer.get_submodule(part)) if part else ", ".join(own)
            title = part or SYMBOLS.get(operator, operator.replace("_", " "))
            boxes.append(Box(title, detail, shape, found))
            source[node.name] = [len(boxes) - 1]
        last_part = part
    return _reachable(boxes)


def _reachable(boxes: list[Box]) -> list[Box]:
    """Drop boxes whose values reach no output."""
    kept, waiting = {0}, [len(boxes) - 1]
    while waiting:
        index = waiting.pop()
        if index not in kept:
            kept.add(index)
            waiting += boxes[index].inputs
    order = sorted(kept)
    for index in order:
        boxes[index].inputs = [order.index(i) for i in boxes[index].inputs if i in kept]
    return [boxes[index] for index in order]


def _operator(node: Any) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0].rstrip("_")


def _part(node: Any, opened: set[str]) -> str:
    """Return the part of the mixer that an operator belongs to; empty between the parts."""
    stack = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    inner = [path for path in stack[1:] if path not in opened]
    return inner[0] if inner else ""


def _describe(part: nn.Module) -> str:
    """Describe a part: its class and channels."""
    kind = type(part).__name__
    ends = [
        getattr(part, f"{end}_features", getattr(part, f"{end}_channels", None))
        for end in ("in", "out")
    ]
    if isinstance(part, nn.Conv2d):
        size = "×".join(map(str, part.kernel_size))
        kind = f"{size} depthwise" if part.groups == part.in_channels > 1 else f"{size} convolution"
    return f"{kind} {ends[0]} → {ends[1]}" if all(isinstance(end, int) for end in ends) else kind


def _shape(value: torch.Tensor) -> str:
    return " × ".join(str(int(side)) for side in value.shape[1:])


def layered(boxes: list[Box]) -> tuple[list[Box], list[list[int]]]:
    """Sort boxes into rows; long edges get a point in every row that they pass."""
    rows_of: list[int] = []
    for box in boxes:
        rows_of.append(1 + max((rows_of[i] for i in box.inputs), default=-1))
    boxes = [Box(**vars(box)) for box in boxes]
    for index in range(len(rows_of)):
        for place, start in enumerate(boxes[index].inputs):
            for row in range(rows_of[start] + 1, rows_of[index]):
                boxes.append(Box("", inputs=[start], is_point=True))
                rows_of.append(row)
                start = len(boxes) - 1
            boxes[index].inputs = [*boxes[index].inputs]
            boxes[index].inputs[place] = start
    rows = [[i for i, at in enumerate(rows_of) if at == row] for row in range(max(rows_of) + 1)]
    for above, row in itertools.pairwise(rows):  # each box near the mean of its inputs
        at = {index: place for place, index in enumerate(above)}
        row.sort(key=lambda i: sum(at[one] for one in boxes[i].inputs) / len(boxes[i].inputs))
    return boxes, rows


def draw(boxes: list[Box], label: str) -> str:
    """Return the picture as SVG, in the colour of the text around it."""
    boxes, rows = layered(boxes)
    sizes = [(14 if box.is_point else BOX[0], BOX[1]) for box in boxes]
    widths = [sum(sizes[i][0] for i in row) + GAP_X * (len(row) - 1) for row in rows]
    width, centre = max(widths) + 2 * MARGIN, {}
    for number, (row, used) in enumerate(zip(rows, widths, strict=True)):
        x = (width - used) / 2
        for i in row:
            centre[i] = (x + sizes[i][0] / 2, MARGIN + number * (BOX[1] + GAP_Y) + BOX[1] / 2)
            x += sizes[i][0] + GAP_X
    height = 2 * MARGIN + len(rows) * (BOX[1] + GAP_Y) - GAP_Y
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="dataflow" '
        f'viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" role="img" aria-label="{escape(label)}" font-family="sans-serif" '
        'text-anchor="middle" stroke="currentColor" fill="none">',
        '<defs><marker id="arrow" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L6 3L0 6z" fill="currentColor" stroke="none"/>'
        "</marker></defs>",
    ]
    for index, box in enumerate(boxes):
        x, y = centre[index]
        if box.is_point:
            drawn.append(f'<path d="M{x:g} {y - BOX[1] / 2:g}V{y + BOX[1] / 2:g}"/>')
        else:
            drawn += _box(box, x, y)
        for start in box.inputs:
            from_x, from_y = centre[start]
            top, bottom = from_y + BOX[1] / 2, y - BOX[1] / 2
            middle = (top + bottom) / 2
            end = "" if box.is_point else ' marker-end="url(#arrow)"'
            drawn.append(
                f'<path d="M{from_x:g} {top:g}C{from_x:g} {middle:g} {x:g} {middle:g} '
                f'{x:g} {bottom:g}"{end}/>'
            )
    return "".join([*drawn, "</svg>"])


def _box(box: Box, x: float, y: float) -> list[str]:
    lines = [box.title, box.detail] if box.detail else [box.title]
    if box.title in ("x", "y") or not box.detail:
        lines = [box.title, box.shape]
    left, top = x - BOX[0] / 2, y - BOX[1] / 2
    texts = [
        f'<text x="{x:g}" y="{y - 3 + 13 * number:g}" font-size="{11 - 2 * number}" '
        f'fill="currentColor" stroke="none">{escape(line[:30])}</text>'
        for number, line in enumerate(lines)
    ]
    hover = f"<title>{escape(box.title)}: {escape(box.shape)}</title>"
    rect = f'<rect x="{left:g}" y="{top:g}" width="{BOX[0]}" height="{BOX[1]}" rx="6"/>'
    return [f"<g>{hover}{rect}", *texts, "</g>"]


def picture(name: str) -> str:
    """Return the picture of a registered mixer."""
    return draw(trace(name), f"Data flow of {name}")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(sys.argv[1]), encoding="utf-8")
