"""The base class of all fast modules, and the conversion of a network to them and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_calls

from backbones.fast.library import load
from backbones.importing import import_file, read_declarations
from backbones.layers.eager import is_switched_off
from backbones.layers.graph_sizes import is_exporting
from backbones.replace import share_state

M = TypeVar("M", bound=nn.Module)
FORM = r"^class \w+\(Fast\w+, (\w+)\)"  # the plain class of a form
# Quantised, sharded and fake tensors define operations of their own.
ORDINARY = frozenset({Tensor, nn.Parameter})
_FORMS: dict[type[nn.Module], type[FastModule]] = {}


class FastModule(nn.Module, ABC):
    """Fast form of a plain module, which its class inherits from behind this one.

    ``fast`` makes it from a built module and shares all state with it. Every call computes either
    by the fast form or, where ``needs_plain`` or ``serves`` say so, by the plain class's forward.

    Attributes:
        needs_operators: True if ``compute`` calls compiled operators, which are a CPU's; otherwise
            it runs on any device.
        is_traceable: True if ``compute`` also serves under torch.compile, by an operator with a
            fake implementation. Exports keep the plain form.
    """

    needs_operators = True
    is_traceable = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Register the class as the fast form of its second base class, if there is one."""
        super().__init_subclass__(**options)
        first, *plain_bases = cls.__bases__
        if issubclass(first, FastModule):
            _FORMS.update(dict.fromkeys(plain_bases, cls))

    def forward(self, x: Any = None, *rest: Any, **options: Any) -> Any:
        """Compute by the fast form if it serves this call, otherwise by the plain one."""
        if x is None:  # the input has a name that only the plain form knows
            return super().forward(*rest, **options)
        if self.is_fast(x, *rest, **options):
            return self.compute(x, *rest, **options)
        return super().forward(x, *rest, **options)

    @classmethod
    def may_serve(cls, module: Any) -> bool:
        """Return True if the options of a plain module allow the fast form; others stay plain."""
        return True

    def is_fast(self, x: Tensor, *rest: Any, **options: Any) -> bool:
        """Return True if ``forward`` computes this call by the fast form: the one test per call."""
        if torch.compiler.is_compiling():
            return self.is_traceable and not is_exporting() and self.serves(x, *rest, **options)
        return (
            not needs_plain(self, x)
            and (not self.needs_operators or operators_serve(x))
            and self.serves(x, *rest, **options)
        )

    def serves(self, *inputs: Any, **options: Any) -> bool:
        """Return True if ``compute`` covers the module's options and this input."""
        return True

    @abstractmethod
    def compute(self, *inputs: Any, **options: Any) -> Any:
        """Return what the plain class's forward returns, to rounding."""

    def _get_name(self) -> str:
        return type(self).__bases__[1].__name__


def needs_plain(module: nn.Module, x: Tensor) -> bool:
    """Return True if a call must run the plain operations.

    These are calls under a compiler, tracer, ``torch.func``, forward-mode derivatives or a dispatch
    mode, calls with tensors of other classes, and calls of modules with a hook, a replaced
    ``forward``, a parametrization, or weights of several types, without values or with gaps.
    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or is_switched_off.get()
        or type(x) not in ORDINARY
        or x.is_meta
        or module_calls._global_forward_hooks
        or module_calls._global_forward_pre_hooks
        or module_calls._global_backward_hooks
        or module_calls._global_backward_pre_hooks
    ):
        return True
    # Under autocast weights keep the type that they were built in.
    is_cast = torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64
    dtype = torch.float32 if is_cast else x.dtype
    # torch's own iterators over modules and parameters take longer than a small map.
    modules = [module]
    for part in modules:
        if (
            part._forward_hooks
            or part._forward_pre_hooks
            or part._backward_hooks
            or part._backward_pre_hooks
            # A replica's weight is an attribute; a user may have assigned a forward.
            or "forward" in part.__dict__
            or part.__dict__.get("weight") is not None
        ):
            return True
        for parameter in part._parameters.values():
            if parameter is not None and not (
                parameter.dtype is dtype
                and parameter.is_contiguous()
                and not parameter.is_meta
                and type(parameter) in ORDINARY
            ):
                return True
        if parts := part._modules:
            if "parametrizations" in parts:
                return True
            modules += [part_module for part_module in parts.values() if part_module is not None]
    return False


def operators_serve(x: Tensor) -> bool:
    """Return True if the compiled operators take a tensor: 32 and 64 bits on a CPU."""
    return (
        x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not load()
    )


def fast(network: M) -> M:
    """Replace every module below a network, or the network, by its fast form.

    Parameters, buffers, options and hooks are shared, so names in state dicts, optimisers and
    pickles are those of the plain network.

    Args:
        network: Built; changed in place unless it has a fast form itself.

    Returns:
        The network.
    """
    return _convert(network, _find_form, {})


def plain(network: M) -> M:
    """Undo ``fast``: replace every fast module by one of its plain class."""
    bases: dict[type[nn.Module], type[nn.Module]] = {kind: base for base, kind in _FORMS.items()}
    return _convert(network, lambda module: bases.get(type(module)), {})


def _find_form(module: nn.Module) -> type[FastModule] | None:
    """Return the fast form of a module, or None; its file is imported now."""
    for file, plain_class in read_declarations("backbones.fast", FORM):
        if plain_class == type(module).__name__:
            import_file(file)
    kind = _FORMS.get(type(module))
    return kind if kind is not None and kind.may_serve(module) else None


def _convert(
    module: Any, class_of: Callable[[nn.Module], Any], copies: dict[nn.Module, nn.Module]
) -> Any:
    """Convert a module and its parts; a part in several places stays one object."""
    if module in copies:
        return copies[module]
    kind = class_of(module)
    copies[module] = module if kind is None else share_state(module, kind)
    for name, part in module._modules.items():
        if part is not None and (converted := _convert(part, class_of, copies)) is not part:
            module._modules[name] = converted
    return copies[module]
