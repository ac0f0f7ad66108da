"""Use a backbone in a config of MMDetection."""

from mmdet.registry import MODELS

import backbones.mm  # in a config: custom_imports = dict(imports=["backbones.mm"])
import heads  # torchvision's operators where mmcv has none

backbone = MODELS.build(
    dict(
        type="swin_t_afbo",
        out_indices=(0, 1, 2, 3),
        frozen_stages=1,
        norm_eval=True,
        mixer=dict(g2=6),
    )
)
