"""Where dropout acts in every mixer that has it, over the registry.

A channel mixer's acts where an FFN's does (timm's two places): on what its last linear layer reads,
and on what it gives. The gating units of gMLP and PosMLP drop after the last layer alone, as the
latter's paper and code say.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backbones import Mixer, list_mixers, mixer_options
from tests.tensors import build_mixer, tokens

DIM, HIDDEN = 12, 48
# ConvNeXt's blocks, the two networks of functions, and what stands for attention have none.
WITHOUT = {
    "channel": {"cheby_kan", "convnext", "convnext_v2", "nonlinear_sum"},
    "token": {"attention", "ffnified", "pooling", "sbm"},
}
OPTIONS = {"scheme_12": {"cca": "off", "g2": 1}, "scheme_44": {"cca": "off"}}
CHANNEL = [name for name in list_mixers("channel") if "drop" in mixer_options(name)]
TOKEN = [name for name in list_mixers("token") if "drop" in mixer_options(name)]


class Places:
    """Stands for ``F.dropout``: notes what it is given and, in one place, gives zeros."""

    def __init__(self, silenced=None):
        self.silenced, self.given, self.gave, self.rates = silenced, [], [], []

    def __call__(self, x, p=0.5, training=True, inplace=False):
        assert training
        silent = len(self.given) == self.silenced
        self.given.append(x)
        self.gave.append(torch.zeros_like(x) if silent else x.clone())
        self.rates.append(p)
        return self.gave[-1]


def build(name, **options):
    known = mixer_options(name)
    sizes = {"hidden_ratio": HIDDEN / DIM, "window": 4, "groups": 2}
    usual = {key: value for key, value in sizes.items() if key in known}
    if name in CHANNEL:  # their windows and groups are others'
        usual = {key: value for key, value in usual.items() if key == "hidden_ratio"}
    options = {"drop": 0.25, **OPTIONS.get(name, {}), **usual, **options}
    return build_mixer(name, DIM, grid=(4, 4), **options).train()


X = tokens(2, 4, 4, DIM)


def run(monkeypatch, mixer, silenced=None):
    """The mixer's output, its dropouts, and what each layer with weights was given."""
    places, read = Places(silenced), []
    monkeypatch.setattr(F, "dropout", places)
    hooks = [
        module.register_forward_pre_hook(lambda _, given: read.append(given[0]))
        for module in mixer.modules()
        if not list(module.children()) and not isinstance(module, nn.Dropout)
    ]
    out = mixer(X)
    for hook in hooks:
        hook.remove()
    monkeypatch.undo()
    return out, places, read


@pytest.mark.parametrize("kind", WITHOUT)
def test_which_mixers_have_dropout(kind):
    without = {name for name in list_mixers(kind) if "drop" not in mixer_options(name)}
    assert without >= WITHOUT[kind]
    assert len(CHANNEL) >= 15
    assert len(TOKEN) >= 5


@pytest.mark.parametrize("name", CHANNEL)
def test_channel_mixers_drop_what_the_last_layer_reads_and_what_they_give(name, monkeypatch):
    mixer = build(name)
    out, places, read = run(monkeypatch, mixer)
    assert places.rates == [0.25, 0.25]
    first, last = places.gave
    assert last.shape == (2, 4, 4, DIM)
    # Nothing lies between the first and the last layer, or between the second and the end. IFFN
    # drops before its depthwise block, as released.
    if name == "iffn":
        assert any(x.data_ptr() == first.data_ptr() for x in read[-6:])
    else:
        assert any(x is first for x in read[-2:])
    assert torch.equal(out, last)
    silent, _, _ = run(monkeypatch, mixer, silenced=1)
    assert not silent.any()
    constant, _, _ = run(monkeypatch, mixer, silenced=0)
    torch.testing.assert_close(constant, constant[:1, :1, :1].expand_as(constant))
    assert not torch.allclose(out, out[:1, :1, :1].expand_as(out))
    mixer, places = build(name), Places()
    if type(mixer).mix_prefix is Mixer.mix_prefix:
        return  # it takes none
    monkeypatch.setattr(F, "dropout", places)
    _, prefix = mixer(X, tokens(2, 3, DIM, seed=2))
    monkeypatch.undo()
    wide = sum(x.shape[:-1].numel() for x in places.given if x.shape[-1] == HIDDEN)
    narrow = sum(x.shape[:-1].numel() for x in places.given if x.shape[-1] == DIM)
    assert wide in (0, 2 * (16 + 3))  # gated mixers may be of another width
    assert narrow == 2 * (16 + 3)
    storages = {x.untyped_storage().data_ptr() for x in places.gave}
    assert prefix.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize("name", TOKEN)
def test_gating_units_drop_what_they_give(name, monkeypatch):
    mixer = build(name)
    out, places, _ = run(monkeypatch, mixer)
    assert places.rates == [0.25]
    assert torch.equal(out, places.gave[0])
    assert not run(monkeypatch, mixer, silenced=0)[0].any()


@pytest.mark.parametrize("name", [*CHANNEL, *TOKEN])
def test_evaluation_is_free_of_dropout(name):
    mixer = build(name, drop=0.5).eval()
    with torch.no_grad():
        assert torch.equal(mixer(X), mixer(X))
        assert torch.equal(mixer(X), build(name, drop=0.0).eval()(X))
