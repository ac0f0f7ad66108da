"""Slots one at a time, each through its expert."""

import torch
import torch.nn.functional as F

CASES = [{}, {"experts": 3, "slots": 2, "hidden_ratio": 1}]


def mixed(mixer, tokens):
    unit = tokens / tokens.norm(dim=-1, keepdim=True)
    _, count, slots = mixer.phi.shape
    logits, outputs = [], []
    for expert in range(count):
        for slot in range(slots):
            phi = mixer.phi[:, expert, slot]
            logits.append(unit @ phi / phi.norm() * mixer.scale)
            share = logits[-1].exp()
            mean = (share[..., None] * tokens).sum(1) / share.sum(1, keepdim=True)
            parts = mixer.experts
            hidden = F.gelu(mean @ parts.w1[expert] + parts.b1[expert, 0])
            outputs.append(hidden @ parts.w2[expert] + parts.b2[expert, 0])
    shares = torch.stack(logits, -1).exp()
    shares = shares / shares.sum(-1, keepdim=True)
    return sum(shares[..., n, None] * y[:, None] for n, y in enumerate(outputs))


def reference(mixer, x):
    return mixed(mixer, x.flatten(1, 2)).reshape(x.shape)


def joint(mixer, x, prefix):
    y = mixed(mixer, torch.cat([prefix, x.flatten(1, 2)], 1))
    return y[:, prefix.shape[1] :].reshape(x.shape), y[:, : prefix.shape[1]]


def macs(mixer, c, h, w):
    count, _, hidden = mixer.experts.w1.shape
    slots = count * mixer.phi.shape[2]
    return 3 * h * w * c * slots + slots * 2 * c * hidden
