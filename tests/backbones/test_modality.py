"""A host of another modality than images is built, checked and counted by its own shapes."""

import pytest
import torch
from torch import nn

from backbones import Backbone, FeatureInfo, create_backbone, register_host
from backbones.analysis.counting import count_macs, count_parameters
from backbones.registry import host_modality
from tests.errors import refuses

LENGTH = 128


class Toy1D(Backbone):
    """Signals (B, 2, L) -> maps (B, 8, L / 4) and (B, 16, L / 8)."""

    def __init__(self, config):
        super().__init__()
        self.feature_info = (FeatureInfo(8, 4), FeatureInfo(16, 8))
        self.num_features = 16
        self.grid = config.grid(4)
        self.stem = nn.Conv1d(2, 8, 4, 4)
        self.blocks = nn.ModuleList([nn.Conv1d(8, 16, 3, 2, 1)])

    def forward(self, signals):
        first = self.stem(signals)
        return first, self.blocks[0](first)

    def embed(self, signals):
        return self.forward(signals)[-1].mean(dim=-1)


class Wrong1D(Toy1D):
    def forward(self, signals):
        first, second = super().forward(signals)
        return first[..., 1:], second


@pytest.fixture(autouse=True)
def toy_1d(registering):
    for name, build in (("toy_1d", Toy1D), ("wrong_1d", Wrong1D)):
        register_host(name, slots=(), source="this test", modality="signal")(build)


def test_sizes_maps_and_counts_of_signals():
    backbone = create_backbone("toy_1d", img_size=LENGTH)
    assert (host_modality("toy_1d"), backbone.modality) == ("signal", "signal")
    assert (backbone.img_size, backbone.grid) == ((1, LENGTH), (1, LENGTH // 4))
    signals = torch.randn(3, 2, LENGTH)
    assert [tuple(x.shape) for x in backbone(signals)] == [(3, 8, 32), (3, 16, 16)]
    assert backbone.embed(signals).shape == (3, 16)
    assert create_backbone("toy_1d").img_size == (1, 224)
    with pytest.raises(ValueError, match=r"map 0 of wrong_1d is \(1, 8, 31\) for signals of 128"):
        create_backbone("wrong_1d")(torch.randn(1, 2, LENGTH))
    assert create_backbone("toy_1d", img_size=16).img_size == (1, 16)
    refuses("img_size must be at least 1, got 0", create_backbone, "toy_1d", img_size=0)
    backbone = create_backbone("toy_1d")
    assert count_parameters(backbone) == 2 * 8 * 4 + 8 + 8 * 16 * 3 + 16
    macs = count_macs(backbone, shape=(2, LENGTH))
    assert macs == 2 * 8 * 4 * (LENGTH // 4) + 8 * 16 * 3 * (LENGTH // 8)
