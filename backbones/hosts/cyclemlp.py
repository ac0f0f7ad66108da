"""CycleMLP-B1 and B2: fully connected layers that read each channel from a neighbouring token.

Source: Chen et al., "CycleMLP: A MLP-like Architecture for Dense Prediction", ICLR 2022,
https://arxiv.org/abs/2107.10224; the authors' released code (github.com/ShoufaChen/CycleMLP) for
the names of weights and for offsets: its layer ``sfc_h`` shifts along the width and ``sfc_w`` along
the height. Weights start truncated normal with deviation 0.02.

Axes: B images, H W map, C channels.
"""

from __future__ import annotations

from torch import Tensor, nn

from backbones.hosts.scaffolds.network_list import HIDDEN_RATIO, NetworkList
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.mixers.ffn import FFN
from backbones.mixers.token_mlps.cycle_fc import CycleMixer
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot


class CycleMLP(NetworkList):
    """Four maps at strides 4, 8, 16, 32; NHWC inside. Dense: a LayerNorm for each map.

    Source: CycleMLP, https://arxiv.org/abs/2107.10224.
    """

    def norm_layer(self, dim: int) -> nn.Module:
        """Build a LayerNorm."""
        return nn.LayerNorm(dim)

    def token_mixer(self, slot: Slot) -> nn.Module:
        """Build a mixer of Cycle FC along both axes."""
        return CycleMixer(slot.dim)

    def ffn(self, dim: int) -> nn.Module:
        """Build a plain FFN."""
        return FFN(dim, hidden_ratio=HIDDEN_RATIO)

    def convert_state_dict(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' tensors; their buffers of offsets are constants."""
        state_dict = {k: v for k, v in state_dict.items() if not k.endswith(".offset")}
        return super().convert_state_dict(state_dict)


@register_host("cyclemlp_b1", source="CycleMLP (ICLR 2022)")
def cyclemlp_b1(config: HostConfig) -> CycleMLP:
    """Widths 64 to 512, depths 2, 2, 4, 2."""
    refuse_pretrained("cyclemlp_b1", config)
    return CycleMLP(config, (2, 2, 4, 2))


@register_host("cyclemlp_b2", source="CycleMLP (ICLR 2022)")
def cyclemlp_b2(config: HostConfig) -> CycleMLP:
    """Widths 64 to 512, depths 2, 3, 10, 3."""
    refuse_pretrained("cyclemlp_b2", config)
    return CycleMLP(config, (2, 3, 10, 3))
