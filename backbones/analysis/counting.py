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
from torch._ops import OpOverload
from torch.func import functional_call
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from backbones.analysis.operators import macs_of, spectral_macs_of

Model = Callable[[Tensor], object]
Size = tuple[int, int]
Shape = tuple[int, ...]

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


def count_macs(
    model: Model,
    image_size: int | Size = 224,
    rule: str = "macs",
    *,
    shape: Sequence[int] | None = None,
) -> int:
    """Multiply-adds of one image through ``model`` in evaluation mode.

    Every module that computes with an operator unknown to ``operators`` is named in a warning.

    Args:
        model: A module on any device (on a real one for "fvcore"), or a function of an image tensor
            that runs on meta tensors.
        image_size: Side or (H, W) in pixels.
        rule: "macs", "fvcore" or "torchprofile"; the function of each says what it counts.
        shape: Of one input in place of an image's (3, H, W), such as (C, L) of a signal.

    Raises:
        ValueError: Unknown rule, "fvcore" without fvcore or with a model that has no weights, or a
            model on the meta device that does not run there.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}")
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    shape = (3, *size) if shape is None else tuple(shape)
    with _usual_algorithms():
        if not isinstance(model, nn.Module):
            return RULES[rule](model, shape)
        with _evaluating(model):
            return RULES[rule](model, shape)


def count_products(model: Model, shape: Shape) -> int:
    """Rule "macs": convolutions, linear layers, matrix products, FFTs and complex products.

    Attention's two products are among them. A complex product counts 4, a complex Fourier transform
    of n points 2 n log2(n), a real one half of that. Biases, norms, activations, pooling, resizing,
    real element-wise products and softmax count nothing.
    """
    return round(_counted(model, shape, _Counter).macs)


def count_like_torchprofile(model: Model, shape: Shape) -> int:
    """Rule "torchprofile": rule "macs", and 1 per output element of what torchprofile also counts.

    That is norms with weights, element-wise products (gates, layer scales) and means (average
    pooling). The scale of attention counts where most authors put it: on the logits, or on q if a
    bias is added to the logits (Swin). Biases, sums, activations and softmax count nothing.
    """
    with _ExplicitAttention():
        return round(_counted(model, shape, _ElementCounter).macs)


def count_like_fvcore(model: Model, shape: Shape) -> int:
    """Rule "fvcore": the total of fvcore's FlopCountAnalysis with attention not fused.

    That is rule "macs", 5 per element of a norm (2 of a batch norm), 1 per input element of
    adaptive average pooling and 4 per output element of bilinear resizing. Other pooling,
    element-wise products and activations count nothing. FFTs and complex products, which fvcore
    leaves out, are added as rule "macs" counts them. It runs the model twice, where it is.

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
    images = torch.zeros(1, *shape, device=device)
    # The tracer warns of every size that it takes for a constant; a count wants exactly that.
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
    """Run one image through the model: by shapes alone, or with weights where an operator must.

    Raises:
        ValueError: It fails by shapes alone, and has no weights.
    """
    counter = kind(model)
    try:
        with counter.counting():
            _run_on_meta(model, shape)
    except RuntimeError as error:  # NotImplementedError is one
        if not isinstance(model, nn.Module) or any(p.is_meta for p in model.parameters()):
            said = str(error).splitlines()[0]
            if isinstance(error, NotImplementedError) or "fake impl" in said:
                said = "an operator has no shapes; register them with torch.library.register_fake"
            raise ValueError(
                f"{counter.place()} cannot be counted by shapes alone: {said}"
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
    """Count the same in every process.

    Resizing is a product where a process computes deterministically, and fused forms of torch's own
    transformer layers hide their products.
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
    """What fvcore counts for q k^T and for the product with v."""
    query, key, value = (item.type().sizes() for item in inputs[:3])
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _batched_macs(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    """What fvcore counts for a batch of products, of one that adds something, too."""
    left, right = (item.type().sizes() for item in inputs[1:3])
    return math.prod(left) * int(right[-1])


class _Counter(TorchDispatchMode):
    """Sums up multiply-adds, and notes by module which operators no rule covers.

    Args:
        model: What is counted; its names tell modules apart.
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
        """Count what is computed within, in evaluation, and warn at the end."""
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
                f"multiply-adds of {place} leave out {', '.join(sorted(operators))}, which no rule "
                "covers; give operators of your own one with "
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
            with self:  # in inference mode whole layers arrive here
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self.count(func, args, kwargs, out)
        return out

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Add what one call counts."""
        macs = macs_of(func, args, kwargs, out)
        if macs is None:
            self.unknown.setdefault(self.place(), set()).add(str(func).removesuffix(".default"))
        else:
            self.macs += macs

    def place(self) -> str:
        """Name and class of the module that computes, or that computed last."""
        if self.last is None:
            return "the model"
        return f"{self.names.get(self.last) or 'the model'} ({type(self.last).__name__})"

    def _enter_module(self, module: nn.Module, given: object) -> None:
        if module not in self.names:  # within a function, whose modules are not known before
            for name, part in module.named_modules():
                self.names.setdefault(part, name)
        self.running.append(module)

    def _leave_module(self, module: nn.Module, given: object, out: object) -> None:
        self.running.pop()


def _may_have_parts(func: OpOverload) -> bool:
    # The parts of resizing are products of indices.
    name = func.overloadpacket.__name__
    return func.overloadpacket not in flop_registry and not name.startswith("upsample_")


class _ElementCounter(_Counter):
    """Counts the output elements of affine norms, element-wise products and means as well."""

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Add what one call counts."""
        super().count(func, args, kwargs, out)
        operator = getattr(func, "overloadpacket", None)
        if operator in NORMS and args[NORMS[operator]] is not None:
            self.macs += out[0].numel()
        # Integer products are index arithmetic, done once and cached.
        elif operator in PRODUCTS | MEANS and out.is_floating_point():
            self.macs += out.numel()


class _SpectralCounter(_Counter):
    """Counts what fvcore leaves out: Fourier transforms and complex products."""

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Add what one call counts beyond fvcore."""
        if macs_of(func, args, kwargs, out) is None:
            super().count(func, args, kwargs, out)
        else:
            self.macs += spectral_macs_of(func, args, out)


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
