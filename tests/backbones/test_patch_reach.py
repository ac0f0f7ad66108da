"""The gradient of the embedding reaches every patch, in every host with every mixer."""

import pytest

from backbones import list_mixers
from backbones.analysis.patch_reach import reached_patches
from backbones.registry import find_host, look_up
from tests.families import HOSTS, SMALLEST, build_short, drawn, rest_slow, rest_slow_pairs
from tests.families import NAMES as IMAGE_NAMES
from tests.tensors import images

TOKEN_MIXERS = list_mixers("token")
TOKEN_HOSTS = [host for host in HOSTS if "token" in find_host(host).slots]
TOKEN_PAIRS = [(host, mixer) for host in TOKEN_HOSTS for mixer in TOKEN_MIXERS]
# The first host of each file with every mixer, all others with some: they differ in size only.
DRAWN = drawn(0)
NAMES = [name for name in IMAGE_NAMES if look_up(name)[0].name in SMALLEST or name in DRAWN]
PAIRS = [
    (host, mixer)
    for turn, (host, mixer) in enumerate(TOKEN_PAIRS)
    if host in SMALLEST or turn % 5 == TOKEN_HOSTS.index(host) % 5
]
# Of a drawing the first host of each file; DeiT, which has a class token, with each token mixer.
QUICK = [name for name in DRAWN if look_up(name)[0].name in SMALLEST]
QUICK_PAIRS = [("deit_t", mixer) for mixer in TOKEN_MIXERS]
# Where a mixer's own groups do not divide the host's channels.
FITTING = {("ffnet_2", mixer): {"groups": 4} for mixer in ("ggqpe", "glrpe")}
SIZE = (64, 96)


def assert_sees_every_patch(network):
    """Check the patches of the finest map, in float64 with random weights."""
    network.double().eval()
    reached = reached_patches(network, images(*SIZE), network.feature_info[0].stride)
    assert reached.all(), f"{(~reached).sum()} of {reached.numel()} patches are not reached"


@pytest.mark.parametrize("name", rest_slow(NAMES, QUICK))
def test_every_host_sees_every_patch_with_every_mixer(name):
    assert_sees_every_patch(build_short(name, img_size=SIZE))


@pytest.mark.parametrize(("host", "mixer"), rest_slow_pairs(PAIRS, QUICK_PAIRS))
def test_every_host_sees_every_patch_with_every_token_mixer(host, mixer):
    options = {"name": mixer, **FITTING.get((host, mixer), {})}
    assert_sees_every_patch(build_short(host, token_mixer=options, img_size=SIZE))
