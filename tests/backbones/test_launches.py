"""Operations that a training step of each mixer launches: small ones wait for a GPU's launches."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backbones import create_mixer, list_mixers
from backbones.layers.scans import Scan

MOST = 100
# Their loops have thousands; on a GPU, fla's kernels and cuDNN's LSTM take their places.
LOOPS = {"gated_delta", "lstm2d"}
# More than MOST, with the number of today and the reason.
MORE = {
    "aggregated": (181, "two attentions in one softmax, biases by an MLP on offsets"),
    "atm": (120, "places and interpolated values along two axes, and split attention"),
    "cycle_fc": (111, "copies of strided channels, the fastest form on a CPU"),
    "global_window": (114, "three blocks of five convolutions for one query, as the authors have"),
    "gr_kan": (138, "six polynomials by Horner's rule, which compilers fuse"),
    "mlstm": (176, "a recurrence in chunks between three maps, two gates and two norms"),
    "rasa": (114, "two passes of attention with three dilations each"),
    "ttt": (105, "a step of gradient descent that is differentiated again"),
}
# Operators that compute nothing on a device.
FREE = ("detach", "empty", "promote_types", "scalar_tensor", "unsafe_view")


class Launches(TorchDispatchMode):
    """Counts operators that are neither views nor free."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2]
        if not func.is_view and not any(word in name for word in FREE):
            self.names[name] += 1
        return func(*args, **kwargs or {})


def count_launches(name):
    with torch.device("meta"):
        mixer = create_mixer(name, 64, grid=(56, 56))
    x = torch.empty(1, 56, 56, 64, device="meta", requires_grad=True)
    with Launches() as launches:
        y = mixer(x)
        y.backward(torch.empty_like(y))
    return launches.names


@pytest.mark.parametrize("name", sorted({*list_mixers()} - LOOPS))
def test_a_training_step_launches_few_operations(name, monkeypatch):
    """At 56 x 56 with 64 channels; scans count as the operator that serves on a GPU."""
    if name in ("ss2d", "bi_wkv"):
        pytest.importorskip("triton", reason="there is no Triton for this torch")
        import backbones.fast.triton.scan  # noqa: F401

        scan = torch.ops.mixerlab.linear_scan
        monkeypatch.setattr(Scan, "forward", lambda self, *inputs: scan(*inputs))
    names = count_launches(name)
    most = MORE[name][0] if name in MORE else MOST
    assert 0 < names.total() <= most, names
    assert name not in MORE or names.total() > MOST, f"{name} needs no reason any more"
