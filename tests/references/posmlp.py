"""PosMLP's units written plainly: loops over tokens, windows without padding or rolling.

Source: Wang et al., MM 2022, Eq. 1 and 5 to 15; Swin (ICCV 2021), Sec. 3.2, for shifted windows:
the first window along an axis holds the first w // 2 tokens, at the end of its places.
"""

import torch


def place(index, length, window, shifted):
    """(window number, place in the window) of a token along an axis."""
    if length <= window:
        return 0, index
    shift = window // 2 if shifted else 0
    if index < shift:
        return -1, window - shift + index
    return divmod(index - shift, window)


def mix(u, window, weights, groups, bias=None, *, shifted=False, softmax=False):
    """(H, W, C) -> (H, W, C).

    ``weights(row_m, col_m, row_n, col_n)`` gives (groups,) for the places of tokens m and n.
    """
    height, width, channels = u.shape
    rows = [place(i, height, window, shifted) for i in range(height)]
    columns = [place(j, width, window, shifted) for j in range(width)]
    out = []
    for i in range(height):
        for j in range(width):
            seen = [
                (r, c)
                for r in range(height)
                for c in range(width)
                if rows[r][0] == rows[i][0] and columns[c][0] == columns[j][0]
            ]
            entries = torch.stack(
                [weights(rows[i][1], columns[j][1], rows[r][1], columns[c][1]) for r, c in seen]
            )
            entries = entries.softmax(dim=0) if softmax else entries
            group = torch.arange(channels) % groups
            tokens = torch.stack([u[r, c] for r, c in seen])
            mixed = (entries[:, group] * tokens).sum(dim=0)
            if bias is not None:
                mixed = mixed + bias.reshape(window, window)[rows[i][1], columns[j][1]]
            out.append(mixed)
    return torch.stack(out).reshape(u.shape)


def free(weight, window):
    """Entries of a matrix (N, N)."""
    return lambda i, j, r, c: weight[i * window + j, r * window + c][None]


def lookup(table, window, weight=None):
    """Entries of a table ((2w - 1)^2, s), and of a matrix if there is one."""
    side = 2 * window - 1

    def entry(i, j, r, c):
        found = table[(i - r + window - 1) * side + (j - c + window - 1)]
        return found if weight is None else found + free(weight, window)(i, j, r, c)

    return entry


def quadratic(spreads, centers, sigma):
    """Logits of a Gaussian, or of what the other forms of Sigma make of it."""

    def logit(i, j, r, c):
        delta = torch.tensor([c - j, i - r], dtype=spreads.dtype)
        centre = torch.zeros(len(spreads), 2).to(delta) if centers is None else centers
        offset = delta - centre
        if sigma == "gamma_gammaT":  # -|Gamma^T (delta - Delta)|^2 / 2
            return -torch.einsum("sij,si->sj", spreads, offset).square().sum(-1) / 2
        if sigma == "gamma":
            return torch.einsum("i,sij,sj->s", delta, spreads, centre - delta / 2)
        if sigma == "alpha":
            return -spreads.square() * offset.square().sum(-1) / 2
        return spreads.square() * (centre @ delta) - delta.square().sum() / 2

    return logit


def layer_norm(x, norm):
    """Over the last axis, eps 1e-6."""
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return centred / scale * norm.weight + norm.bias


def gelu(x):
    """By the error function."""
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def branch(x, mixer, mixed, structure):
    """W2 unit(GELU(W1 x + b1)) + b2, where ``mixed`` maps u to M u + b."""
    h = gelu(x @ mixer.fc1.weight.T + mixer.fc1.bias)
    half = h.shape[-1] // 2
    u, v = (h, h) if structure == "nonsplit" else (h[..., :half], h[..., half:])
    if isinstance(mixer.gate.norm, torch.nn.LayerNorm):
        u = layer_norm(u, mixer.gate.norm)
    mu = torch.stack([mixed(image) for image in u])
    z = {"gate": mu * v, "nonsplit": mu * v, "add": mu + v}.get(structure)
    z = torch.cat([mu, v], dim=-1) if structure == "concat" else z
    return z @ mixer.fc2.weight.T + mixer.fc2.bias


def relation(given, u, *, shifted=False):
    """A relation of ours by loops over its own parameters, for one image (H, W, C)."""
    window, bias, groups = given.window, given.bias, given.groups
    if hasattr(given, "spreads"):
        entries = quadratic(given.spreads, given.centers, given.sigma)
        return mix(u, window, entries, groups, bias, shifted=shifted, softmax=True)
    if hasattr(given, "table"):
        entries = lookup(given.table, window, given.weight)
    else:
        entries = free(given.weight, window)
    return mix(u, window, entries, groups, bias, shifted=shifted)
