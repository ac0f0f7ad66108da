"""Analyses of attention, relations, mappings and coefficients with the field's mixers."""

import pytest
import torch

from backbones import create_backbone, create_mixer, list_mixers
from backbones.analysis.attention import record_attention
from backbones.analysis.capturing import coefficients
from backbones.analysis.mappings import channel_mappings, dense
from backbones.analysis.relations import token_relations
from tests.families import rest_slow
from tests.tensors import images

SHOWN = ["aggregated", "gated_attention", "lsa_gsa", "outlook", "rasa", "retention",
         "single_head", "sra"]  # fmt: skip


def network(name):
    return create_backbone("poolformer_s12", img_size=64, token_mixer=name).eval()


@pytest.mark.parametrize("name", rest_slow(SHOWN, ["aggregated", "outlook", "rasa"]))
def test_weights_of_tokens_for_tokens_are_recorded(name):
    found = record_attention(network(name), images(64, 64).float())
    for attention in found.values():
        weights = attention.weights
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        heads = weights.shape[2]
        assert attention.maps().shape == (1, heads, *attention.key_size)
        assert attention.distances().shape == (1, heads)


@pytest.mark.parametrize("name", ["low_rank", "monarch"])
def test_factorised_layers_have_a_matrix(name):
    mixer = create_mixer(name, 16)
    x = torch.randn(3, 16)
    expected = mixer.fc1(x) - mixer.fc1(torch.zeros(16))
    torch.testing.assert_close(x @ dense(mixer.fc1).mT, expected)
    backbone = create_backbone(f"poolformer_s12_{name}", img_size=64)
    assert len(channel_mappings(backbone)) == 12


def test_the_random_matrix_is_a_relation():
    mixer = create_mixer("random", 8, grid=(3, 4))
    relation = token_relations(mixer)[""]
    x = torch.randn(1, 3, 4, 8)
    expected = (relation.matrix @ x.flatten(1, 2)).view_as(x)
    torch.testing.assert_close(mixer(x), expected)
    assert relation.centre_maps().shape == (1, 3, 4)


def jacobian(layer, channels, size):
    """Derivative of each channel's tokens by the same channel's tokens: (C, N, N)."""
    tokens = size[0] * size[1]
    x = torch.randn(1, *size, channels, dtype=torch.float64)
    found = torch.autograd.functional.jacobian(layer, x)
    full = found.reshape(tokens, channels, tokens, channels)
    return full.diagonal(dim1=1, dim2=3).movedim(-1, 0)


@pytest.mark.parametrize("size", [(3, 4), (4, 3), (1, 5)])
def test_the_matrices_of_a_global_filter_are_its_jacobian(size):
    mixer = create_mixer("global_filter", 3, grid=size).double()
    relation = token_relations(mixer)[""]
    assert relation.size == size
    torch.testing.assert_close(relation.matrix, jacobian(mixer, 3, size))


def test_the_matrices_of_s_mlp_are_those_of_columns_and_rows():
    size, fused = (3, 4), []
    mixer = create_mixer("s_mlp", 2, grid=size).double().eval()
    mixer.fuse.register_forward_pre_hook(lambda _, given: fused.append(given[0]))
    mixer(torch.randn(1, *size, 2, dtype=torch.float64))
    u, down, across = fused[0].chunk(3, dim=-1)
    relation = token_relations(mixer)[""]
    found = (relation.matrix @ u.flatten(1, 2)).unflatten(1, size)
    torch.testing.assert_close(found[:1] + mixer.proj_h.bias.view(3, 1, 1), down)
    torch.testing.assert_close(found[1:] + mixer.proj_w.bias.view(4, 1), across)
    reached = relation.centre_maps() != 0
    assert reached.sum(dim=(1, 2)).tolist() == [3, 4]


def test_channel_mixers_with_a_last_layer_have_coefficients():
    names = [name for name in list_mixers("channel") if getattr(built(name), "value_layer", "")]
    assert {"ffn", "glu", "star", "rwkv_channel_mix", "dw_glu"} <= set(names)
    for name in ("star", "dw_glu", "rwkv_channel_mix", "gr_kan"):
        backbone = create_backbone(f"poolformer_s12_{name}", img_size=64).eval()
        found = coefficients(backbone, images(64, 64).float())
        assert len(found) == 12, name


def built(name):
    with torch.device("meta"):
        return create_mixer(name, 16)
