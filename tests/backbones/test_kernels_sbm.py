"""SBM as one compiled operator: what torch's operations give, where it says that it serves."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from backbones import kernels
from backbones.mixers.sbm import fused
from tests.tensors import build_mixer, tokens

pytestmark = pytest.mark.skipif(
    not kernels.is_available(), reason=f"no compiled operators: {kernels.status()}"
)
# Channels that fill lines of memory and that do not; more tokens than go through at a time.
MAPS = [(1, (4, 5), 8), (3, (1, 9), 6), (2, (9, 1), 19), (2, (13, 11), 24), (1, (7, 6), 64)]


def without_operators(mixer, x):
    with kernels.switched_off():
        return mixer(x)


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("batch", "size", "dim"), MAPS, ids=str)
def test_operator_equals_torch(monkeypatch, batch, size, dim, threads):
    mixer = build_mixer("sbm", dim, grid=(4, 5), rank=3, out_proj=dim == 6)
    x = tokens(batch, *size, dim)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert fused.serves(mixer, x)
        found = mixer(x)
    finally:
        torch.set_num_threads(before)
    with torch.enable_grad():
        expected = mixer(x).detach()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(without_operators(mixer, x), expected, rtol=1e-10, atol=1e-10)
    single = mixer.float()(x.float())
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-5)
    assert single.dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 5}, {"x_width": 1}, {"pre_proj": True}, {"norm": False},
        {"use_gate": False}, {"use_linear": False}, {"use_bilinear": False},
    ],
    ids=str,
)  # fmt: skip
def test_other_forms_are_torchs(options):
    mixer, x = build_mixer("sbm", 8, grid=(4, 5), rank=3, **options), tokens(2, 4, 5, 8)
    assert not fused.serves(mixer, x)
    torch.testing.assert_close(mixer(x), without_operators(mixer, x), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_it_serves_where_nobody_looks_inside():
    mixer, x = build_mixer("sbm", 8, grid=(4, 5), rank=3), tokens(2, 4, 5, 8)
    assert fused.serves(mixer, x)
    with torch.enable_grad():
        assert not fused.serves(mixer, x)
    assert not fused.serves(mixer, tokens(2, 1, 3, 8))  # no more tokens than the rank
    assert not fused.serves(mixer, x.float())
    assert not fused.serves(mixer, x.transpose(1, 2))
    with torch.autocast("cpu"):
        assert not fused.serves(mixer, x)
    handle = mixer.bilinear.proj.register_forward_hook(lambda *_: None)
    assert not fused.serves(mixer, x)
    handle.remove()
    mixer.lin_proj.bias = None
    assert not fused.serves(mixer, x)
    torch.testing.assert_close(mixer(x), without_operators(mixer, x), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_weights_that_changed_count():
    mixer, x = build_mixer("sbm", 8, grid=(4, 5), rank=3), tokens(2, 6, 7, 8)
    before = mixer(x)
    for parameter in (mixer.bilinear.space_read, mixer.conv.weight, mixer.norm.bias):
        parameter.mul_(1.5)
        after = mixer(x)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, without_operators(mixer, x), rtol=1e-10, atol=1e-10)
        before = after


def arguments(mixer, x):
    layers = (mixer.in_proj, mixer.bilinear.proj, mixer.lin_proj, mixer.gate_proj, mixer.norm)
    weights, biases = zip(
        *((one.weight.detach(), one.bias.detach()) for one in layers), strict=True
    )
    factors = (factor.detach() for factor in mixer.bilinear.factors(x.shape[1:3]))
    conv = mixer.conv.weight.detach(), mixer.conv.bias.detach()
    return (x, weights, biases, *conv, *factors, mixer.norm.eps)


def test_its_forms_agree():
    """Its schema and its form on "meta": torch's own check."""
    mixer, x = build_mixer("sbm", 8, grid=(4, 5), rank=3), tokens(2, 4, 5, 8)
    operator = torch.ops.mixerlab.star_mixer.default
    torch.library.opcheck(
        operator, arguments(mixer, x), test_utils=("test_schema", "test_faketensor")
    )


@torch.no_grad()
def test_its_products_are_counted_as_torchs():
    mixer, x = build_mixer("sbm", 8, grid=(4, 5), rank=3), tokens(2, 4, 5, 8)
    counts = []
    for function in (mixer, lambda given: without_operators(mixer, given)):
        with FlopCounterMode(display=False) as counter:
            function(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
