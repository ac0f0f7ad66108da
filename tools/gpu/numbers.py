"""Numbers of mixers and of their fast forms on a device, against float64 on the CPU.

The reference runs on the CPU, since a wrong kernel of a GPU may be wrong in float64, too.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from backbones import create_mixer, list_mixers
from backbones.base import Mixer
from backbones.fast import fast
from backbones.fast.base import FastModule
from backbones.fast.triton.choice import try_all
from tools.bench.timing import record_cuda_graph
from tools.gpu.extent import ABSENT, FAIL, PASS, Goals, Record, Setting, describe_error, judge

BATCH = 2
TRIALS = "trials"
KERNEL_TYPES = ("float32", "bfloat16", "float16")
NOISE = 0.02  # moves parameters away from zeros, behind which errors would be hidden


def mixer_names(setting: Setting) -> list[str]:
    """Return the names of all mixers to check."""
    only = setting.extent.only
    return [name for name in list_mixers() if only is None or name in only]


def kernel_names(setting: Setting) -> list[str]:
    """Return the kernels' own trials, and the mixers that have a fast form for the device."""
    return [
        TRIALS,
        *(
            name for name in mixer_names(setting)
            if fast_forms(fast(create_mixer(name, setting.extent.dim)), setting.device)
        ),
    ]  # fmt: skip


def fast_forms(network: nn.Module, device: str) -> list[FastModule]:
    """Return the fast modules of a network that may serve on a device."""
    modules = [part for part in network.modules() if isinstance(part, FastModule)]
    return [part for part in modules if device == "cpu" or not part.needs_operators]


@contextlib.contextmanager
def computing_in(precision: str, device: str) -> Iterator[None]:
    """Compute in float32, TF32, or by autocast in bfloat16 or float16."""
    is_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_tf32
    dtype = None if is_tf32 or precision == "float32" else getattr(torch, precision)
    # A graph that is recorded must cast weights itself.
    with torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False):
        yield


def differentiate(mixer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Return the output and the gradients of input and parameters."""
    x = x.detach().requires_grad_()
    y = mixer(x)
    leaves = [x, *(weight for weight in mixer.parameters() if weight.requires_grad)]
    options = {"allow_unused": True, "materialize_grads": True}
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype), **options)]


def relative_errors(mixer: Mixer, results: list[Tensor], expected: list[Tensor]) -> list[float]:
    """Return the relative errors of the output and of the gradients of input and parameters.

    The output's error is that of most tokens where rounding may turn a mixer's choice.
    """
    results = [result.to("cpu", torch.float64) for result in results]
    y, truth = results[0], expected[0]
    if mixer.makes_choices:
        output = ((y - truth).norm(dim=-1) / truth.norm(dim=-1)).median()
    else:
        output = (y - truth).norm() / truth.norm()
    groups = [slice(1, 2)] + [slice(2, None)] * (len(expected) > 2)
    gradients = [
        torch.stack([(result - truth).norm() for result, truth in
                     zip(results[group], expected[group], strict=True)]).norm()
        / torch.stack([truth.norm() for truth in expected[group]]).norm().clamp(min=1e-30)
        for group in groups
    ]  # fmt: skip
    return [float(output), float(torch.stack(gradients).max())]


def build_case(name: str, setting: Setting) -> tuple[Mixer, Tensor, Tensor, list[Tensor]]:
    """Return a mixer in float64 on the CPU, an input, a gradient of the output, and the results."""
    torch.manual_seed(0)
    side, dim = setting.extent.side, setting.extent.dim
    mixer = create_mixer(name, dim, grid=(side, side)).double().eval()
    for weight in mixer.parameters():
        weight.data += NOISE * torch.randn_like(weight)
    x, grad = torch.randn(2, BATCH, side, side, dim, dtype=torch.float64)
    return mixer, x, grad, differentiate(mixer, x, grad)


def limits_of(goals: Goals, precision: str, gradient: bool = True) -> dict[str, float]:
    """Return the limits of the errors in a precision."""
    limit = goals.errors[precision]
    gradients = {f"{precision} gradient": goals.gradient * limit} if gradient else {}
    return {precision: limit, **gradients}


def check_mixer(name: str, setting: Setting) -> Iterator[Record]:
    """Yield the errors of a mixer's output and gradients in each precision."""
    mixer, x, grad, expected = build_case(name, setting)
    figures: dict[str, float] = {}
    limits: dict[str, float] = {}
    for precision in setting.extent.goals.errors:
        if precision == "tf32" and setting.device != "cuda":
            continue
        moved = copy.deepcopy(mixer).float().to(setting.device)
        with computing_in(precision, setting.device):
            results = differentiate(
                moved, x.float().to(setting.device), grad.float().to(setting.device)
            )
        output, gradient = relative_errors(mixer, results, expected)
        figures |= {precision: output, f"{precision} gradient": gradient}
        limits |= limits_of(setting.extent.goals, precision, not mixer.makes_choices)
    yield judge(figures, limits)


def check_trials(setting: Setting) -> Iterator[Record]:
    """Yield the verdict of each Triton kernel's own trial, per type."""
    side = setting.extent.side
    x = torch.randn(1, side, side, setting.extent.dim, device=setting.device)
    for name in kernel_names(setting)[1:]:  # a pass registers kernels for the mixer's widths
        mixer = fast(create_mixer(name, setting.extent.dim, grid=(side, side)))
        with computing_in("bfloat16", setting.device), torch.no_grad():
            mixer.to(setting.device)(x)
    results = {}
    if setting.device == "cuda":
        results = try_all(torch.device("cuda", torch.cuda.current_device()))
    if not results:
        yield {"verdict": ABSENT, "note": "there is no GPU, no Triton or no kernel"}
    for (kernel, dtype), why in results.items():
        record = {"type": str(dtype).removeprefix("torch."), "served": "" if why else kernel}
        yield {**record, "verdict": FAIL if why else PASS, "note": f"{kernel}: {why}" * bool(why)}


def check_kernel(name: str, setting: Setting) -> Iterator[Record]:
    """Yield the errors of a mixer's fast form per type: eager, compiled and in a CUDA graph."""
    if name == TRIALS:
        yield from check_trials(setting)
        return
    mixer, x, grad, expected = build_case(name, setting)
    x, grad = x.float().to(setting.device), grad.float().to(setting.device)
    for precision in KERNEL_TYPES:
        network = fast(copy.deepcopy(mixer).float().to(setting.device))
        figures: dict[str, float] = {}
        limits: dict[str, float] = {}
        broken, kinds = [], []
        for way, results_of in WAYS.items():
            if way == "graph" and setting.device != "cuda":
                continue
            try:
                with computing_in(precision, setting.device):
                    results, kinds_of_way = results_of(network, x, grad)
            except Exception as error:  # of compilers, drivers and kernels
                broken.append(f"{way}: {describe_error(error)}")
                continue
            kinds += kinds_of_way
            figures[way], figures[f"{way} gradient"] = relative_errors(mixer, results, expected)
            limit = limits_of(setting.extent.goals, precision, not mixer.makes_choices)
            limits |= {key.replace(precision, way): value for key, value in limit.items()}
        record = {"type": precision, "served": ", ".join(kinds), **judge(figures, limits)}
        if broken:
            record |= {"verdict": FAIL, "note": "; ".join([*broken, record["note"]]).strip("; ")}
        yield record


@contextlib.contextmanager
def noting_calls(part: FastModule, called: dict[str, None]) -> Iterator[None]:
    """Add the name of a fast form to ``called`` when it computes."""
    compute = part.compute

    def noted(*inputs: Any, **options: Any) -> Any:
        called[type(part).__name__] = None
        return compute(*inputs, **options)

    vars(part)["compute"] = noted
    try:
        yield
    finally:
        del vars(part)["compute"]


def compute_eagerly(network: nn.Module, x: Tensor, grad: Tensor) -> tuple[list[Tensor], list[str]]:
    """Return the results and the names of the fast forms that computed them."""
    called = dict[str, None]()
    with contextlib.ExitStack() as stack:
        for part in fast_forms(network, x.device.type):
            stack.enter_context(noting_calls(part, called))
        return differentiate(network, x, grad), list(called)


def compute_compiled(network: nn.Module, x: Tensor, grad: Tensor) -> tuple[list[Tensor], list[str]]:
    """Return the results of the compiled network."""
    compiled: Any = torch.compile(network, fullgraph=True, dynamic=False)
    return differentiate(compiled, x, grad), []


def compute_in_graph(network: nn.Module, x: Tensor, grad: Tensor) -> tuple[list[Tensor], list[str]]:
    """Return the results that a CUDA graph recorded on another input gives for this one."""
    place, results = torch.randn_like(x), list[Tensor]()

    def step() -> None:
        results[:] = differentiate(network, place, grad)

    replay = record_cuda_graph(step)
    place.copy_(x)
    replay()
    torch.cuda.synchronize()
    return results, []


WAYS: dict[str, Callable[..., tuple[list[Tensor], list[str]]]] = {
    "eager": compute_eagerly, "compiled": compute_compiled, "graph": compute_in_graph,
}  # fmt: skip
