"""Build backbones and mixers by name."""

import torch

from backbones import create_backbone, create_mixer, list_backbones

print(list_backbones("swin_t_afbo*"))

# Four maps at strides 4, 8, 16, 32, for any image size.
backbone = create_backbone("swin_t_afbo", dense=True)
maps = backbone(torch.zeros(1, 3, 96, 128))
assert [tuple(one.shape[2:]) for one in maps] == [(24, 32), (12, 16), (6, 8), (3, 4)]

# An ablation of a paper, and its embedding.
backbone = create_backbone("deit_t_afbo", mixer={"g2": 6}, img_size=64)
assert backbone.embed(torch.zeros(2, 3, 64, 64)).shape == (2, 192)

# Another token mixer, with its options.
backbone = create_backbone("deit_t", token_mixer={"name": "sbm", "rank": 32}, img_size=64)

# A mixer alone: (B, H, W, 192) -> (B, H, W, 192).
mixer = create_mixer("afbo", dim=192)
assert mixer(torch.zeros(1, 14, 14, 192)).shape == (1, 14, 14, 192)
