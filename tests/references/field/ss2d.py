"""VMamba's recurrence, one direction, token and state at a time."""

import torch
import torch.nn.functional as F

from tests.references.field import depthwise, pointwise

CASES = [{}, {"states": 4, "expansion": 1.5, "rank": 3, "kernel_size": 5}]


def places(h, w):
    """The four orders of the tokens (i, j) of a map."""
    rows = [(i, j) for i in range(h) for j in range(w)]
    columns = [(i, j) for j in range(w) for i in range(h)]
    return rows, columns, rows[::-1], columns[::-1]


def reference(mixer, x):
    h, w = x.shape[1:3]
    u = F.silu(depthwise(mixer.conv2d, pointwise(mixer.in_proj, x)))
    rank, n, _ = mixer.parts
    inner, total = u.shape[-1], [[0.0] * w for _ in range(h)]
    for direction, order in enumerate(places(h, w)):
        a = -mixer.A_logs.reshape(4, inner, n)[direction].exp()
        skip = mixer.Ds.reshape(4, inner)[direction]
        state = u.new_zeros(len(u), inner, n)
        for i, j in order:
            token = u[:, i, j]
            projected = token @ mixer.x_proj_weight[direction].T
            step = projected[:, :rank] @ mixer.dt_projs_weight[direction].T
            step = F.softplus(step + mixer.dt_projs_bias[direction])[..., None]
            b, c = projected[:, None, rank : rank + n], projected[:, None, rank + n :]
            state = (step * a).exp() * state + step * b * token[..., None]
            total[i][j] = total[i][j] + (state * c).sum(-1) + skip * token
    y = torch.stack([torch.stack(row, 1) for row in total], 1)
    norm = mixer.out_norm
    return pointwise(mixer.out_proj, F.layer_norm(y, (inner,), norm.weight, norm.bias))


def macs(mixer, c, h, w):
    rank, n, _ = mixer.parts
    inner, k = mixer.conv2d.weight.shape[0], mixer.conv2d.kernel_size[0]
    return h * w * (2 * c * inner + k * k * inner + 4 * inner * (2 * rank + 2 * n))
