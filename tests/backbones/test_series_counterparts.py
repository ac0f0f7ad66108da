"""Encoder layers of PatchTST beside those of transformers, with the same random weights."""

import pytest
import torch

from backbones import create_backbone
from tests.tensors import randomise, tokens

pytestmark = pytest.mark.slow
patchtst = pytest.importorskip(
    "transformers.models.patchtst.modeling_patchtst", reason="transformers is not installed"
)

NAMES = {
    "norm1": "norm_sublayer1.batchnorm", "norm2": "norm_sublayer3.batchnorm",
    "attn.proj": "self_attn.out_proj", "mlp.fc1": "ff.0", "mlp.fc2": "ff.3",
}  # fmt: skip


def theirs(dim, heads, hidden):
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
