"""With one seed, a host has the same initial weights in every release and with every mixer."""

import functools

import pytest
import torch

from backbones import create_backbone
from backbones.registry import find_host
from tests.families import SMALLEST

# Sums of the plain hosts' weights at seed 0, as of commit 2132bf5.
STARTS = {
    "convnext_t": 8177.9099, "cyclemlp_b1": 5802.0479, "deit_t": 4773.2252,
    "edgevit_xxs": 6033.4851, "ffnet_1": 56247.7464, "gcvit_xxt": 7887.7338, "gmlp_ti": 21424.4480,
    "hiremlp_t": 19099.3600, "lvt_r1": 4451.1787, "mixer_s16": 8734.1803,
    "poolformer_s12": 7177.5902, "posmlp_t": 12971.9263, "pvt_v2_b1": 6926.4921,
    "resnet18": 7589.4771, "sbm_t": 15498.5613, "swin_t": 12382.5187, "visionllama_s": 12855.6100,
}  # fmt: skip


def host_weights(name, **options):
    torch.manual_seed(0)
    backbone = create_backbone(name, img_size=64, **options)
    slots = tuple(backbone.mixers())
    tensors = backbone.state_dict().items()
    return {key: value for key, value in tensors if not (slots and key.startswith(slots))}


plain_weights = functools.cache(host_weights)


@pytest.mark.parametrize("host", STARTS)
def test_a_host_starts_from_the_weights_of_earlier_releases(host):
    weights = plain_weights(host).values()
    total = sum(w.double().sum().item() for w in weights if w.is_floating_point())
    assert total == pytest.approx(STARTS[host], abs=0.01)


@pytest.mark.parametrize("host", [name for name in SMALLEST if find_host(name).slots])
def test_a_host_starts_from_the_same_weights_with_and_without_mixers(host):
    plain, slots = plain_weights(host), find_host(host).slots
    name = f"{host}_afbo" if "channel" in slots else host
    weights = host_weights(name, token_mixer="attention" if "token" in slots else None)
    shared = weights.keys() & plain.keys()
    assert shared
    assert [key for key in shared if not torch.equal(weights[key], plain[key])] == []
