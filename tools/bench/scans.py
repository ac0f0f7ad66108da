"""Time the scans of recurrent mixers, in chunks, against a Python loop over tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones.mixers.recurrent.bi_wkv import bi_wkv
from backbones.mixers.recurrent.gated_delta import delta_rule
from backbones.mixers.recurrent.mlstm import mlstm
from backbones.mixers.recurrent.ss2d import selective_scan
from tools.bench.timing import (
    interleave,
    make_step,
    print_status,
    set_up_process,
    summarise_ratios,
)
from tools.cli.arguments import parse_integer
from tools.cli.tables import Record


def loop_selective(u: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the reads of the selective scan."""
    state, reads = torch.zeros_like(u[0].unsqueeze(-1) * a), []
    for token, width, write, read in zip(*(x.unbind(0) for x in (u, step, b, c)), strict=True):
        decay = (width.unsqueeze(-1) * a).exp()
        state = decay * state + (width * token).unsqueeze(-1) * write.unsqueeze(-2)
        reads.append((state * read.unsqueeze(-2)).sum(-1))
    return torch.stack(reads)


def loop_wkv(k: Tensor, v: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """Return bi_wkv's means, by a loop in each direction."""
    count, rate = k.shape[1], (-decay / k.shape[1]).exp()
    weights = (k - k.detach().amax(1, keepdim=True)).unbind(1)
    sums = []
    for order in (range(count), range(count - 1, -1, -1)):
        top, bottom = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        states = [(top, bottom)] * count
        values = v.unbind(1)
        for t in order:
            states[t] = (top, bottom)
            weight = weights[t].exp()
            top, bottom = rate * top + weight * values[t], rate * bottom + weight
        sums.append(states)
    means = []
    for value, weight, before, after in zip(v.unbind(1), weights, *sums, strict=True):
        self_weight = (bonus / count + weight).exp()
        top, bottom = (x + y for x, y in zip(before, after, strict=True))
        means.append((top + self_weight * value) / (bottom + self_weight))
    return torch.stack(means, dim=1)


def loop_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Return the reads of the gated delta rule."""
    state, reads = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    parts = (q.unsqueeze(3), k.unsqueeze(3), v.unsqueeze(3), log_decay.exp(), beta)
    for query, key, value, decay, rate in zip(*(part.unbind(2) for part in parts), strict=True):
        state = decay[..., None, None] * state
        state = state + key.mT @ (rate[..., None, None] * (value - key @ state))
        reads.append(query @ state)
    return torch.cat(reads, dim=2)


def loop_mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, log_forget: Tensor) -> Tensor:
    """Return h of mLSTM."""
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    memory, reads = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    parts = (q.unsqueeze(3), k.unsqueeze(3), v.unsqueeze(3), i.exp(), log_forget.exp())
    for query, key, value, write, keep in zip(*(part.unbind(2) for part in parts), strict=True):
        memory = keep[..., None, None] * memory + write[..., None, None] * key.mT @ value
        reads.append(query @ memory)
    sums = torch.cat(reads, dim=2)
    return sums[..., :-1] / sums[..., -1:].abs().clamp(min=1)


def make_inputs(name: str, tokens: int, dim: int) -> tuple[Tensor, ...]:
    """Return what the mixer of this name gives to its scan for one map, with its default options.

    Args:
        name: "ss2d", "bi_wkv", "gated_delta" or "mlstm".
        tokens: N.
        dim: Channels C of the mixer.
    """
    if name == "ss2d":
        u, step = torch.randn(tokens, 4, 1, dim), torch.rand(tokens, 4, 1, dim)
        b, c = torch.randn(2, tokens, 4, 1, 1)
        return u, step, -torch.ones(4, 1, dim, 1), b, c
    if name == "bi_wkv":
        k, v = torch.randn(2, 1, tokens, dim)
        return k, v, torch.linspace(-5, 3, dim), torch.zeros(dim)
    heads, batch, key, value = (
        (max(1, dim // 64), 2, 48, 96) if name == "gated_delta" else (4, 1, dim // 2, dim // 2)
    )
    q, k = F.normalize(torch.randn(2, batch, heads, tokens, key), dim=-1)
    v = torch.randn(batch, heads, tokens, value)
    gates = torch.rand(batch, heads, tokens)
    gate_inputs = (-0.1 * gates, gates)
    return (q, k, v, *(gate_inputs if name == "gated_delta" else gate_inputs[::-1]))


Scan = Callable[..., Tensor]
SCANS: dict[str, tuple[Scan, Scan]] = {
    "ss2d": (selective_scan, loop_selective),
    "bi_wkv": (bi_wkv, loop_wkv),
    "gated_delta": (delta_rule, loop_delta),
    "mlstm": (mlstm, loop_mlstm),
}


class OnInputs(nn.Module):
    """A scan as a module of its first input.

    Args:
        function: The scan.
        others: Its other inputs.
    """

    def __init__(self, function: Scan, more_inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.function, self.others = function, more_inputs

    def forward(self, first: Tensor) -> Tensor:
        """Scan."""
        return self.function(first, *self.others)


def time_scans(options: dict[str, str]) -> list[Record]:
    """Time each scan and its loop in the same rounds; return a record for each.

    Raises:
        ValueError: An option is wrong.
    """
    tokens, dim = (parse_integer(name, options[name]) for name in ("tokens", "dim"))
    rounds = parse_integer("rounds", options["rounds"], least=2)
    names = options["mixer"].split(",")
    if outsiders := set(names) - set(SCANS):
        raise ValueError(
            f"mixer must be one or more of {', '.join(SCANS)}; got {', '.join(sorted(outsiders))}"
        )
    dtype, device, records = set_up_process(options), options["device"], []
    for name in names:
        inputs = [x.to(device) for x in make_inputs(name, tokens, dim)]
        for kind in ("forward", "training")[: 1 + (options["train"] == "true")]:
            print_status(f"{name}: {kind}, {tokens} tokens, {rounds} rounds")
            for x in inputs:
                x.requires_grad_(kind == "training")
            forms = [OnInputs(form, inputs[1:]) for form in SCANS[name]]
            steps = [make_step(form, inputs[0], kind, dtype) for form in forms]
            chunked, looped = interleave(steps, rounds, device, options["clock"])
            records.append(
                {
                    "mixer": name,
                    "step": kind,
                    "tokens": tokens,
                    "ms": statistics.median(chunked) * 1e3,
                    "loop_ms": statistics.median(looped) * 1e3,
                    **summarise_ratios(looped, chunked),
                }
            )
    return records
