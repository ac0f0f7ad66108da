"""Hire-MLP-Tiny and Small: fully connected layers over shifted regions of rows or columns.

Source: Guo et al., "Hire-MLP: Vision MLP via Hierarchical Rearrangement", CVPR 2022,
https://arxiv.org/abs/2108.13341; the authors' released code (github.com/ggjy/Hire-Wave-MLP.pytorch,
``mlp_based``) for the names of weights, region sizes and shifts. Its Tiny has 18.04 M parameters;
AFBO's tables quote 17.0 M. Weights start truncated normal with deviation 0.02.

Axes: B images, C channels, H W map, p rows of a region.
"""

from __future__ import annotations

from timm.layers import Mlp
from torch import nn

from backbones.hosts.scaffolds.network_list import HIDDEN_RATIO, NetworkList
from backbones.hosts.scaffolds.timm_source import refuse_pretrained
from backbones.mixers.token_mlps.hire import REGIONS, HireMixer, usual_shift
from backbones.registry import register_host
from backbones.slots import HostConfig, Slot


class HireMLP(NetworkList):
    """Four maps at strides 4, 8, 16, 32; NCHW in channels_last memory inside.

    All norms are BatchNorm; a ReLU follows the convolutions between stages. Dense: a BatchNorm for
    each map; the authors synchronise theirs over GPUs (``trainer.sync_batchnorm=true``).

    Source: Hire-MLP, https://arxiv.org/abs/2108.13341.
    """

    channels_first = True
    block_layout = "nchw"
    embedding_norm = True

    def norm_layer(self, dim: int) -> nn.Module:
        """Build a BatchNorm."""
        return nn.BatchNorm2d(dim)

    def token_mixer(self, slot: Slot) -> nn.Module:
        """Build a mixer of the stage's regions, shifted by the block's place."""
        return HireMixer(slot.dim, REGIONS[slot.stage], usual_shift(slot))

    def ffn(self, dim: int) -> nn.Module:
        """Build an FFN of 1x1 convolutions."""
        return Mlp(dim, int(HIDDEN_RATIO * dim), use_conv=True)


@register_host("hiremlp_t", source="Hire-MLP (CVPR 2022)")
def hiremlp_t(config: HostConfig) -> HireMLP:
    """Widths 64 to 512, depths 2, 2, 4, 2."""
    refuse_pretrained("hiremlp_t", config)
    return HireMLP(config, (2, 2, 4, 2))


@register_host("hiremlp_s", source="Hire-MLP (CVPR 2022)")
def hiremlp_s(config: HostConfig) -> HireMLP:
    """Widths 64 to 512, depths 3, 4, 10, 3."""
    refuse_pretrained("hiremlp_s", config)
    return HireMLP(config, (3, 4, 10, 3))
