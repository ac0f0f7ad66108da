"""Token relations (matrices, position terms, attention) against plain reference computations."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from backbones.analysis.attention import Attention, record_attention, rollout
from backbones.analysis.relations import Relation, mean_distance, places, token_relations
from tests.errors import refuses
from tests.families import SMALLEST, build_short, rest_slow, short
from tests.tensors import build_mixer, images, tokens

SIZE = (64, 96)
ATTEND = (
    "deit_t",
    "edgevit_xxs",
    "gcvit_xxt",
    "lvt_r1",
    "pvt_v2_b1",
    "swin_t",
    "timm",
    "visionllama_s",
)
RELATE = ("gcvit_xxt", "gmlp_ti", "posmlp_t", "sbm_t", "swin_t")
# One host each: global attention, token matrix, reduced keys, convolutions, window attention.
QUICK = ("deit_t", "gmlp_ti", "pvt_v2_b1", "resnet18", "swin_t")


@functools.cache
def network(name, mixer=None):
    torch.manual_seed(0)
    backbone = build_short(name, token_mixer=mixer) if mixer else short(name)
    return backbone.double().eval().requires_grad_(False)


def test_mean_distances_by_hand():
    size = (3, 5)
    at = places(size)
    assert at[7].tolist() == [1, 2]
    all_distances = [math.dist(a, b) for a, b in itertools.product(at.tolist(), repeat=2)]
    weights = torch.stack([torch.eye(15), torch.full((15, 15), -0.2), torch.eye(15).roll(1, 1)])
    found = mean_distance(weights.double(), at, at)
    assert found[0].item() == 0
    assert found[1].item() == pytest.approx(sum(all_distances) / len(all_distances))
    steps = [math.dist(at[i].tolist(), at[(i + 1) % 15].tolist()) for i in range(15)]
    assert found[2].item() == pytest.approx(sum(steps) / 15)
    one = torch.zeros(1, 15, 15, dtype=torch.float64)
    assert mean_distance(one, at, at).isnan().all()
    one[0, 0, 4] = 2.0
    assert mean_distance(one, at, at).item() == 4
    logits = torch.zeros(1, 4, 4)
    even = Relation("position logits", logits, (2, 2)).mean_distance().item()
    assert even == pytest.approx((0 + 1 + 1 + math.sqrt(2)) / 4)
    assert Relation("weights", logits, (2, 2)).mean_distance().isnan().all()


@pytest.mark.parametrize("name", rest_slow(SMALLEST, QUICK))
def test_every_host_has_relations_or_raises_an_error(name):
    if name not in RELATE:
        refuses("lacks a matrix over tokens", token_relations, network(name))
        return
    backbone = network(name)
    found = token_relations(backbone)
    assert len(found) == len(backbone.token_mixers())
    for key, one in found.items():
        count = one.size[0] * one.size[1]
        assert any(key.startswith(mixer) for mixer in backbone.token_mixers())
        assert one.matrix.shape[1:] == (count, count)
        assert one.centre_maps().shape == (len(one.matrix), *one.size)
        assert (one.mean_distance() >= 0).all()


@pytest.mark.parametrize("size", [(4, 4), (2, 3)], ids=["window", "smaller"])
@pytest.mark.parametrize("name", ["ggqpe", "glrpe", "lrpe", "lrpe_m", "sgu"])
def test_a_gating_unit_applies_its_matrix(name, size):
    network = images_into(build_mixer(name, dim=32, window=4))
    (found,) = token_relations(network, size).values()
    assert found.size == found.bias.shape == size
    u = tokens(1, *size, 2 * len(found.matrix))
    mixed = network.mixer.gate.relation(u)[0].flatten(0, 1)
    matrices = found.matrix.repeat(2, 1, 1)  # channel c has that of group c modulo groups
    expected = torch.einsum("cnm,mc->nc", matrices, u[0].flatten(0, 1))
    torch.testing.assert_close(mixed, expected + found.bias.reshape(-1, 1))
    assert (found.non_locality is not None) == (name == "ggqpe")
    assert bool(found.parts) == (name == "lrpe_m")
    if found.parts:
        torch.testing.assert_close(sum(found.parts.values()), found.matrix)
    (whole,) = token_relations(network, (5, 9)).values()
    assert whole.size == (4, 4)
    (alone,) = token_relations(network).values()
    torch.testing.assert_close(whole.matrix, alone.matrix)


def images_into(mixer):
    """Return a network that passes images (B, 3, H, W) directly to a mixer of 32 channels."""

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = mixer

        def forward(self, x):
            return self.mixer(F.pad(x.permute(0, 2, 3, 1), (0, 29)))

    return Network()


def test_sbm_applies_its_matrix():
    mixer = build_mixer("sbm", dim=8, grid=(5, 4))
    mapping, relation = mixer.bilinear, token_relations(mixer)["bilinear"]
    x = tokens(1, 5, 4, 8)
    expected = relation.matrix[0] @ x[0].flatten(0, 1) @ mapping.proj.weight.T
    torch.testing.assert_close(mapping(x)[0].flatten(0, 1), expected + mapping.proj.bias)


def test_non_locality_of_known_gaussians():
    mixer = build_mixer("ggqpe", dim=8, groups=2)
    found = []
    for spread in (2.0, 0.5):
        with torch.no_grad():
            mixer.gate.relation.spreads.copy_(spread * torch.eye(2).expand(2, 2, 2))
        relation = token_relations(mixer)["gate.relation"]
        found.append((relation.non_locality, float(relation.mean_distance().mean())))
    assert [g for g, _ in found] == pytest.approx([4, 0.25])
    assert found[0][1] < found[1][1]
    # P of diag(4, 4), diag(4, 4e-6) and diag(9, 1e-3): the second is below 1e-4 of the largest.
    mixer = build_mixer("ggqpe", dim=12, groups=3)
    spreads = torch.tensor([[2.0, 2.0], [2.0, 2e-3], [3.0, 1e-3**0.5]])
    with torch.no_grad():
        mixer.gate.relation.spreads.copy_(torch.diag_embed(spreads))

    def found(**options):
        relation = token_relations(mixer, **options)["gate.relation"]
        return relation.left_out, relation.non_locality

    assert found() == (1, pytest.approx((4 + 9e-3**0.5) / 2))
    assert found(singular=0.0) == (0, pytest.approx((4 + 4e-3 + 9e-3**0.5) / 3))
    assert found(singular=1e-3) == (2, pytest.approx(4))
    with torch.no_grad():
        mixer.gate.relation.spreads.zero_()
    left_out, non_locality = found()
    assert left_out == 3
    assert math.isnan(non_locality)


@pytest.mark.parametrize("name", rest_slow(SMALLEST, QUICK))
def test_attention_of_every_host(name):
    backbone = network(name)
    if name not in ATTEND:
        refuses("lacks attention", record_attention, backbone, images(*SIZE))
        return
    for size in (SIZE, (80, 112)):
        found = record_attention(backbone, images(*size, batch=2))
        assert set(found) <= set(backbone.token_mixers())
        for one in found.values():
            total = one.weights.sum(-1)
            torch.testing.assert_close(total, torch.ones_like(total))
            prefix, queries, keys = one.num_prefix_tokens, one.query_size, one.key_size
            assert one.weights.shape[0] == 2
            assert one.weights.shape[3] == prefix + queries[0] * queries[1]
            assert one.weights.shape[4] == prefix + keys[0] * keys[1]
            assert one.distances().shape == (2, one.weights.shape[2])
            assert (one.distances() <= math.dist((0, 0), (256, 256))).all()
            assert one.maps().shape[2:] == keys


def test_recorded_attention_equals_the_layers():
    backbone = network("deit_t")
    layer = backbone.blocks[1].attn
    kept = []
    handle = layer.register_forward_hook(lambda module, inputs, output: kept.append(inputs[0]))
    found = record_attention(backbone, images(*SIZE))["blocks.1.attn"]
    handle.remove()
    query, key, _ = layer.qkv(kept[0]).unflatten(-1, (3, 3, 64)).permute(2, 0, 3, 1, 4)
    expected = (query @ key.mT / 8).softmax(-1)
    torch.testing.assert_close(found.weights[:, 0], expected)
    torch.testing.assert_close(found.maps(), expected[:, :, 0, 1:].unflatten(-1, (4, 6)))
    # The first stage computes a window's weights from the mean of a 2x2 patch.
    backbone = network("lvt_r1")
    (first, *_), kept = backbone.token_mixers(), []
    layer = backbone.get_submodule(first)
    handle = layer.register_forward_hook(lambda module, inputs, output: kept.append(inputs[0]))
    found = record_attention(backbone, images(*SIZE, batch=2))
    handle.remove()
    assert list(found) == list(backbone.token_mixers())
    one = found[first]
    assert one.weights.shape == (2, 8 * 12, layer.num_heads, 9, 9)
    assert (one.query_size, one.key_size, one.step, one.stride) == ((3, 3), (3, 3), 1, 4)
    patch = kept[0][1, 4:6, 2:4].mean((0, 1))  # of window (2, 1)
    logits = layer.coefficients(patch).view(layer.num_heads, 9, 9) / math.sqrt(32)
    torch.testing.assert_close(one.weights[1, 2 * 12 + 1], logits.softmax(-1))


def test_rollout_equals_a_plain_product():
    layers = []
    for seed in range(3):
        weights = F.softmax(tokens(2, 1, 2, 5, 5, seed=seed), dim=-1)
        layers.append(Attention(weights, 1, (2, 2), (2, 2), 1.0, 1.0, 16.0))
    expected = torch.eye(5, dtype=torch.float64)
    for one in layers:
        expected = (0.5 * one.weights[0, 0].mean(0) + 0.5 * torch.eye(5)) @ expected
    found = rollout(layers)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 5, dtype=torch.float64))
    refuses("whole map", rollout, record_attention(network("swin_t"), images(*SIZE)))
