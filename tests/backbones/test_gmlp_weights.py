"""gMLP as PosMLP's authors released it: their names, the order of its halves, and epsilons.

Source: github.com/Zhicaiwww/PosMLP at f675cbb, models/gmlp.py and models/patch_emb.py.
"""

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone
from heads.linear import LinearClassifier
from tests.references.checkpoints import fill, pair

WIDTH, HIDDEN, DEPTH, N = 128, 768, 30, 196
LAST_WITH_BIAS = 25  # of the free unit


def authors_shapes(unit):
    """Names and shapes of their gMLP-Ti: its own unit ("sgu") or PosMLP's ("ggqpe")."""
    shapes = pair("stem.proj", WIDTH, 3, 16, 16) | pair("stem.norm", WIDTH)
    shapes |= pair("norm", WIDTH) | pair("head", 10, WIDTH)
    for i in range(DEPTH):
        block = f"blocks.{i}.mlp_channels"
        shapes |= pair(f"blocks.{i}.norm", WIDTH) | pair(f"{block}.fc1", HIDDEN, WIDTH)
        shapes |= pair(f"{block}.fc2", WIDTH, HIDDEN // 2)
        if unit == "sgu":
            shapes |= pair(f"{block}.gate.proj_list.0", N, N)
            shapes |= pair(f"{block}.gate.norm_list.0", HIDDEN // 2)
            if i > LAST_WITH_BIAS:
                del shapes[f"{block}.gate.proj_list.0.bias"]
        else:
            pos = f"{block}.gate.pos"
            shapes |= {f"{pos}.attention_centers": (8, 2), f"{pos}.attention_spreads": (8, 2, 2)}
            shapes |= {f"{pos}.token_proj_n_bias": (1, N, 1), f"{pos}.rel_indices": (N, N, 5)}
    return shapes


def their_network(weights, images):
    """Logits by the equations, with their unit: the first half is mixed, the second gates."""

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], scale, shift, 1e-6)

    x = F.conv2d(images, weights["stem.proj.weight"], weights["stem.proj.bias"], 16)
    x = norm(x.flatten(2).mT, "stem.norm")
    for i in range(DEPTH):
        block = f"blocks.{i}.mlp_channels"
        u, v = F.gelu(linear(norm(x, f"blocks.{i}.norm"), f"{block}.fc1")).chunk(2, dim=-1)
        mixed = linear(norm(u, f"{block}.gate.norm_list.0").mT, f"{block}.gate.proj_list.0").mT
        x = x + linear(mixed * v, f"{block}.fc2")
    return linear(norm(x, "norm").mean(dim=1), "head")


@pytest.mark.parametrize(
    "options",
    [{"stem_norm": True, "gate_eps": 1e-6}, {"token_mixer": "sgu"}],
    ids=["own unit", "sgu"],
)
@torch.no_grad()
def test_weights_of_their_gmlp_give_their_outputs(options, tmp_path):
    weights = {key: value.double() for key, value in fill(authors_shapes("sgu")).items()}
    torch.save({"state_dict": weights}, tmp_path / "gmlp.pth.tar")
    model = LinearClassifier.from_pretrained("gmlp_ti", tmp_path / "gmlp.pth.tar", **options)
    images = torch.rand(2, 3, 224, 224, dtype=torch.float64)
    expected = their_network(weights, images)
    found = model.double().eval()(images)
    # The weights were read as float32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max())


@torch.no_grad()
def test_the_epsilon_of_the_unit_is_an_option():
    images = torch.rand(1, 3, 64, 64)
    found = []
    for options in ({}, {"gate_eps": 1e-5}, {"gate_eps": 1e-2}):
        torch.manual_seed(0)
        backbone = create_backbone("gmlp_ti", **options).eval()
        for block in backbone.blocks:
            block.mlp_channels.gate.proj.weight.fill_(0.01)
        found.append(backbone.embed(images))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    with pytest.raises(ValueError, match="gate_eps=1e-06 belongs to gMLP's own unit"):
        create_backbone("gmlp_ti_ggqpe", gate_eps=1e-6)


@torch.no_grad()
def test_weights_of_their_gmlp_with_ggqpe_load(tmp_path):
    weights = fill(authors_shapes("ggqpe"))
    torch.save({"state_dict_ema": weights}, tmp_path / "gmlp.pth.tar")
    model = LinearClassifier.from_pretrained("gmlp_ti_ggqpe", tmp_path / "gmlp.pth.tar")
    relation = model.backbone.blocks[29].mlp_channels.gate.relation
    pos = "blocks.29.mlp_channels.gate.pos"
    assert torch.equal(relation.centers, weights[f"{pos}.attention_centers"])
    assert torch.equal(relation.bias, weights[f"{pos}.token_proj_n_bias"][0])
    assert torch.equal(model.classifier.weight, weights["head.weight"])


def test_a_norm_of_the_stem_is_asked_for(tmp_path):
    torch.save(fill(authors_shapes("sgu")), tmp_path / "gmlp.pth.tar")
    with pytest.raises(ValueError, match="build with stem_norm=True"):
        create_backbone("gmlp_ti", pretrained=tmp_path / "gmlp.pth.tar")
