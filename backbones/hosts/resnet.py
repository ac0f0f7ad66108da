"""ResNet-18 and -50 on timm's network: baselines without slots for mixers.

The four maps are the stages' outputs, as in MMDetection. ``pretrained=True`` loads torchvision's
first weights, from which that toolkit and most papers start.

Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016,
https://arxiv.org/abs/1512.03385, Table 1; the stride of a bottleneck is in its 3x3 convolution, as
in torchvision.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

from timm.models.resnet import ResNet as TimmResNet
from torch import Tensor, nn

from backbones.base import FeatureInfo
from backbones.checkpoints.keys import rename
from backbones.hosts.scaffolds.hierarchical import PATCH_SIZE, HierarchicalBackbone
from backbones.hosts.scaffolds.timm_source import create_timm_model, read_source
from backbones.registry import register_host
from backbones.slots import HostConfig

STEM = ("conv1", "bn1", "act1", "maxpool")
Pool = Literal["avg", "max", "avgmax"]
POOLING = dict(zip(get_args(Pool), ("mean", "maximum", "mean of mean and maximum"), strict=True))
OUTPUT_STRIDES = (8, 16, 32)
STAGES = ("layer1", "layer2", "layer3", "layer4")


class ResNet(HierarchicalBackbone):
    """Four maps at strides 4, 8, 16, 32; NCHW inside.

    For small images the stem omits its pooling. With ``patch_size`` 1 its convolution is 3x3, not
    7x7, as in the paper's networks for CIFAR (Sec. 4.2).

    Args:
        model: timm's network.
        config: Options of every host.
        output_stride: Stride of the last map; below 32 the last stages dilate their kernels.
        global_pool: Pooling of the embedding: mean, maximum, or the mean of both.

    Source: ResNet, https://arxiv.org/abs/1512.03385.
    """

    channels_first = True
    block_layout = "nchw"
    token_slots = ()
    channel_slots = ()
    classification_keys = ()
    map_keys = ()

    def __init__(
        self,
        model: TimmResNet,
        config: HostConfig,
        *,
        output_stride: int = 32,
        global_pool: Pool = "avg",
    ) -> None:
        super().__init__()
        self.pretrained_cfg = read_source(model)
        for name in (*STEM, *STAGES):
            self.add_module(name, model.get_submodule(name))
        features = cast("list[dict[str, int]]", model.feature_info)[1:]  # the first is the stem
        self.set_maps(config, [info["num_chs"] for info in features], nn.Identity)
        if output_stride < OUTPUT_STRIDES[-1]:
            self.feature_info = tuple(
                FeatureInfo(info["num_chs"], info["reduction"]) for info in features
            )
            self.size_divisor = output_stride
        self.global_pool = global_pool
        self.pooling = f"{POOLING[global_pool]} of the map"
        if config.patch_size < PATCH_SIZE:
            self.maxpool = nn.Identity()
        if config.patch_size == 1:
            self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")

    def stage_maps(self, images: Tensor) -> list[Tensor]:
        """Return the four stage outputs (B, C, h, w) of images (B, 3, H, W)."""
        x = images
        for name in STEM:
            x = self.get_submodule(name)(x)
        maps = []
        for name in STAGES:
            x = self.get_submodule(name)(x)
            maps.append(x)
        return maps

    def embed(self, images: Tensor) -> Tensor:
        """Return the pooled last map: (B, 3, H, W) -> (B, num_features)."""
        if self.global_pool == "avg":
            return super().embed(images)
        self.check_embeds()
        x = self.stage_maps(images)[-1]
        most = x.amax((2, 3))
        return most if self.global_pool == "max" else (x.mean((2, 3)) + most) / 2

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the classifier; timm and torchvision use the same names."""
        return rename(state_dict, [(r"^fc\.", "classifier.")])


def _build(variant: str, config: HostConfig, output_stride: int, global_pool: Pool) -> ResNet:
    dilated = {} if output_stride == OUTPUT_STRIDES[-1] else {"output_stride": output_stride}
    if output_stride not in OUTPUT_STRIDES or (dilated and config.patch_size < PATCH_SIZE):
        raise ValueError(
            f"backbone.output_stride must be one of {', '.join(map(str, OUTPUT_STRIDES))}, with "
            f"backbone.patch_size={PATCH_SIZE} if it is not {OUTPUT_STRIDES[-1]}; got "
            f"{output_stride} with {config.patch_size}"
        )
    model = create_timm_model(f"{variant}.tv_in1k", config, **dilated)
    return ResNet(
        cast("TimmResNet", model), config, output_stride=output_stride, global_pool=global_pool
    )


@register_host("resnet18", slots=(), source="ResNet, Table 1")
def resnet18(config: HostConfig, *, output_stride: int = 32, global_pool: Pool = "avg") -> ResNet:
    """Widths 64 to 512, depths 2, 2, 2, 2, blocks of two 3x3 convolutions."""
    return _build("resnet18", config, output_stride=output_stride, global_pool=global_pool)


@register_host("resnet50", slots=(), source="ResNet, Table 1")
def resnet50(config: HostConfig, *, output_stride: int = 32, global_pool: Pool = "avg") -> ResNet:
    """Widths 256 to 2048, depths 3, 4, 6, 3, bottlenecks."""
    return _build("resnet50", config, output_stride, global_pool)
