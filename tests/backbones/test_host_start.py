"""With one seed, a host has the same initial weights in every release and with every mixer."""

import pytest
import torch

from backbones import create_backbone
from backbones.registry import find_host

# Sums of the weights outside of the mixers' slots at seed 0, as of commit 2132bf5.
PAIRED = {
    "convnext_t": 8177.9099, "deit_t": 4773.2252, "edgevit_xxs": 6033.4851, "gcvit_xxt": 7887.7338,
    "mixer_s16": 8734.1803, "gmlp_ti": 21424.4480, "lvt_r1": 4451.1787, "pvt_v2_b1": 6926.4921,
    "poolformer_s12": 7177.5902, "resnet18": 7589.4771, "swin_t": 12382.5187,
}  # fmt: skip
# Blocks of these hosts and their mixers are initialised in turn.
INTERLEAVED = {
    "cyclemlp_b1": 5802.0479, "cyclemlp_b1_afbo": 5833.5092, "hiremlp_t_afbo": 19196.6903,
    "posmlp_t": 12971.9263, "sbm_t_afbo": 15695.1907, "visionllama_s_afbo": 12984.5468,
}  # fmt: skip


def host_weights(name, **options):
    torch.manual_seed(0)
    backbone = create_backbone(name, img_size=64, **options)
    slots = tuple(backbone.mixers())
    tensors = backbone.state_dict().items()
    return {key: value for key, value in tensors if not (slots and key.startswith(slots))}


def total(weights):
    return sum(w.double().sum().item() for w in weights.values() if w.is_floating_point())


@pytest.mark.parametrize("host", PAIRED)
def test_a_host_starts_from_the_same_weights_with_and_without_mixers(host):
    plain = host_weights(host)
    assert total(plain) == pytest.approx(PAIRED[host], abs=0.01)
    slots = find_host(host).slots
    carriers = [host_weights(f"{host}_afbo")] if "channel" in slots else []
    carriers += [host_weights(host, token_mixer="attention")] if "token" in slots else []
    for weights in carriers:
        shared = weights.keys() & plain.keys()
        assert shared
        assert all(torch.equal(weights[key], plain[key]) for key in shared)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_a_host_with_mixers_starts_from_the_weights_of_earlier_releases(name):
    assert total(host_weights(name)) == pytest.approx(INTERLEAVED[name], abs=0.01)
