"""Complex waves, shifted and summed neighbour by neighbour."""

import torch

from tests.references.field import depthwise, pointwise, shifted
from tests.references.field.atm import merged

CASES = [{}, {"phase": "depthwise", "kernel_size": 3, "bias": True}, {"form": "paper"}]


def summed(waves, x, form):
    conv, norm, _ = waves.theta
    phase = depthwise(conv, x) if conv.groups > 1 else pointwise(conv, x)
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    phase = ((phase - norm.running_mean) * scale + norm.bias).clamp(min=0)
    wave = torch.polar(torch.ones_like(phase), phase) * pointwise(waves.amplitude, x)
    pair = (wave.real, wave.imag)
    if form == "released":
        entries, c = [*wave.real.unbind(-1), *wave.imag.unbind(-1)], x.shape[-1]
        pair = [
            torch.stack([entries[2 * channel + part] for channel in range(c)], -1)
            for part in (0, 1)
        ]
    weight, total = waves.token_fc.weight, 0.0
    rows, columns = weight.shape[2:]
    for i in range(rows):
        for j in range(columns):
            real, imaginary = weight[:, 0, i, j], weight[:, 1, i, j]
            offset = (i - rows // 2, j - columns // 2)
            total = total + real * shifted(pair[0], *offset)
            total = total + imaginary * shifted(pair[1], *offset)
    return total


def reference(mixer, x):
    branches = [summed(waves, x, mixer.form) for waves in (mixer.along, mixer.across)]
    branches.append(pointwise(mixer.fc_c, x))
    return pointwise(mixer.proj, merged(mixer.reweight, branches))


def macs(mixer, c, h, w):
    conv, k = mixer.along.theta[0], max(mixer.along.token_fc.kernel_size)
    phase = 9 * c if conv.groups > 1 else c * c
    merging = c * (c // 4) + (c // 4) * 3 * c
    return h * w * (2 * (phase + c * c + 2 * k * c) + 2 * c * c) + merging
