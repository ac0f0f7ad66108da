"""Multiply-adds of single operators, and the operators that are free by convention.

An operator is counted, free or unknown. Counted are products of matrices, convolutions, Fourier
transforms and products of complex numbers. Free are element-wise operations, norms, activations,
pooling, resampling, reductions and operators that move values. All others are unknown.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

COMPLEX_PRODUCT = 4  # multiply-adds of (a + ib)(c + id)
FFT = 2  # multiply-adds of a complex transform of n points, over n log2(n); a real one has half

aten = torch.ops.aten
# Tags by which torch says that an operator is element-wise, a reduction or a view.
FREE_TAGS = {
    torch.Tag.pointwise,
    torch.Tag.reduction,
    torch.Tag.view_copy,
    torch.Tag.inplace_view,
}
DEFORMABLE = "torchvision.deform_conv2d"  # registered when torchvision is imported
FREE_NAMESPACES = ("prim", "prims", "profiler", "debug", "c10d", "_c10d_functional")
# Free operators without such a tag, by name without underscores around it.
FREE = re.compile(
    # Creation, movement, selection and comparison of values.
    r"arange|empty.*|new_.*|eye|full.*|linspace|logspace|ones.*|zeros?|zeros_like|scalar_tensor|"
    r"rand.*|bernoulli|binomial|cauchy|exponential|geometric|(log_)?normal.*|multinomial|poisson|"
    r"uniform|sample_dirichlet|standard_gamma|.*_window|range|efficientzerotensor|tri[lu].*|"
    r"fft_r?fftfreq|affine_grid_generator|complex|polar|"
    r".*_copy|copy_from.*|to_copy|to_dense|copy|clone|cat|chunk_cat|stack|contiguous|alias|lift.*|"
    r"detach|unsafe_view|reshape.*|resize.*|set|set_data|fill|put|roll|rot90|flip|repeat.*|"
    r"block_diag|diag_embed|diagonal_scatter|as_strided.*|narrow|select_scatter|slice_scatter|"
    r"unsafe_split.*|constant_pad_nd|reflection_pad.*|replication_pad.*|im2col|col2im|"
    r"pixel_(un)?shuffle|channel_shuffle|(unsafe_)?index.*|gather|scatter.*|take.*|where|masked_.*|"
    r"unsafe_masked_index.*|embedding.*|nonzero.*|unique.*|isin|bucketize|searchsorted|"
    r"histc|bincount|local_scalar_dense|item|assert.*|functional_assert.*|sym_.*|is_.*|equal|"
    r"allclose|has_.*|fused_sdp_choice|linalg_check_errors|histogram.*|record_stream|pin_memory|"
    r"lazy_clone|print|q(uantize)?_.*|int_repr|"
    # Element-wise operations, norms, activations, softmax, dropout and losses.
    r"add_relu|floor_divide|hardswish|thnn_fused_.*_cell|linalg_cross|.*_loss.*|"
    r"binary_cross_entropy.*|"
    r"native_(layer|group|batch)_norm.*|batch_norm.*|cudnn_batch_norm|fused_rms_norm|renorm|"
    r"weight_norm_interface|(log_|safe_)?softmax|glu|prelu.*|rrelu.*|log_sigmoid_forward|"
    r".*dropout|"
    # Pooling and resampling, also of regions.
    r"(adaptive_|fractional_)?(avg|max)_pool.*|max_unpool.*|upsample_.*|"
    r"(cudnn_)?grid_sampler.*|roi_align|roi_pool|ps_roi_align|ps_roi_pool|nms|"
    # Sums, scans and orders.
    r"cum.*|logcumsumexp|aminmax|sort|topk|kthvalue|trace|dist|segment_reduce|native_norm"
)
# Activations of complex numbers are free as well; other functions of them are unknown.
COMPLEX_UNKNOWN = {"div", "divide", "reciprocal", "addcdiv", "prod", "cumprod", "pow", "lerp"}


def operator_macs(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> float | None:
    """Return the multiply-adds of a call: 0 for a free operator, None for an unknown one.

    Args:
        func: The operator, with its overload.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: Its result.
    """
    operator = getattr(func, "overloadpacket", None)  # higher-order operators lack it
    if operator is None:
        return None
    if operator in flop_registry:
        # torch's formulas count a complex product as one multiply-add.
        factor = COMPLEX_PRODUCT if _has_complex(args) else 1
        return factor * int(flop_registry[operator](*args, **kwargs, out_val=out)) // 2
    rule = COUNTED.get(operator) or (_deformable if str(operator) == DEFORMABLE else None)
    if rule is not None:
        return rule(args, kwargs, out)
    if _has_complex(args):
        if operator in (aten.mul, aten.mul_, aten.addcmul, aten.addcmul_):
            factors = [x for x in args[-2:] if isinstance(x, Tensor) and x.is_complex()]
            return COMPLEX_PRODUCT * out.numel() if len(factors) == 2 else 0
        if _plain_name(func) in COMPLEX_UNKNOWN and not _is_by_real(func, args):
            return None
    return 0 if is_free(func) else None


def spectral_macs(func: Any, args: tuple[Any, ...], out: Any) -> float:
    """Return the share of complex products and FFTs, which counters of real products omit."""
    operator = getattr(func, "overloadpacket", None)
    if operator in flop_registry:
        complex_macs = operator_macs(func, args, {}, out) if _has_complex(args) else 0
        return (complex_macs or 0) * (COMPLEX_PRODUCT - 1) / COMPLEX_PRODUCT
    if operator in TRANSFORMS or _has_complex(args):
        return operator_macs(func, args, {}, out) or 0
    return 0


@functools.cache
def is_free(func: Any) -> bool:
    """Return True for an operator that is free by convention."""
    if func.namespace in FREE_NAMESPACES:
        return True
    if func.namespace not in ("aten", "torchvision"):
        return False
    if func.is_view or FREE_TAGS.intersection(func.tags):
        return True
    name = _plain_name(func)
    if FREE.fullmatch(name):
        return True
    # In-place variants lack the tag.
    function = getattr(torch.ops.aten, name, None)
    return function is not None and any(
        FREE_TAGS.intersection(getattr(function, overload).tags)
        for overload in function.overloads()
    )


def _plain_name(func: Any) -> str:
    """Return the name without the underscores of private and in-place operators."""
    name: str = func.overloadpacket.__name__
    return name.strip("_").removeprefix("foreach_")


def _has_complex(values: Any) -> bool:
    for value in values:
        if isinstance(value, Tensor) and value.is_complex():
            return True
    return False


def _is_by_real(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True for a complex number divided by a real one."""
    by = args[1] if len(args) > 1 else None
    real = not by.is_complex() if isinstance(by, Tensor) else isinstance(by, int | float)
    return _plain_name(func) in ("div", "divide") and real


Rule = Callable[[tuple[Any, ...], Mapping[str, Any], Any], float | None]


def _products(*shapes: int) -> Rule:
    """Count a product of matrices or vectors.

    Args:
        *shapes: Positions of both factors among the arguments; the last axis of the first one is
            summed over, and all axes of the second one after its first are free.
    """
    first_shapes, second_shapes = shapes

    def rule(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        first, second = args[first_shapes], args[second_shapes]
        columns = second.shape[-1] if second.ndim > 1 else 1
        factor = COMPLEX_PRODUCT if first.is_complex() and second.is_complex() else 1
        return int(factor * first.numel() * columns)

    return rule


def _outer(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    return int(out.numel()) * (COMPLEX_PRODUCT if out.is_complex() else 1)


def _bilinear(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count sum_ij x_i W_oij y_j as a product of W with the longer vector, then with the other."""
    (tokens, i), (outputs, _, j) = args[0].shape, args[1].shape
    factor = COMPLEX_PRODUCT if out.is_complex() else 1
    return int(factor * tokens * outputs * (i * j + min(i, j)))


def _distances(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int | None:
    """Count Euclidean distances: one square and sum per pair and channel."""
    if len(args) > 2 and args[2] != 2:
        return None
    return int(out.numel() * args[0].shape[-1])


def _deformable(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the convolution of a deformable one's samples."""
    return int(out.numel() * args[1][0].numel())


def _triangular(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count the substitutions of a triangular system without its divisions."""
    return int(out.numel() * (args[0].shape[-1] - 1) // 2)


def _conv_tbc(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    return int(out.numel() * args[1].shape[0] * args[1].shape[1])


def _attention(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Count q k^T and the product with v."""
    query, key, value = args[:3]
    return int(math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _transform(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    """Count a Fourier transform over one or several axes, by the points of its real side."""
    x, axes = args[:2]
    points = x if not x.is_complex() or out.is_complex() else out
    macs = points.numel() * math.log2(math.prod(points.shape[axis] for axis in axes))
    return FFT * macs if x.is_complex() and out.is_complex() else FFT * macs / 2


TRANSFORMS: dict[Any, Rule] = dict.fromkeys(
    (aten._fft_r2c, aten._fft_c2r, aten._fft_c2c), _transform
)
COUNTED: dict[Any, Rule] = {
    **TRANSFORMS,
    aten.mv: _products(0, 1),
    aten.addmv: _products(1, 2),
    aten.addmv_: _products(1, 2),
    aten.dot: _products(0, 1),
    aten.vdot: _products(0, 1),
    aten.addr: _outer,
    aten.addr_: _outer,
    aten.addbmm: _products(1, 2),
    aten.addbmm_: _products(1, 2),
    aten.addmm_: _products(1, 2),
    aten.baddbmm_: _products(1, 2),
    aten._addmm_activation: _products(1, 2),
    aten._int_mm: _products(0, 1),
    aten._trilinear: _bilinear,
    aten._cdist_forward: _distances,
    aten._euclidean_dist: _distances,
    aten.conv_tbc: _conv_tbc,
    aten.linalg_solve_triangular: _triangular,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
}
