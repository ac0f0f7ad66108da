"""Networks that differ in more than their mixers are named in tables."""

import pytest
import torch

from backbones import create_backbone
from backbones.analysis.description import describe_network, unlike_host


def build_network(name, **options):
    with torch.device("meta"):
        return create_backbone(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "tokens", "pooling"),
    [("deit_t", {}, 1, "class token"), ("deit_t", {"class_token": False}, 0, "mean of the map"),
     ("deit_t", {"distilled": True}, 2, "class and distillation token"),
     ("deit_t_iffn", {}, 0, "mean of the map"),
     ("deit_t_iffn", {"class_token": True}, 1, "class token"),
     ("deit_t", {"dense": True}, 1, "none, for dense prediction"),
     ("swin_t_afbo", {}, 0, "mean of the map"), ("lvt_r1", {}, 0, "class token")],
)  # fmt: skip
def test_facts_equal_those_of_the_built_network(name, options, tokens, pooling):
    facts = describe_network(build_network(name, **options))
    assert (facts["class_tokens"], facts["pooling"]) == (tokens, pooling)
    assert facts["host"] == name.removesuffix("_iffn").removesuffix("_afbo")


@pytest.mark.parametrize("host", ["deit_t", "swin_t", "poolformer_s12", "lvt_r1", "ffnet_1"])
def test_a_mixer_alone_changes_no_fact(host):
    plain = describe_network(build_network(host))
    own = {"mixer": {"hidden_ratio": 3}} if host in ("deit_t", "swin_t") else {}
    for name, options in ((f"{host}_glu", {}), (f"{host}_convnext_v2", {}), (host, own)):
        assert describe_network(build_network(name, **options)) == plain


def test_pooling_of_a_host_is_what_its_embedding_reads():
    """A mean has a gradient at every position of the last block's map, a token only at its own."""
    for options in ({}, {"class_token": False}):
        backbone = create_backbone("deit_t", img_size=64, **options).eval()
        outputs = []
        backbone.blocks[-1].register_forward_hook(lambda *call, kept=outputs: kept.append(call[2]))
        outputs.clear()
        embedding = backbone.embed(torch.randn(1, 3, 64, 64))
        (gradient,) = torch.autograd.grad(embedding.square().sum(), outputs[0])
        reached = (gradient.abs().sum(-1) > 0).sum().item()
        assert (reached == 1) == (backbone.pooling == "class token")
        assert (reached == 16) == (backbone.pooling == "mean of the map")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("deit_t", {}, None),
        ("deit_t_afbo", {"class_token": False}, None),
        ("deit_t_iffn", {"class_token": True}, None),
        ("swin_t_iffn", {}, None),
        ("deit_t_iffn", {"class_token": False, "img_size": 64},
         "deit_t_iffn is built without a class token (mean pooling), unlike deit_t"),
        ("lvt_r1_afbo", {}, "lvt_r1_afbo is built with swap_class_ffn=false, unlike lvt_r1"),
        ("gmlp_ti_lrpe", {},
         "gmlp_ti_lrpe is built with 256 parameters more in the host, unlike gmlp_ti"),
    ],
)  # fmt: skip
def test_changes_of_the_host_by_a_mixer_are_named(name, options, said):
    state = torch.get_rng_state()
    assert unlike_host(build_network(name, **options)) == said
    assert torch.equal(torch.get_rng_state(), state)
