"""A device of which there is none: its numbers are the CPU's, its rules those of a GPU.

A tensor on it wraps one of the CPU. Operations on it refuse other tensors and generators of the CPU
where CUDA does, and autocast casts what it casts on CUDA. Importing this file adds the device to
torch, for the whole process.
"""

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_iter, tree_map

NAME = "pretended"
# Operators that take tensors of two devices: copies, and a device's values by indices of the CPU.
MIXING = {"copy_", "_to_copy", "_copy_from", "set_"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# Operators that take a number from the CPU as a tensor of no axes, besides pointwise ones.
TAKING_NUMBERS = {"fill_", "index_fill", "index_fill_", "masked_fill", "masked_fill_"}
# What CUDA's autocast casts; torch's autocast_mode.h has the lists.
LOW = (
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv",
    "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "linalg_multi_dot", "scaled_dot_product_attention",
)  # fmt: skip
FLOAT = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p",
    "reciprocal", "rsqrt", "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim",
    "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
    "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bicubic2d_aa",
)  # fmt: skip
SUMS = (  # these give float32, unless the call names a type
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
    "sum.dim_IntList",
)  # fmt: skip
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
    "index_put", "tensordot", "scatter_add",
)  # fmt: skip
FACTORIES = (
    "arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "logspace",
    "randperm", "randperm.generator", "tril_indices", "triu_indices",
)  # fmt: skip


class Module(backend_registration._DummyBackendModule):
    """torch.pretended."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def set_device(self, device):
        pass

    def synchronize(self, device=None):
        pass

    def empty_cache(self):
        pass

    def is_bf16_supported(self):
        return True


torch.utils.rename_privateuse1_backend(NAME)
backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
DEVICE = torch.device(NAME, 0)
CPU = torch.device("cpu")


def is_here(device):
    return device is not None and torch.device(device).type == NAME


class Pretended(Tensor):
    """A tensor on the device; ``raw`` holds its numbers on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        return Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=DEVICE,
        )  # fmt: skip

    def __init__(self, raw):
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})

    def __repr__(self, **_):
        return f"{self.raw} on {NAME}"

    def tolist(self):
        return self.raw.tolist()

    def numpy(self, *, force=False):
        if force:
            return self.raw.numpy(force=True)
        raise TypeError(f"can't convert {NAME} device type tensor to numpy; use Tensor.cpu()")

    def data_ptr(self):
        return self.raw.data_ptr()

    def __reduce_ex__(self, protocol):
        return self.raw.detach().__reduce_ex__(protocol)  # files hold plain tensors

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = Pretended(self.raw.detach().clone()).requires_grad_(self.requires_grad)
            kept = {key: value for key, value in vars(self).items() if key != "raw"}
            vars(copied).update(kept)
            memo[id(self)] = copied
        return memo[id(self)]


def compute(operator, args, kwargs):
    """Run an operator on the CPU, after refusing what a device refuses."""
    name = operator._schema.name.partition("::")[2]
    check(operator, name, args, kwargs)
    stays = not kwargs.get("device") or is_here(kwargs["device"])
    wrappers = {}

    def unwrap(value):
        if isinstance(value, Pretended):
            wrappers[id(value.raw)] = value
            return value.raw
        return CPU if isinstance(value, torch.device) else value

    def wrap(value):
        if not isinstance(value, Tensor) or isinstance(value, Pretended) or not stays:
            return value
        return wrappers[id(value)] if id(value) in wrappers else Pretended(value)

    result = operator(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    if name == "copy_" and not isinstance(args[0], Pretended):
        return args[0]
    return tree_map(wrap, result)


def check(operator, name, args, kwargs):
    """Refuse tensors and generators of the CPU, as CUDA does.

    Raises:
        RuntimeError: In CUDA's words.
    """
    if name in MIXING:
        return
    indices = name in INDEXING and isinstance(args[0], Pretended)
    numbers = torch.Tag.pointwise in operator.tags or name in TAKING_NUMBERS
    for place, value in enumerate((*args, *kwargs.values())):
        for one in tree_iter(value):
            if isinstance(one, torch.Generator) and one.device.type != NAME:
                raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
            if not isinstance(one, Tensor) or isinstance(one, Pretended):
                continue
            if ((numbers or indices) and one.ndim == 0) or (indices and place == 1):
                continue
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got one of shape "
                f"{tuple(one.shape)} on {one.device} beside {NAME}"
            )


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return Pretended(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return Pretended(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    numbers = source.raw if isinstance(source, Pretended) else source
    (target.raw if isinstance(target, Pretended) else target).copy_(numbers)
    return target


def _factory(name):
    operator = _overload(name)

    def make(*args, device=None, pin_memory=None, **kwargs):
        return Pretended(operator(*args, device=CPU, **kwargs))

    return make


def _overload(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _casting(name, choose):
    """Return an operator's kernel under autocast, which casts its tensors to what is chosen."""
    operator = _overload(name)

    def kernel(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            kind = choose(args, kwargs)

            def cast(value):
                return value.to(kind) if _is_cast(value) else value

            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


def _is_cast(value):
    return (
        isinstance(value, Tensor)
        and value.device.type == NAME
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _low(args, kwargs):
    return torch.get_autocast_dtype(NAME)


def _float(args, kwargs):
    return torch.float32


def _widest(args, kwargs):
    types = [value.dtype for value in tree_iter((args, kwargs)) if _is_cast(value)]
    return torch.float32 if torch.float32 in types else torch.get_autocast_dtype(NAME)


def _sum(name):
    """Return a sum's kernel under autocast."""
    operator = _overload(name)
    names = [argument.name for argument in operator._schema.arguments][1:]

    def kernel(value, *args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            kwargs |= dict(zip(names, args, strict=False))
            if kwargs.get("dtype") is None and _is_cast(value):
                kwargs["dtype"] = torch.float32
            return operator(value, **kwargs)

    return kernel


AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
LIBRARIES = [
    torch.library.Library("aten", "IMPL", "PrivateUse1"),
    torch.library.Library("_", "IMPL", "AutocastPrivateUse1"),
    torch.library.Library("aten", "IMPL", "AutocastPrivateUse1"),
]

LIBRARIES[0].impl("empty.memory_format", _empty)
LIBRARIES[0].impl("empty_strided", _empty_strided)
LIBRARIES[0].impl("_copy_from", _copy_from)
for _name in FACTORIES:
    LIBRARIES[0].impl(_name, _factory(_name))
LIBRARIES[1].fallback(torch.library.fallthrough_kernel)
for _names, _choose in ((LOW, _low), (FLOAT, _float), (WIDEST, _widest)):
    for _name in _names:
        LIBRARIES[2].impl(_name, _casting(_name, _choose))
for _name in SUMS:
    LIBRARIES[2].impl(_name, _sum(_name))
# Moved parameters stay the same objects, as their tensors cannot be exchanged beneath them.
torch.__future__.set_swap_module_params_on_conversion(True)
