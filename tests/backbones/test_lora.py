"""Low-rank adapters: equation, what is trained, merging, checkpoints, messages."""

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone, list_hosts
from backbones.lora import merge_adapters, require_peft
from tests.errors import refuses
from tests.families import rest_slow

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def adapted(name="deit_t", rank=4, **options):
    """A backbone whose adapters change its outputs."""
    torch.manual_seed(0)
    backbone = create_backbone(name, img_size=64, lora={"rank": rank, **options}).eval()
    with torch.no_grad():
        for key, parameter in backbone.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.05)
    return backbone


def test_a_misspelt_option_and_a_missing_package_are_named(monkeypatch):
    with pytest.raises(
        ValueError, match=r"no option of backbone.lora called 'ranks'; did you mean rank"
    ):
        create_backbone("deit_t", img_size=64, lora={"ranks": 4})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(r"backbone.lora needs peft; type: pip install .mixerlab\[lora\]", require_peft)


@needs_peft
def test_a_layer_adds_a_product_of_low_rank():
    backbone = adapted(alpha=6.0, targets=["qkv"])
    assert backbone.adapted == tuple(f"blocks.{i}.attn.qkv" for i in range(12))
    layer = backbone.get_submodule("blocks.3.attn.qkv")
    low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (low.shape, high.shape) == ((4, 192), (576, 4))
    x = torch.randn(5, 192)
    base = layer.base_layer
    expected = F.linear(x, base.weight + 6 / 4 * high @ low, base.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


@needs_peft
def test_only_adapters_and_named_parts_are_trained():
    backbone = adapted(targets=["attn"], train=["norm1", "blocks.11.mlp"])
    trained = {name for name, p in backbone.named_parameters() if p.requires_grad}
    assert trained == {
        name
        for name, _ in backbone.named_parameters()
        if "lora_" in name or ".norm1." in name or name.startswith("blocks.11.mlp")
    }
    backbone.train()
    backbone.embed(IMAGES).square().sum().backward()
    assert {name for name, p in backbone.named_parameters() if p.grad is not None} == trained


@needs_peft
def test_merging_keeps_the_numbers_and_restores_the_names(tmp_path):
    backbone, plain = adapted(), create_backbone("deit_t", img_size=64).eval()
    before = backbone.embed(IMAGES)
    state = {f"model.backbone.{key}": value for key, value in backbone.state_dict().items()}
    torch.save({"state_dict": state, "network": dict(backbone.record)}, tmp_path / "a.ckpt")
    assert (plain.embed(IMAGES) - before).abs().max() > 1e-3
    for options in ({}, {"lora": {"rank": 2}}):  # new adapters start at zero on the merged weights
        opened = create_backbone("deit_t", img_size=64, pretrained=tmp_path / "a.ckpt", **options)
        torch.testing.assert_close(opened.eval().embed(IMAGES), before, atol=1e-4, rtol=1e-4)
    torch.save({"state_dict": state}, tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match="has low-rank adapters, but not their scale"):
        create_backbone("deit_t", img_size=64, pretrained=tmp_path / "b.ckpt")
    merged = merge_adapters(copy.deepcopy(backbone))
    torch.testing.assert_close(merged.embed(IMAGES), before, atol=1e-4, rtol=1e-4)
    assert merged.state_dict().keys() == plain.state_dict().keys()


@needs_peft
def test_a_new_mixer_would_be_frozen_at_random_values(tmp_path):
    torch.save(create_backbone("deit_t", img_size=64).state_dict(), tmp_path / "a.pth")
    options = {"img_size": 64, "pretrained": tmp_path / "a.pth"}
    with pytest.raises(
        ValueError, match=r"random values .*whole, such as backbone.lora.train=\[mlp\]"
    ):
        create_backbone("deit_t_afbo", **options, lora={})
    trained = create_backbone("deit_t_afbo", **options, lora={"train": ["mlp"]})
    assert all(p.requires_grad for n, p in trained.named_parameters() if ".mlp." in n)
    with pytest.raises(ValueError, match=r"backbone.lora.targets.*'qvk'; did you mean qkv"):
        create_backbone("deit_t", img_size=64, lora={"targets": ["qvk"]})
    with pytest.raises(ValueError, match=r"backbone.lora.train"):
        create_backbone("deit_t", img_size=64, lora={"train": ["norm7"]})


HOSTS = [name for name in list_hosts(modality="image") if name != "timm"]


@needs_peft
@pytest.mark.parametrize("name", rest_slow(HOSTS, HOSTS[:1]))
def test_adapters_of_every_host_get_gradients(name):
    torch.manual_seed(0)
    backbone = create_backbone(name, img_size=64, lora={"rank": 2}, dense=True)
    assert backbone.adapted
    with torch.no_grad():
        for key, parameter in backbone.named_parameters():
            # Layer scales and norms that start at zero hide the layers behind them.
            parameter.add_(0.1 if parameter.ndim < 2 or "lora_B" in key else 0)
    sum(one.square().sum() for one in backbone(IMAGES)).backward()
    trained = {n: p for n, p in backbone.named_parameters() if p.requires_grad}
    assert not [n for n, p in trained.items() if p.grad is None]
