"""BiLSTM2D: LSTMs run down and up the columns and both ways along the rows of a map.

    y = W [V(x), H(x)] + b
    c_t = sigma(f) c_{t-1} + sigma(i) tanh(g),  h_t = sigma(o) tanh(c_t)
    (i, f, g, o) = P x_t + p + Q h_{t-1} + q

V puts the states h of both directions of a column side by side, H those of a row.

Source: Tatsunami and Taki, "Sequencer: Deep LSTM for Image Classification", NeurIPS 2022,
https://arxiv.org/abs/2205.01972, Eq. 1 to 9; Hochreiter and Schmidhuber, 1997. A quarter of C as
hidden channels per direction is that of Sequencer2D-S. Weights of the LSTMs start uniform in +-
1 / sqrt(hidden channels), W Glorot-uniform, as in the authors' code.

A loop over the places of all lines at once, which can be compiled and exported at any size; its
fast form is torch's own LSTM.

Axes: B images, H W map, C channels, D hidden channels, T places of a line.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backbones.mixer import Mixer
from backbones.registry import register_mixer
from backbones.slots import hidden_width


@register_mixer("lstm2d", kind="token", source="Sequencer (NeurIPS 2022)")
class LSTM2d(Mixer):
    """W [V(x), H(x)] + b; class tokens are not mixed: the host pools its map.

    Args:
        dim: Channels C.
        expansion: D over C.

    Shape: (B, H, W, C) -> (B, H, W, C), any map size. Parameters: 16 D (C + D + 2) + 4 D C + C.

    Raises:
        ValueError: D is below 1.

    Source: Sequencer (NeurIPS 2022), https://arxiv.org/abs/2205.01972.
    """

    def __init__(self, dim: int, *, expansion: float = 0.25) -> None:
        super().__init__()
        hidden = hidden_width(dim, expansion)
        self.rnn_v, self.rnn_h = TwoWayLSTM(dim, hidden), TwoWayLSTM(dim, hidden)
        self.fc = nn.Linear(4 * hidden, dim)
        nn.init.xavier_uniform_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def mix(self, x: Tensor) -> Tensor:
        """Run over columns and rows: (B, H, W, C) -> (B, H, W, C)."""
        columns = self.rnn_v(x.transpose(1, 2)).transpose(1, 2)
        return self.fc(torch.cat([columns, self.rnn_h(x)], dim=-1))


class TwoWayLSTM(nn.Module):
    """Both directions of an LSTM over lines: (B, L, T, C) -> (B, L, T, 2 D).

    Its parameters are those of ``nn.LSTM(C, D, bidirectional=True)``, by the same names.

    Args:
        dim: C.
        hidden: D.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        shapes = {"weight_ih": (dim,), "weight_hh": (hidden,), "bias_ih": (), "bias_hh": ()}
        for end in ("l0", "l0_reverse"):
            for name, shape in shapes.items():
                parameter = nn.Parameter(torch.empty(4 * hidden, *shape))
                nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)
                self.register_parameter(f"{name}_{end}", parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Run both ways at once, as a batch of two."""
        input_weight, recurrent_weight, bias_given, bias_recurrent = (
            torch.stack([getattr(self, f"{name}_{end}") for end in ("l0", "l0_reverse")])
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        lines = x.flatten(0, 1).transpose(0, 1)  # (T, B L, C)
        two_ways = torch.stack([lines, lines.flip(0)], dim=1)  # (T, 2, B L, C)
        inputs = two_ways @ input_weight.mT + (bias_given + bias_recurrent).unsqueeze(1)
        hidden = inputs.new_zeros(*inputs.shape[1:3], recurrent_weight.shape[-1])
        cell, states = hidden, []
        for place in inputs.unbind(0):
            gates = place + hidden @ recurrent_weight.mT
            i, f, g, o = gates.chunk(4, dim=-1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            states.append(hidden)
        forward, backward = torch.stack(states, dim=2).unbind(0)  # (B L, T, D)
        return torch.cat([forward, backward.flip(1)], dim=-1).unflatten(0, x.shape[:2])
