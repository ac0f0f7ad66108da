"""Mixers, hosts, losses and the device itself, for tests/house/test_devices.py.

Run by ``python -m pytest -p tests.pretended.device tests/pretended/networks.py``.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from backbones import create_mixer, list_hosts, list_mixers
from backbones.registry import find_host
from tasks.point_segmentation.inputs import clouds
from tests.families import build_short, rest_slow_pairs
from tests.pretended.device import DEVICE, NAME

LOW = [False, True]  # float32, or autocast to bfloat16
HOSTS = [name for name in list_hosts() if name != "timm"]  # needs the name of a model
# The first host of each file.
QUICK = {find_host(name).build.__module__: name for name in reversed(HOSTS)}
SMALL = {"u_dit_b": "u_dit_tiny", "ffnet_3d": "ffnet_3d_tiny"}
QUICK = {SMALL.get(name, name) for name in QUICK.values()}
# Options and inputs of a modality's hosts.
CASES = {
    "image": ({"img_size": 64}, lambda: [torch.randn(2, 3, 64, 64)]),
    "series": ({"img_size": 48}, lambda: [torch.randn(2, 48, 7)]),
    "text": ({"img_size": 16}, lambda: [torch.randint(5, 50, (2, 16))]),
    "point_cloud": ({}, lambda: [clouds(2, (600, 9))]),
    "low_resolution_image": ({}, lambda: [torch.rand(1, 3, 16, 16)]),
    "noisy_image": (
        {"img_size": 32},
        lambda: [torch.randn(2, 4, 32, 32), torch.tensor([5, 900]), torch.tensor([0, 3])],
    ),
}


def passed(network, inputs, device, low):
    """Return a network's outputs after a step of training."""
    torch.manual_seed(1)  # dropout; the device draws as the CPU does
    with torch.autocast(device, torch.bfloat16, enabled=low):
        outputs = network(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(one.float().square().mean() for one in outputs).backward()
    return [one.detach() for one in outputs]


def compare(network, inputs, low):
    """Compare a step on the device with one on the CPU."""
    there = copy.deepcopy(network).to(DEVICE)
    for one in inputs:
        one.requires_grad_(one.is_floating_point())
    moved = [one.detach().to(DEVICE).requires_grad_(one.requires_grad) for one in inputs]
    found = passed(there, moved, NAME, low)
    wanted = passed(network, inputs, "cpu", low)
    for one, other in zip(found, wanted, strict=True):
        assert one.device == DEVICE
        if not low:  # autocast's lists differ between devices
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
        assert one.isfinite().all()
    own = dict(network.named_parameters())
    for name, parameter in there.named_parameters():
        assert (parameter.grad is None) == (own[name].grad is None), name
        assert parameter.grad is None or parameter.grad.device == DEVICE, name


@pytest.mark.parametrize("low", LOW, ids=["float32", "autocast"])
@pytest.mark.parametrize("name", list_mixers())
def test_mixers(name, low):
    torch.manual_seed(0)
    compare(create_mixer(name, 32, grid=(8, 8)), [torch.randn(2, 8, 8, 32)], low)


@pytest.mark.parametrize(
    ("name", "low"),
    rest_slow_pairs(itertools.product(HOSTS, LOW), [(name, True) for name in QUICK]),
)
def test_hosts(name, low):
    options, inputs = CASES[find_host(name).modality]
    torch.manual_seed(0)
    compare(build_short(name, **options), inputs(), low)


class Forgetful(nn.Module):
    """A mixer that makes a tensor without its device."""

    def forward(self, x):
        return x * torch.arange(x.shape[1])[:, None, None]


def test_numbers_are_drawn_by_the_devices_generator():
    shape = {"size": (3, 4), "device": DEVICE}
    there = torch.randn(**shape, generator=torch.Generator(DEVICE).manual_seed(3))
    assert there.cpu().equal(torch.randn(3, 4, generator=torch.Generator().manual_seed(3)))
    with pytest.raises(RuntimeError, match="type for generator but found 'cpu'"):
        torch.randn(**shape, generator=torch.Generator())


def test_a_tensor_made_without_its_device_is_refused():
    with pytest.raises(RuntimeError, match="got one of shape"):
        Forgetful().to(DEVICE)(torch.ones(2, 3, 3, 4, device=DEVICE))
