"""Calls of a network's modules, recorded on the meta device: shapes, and what they compute.

Only shapes are computed, so a network of any size takes a fraction of a second.

Axes: B images, H W map, N tokens, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

BATCH = 2
# Functions that only arrange the values of a tensor, by their names in torch.
ARRANGING = frozenset(
    {
        "permute", "transpose", "reshape", "view", "flatten", "unflatten", "contiguous", "squeeze",
        "unsqueeze", "clone", "to", "float", "type", "roll", "pad", "movedim", "view_as",
    }
)  # fmt: skip
# Functions that combine the values of several places.
COMBINING = frozenset(
    {
        "scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum",
        "__matmul__", "rfft2", "fft2", "cumsum",
    }
)  # fmt: skip
POOLING = frozenset({"avg_pool2d", "max_pool2d", "_max_pool2d", "avg_pool1d"})
ADDITION = frozenset({"add", "__add__", "__radd__", "__iadd__", "add_"})
PRODUCT = frozenset({"mul", "__mul__", "__rmul__", "__imul__", "mul_"})
CONVOLUTION = frozenset({"conv1d", "conv2d"})


@dataclass(frozen=True)
class Layer:
    """A linear layer or convolution that was called.

    Attributes:
        shape: Shape of its input.
        is_linear: True for a linear layer, False for a convolution.
        inputs: Input channels.
        outputs: Output channels.
        kernel: Product of the kernel's sides; 1 for a linear layer.
        groups: Groups of the convolution.
        stride: Largest stride.
    """

    shape: tuple[int, ...]
    is_linear: bool
    inputs: int
    outputs: int
    kernel: int = 1
    groups: int = 1
    stride: int = 1

    @property
    def is_pointwise(self) -> bool:
        """True if every output reads one place of the map."""
        return self.kernel == 1 and self.stride == 1 and self.groups == 1

    @property
    def is_depthwise(self) -> bool:
        """True if every output reads one channel."""
        return self.groups > 1 and self.inputs == self.groups and self.kernel > 1


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: Name of the module.
        given: Shape of the first tensor that it got.
        returned: Shape of what it returned; None unless that is a tensor.
        layers: Linear layers and convolutions, in order.
        functions: Names of the functions of torch that it called.
        adds_input: True if it added something to its own input.
        scales_input: True if it multiplied its own input by something computed from it.
    """

    name: str
    input_shape: tuple[int, ...]
    root: int
    returned: tuple[int, ...] | None = None
    layers: list[Layer] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    adds_input: bool = False
    scales_input: bool = False


def record_calls(network: nn.Module, run: Callable[[], Any]) -> dict[str, list[ModuleCall]]:
    """Return the calls of every module while ``run`` runs, by module and in order.

    Args:
        network: On the meta device.
        run: Calls the network.
    """
    recorder = _CallRecorder()
    handles = []
    for name, module in network.named_modules():
        if name:
            handles += recorder.watch(name, module)
    try:
        with recorder:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return recorder.calls


class _CallRecorder(TorchFunctionMode):
    """Records the functions of torch for every module that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[ModuleCall]] = {}
        self._running: list[ModuleCall] = []
        self._roots: dict[int, int] = {}  # tensor -> the tensor that it is an arrangement of
        self._kept: list[Tensor] = []  # so that no two tensors of the pass share an id

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        def begin(_: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
            first = next((value for value in args if isinstance(value, Tensor)), None)
            shape = () if first is None else tuple(first.shape)
            call = ModuleCall(name, shape, 0 if first is None else self._root(first))
            self.calls.setdefault(name, []).append(call)
            self._running.append(call)

        def end(_: nn.Module, args: Any, options: Any, result: Any) -> None:
            call = self._running.pop()
            if isinstance(result, Tensor):
                call.returned = tuple(result.shape)

        return [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(end, with_kwargs=True),
        ]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [value for value in args if isinstance(value, Tensor)]
        if name in ARRANGING and tensors and isinstance(result, Tensor):
            self._kept += [tensors[0], result]
            self._roots[id(result)] = self._root(tensors[0])
        layer = _layer(name, func, tensors, args, kwargs or {})
        for call in self._running:
            call.functions.add(name)
            if layer is not None:
                call.layers.append(layer)
        if name in ADDITION | PRODUCT and len(tensors) == 2:
            self._note_sum(name in ADDITION, tensors)
        return result

    def _note_sum(self, is_sum: bool, tensors: list[Tensor]) -> None:
        roots = [self._root(tensor) for tensor in tensors]
        for call in self._running:
            is_whole = any(
                root == call.root and tensor.numel() == math.prod(call.input_shape)
                for root, tensor in zip(roots, tensors, strict=True)
            )
            if is_sum:
                call.adds_input |= is_whole and tensors[0].shape == tensors[1].shape
            elif is_whole:
                call.scales_input |= not any(isinstance(tensor, nn.Parameter) for tensor in tensors)

    def _root(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return self._roots.get(id(tensor), id(tensor))


def _layer(
    name: str, func: Any, tensors: list[Tensor], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Layer | None:
    """Return the linear layer or convolution that a function computes."""
    if func is F.linear and len(tensors) > 1:
        outputs, inputs = tensors[1].shape
        return Layer(tuple(tensors[0].shape), True, inputs, outputs)
    if name in CONVOLUTION and len(tensors) > 1:
        weight = tensors[1]
        places: Iterable[Any] = args[3:]
        stride, _, _, groups = [*places, *(1, 0, 1, 1)[len(args[3:]) :]][:4]
        stride, groups = options.get("stride", stride), options.get("groups", groups)
        return Layer(
            tuple(tensors[0].shape), False, tensors[0].shape[1], weight.shape[0],
            math.prod(weight.shape[2:]), groups, stride if isinstance(stride, int) else max(stride),
        )  # fmt: skip
    return None
