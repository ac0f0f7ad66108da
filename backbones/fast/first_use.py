"""Try a form on a device before its first use there, beside torch's operations, with gradients.

A form that cannot be compiled or launched, or that gives other numbers, is named in one warning;
torch's operations serve instead.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# How far outputs and gradients may lie from float64's, over the largest number of each.
TOLERANCES = {
    torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 0.02, torch.bfloat16: 0.1,
}  # fmt: skip
Function = Callable[..., Tensor]
_failures: dict[tuple[str, torch.device, torch.dtype], str] = {}
_trying = threading.Lock()


def serves(
    form: str,
    device: torch.device,
    dtype: torch.dtype,
    load: Callable[[], Function],
    plain: Function,
    inputs: Sequence[Tensor],
) -> bool:
    """Return True if a form computes in this type on this device; try it if it is new there.

    Args:
        form: Its name in the warning.
        device: Where it shall serve.
        dtype: Of what it computes with.
        load: Imports the form and returns it.
        plain: Computes the same by torch's operations.
        inputs: Small ones for both, in float64 on the CPU.
    """
    key = (form, device, dtype)
    if key not in _failures:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Whoever records a graph makes a pass before, as torch's instructions have it.
            return False
        with _trying:
            if key not in _failures:
                _failures[key] = find_fault(device, dtype, load, plain, inputs)
                if _failures[key]:
                    warnings.warn(
                        f"{form} does not serve on {device} in {dtype}, torch's own operations "
                        f"do: {_failures[key]}",
                        stacklevel=3,
                    )
    return not _failures[key]


def find_fault(
    device: torch.device,
    dtype: torch.dtype,
    load: Callable[[], Function],
    plain: Function,
    inputs: Sequence[Tensor],
) -> str:
    """Return why a form fails, or an empty string; the arguments are those of ``serves``."""
    try:
        with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
            given = [x.to(device, dtype) for x in inputs]
            mine = _results(load(), given)
            exact = _results(plain, [x.double() for x in given])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever kind: a compiler, a driver, a GPU too old
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    for index, (one, other) in enumerate(zip(mine, exact, strict=True)):
        difference = float((one.double() - other).abs().max() / other.abs().max())
        if not difference <= TOLERANCES[dtype]:
            name = f"the gradient of input {index}" if index else "the output"
            return f"{name} differs by {difference:.1e}"
    return ""


@torch.enable_grad()
def _results(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of all inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, weights.to(y.dtype))]
