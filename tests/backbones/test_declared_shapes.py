"""Hosts that differ from their declared maps or parameter names are refused by name."""

import copy
import pickle

import pytest
import torch
from torch import nn

from backbones import Backbone
from backbones.base import FeatureInfo
from backbones.parameters.freezing import freeze_stages
from backbones.parameters.layer_ids import LayerNames, Rule
from tests.errors import refuses


class Small(Backbone):
    """Host with two maps at strides 4 and 8 and its own parameter names."""

    layer_names = LayerNames(
        blocks=(Rule(r"net\.level(\d+)\.unit(\d+)\.", first=1),),
        beginnings=(Rule(r"net\.down(\d+)\.", first=1),),
        ends=(Rule(r"net\.norm(\d+)\.", first=1),),
        stem=("net.entry.",),
    )
    classification_keys = ("final.",)

    def __init__(self):
        super().__init__()
        self.name = "small"
        self.feature_info = (FeatureInfo(4, 4), FeatureInfo(6, 8))
        self.num_features = 6
        self.net = nn.Module()
        self.net.entry = nn.Conv2d(3, 4, 4, 4)
        self.net.level1 = nn.Module()
        self.net.level1.unit0, self.net.level1.unit1 = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.net.norm1 = nn.GroupNorm(1, 4)
        self.net.down2 = nn.Conv2d(4, 6, 3, 2, 1)
        self.net.level2 = nn.Module()
        self.net.level2.unit0 = nn.Conv2d(6, 6, 1)
        self.final = nn.LayerNorm(6)

    def forward(self, images):
        first = self.net.entry(images)
        return first, self.net.down2(first)

    def embed(self, images):
        return self.forward(images)[1].mean((2, 3))


class Selecting(Small):
    def __init__(self):
        super().__init__()
        self.feature_info = self.feature_info[1:]

    def forward(self, images):
        return super().forward(images)[1:]


IMAGES = torch.zeros(2, 3, 64, 96)


def returning(result):
    class Wrong(Small):
        def forward(self, images):
            return result(super().forward(images))

    return Wrong()


def test_declared_maps_and_embeddings_pass():
    assert [tuple(x.shape) for x in Small()(IMAGES)] == [(2, 4, 16, 24), (2, 6, 8, 12)]
    assert [tuple(x.shape) for x in Selecting()(IMAGES)] == [(2, 6, 8, 12)]
    for copied in (copy.deepcopy(Small()), pickle.loads(pickle.dumps(Small()))):
        assert len(copied(IMAGES)) == 2
    assert Small().embed(IMAGES).shape == (2, 6)
    with torch.device("meta"):
        assert Small()(IMAGES.to("meta"))[0].is_meta
    host = Small()
    host.num_features = 4
    refuses(r"embed of small returned \(2, 6\); num_features", host.embed, IMAGES)
    host = returning(lambda maps: maps[:1])
    assert len(torch.export.export(host, (IMAGES,)).module()(IMAGES)) == 1


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (list, "forward of small returned list; return a tuple"),
        (lambda maps: maps[0], "forward of small returned Tensor; return a tuple"),
        (lambda maps: None, "returned NoneType"),
        (lambda maps: maps[:1], r"returned 1 maps; .* each of the 2 entries of feature_info"),
        (lambda maps: (*maps, maps[0]), "returned 3 maps"),
        (lambda maps: maps[::-1], r"map 0 of small is \(2, 6, 8, 12\) for images of 64x96; .*"
                                  r"4 channels at stride 4, which is \(2, 4, 16, 24\)"),
        (lambda maps: (maps[0], maps[1][:, :, 1:]), r"map 1 of small is \(2, 6, 7, 12\)"),
        (lambda maps: (maps[0], maps[1][:1]), r"map 1 of small is \(1, 6, 8, 12\)"),
        (lambda maps: (maps[0].permute(0, 2, 3, 1), maps[1]), r"is \(2, 16, 24, 4\)"),
        (lambda maps: (maps[0].flatten(2), maps[1]), r"is \(2, 4, 384\)"),
        (lambda maps: (maps[0], "map"), "map 1 of small is str"),
    ],
)  # fmt: skip
def test_other_maps_are_refused_at_the_first_pass(result, said):
    refuses(said, returning(result), IMAGES)


def test_declared_names_tell_layers_stages_and_blocks():
    host = Small()
    assert host.block_names() == ("net.level1.unit0", "net.level1.unit1", "net.level2.unit0")
    assert host.num_layers == 5
    layers = {
        "net.entry.weight": 0, "net.level1.unit0.weight": 1, "net.level1.unit1.bias": 2,
        "net.norm1.weight": 2, "net.down2.weight": 3, "net.level2.unit0.weight": 3,
        "final.weight": 4,
    }  # fmt: skip
    assert {name: host.layer_id(name) for name in layers} == layers
    freeze_stages(host, 1)
    learning = {name.rpartition(".")[0] for name, p in host.named_parameters() if p.requires_grad}
    assert learning == {"net.down2", "net.level2.unit0", "final"}
    host.set_grad_checkpointing()
    assert len(host.train()(IMAGES)) == 2
