"""Record a network as a graph, for torch.export and ONNX.

Batch, height and width stay free if the network's code allows it. Code that branches on the map
size, such as PosMLP's windows, fixes height and width to those of the request. The README states
which sizes are possible.
"""

from __future__ import annotations

import copy
import itertools
import linecache
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from backbones.factory import LEAST_SIDE
from backbones.layers.graph_sizes import adaptive_avg_pool
from backbones.layers.reparam import fuse, is_fused
from tools.exports.requests import ExportRequest

INPUT = "images"
LONG = "(takes minutes for a large network)"
AXES = {0: "batch", 2: "height", 3: "width"}


@dataclass(frozen=True)
class Graph:
    """A network recorded as one graph.

    Attributes:
        program: From torch.export.
        free_axes: Axes of the images that may have any size, among "batch", "height", "width".
        why_fixed: The reason why other axes are fixed, a clause; empty if all are free.
        least: Minimum height and width, if these are free.
    """

    program: ExportedProgram
    free_axes: tuple[str, ...]
    why_fixed: str
    least: int = LEAST_SIDE

    def axes(self) -> dict[int, str]:
        """Return the free axes of the images by position."""
        return {axis: name for axis, name in AXES.items() if name in self.free_axes}

    def sizes(self, size: tuple[int, int]) -> list[tuple[int, int, int]]:
        """Return (B, H, W) to compare on: the traced size and, for free axes, others."""
        if "height" not in self.free_axes:
            return [(2, *size), (1, *size), (3, *size)]
        # Maps of 73 x 99 have odd sides at three of the strides 4, 8, 16, 32.
        return [(2, *size), (1, self.least, self.least), (1, 71, 101), (1, 73, 99), (3, 128, 96)]


def inference_form(network: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode, re-parameterised if the network can be folded."""
    network = copy.deepcopy(network).eval().requires_grad_(False)
    return network if is_fused(network) else fuse(network)


def trace(network: nn.Module, request: ExportRequest, why_fixed: str = "") -> Graph:
    """Record a network with as many free axes as it allows.

    Each graph is run on other sizes too, since torch.export may silently fix an axis.

    Args:
        network: In its ``inference_form``.
        request: The export.
        why_fixed: The reason to fix height and width at once; empty to try free ones first.

    Raises:
        ValueError: The network cannot be recorded at any size; it names module and operator.
    """
    why = why_fixed
    cause: Exception | None = None
    any_size = with_any_size_pools(network)
    # Named axes must be proved free; if torch's algebra cannot do so, the runs below decide.
    choices = ({0: "batch"},) if why_fixed else (AXES, {0: "batch"})
    for axes, has_names in itertools.product(choices, (True, False)):
        recorded = any_size if axes is AXES else network
        try:
            program = _export(recorded, request.images(), axes, has_names, least_side(request))
        except Exception as error:  # torch.export raises any error of the traced code
            why, cause = size_reason(recorded, error), error
            request.report(f"free {' and '.join(axes.values())} failed this way; trying the next")
            continue
        reason = "" if axes is AXES else why
        graph = Graph(program, tuple(axes.values()), reason, least_side(request))
        cause = _first_failure(graph, request)
        if cause is None:
            return graph
        why = size_reason(recorded, cause)
    assert cause is not None, "each choice above failed"
    why = culprit(recorded, cause)
    raise ValueError(f"{request.backbone} cannot be recorded as a graph: {why}") from cause


def least_side(request: ExportRequest) -> int:
    """Return the minimum side of the graph: that of every backbone, or less for small images."""
    return min(LEAST_SIDE, *request.image_size)


class _EveryNth(nn.Module):
    """(B, C, H, W) -> (B, C, ceil(H / n), ceil(W / n)): the first of every n rows and columns."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        # A view would make the graph compare strides with memory formats and fix the result.
        for axis in (2, 3):
            x = x.index_select(axis, torch.arange(0, x.shape[axis], self.n, device=x.device))
        return x


class _WindowMeans(nn.Module):
    """``nn.AdaptiveAvgPool2d`` for maps of any size."""

    def __init__(self, sides: tuple[int, int]) -> None:
        super().__init__()
        self.sides = sides

    def forward(self, x: Tensor) -> Tensor:
        return adaptive_avg_pool(x, self.sides)


def with_any_size_pools(network: nn.Module) -> nn.Module:
    """Replace pooling whose code branches on the remainder of the size, which a graph would fix.

    Strided max pooling becomes pooling at every place, followed by a selection; adaptive means
    become products.
    """
    network = copy.deepcopy(network)
    for parent in list(network.modules()):
        for name, pool in list(parent.named_children()):
            if isinstance(pool, nn.MaxPool2d) and isinstance(pool.stride, int) and pool.stride > 1:
                if pool.dilation != 1:
                    continue
                # With ceil_mode the last windows extend beyond the map, where the maximum is -inf.
                end = pool.stride - 1 if pool.ceil_mode else 0
                padding = nn.ConstantPad2d((0, end, 0, end), -torch.inf)
                everywhere = nn.MaxPool2d(pool.kernel_size, 1, pool.padding)
                setattr(parent, name, nn.Sequential(padding, everywhere, _EveryNth(pool.stride)))
            elif isinstance(pool, nn.AdaptiveAvgPool2d):
                size: Any = pool.output_size
                sides = (size, size) if isinstance(size, int) else size
                if None not in sides:
                    setattr(parent, name, _WindowMeans(sides))
    return network


def _export(
    network: nn.Module, images: Tensor, axes: Mapping[int, str], has_names: bool, side: int
) -> ExportedProgram:
    least = {axis: 1 if axis == 0 else side for axis in axes}
    dims: Any = {
        axis: Dim(name, min=least[axis]) if has_names else Dim.AUTO(min=least[axis])
        for axis, name in axes.items()
    }
    with torch.no_grad():
        return torch.export.export(network, (images,), dynamic_shapes=(dims,))


def _first_failure(graph: Graph, request: ExportRequest) -> Exception | None:
    """Return the error at the first size that should work but fails, or None."""
    run = graph.program.module()
    for batch, *size in graph.sizes(request.image_size):
        try:
            with torch.no_grad():
                run(request.images(batch, (size[0], size[1])))
        except Exception as error:  # guards and operators raise many kinds
            return error
    return None


def size_reason(network: nn.Module, error: BaseException) -> str:
    """Return why a graph takes one size, in words for users; ``culprit`` has torch's words."""
    text = str(error)
    if any(word in text for word in ("Guard failed", "Constraints violated", "specialized")):
        return "the network's code branches on the size of its maps"
    part = culprit(network, error).partition(", ")[0]
    return f"the code of {part} works for the size that it was recorded at"


def culprit(network: nn.Module, error: BaseException) -> str:
    """Name the module and operator (or line) of a failure, and the start of its message."""
    module, operator, line = "the network", "", ""
    names = {id(part): name for name, part in network.named_modules()}
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            module = f"{names[id(owner)] or 'the network'} ({type(owner).__name__})"
            line = linecache.getline(frame.f_code.co_filename, number).strip()
        called = frame.f_locals.get("func")
        if isinstance(called, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            operator = str(called)
    match = re.search(r"aten[.:]+\w+(\.\w+)?", str(error))
    operator = (
        operator or (match.group() if match else "") or (f"`{line}`" if line else "its sizes")
    )
    return f"{module}, {operator}: {_sentence(error)}"


def find_calling_module(program: ExportedProgram, operator: str) -> str:
    """Return the innermost module that called an operator of a program."""
    for node in program.graph.nodes:
        if str(node.target).startswith(operator) and node.meta.get("nn_module_stack"):
            path, kind = list(node.meta["nn_module_stack"].values())[-1]
            kind = kind if isinstance(kind, str) else kind.__name__
            return f"{path} ({kind.rpartition('.')[2]})"
    return "the network"


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}..."
