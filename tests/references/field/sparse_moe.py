"""Tokens are seated one by one, and each goes through its experts by itself."""

import torch
import torch.nn.functional as F

CASES = [{}, {"experts": 5, "selected": 1, "capacity": 0.5, "hidden_ratio": 1}]


def reference(mixer, x):
    tokens, experts = x.flatten(1, 2), mixer.router.out_features
    shares = (tokens @ mixer.router.weight.T).softmax(-1)
    order = shares.argsort(-1, descending=True)[..., : mixer.selected]
    n = tokens.shape[1]
    places = max(1, round(mixer.selected * n * mixer.capacity / experts))
    images = []
    for image in range(len(x)):
        free, out = [places] * experts, [torch.zeros_like(tokens[0, 0])] * n
        for choice in range(mixer.selected):
            for t in range(n):
                e = int(order[image, t, choice])
                if free[e]:
                    free[e] -= 1
                    parts = mixer.experts
                    hidden = F.gelu(tokens[image, t] @ parts.w1[e] + parts.b1[e, 0])
                    y = hidden @ parts.w2[e] + parts.b2[e, 0]
                    out[t] = out[t] + shares[image, t, e] * y
        images.append(torch.stack(out))
    return torch.stack(images).reshape(x.shape)


def macs(mixer, c, h, w):
    experts, _, hidden = mixer.experts.w1.shape
    places = max(1, round(mixer.selected * h * w * mixer.capacity / experts))
    return h * w * c * experts + experts * places * 2 * c * hidden
