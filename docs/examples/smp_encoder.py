"""Register backbones as encoders of segmentation_models_pytorch."""

import segmentation_models_pytorch as smp
import torch
from segmentation_models_pytorch.encoders import encoders
from torch import nn

from backbones import create_backbone


class Encoder(nn.Module):
    """A backbone with maps of strides 4 to 32, in the form of segmentation_models_pytorch.

    Its decoders also read the image and a map of stride 2, which gets no channels.
    """

    output_stride = 32

    def __init__(self, backbone, depth=5, output_stride=32):
        super().__init__()
        self.backbone = create_backbone(backbone, dense=True)
        self.out_channels = [3, 0, *(info.channels for info in self.backbone.feature_info)]

    def set_in_channels(self, in_channels, pretrained=True):
        if in_channels != 3:
            self.backbone.set_in_chans(in_channels, keep_weights=pretrained)
            self.out_channels[0] = in_channels

    def forward(self, images):
        batch, _, height, width = images.shape
        empty = images.new_empty(batch, 0, height // 2, width // 2)
        return [images, empty, *self.backbone(images)]


for name in ("swin_t_afbo", "pvt_v2_b1_scfbo"):
    encoders[name] = {"encoder": Encoder, "pretrained_settings": {}, "params": {"backbone": name}}

images, masks = torch.rand(2, 3, 64, 96), torch.randint(3, (2, 64, 96))
for decoder in (smp.Unet, smp.FPN):
    model = decoder("swin_t_afbo", encoder_weights=None, classes=3)
    nn.functional.cross_entropy(model(images), masks).backward()
