"""Encoder layers of PatchTST and iTransformer beside other packages', with the same weights."""

import importlib.util

import pytest
import torch

from backbones import create_backbone
from tests.tensors import randomise, tokens

pytestmark = pytest.mark.slow
NAMES = {
    "norm1": "norm_sublayer1.batchnorm", "norm2": "norm_sublayer3.batchnorm",
    "attn.proj": "self_attn.out_proj", "mlp.fc1": "ff.0", "mlp.fc2": "ff.3",
}  # fmt: skip


def theirs(dim, heads, hidden):
    patchtst = pytest.importorskip("transformers.models.patchtst.modeling_patchtst")
    config = patchtst.PatchTSTConfig(
        d_model=dim, num_attention_heads=heads, ffn_dim=hidden, norm_type="batchnorm",
        pre_norm=False, attention_dropout=0.0, ff_dropout=0.0, path_dropout=0.0,
        activation_function="gelu", channel_attention=False, bias=True,
        attn_implementation="eager",
    )  # fmt: skip
    return patchtst.PatchTSTEncoderLayer(config).double().eval()


def test_encoder_layers_equal_those_of_transformers():
    backbone = randomise(create_backbone("patchtst", dim=16, heads=4, depth=1, fast=False))
    own = backbone.blocks[0].state_dict()
    qkv = {"q": 0, "k": 1, "v": 2}
    tensors = {}
    for key, value in own.items():
        part, _, tensor = key.rpartition(".")
        if part == "attn.qkv":
            for name, place in qkv.items():
                tensors[f"self_attn.{name}_proj.{tensor}"] = value.chunk(3)[place]
        else:
            tensors[f"{NAMES[part]}.{tensor}"] = value
    layer = theirs(16, 4, 32)
    layer.load_state_dict(tensors)
    x = tokens(2, 3, 7, 16)  # series, variables, patches, channels
    found = backbone.blocks[0](x.flatten(0, 1)).unflatten(0, (2, 3))
    wanted = layer(x)
    wanted = wanted if isinstance(wanted, torch.Tensor) else wanted[0]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


# Names of iTransformer's layers, ours and neuralforecast's.
THEIR_NAMES = {
    "attn.proj": "attention.out_projection", "mlp.fc1": "conv1", "mlp.fc2": "conv2",
    "norm1": "norm1", "norm2": "norm2",
}  # fmt: skip


def neuralforecast_layers():
    """Return neuralforecast's file of layers; the package itself imports ray and more."""
    package = importlib.util.find_spec("neuralforecast")
    if package is None:
        pytest.skip("neuralforecast is not installed")
    (folder,) = package.submodule_search_locations
    spec = importlib.util.spec_from_file_location("layers", f"{folder}/common/_modules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_encoder_layers_equal_those_of_neuralforecast():
    layers = neuralforecast_layers()
    backbone = randomise(
        create_backbone("itransformer", img_size=32, dim=16, heads=4, depth=1, fast=False)
    )
    tensors = {}
    for key, value in backbone.blocks[0].state_dict().items():
        part, _, tensor = key.rpartition(".")
        if part == "attn.qkv":
            for name, own in zip(("query", "key", "value"), value.chunk(3), strict=True):
                tensors[f"attention.{name}_projection.{tensor}"] = own
        else:
            is_kernel = part.startswith("mlp") and tensor == "weight"
            tensors[f"{THEIR_NAMES[part]}.{tensor}"] = value[..., None] if is_kernel else value
    hidden = backbone.blocks[0].mlp.fc1.out_features
    attention = layers.AttentionLayer(layers.FullAttention(False, attention_dropout=0.0), 16, 4)
    layer = layers.TransEncoderLayer(attention, 16, hidden, dropout=0.0, activation="gelu")
    layer.double().eval().load_state_dict(tensors)
    x = tokens(2, 7, 16)  # series, variables, channels
    torch.testing.assert_close(backbone.blocks[0](x), layer(x)[0], rtol=1e-9, atol=1e-9)
