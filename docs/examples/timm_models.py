"""Use a backbone as a model of timm."""

import timm
import torch

import backbones.timm_models  # registers every name

model = timm.create_model("swin_t_afbo", num_classes=10)
assert model(torch.zeros(1, 3, 224, 224)).shape == (1, 10)

pyramid = timm.create_model("swin_t_afbo", features_only=True)
assert pyramid.feature_info.channels() == [96, 192, 384, 768]
