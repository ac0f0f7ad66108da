"""Average pooling: torch's numbers without what torch gets wrong for channels-last maps."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from backbones import create_mixer, list_mixers
from backbones.layers.pooling import AvgPool2d, avg_pool2d
from tests.families import BOTH, meta_backbone, rest_slow, rest_slow_pairs
from tests.tensors import tokens


class WatchPooling(TorchDispatchMode):
    """Counts calls of torch's average pooling, and those with padding or ceil_mode."""

    def __init__(self):
        super().__init__()
        self.calls, self.wrong = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.avg_pool2d.default:
            x, _, *rest = args
            _, padding, ceil_mode = [*rest, *([], [0, 0], False)[len(rest) :]][:3]
            self.calls += 1
            if any(padding) or ceil_mode:
                self.wrong.append((tuple(x.shape), padding, ceil_mode))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("kernel_size", "stride", "padding", "ceil_mode"),
    [(3, 1, 1, False), (2, 2, 0, True), (3, 2, 1, True), ((1, 5), (1, 1), (0, 2), False),
     ((3, 4), (2, 3), (1, 2), True), (2, 3, 1, True), (7, 1, 3, False)],
)  # fmt: skip
@pytest.mark.parametrize("count_include_pad", [False, True])
def test_equals_torch_s_pooling(
    memory_format, kernel_size, stride, padding, ceil_mode, count_include_pad
):
    for size in ((8, 9), (7, 12), (1, 5), (10, 4)):
        x = tokens(2, 3, *size).contiguous(memory_format=memory_format).requires_grad_()
        options = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
        pool = nn.AvgPool2d(kernel_size, stride, padding, **options)
        expected = pool(x)
        ours = AvgPool2d(kernel_size, stride, padding, **options)
        with WatchPooling() as watch:
            y = ours(x)
        assert watch.calls
        assert not watch.wrong
        close = {"rtol": 1e-14, "atol": 1e-14}
        torch.testing.assert_close(y, expected, **close)
        grads = [torch.autograd.grad(z, x, torch.cos(z.detach()))[0] for z in (y, expected)]
        torch.testing.assert_close(*grads, **close)


def test_factors_are_exact_in_half_precision():
    x = torch.ones(1, 1, 4, 5, dtype=torch.bfloat16)
    y = avg_pool2d(x, (3, 3), (1, 1), (1, 1), count_include_pad=False)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, x, rtol=2**-8, atol=0)


def test_no_mixer_pools_with_padding():
    calls = 0
    options = {"afbo": {"sm": "avg"}}
    for name in list_mixers():
        with torch.device("meta"):
            mixer = create_mixer(name, 24, grid=(7, 9), **options.get(name, {}))
            with WatchPooling() as watch:
                mixer(torch.empty(1, 7, 9, 24))
        assert not watch.wrong, name
        calls += watch.calls
    assert calls >= 4  # pooling, AFBO's, csa, outlook


@pytest.mark.parametrize("name", rest_slow(BOTH, ["poolformer_s12", "poolformer_s12_afbo"]))
def test_no_host_pools_with_padding(name):
    x = torch.empty(1, 3, 65, 93, device="meta").contiguous(memory_format=torch.channels_last)
    with WatchPooling() as watch:
        meta_backbone(name)(x)
    assert not watch.wrong


# With padding, with ceil_mode, and one whose maps lie channels-last behind a replaced mixer.
@pytest.mark.parametrize(
    ("model", "mixer"),
    rest_slow_pairs(
        [("poolformer_s12", "afbo"), ("tresnet_m", None), ("volo_d1_224", None),
         ("res2net50_26w_4s", None)],
        [("poolformer_s12", "afbo")],
    ),
)  # fmt: skip
def test_no_model_of_timm_pools_with_padding(model, mixer):
    backbone = meta_backbone("timm", model=model, mixer=mixer)
    with WatchPooling() as watch:
        backbone(torch.empty(2, 3, 224, 224, device="meta"))
    assert watch.calls
    assert not watch.wrong
