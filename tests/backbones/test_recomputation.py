"""Gradient checkpointing, frozen stages and kept statistics: options of every backbone."""

import copy
from itertools import cycle

import pytest
import torch
from torch import nn

from backbones import list_backbones, list_mixers
from backbones.layers.recomputation import Recomputed
from backbones.registry import look_up
from tests.families import SWAPPED, build_short, rest_slow_pairs
from tests.tensors import images

# Every mixer on a host of tokens or, by turns, on one of maps.
MIXED = [
    f"{host}_{mixer}"
    for mixer, host in zip(
        sorted(list_mixers("channel")), cycle(("deit_t", "swin_t")), strict=False
    )
    if f"{host}_{mixer}" in list_backbones(f"{host}_*")
]


def built(name, **options):
    torch.manual_seed(0)
    backbone = build_short(name, drop_path_rate=0.4, **options)
    return backbone.double().train()


def trained(backbone, size=64):
    """Maps, gradients and buffers of one pass, and how often each leaf ran."""
    runs = dict.fromkeys((n for n, m in backbone.named_modules() if not list(m.children())), 0)

    def count(name):
        def hook(*_):
            runs[name] += 1

        return hook

    hooks = [m.register_forward_hook(count(n)) for n, m in backbone.named_modules() if n in runs]
    torch.manual_seed(1)
    maps = backbone(images(size, size + 8, batch=2))
    sum(x.square().mean() for x in maps).backward()
    for hook in hooks:
        hook.remove()
    gradients = {n: p.grad for n, p in backbone.named_parameters() if p.grad is not None}
    return maps, gradients, dict(backbone.named_buffers()), runs


def blocks_of(backbone):
    return [n for n, m in backbone.named_modules() if isinstance(m, Recomputed)]


CASES = [
    *((name, {"dense": True}) for name in SWAPPED),
    *((name, {}) for name in MIXED),
    *(("swin_t", {"token_mixer": mixer}) for mixer in list_mixers("token")),
]
QUICK = [(name, {"dense": True}) for name in ("deit_t_afbo", "resnet18")]


@pytest.mark.parametrize(("name", "options"), rest_slow_pairs(CASES, QUICK), ids=str)
def test_gradients_equal_those_of_kept_activations(name, options):
    kept, again = built(name, **options), built(name, grad_checkpointing=True, **options)
    again.load_state_dict(kept.state_dict())
    maps, gradients, buffers, once = trained(kept)
    maps_again, gradients_again, buffers_again, twice = trained(again)
    tight = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(maps_again, maps, **tight)
    torch.testing.assert_close(gradients_again, gradients, **tight)
    torch.testing.assert_close(buffers_again, buffers, rtol=0, atol=0)
    assert gradients
    blocks = blocks_of(again)
    inside = tuple(f"{block}." for block in blocks)
    ran = {leaf for leaf in once if once[leaf]}
    assert all(twice[leaf] == once[leaf] for leaf in ran if not leaf.startswith(inside))
    for block in inside:
        assert any(twice[leaf] == 2 * once[leaf] for leaf in ran if leaf.startswith(block)), block
    if look_up(name)[0].name != "timm":  # whose groups are those of the model before it was cut
        assert len(blocks) == sum(again.layer_ids.depths)


def test_graphs_statistics_and_evaluation():
    backbone = built("resnet18", grad_checkpointing=True)
    total = sum(x.square().mean() for x in backbone(images(64, 64, batch=2)))
    leaves = [p for p in backbone.parameters() if p.requires_grad]
    first = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    before = copy.deepcopy(backbone.state_dict())
    torch.testing.assert_close(torch.autograd.grad(total, leaves, allow_unused=True), first)
    torch.testing.assert_close(backbone.state_dict(), before, rtol=0, atol=0)
    norms = [m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(int(norm.num_batches_tracked), norm.momentum) for norm in norms} == {(1, 0.1)}
    backbone = built("resnet18", grad_checkpointing=True).eval()
    once = trained(backbone)[3]
    assert set(once.values()) <= {0, 1}
    backbone = build_short("resnet18", dense=True, norm_eval=True).train()
    before = copy.deepcopy(backbone.state_dict())
    backbone(images(64, 64, batch=2).float())
    assert all(torch.equal(v, before[k]) for k, v in backbone.state_dict().items())
    assert backbone.training
