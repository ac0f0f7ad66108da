"""Parameters and multiply-adds (MACs) of a model, from shapes alone.

Papers say "FLOPs" and mean multiply-adds, but do not agree on what counts as one; a rule is one
such convention. Counting runs on the meta device, so a model of any size takes no memory.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

Model = Callable[[Tensor], object]
Size = tuple[int, int]

aten = torch.ops.aten
# Operators with the position of their weight, which is None when the norm is not affine.
NORMS = {
    aten.native_layer_norm: 2,
    aten.native_group_norm: 1,
    aten.native_batch_norm: 1,
    aten._native_batch_norm_legit: 1,
    aten._native_batch_norm_legit_no_training: 1,
}
PRODUCTS = {aten.mul, aten.mul_, aten.addcmul}
MEANS = {aten.mean, aten.avg_pool2d, aten._adaptive_avg_pool2d}


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, shared ones once; buffers are none."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_macs(model: Model, image_size: int | Size = 224, rule: str = "macs") -> int:
    """Multiply-adds of one image through ``model`` in evaluation mode.

    Args:
        model: A module on any device (on a real one for "fvcore"), or a function of an image tensor
            that runs on meta tensors.
        image_size: Side or (H, W) in pixels.
        rule: "macs", "fvcore" or "torchprofile"; the function of each says what it counts.

    Raises:
        ValueError: Unknown rule, or "fvcore" without fvcore or with a model that has no weights.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}")
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    with _usual_algorithms():
        if not isinstance(model, nn.Module):
            return RULES[rule](model, size)
        with _evaluating(model):
            return RULES[rule](model, size)


def count_products(model: Model, size: Size) -> int:
    """Rule "macs": convolutions, linear layers and matrix products, attention's two among them.

    Biases, norms, activations, pooling, element-wise products and softmax count nothing.
    """
    with FlopCounterMode(display=False) as counter:
        _run_on_meta(model, size)
    return counter.get_total_flops() // 2


def count_like_torchprofile(model: Model, size: Size) -> int:
    """Rule "torchprofile": rule "macs", and 1 per output element of what torchprofile also counts.

    That is norms with weights, element-wise products (gates, layer scales) and means (average
    pooling). The scale of attention counts where most authors put it: on the logits, or on q if a
    bias is added to the logits (Swin). Biases, sums, activations and softmax count nothing.
    """
    with (
        FlopCounterMode(display=False) as counter,
        _ElementCounter() as extra,
        _ExplicitAttention(),
    ):
        _run_on_meta(model, size)
    return counter.get_total_flops() // 2 + extra.elements


def count_like_fvcore(model: Model, size: Size) -> int:
    """Rule "fvcore": the total of fvcore's FlopCountAnalysis with attention not fused.

    That is rule "macs", 5 per element of a norm (2 of a batch norm), 1 per input element of
    adaptive average pooling and 4 per output element of bilinear resizing. Other pooling,
    element-wise products and activations count nothing. It runs the model once, where it is.

    Raises:
        ValueError: fvcore is not installed, or the model is on the meta device or no module.
    """
    if importlib.util.find_spec("fvcore") is None:
        raise ValueError(
            "rule fvcore needs the package fvcore: pip install fvcore; or use another rule"
        )
    if not isinstance(model, nn.Module) or any(p.is_meta for p in model.parameters()):
        raise ValueError("rule fvcore runs the model: give it a module with weights, not on meta")
    from fvcore.nn import FlopCountAnalysis

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    # The tracer warns of every size that it takes for a constant; a count wants exactly that.
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        analysis = FlopCountAnalysis(model, torch.zeros(1, 3, *size, device=device))
        analysis.set_op_handle("aten::scaled_dot_product_attention", _attention_macs)
        analysis.set_op_handle("aten::baddbmm", _batched_macs)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        return int(analysis.total())


RULES: dict[str, Callable[[Model, Size], int]] = {
    "macs": count_products,
    "fvcore": count_like_fvcore,
    "torchprofile": count_like_torchprofile,
}


@torch.no_grad()
def _run_on_meta(model: Model, size: Size) -> None:
    images = torch.empty(1, 3, *size, device="meta")
    if not isinstance(model, nn.Module):
        model(images)
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    functional_call(model, {name: tensor.to("meta") for name, tensor in tensors.items()}, (images,))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _usual_algorithms() -> Iterator[None]:
    """Count the same in a process that computes deterministically: there resizing is products."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warns)


def _attention_macs(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """What fvcore counts for q k^T and for the product with v."""
    query, key, value = (item.type().sizes() for item in inputs[:3])
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _batched_macs(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """What fvcore counts for a batch of products, of one that adds something, too."""
    left, right = (item.type().sizes() for item in inputs[1:3])
    return math.prod(left) * int(right[-1])


class _ElementCounter(TorchDispatchMode):
    """Counts the output elements of affine norms, element-wise products and means."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator in NORMS and args[NORMS[operator]] is not None:
            self.elements += result[0].numel()
        # Integer products are index arithmetic, done once and cached.
        elif operator in PRODUCTS | MEANS and result.is_floating_point():
            self.elements += result.numel()
        return result


class _ExplicitAttention(TorchFunctionMode):
    """Runs fused attention as products; only shapes matter, so without softmax and mask."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        if (kwargs or {}).get("attn_mask") is not None:
            return ((query * 1.0) @ key.transpose(-2, -1)) @ value
        return ((query @ key.transpose(-2, -1)) * 1.0) @ value
