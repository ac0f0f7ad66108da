"""Put a backbone into torchvision's detectors."""

from collections import OrderedDict

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from backbones import create_backbone


class Pyramid(nn.Module):
    """A backbone with torchvision's feature pyramid."""

    def __init__(self, backbone, extra):
        super().__init__()
        self.backbone, self.out_channels = backbone, 256
        channels = [info.channels for info in backbone.feature_info]
        self.fpn = FeaturePyramidNetwork(channels, self.out_channels, extra_blocks=extra)

    def forward(self, images):
        maps = self.backbone(images)
        return self.fpn(OrderedDict((str(index), one) for index, one in enumerate(maps)))


# Images are padded to the backbone's size_divisor; the boxes of one image are in target.
images = [torch.rand(3, 96, 128)]
targets = [{"boxes": torch.tensor([[8.0, 9, 60, 70]]), "labels": torch.tensor([1])}]
backbone = create_backbone("swin_t_afbo", dense=True)
sizes = {"min_size": 96, "max_size": 128, "size_divisible": backbone.size_divisor}

detector = FasterRCNN(Pyramid(backbone, LastLevelMaxPool()), num_classes=3, **sizes)
sum(detector(images, targets).values()).backward()
found = detector.eval()(images)  # boxes, labels and scores of each image

# RetinaNet adds two maps to the pyramid, and needs the sizes of anchors for all six.
octaves = tuple(
    tuple(int(side * 2 ** (i / 3)) for i in range(3)) for side in (16, 32, 64, 128, 256, 512)
)
anchors = AnchorGenerator(octaves, ((0.5, 1.0, 2.0),) * len(octaves))
pyramid = Pyramid(create_backbone("swin_t_afbo", dense=True), LastLevelP6P7(256, 256))
detector = RetinaNet(pyramid, num_classes=3, anchor_generator=anchors, **sizes)
sum(detector(images, targets).values()).backward()
