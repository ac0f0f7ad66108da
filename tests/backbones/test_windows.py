"""Windows of graphs for any size: the same numbers as windows of a known size, on every map."""

import itertools

import pytest
import torch
from torch import nn

from backbones import create_backbone
from backbones.hosts import gcvit, swin
from backbones.layers import shifted_windows

# Below, at and above one and two windows of 7, on either axis.
SIZES = [*itertools.product((7, 8), (5, 7, 9)), (3, 6), (13, 14), (15, 10), (14, 21), (20, 7)]


@pytest.fixture(scope="module")
def blocks():
    """Blocks of either host in float64, their tables of offsets drawn anew to be felt."""
    torch.manual_seed(0)
    hosts = {"swin": create_backbone("swin_t"), "gcvit": create_backbone("gcvit_xxt")}
    for host in hosts.values():
        host.double().eval()
        for name, parameter in host.named_parameters():
            if "relative_position_bias_table" in name:
                nn.init.normal_(parameter)
    return hosts


def any_size(monkeypatch, value):
    for module in (swin, gcvit, shifted_windows):
        monkeypatch.setattr(module, "is_any_size", lambda size: value)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_swins_windows_in_graphs(blocks, size, number, single, monkeypatch):
    block = next(m for m in blocks["swin"].modules() if isinstance(m, nn.Sequential)
                 and len(m) == 2 and isinstance(m[0], swin.SwinBlock))[number]  # fmt: skip
    monkeypatch.setattr(block, "shift_single_window", single)
    x = torch.randn(2, *size, 96, dtype=torch.float64)
    with torch.no_grad():
        any_size(monkeypatch, False)
        expected = block(x)
        any_size(monkeypatch, True)
        torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_windows_that_only_pad_in_graphs(blocks, size, monkeypatch):
    stage = next(m for m in blocks["gcvit"].modules() if hasattr(m, "global_norm"))
    x = torch.randn(2, *size, 64, dtype=torch.float64)
    query = torch.randn(2, 7, 7, 64, dtype=torch.float64)
    for block in stage.blocks:
        with torch.no_grad():
            any_size(monkeypatch, False)
            expected = block._window_attn(x, query)
            any_size(monkeypatch, True)
            got = block._window_attn(x, query)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
        assert got.shape == x.shape
