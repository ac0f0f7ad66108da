"""Parameters and multiply-adds (MACs) of a model, from shapes alone.

Papers call multiply-adds "FLOPs" and count them by different conventions; a rule is one such
convention. Counting runs on the meta device, without memory for weights.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import functional_call
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from backbones.analysis.operators import operator_macs, spectral_macs
from backbones.layers.pooling import AvgPool2d
from backbones.mixer import class_name

Model = Callable[[Tensor], object]
Size = tuple[int, int]
Shape = tuple[int, ...]

aten = torch.ops.aten
# Operators with the position of their weight, which is None unless the norm is affine.
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
    """Return the number of parameters, shared ones once, without buffers."""
    return sum(parameter.numel() for parameter in module.parameters())


def count_macs(
    model: Model,
    image_size: int | Size = 224,
    rule: str = "macs",
    *,
    shape: Sequence[int] | None = None,
) -> int:
    """Count the multiply-adds of one image through ``model`` in evaluation mode.

    A warning names every module with an operator unknown to ``operators``.

    Args:
        model: A module on any device (on a real one for "fvcore"), or a function of an image tensor
            that runs on meta tensors.
        image_size: Side or (H, W) in pixels.
        rule: "macs", "fvcore" or "torchprofile"; see their functions.
        shape: Shape of one input instead of an image's (C, H, W), such as (C, L) of a signal.

    Raises:
        ValueError: Unknown rule, "fvcore" without fvcore or without weights, or a model on the meta
            device that fails there.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}")
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    shape = (channels_of(model), *size) if shape is None else tuple(shape)
    with _usual_algorithms():
        if not isinstance(model, nn.Module):
            return RULES[rule](model, shape)
        with _evaluating(model):
            return RULES[rule](model, shape)


def channels_of(model: Model) -> int:
    """Return the channels of the images that a network with a backbone takes; 3 for others."""
    return int(getattr(getattr(model, "backbone", model), "in_chans", 3))


def count_products(model: Model, shape: Shape) -> int:
    """Count by rule "macs": convolutions, linear layers, matrix and complex products, FFTs.

    Attention's two products are included. A complex product counts 4, a complex Fourier transform
    of n points 2 n log2(n), a real one half of that. Biases, norms, activations, pooling, resizing,
    real element-wise products and softmax are free. A triangular system of n unknowns counts its
    n (n - 1) / 2 substitutions, which torch's FlopCounterMode leaves out, as it leaves out fused
    attention on a CPU: ``gated_delta`` has 1 % and ``bi_level`` 2 % more here.
    """
    return round(_counted(model, shape, _Counter).macs)


def count_like_torchprofile(model: Model, shape: Shape) -> int:
    """Count by rule "torchprofile": rule "macs", and 1 per output element of further operators.

    These are norms with weights, element-wise products (gates, layer scales) and means (average
    pooling). The scale of attention is counted as by most authors: on the logits, or on q if a bias
    is added to the logits (Swin). Biases, sums, activations and softmax are free.
    """
    with _ExplicitAttention():
        return round(_counted(model, shape, _ElementCounter).macs)


def count_like_fvcore(model: Model, shape: Shape) -> int:
    """Count by rule "fvcore": the total of fvcore's FlopCountAnalysis with unfused attention.

    It is rule "macs", 5 per element of a norm (2 of a batch norm), 1 per input element of adaptive
    average pooling and 4 per output element of bilinear resizing. Other pooling, element-wise
    products and activations are free. FFTs and complex products, which fvcore omits, are added by
    rule "macs". The model runs twice on its device.

    Raises:
        ValueError: fvcore is missing, or the model is a function or on the meta device.
    """
    if importlib.util.find_spec("fvcore") is None:
        raise ValueError(
            "rule fvcore needs the package fvcore: pip install fvcore; or use another rule"
        )
    if not isinstance(model, nn.Module) or any(p.is_meta for p in model.parameters()):
        raise ValueError("rule fvcore runs the model: give it a module with weights, not on meta")
    from fvcore.nn import FlopCountAnalysis

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    images = torch.zeros(1, *shape, device=device)
    # The tracer warns of every size that it treats as a constant, as counting requires.
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        analysis = FlopCountAnalysis(model, images)
        analysis.set_op_handle("aten::scaled_dot_product_attention", _attention_macs)
        analysis.set_op_handle("aten::baddbmm", _batched_macs)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        total = int(analysis.total())
    counter = _SpectralCounter(model)
    with counter.counting():
        model(images)
    return total + round(counter.macs)


RULES: dict[str, Callable[[Model, Shape], int]] = {
    "macs": count_products,
    "fvcore": count_like_fvcore,
    "torchprofile": count_like_torchprofile,
}


def _counted(model: Model, shape: Shape, kind: type[_Counter]) -> _Counter:
    """Run one input through the model: by shapes alone, or with weights if an operator needs them.

    Raises:
        ValueError: It fails by shapes alone, and lacks weights.
    """
    counter = kind(model)
    try:
        with counter.counting():
            _run_on_meta(model, shape)
    except RuntimeError as error:  # NotImplementedError is one
        if not isinstance(model, nn.Module) or any(p.is_meta for p in model.parameters()):
            reason = str(error).splitlines()[0]
            if isinstance(error, NotImplementedError) or "fake impl" in reason:
                reason = "an operator lacks shapes; register them with torch.library.register_fake"
            raise ValueError(
                f"{counter.place()} cannot be counted by shapes alone: {reason}"
            ) from error
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        counter = kind(model)
        with counter.counting():
            model(torch.zeros(1, *shape, device=device))
    return counter


def _run_on_meta(model: Model, shape: Shape) -> None:
    images = torch.empty(1, *shape, device="meta")
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
    """Use the same algorithms in every process.

    In deterministic mode resizing is a product, and fused forms of torch's transformer layers hide
    their products.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.use_deterministic_algorithms(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warns)
        torch.backends.mha.set_fastpath_enabled(fused)


def _attention_macs(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Return fvcore's count of q k^T and the product with v."""
    query, key, value = (item.type().sizes() for item in inputs[:3])
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _batched_macs(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """Return fvcore's count of a batch of products, with or without a sum."""
    first_sizes, second_sizes = (item.type().sizes() for item in inputs[1:3])
    return math.prod(first_sizes) * int(second_sizes[-1])


class _Counter(TorchDispatchMode):
    """Counter of multiply-adds that records unknown operators by module.

    Args:
        model: The model that is counted.
    """

    supports_higher_order_operators = True

    def __init__(self, model: Model) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs: float = 0
        self.names: dict[nn.Module, str] = {}
        self.running: list[nn.Module] = []
        self.last: nn.Module | None = None
        self.unknown: dict[str, set[str]] = {}
        if isinstance(model, nn.Module):
            self.names = {module: name for name, module in model.named_modules()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the operators inside the context without autograd, and warn at the end."""
        hooks = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        )
        try:
            with torch.no_grad(), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self._warn()

    def _warn(self) -> None:
        for place, operators in self.unknown.items():
            warnings.warn(
                f"multiply-adds of {place} leave out {', '.join(sorted(operators))}, which are "
                "unknown; add a formula for your operators with "
                "torch.utils.flop_counter.register_flop_formula",
                stacklevel=2,
            )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.last = self.running[-1] if self.running else None
        if isinstance(func, OpOverload) and _may_have_parts(func):
            with self:  # inference mode dispatches whole layers
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self.count(func, args, kwargs, out)
        return out

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Add the count of one call."""
        macs = operator_macs(func, args, kwargs, out)
        if macs is None:
            self.unknown.setdefault(self.place(), set()).add(str(func).removesuffix(".default"))
        else:
            self.macs += macs

    def place(self) -> str:
        """Return name and class of the running module, or of the last one."""
        if self.last is None:
            return "the model"
        return f"{self.names.get(self.last) or 'the model'} ({class_name(self.last)})"

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        if module not in self.names:  # within a function
            for name, part in module.named_modules():
                self.names.setdefault(part, name)
        self.running.append(module)

    def _leave_module(self, module: nn.Module, inputs: object, out: object) -> None:
        self.running.pop()


@functools.cache
def _may_have_parts(func: OpOverload) -> bool:
    # Resizing decomposes into products of indices.
    name = func.overloadpacket.__name__
    return func.overloadpacket not in flop_registry and not name.startswith("upsample_")


class _ElementCounter(_Counter):
    """Counter that adds output elements of affine norms, element-wise products and means."""

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Add the count of one call."""
        super().count(func, args, kwargs, out)
        operator = getattr(func, "overloadpacket", None)
        if isinstance(self.last, AvgPool2d):
            return  # the factors at the border belong to the form, not to the network
        if operator in NORMS and args[NORMS[operator]] is not None:
            self.macs += out[0].numel()
        # Integer products are index arithmetic, which is computed once and cached.
        elif operator in PRODUCTS | MEANS and out.is_floating_point():
            self.macs += out.numel()

    def _leave_module(self, module: nn.Module, inputs: object, out: object) -> None:
        super()._leave_module(module, inputs, out)
        if isinstance(module, AvgPool2d) and isinstance(out, Tensor):
            self.macs += out.numel()


class _SpectralCounter(_Counter):
    """Counter of the operators that fvcore omits: Fourier transforms and complex products."""

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Add the count of one call beyond fvcore."""
        if operator_macs(func, args, kwargs, out) is None:
            super().count(func, args, kwargs, out)
        else:
            self.macs += spectral_macs(func, args, out)


class _ExplicitAttention(TorchFunctionMode):
    """Mode that runs fused attention as products, without softmax and mask, for shapes alone."""

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
