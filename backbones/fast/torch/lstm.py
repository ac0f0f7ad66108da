"""The LSTMs of ``lstm2d`` by torch's own: cuDNN on a GPU, oneDNN in float32 on a CPU.

Compilers, exports and autocast on a CPU keep the loop. Processor time of a step of lstm2d with over
without it, on one thread of an AMD EPYC with 56 x 56 tokens of 64 channels: 0.39 forward, 0.36
with gradients.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from backbones.fast.base import FastModule
from backbones.mixers.recurrent.lstm2d import TwoWayLSTM

# cuDNN copies the weights, a few kilobytes, into one block per call; torch advises flattening.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")


class FastTwoWayLSTM(FastModule, TwoWayLSTM):
    """Both directions by ``torch.lstm`` with the same parameters."""

    needs_operators = False

    def serves(self, x: Tensor) -> bool:
        """Return True on a GPU, and on a CPU without autocast."""
        return x.is_cuda or (x.is_cpu and not torch.is_autocast_enabled("cpu"))

    def compute(self, x: Tensor) -> Tensor:
        """Run both ways: (B, L, T, C) -> (B, L, T, 2 D)."""
        lines = x.flatten(0, 1)
        weights = [
            getattr(self, f"{name}_{end}")
            for end in ("l0", "l0_reverse")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ]
        start = x.new_zeros(2, len(lines), self.weight_hh_l0.shape[1])
        # Without dropout both modes compute the same, and cuDNN's gradients need that of training.
        states, _, _ = torch.lstm(
            lines, (start, start), weights, has_biases=True, num_layers=1, dropout=0.0,
            train=self.training or torch.is_grad_enabled(), bidirectional=True, batch_first=True,
        )  # fmt: skip
        return states.unflatten(0, x.shape[:2])
