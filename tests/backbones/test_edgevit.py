"""EdgeViT-XXS against plain equations under the authors' names, at any size."""

import pytest
import torch

from backbones import list_mixers
from backbones.analysis.counting import count_macs, count_parameters
from backbones.hosts.edgevit import LocalAggregation, SparseAttention
from heads.linear import LinearClassifier
from tests.families import meta_backbone, meta_classifier, rest_slow
from tests.references import edgevit as reference
from tests.references.checkpoints import fill, in_float64
from tests.tensors import images

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SWAPPED = [name for name in list_mixers("channel") if name != "ffn"]


@torch.no_grad()
def test_released_checkpoint_gives_the_logits_of_the_equations(tmp_path):
    tensors = fill(reference.shapes())
    torch.save({"model": tensors}, tmp_path / "edgevit.pth")
    model = LinearClassifier.from_pretrained("edgevit_xxs", tmp_path / "edgevit.pth")
    theirs = reference.Network(in_float64(tensors))
    model.double().eval()
    for size in [(64, 96), (65, 97), (200, 304)]:
        torch.testing.assert_close(model(images(*size)), theirs.logits(images(*size)), **CLOSE)
        maps = theirs.maps(images(*size))
        torch.testing.assert_close(model.backbone(images(*size)), maps, **CLOSE)


def test_parameters_and_macs():
    model = meta_classifier("edgevit_xxs")
    assert count_parameters(model) == 4_067_704
    assert count_macs(model) / 1e9 == pytest.approx(0.5513, abs=5e-5)
    ffns = [m.mlp for m in model.modules() if isinstance(m, LocalAggregation | SparseAttention)]
    assert len(ffns) == 12
    assert sum(count_parameters(ffn) for ffn in ffns) == 2_434_392


@pytest.mark.parametrize("name", rest_slow(SWAPPED, ("afbo", "iffn", "glu")))
@torch.no_grad()
def test_every_channel_mixer_fits_both_halves(name):
    for dense in (False, True):
        backbone = meta_backbone(f"edgevit_xxs_{name}", dense=dense).eval()
        assert len(backbone(torch.empty(2, 3, 65, 97, device="meta"))) == 4
        halves = [key.split(".")[-3] for key in backbone.mixers()]
        assert (halves.count("local"), halves.count("sparse")) == (5, 7)
