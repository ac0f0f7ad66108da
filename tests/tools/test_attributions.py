"""Pixel attributions, checked by sums, formulas and a model that reads one quadrant per class."""

import csv

import pytest
import torch
from PIL import Image
from torch import nn

from backbones import create_backbone
from heads.linear import LinearClassifier
from tests.families import short
from tests.tensors import images
from tools import analyse
from tools.analyses.attributing import COMPLETE, METHODS, SIGNED, attributions
from tools.analyses.kinds import attributions as kind

pytest.importorskip("captum")


class Quadrants(nn.Module):
    """The logit of class k is the sum of the squares of quadrant k, row by row."""

    def forward(self, x):
        height, width = x.shape[2] // 2, x.shape[3] // 2
        squares = x.square().sum(1)
        parts = [squares[:, :height], squares[:, height:]]
        halves = [half for part in parts for half in (part[..., :width], part[..., width:])]
        return torch.stack([half.sum((1, 2)) for half in halves], 1)


@pytest.mark.parametrize("method", METHODS)
def test_attributions_lie_in_the_quadrant_of_the_class(method):
    x, classes = images(16, 24, batch=2), torch.tensor([1, 2])
    found = attributions(Quadrants(), x, classes, method=method, steps=8, window=4)
    assert found.shape == (2, 16, 24)
    inside = torch.zeros(2, 16, 24, dtype=torch.bool)
    inside[0, :8, 12:] = inside[1, 8:, :12] = True
    if method == "occlusion":  # windows of 4 pixels extend 2 over the edge
        inside[0, :10, 10:] = inside[1, 6:, :14] = True
    assert not found[~inside].any()
    assert found[inside].abs().mean() > 0.1
    if method != "gradient_shap":
        assert (found >= 0).all()


def test_attributions_equal_their_formulas():
    x, classes = images(8, 8), torch.tensor([3])
    own = x[0, :, 4:, 4:]
    expected = {
        "saliency": (2 * own).abs().sum(0),
        "input_x_gradient": 2 * own.square().sum(0),
        "integrated_gradients": own.square().sum(0),
        "occlusion": own.square().sum(0),
    }
    for method, values in expected.items():
        found = attributions(Quadrants(), x, classes, method=method, window=1)[0]
        torch.testing.assert_close(found[4:, 4:].double(), values, rtol=1e-5, atol=1e-5)
    x, classes = images(40, 64), torch.tensor([2])
    found, fifth, fourth = (
        attributions(Quadrants(), x, classes, method="occlusion", window=window)
        for window in (0, 5, 4)
    )
    torch.testing.assert_close(found, fifth)
    assert not torch.equal(found, fourth)


def test_integrated_gradients_are_complete():
    """They sum to the logit of the image minus the logit of a zero input."""
    torch.manual_seed(0)
    model = LinearClassifier(short("deit_t"), 5).double().eval()
    with torch.no_grad():
        model.classifier.weight.normal_()
    model.requires_grad_(False)
    x, classes = images(32, 48, batch=2), torch.tensor([4, 0])
    differences = (model(x) - model(torch.zeros_like(x))).gather(1, classes[:, None]).flatten()
    assert differences.abs().min() > 0.01
    sums = attributions(model, x, classes, steps=200).sum((1, 2))
    torch.testing.assert_close(sums, differences, rtol=1e-3, atol=1e-4)


def test_the_command(tmp_path, capsys):
    assert set(kind.CHOICES["method"]) == set(METHODS) >= {*SIGNED, *COMPLETE}
    path, out = tmp_path / "deit.pth", tmp_path / "out"
    torch.manual_seed(0)
    torch.save(LinearClassifier(create_backbone("deit_t"), 7).state_dict(), path)
    Image.new("RGB", (48, 32), "olive").save(tmp_path / "a.png")
    network = [f"ckpt={path}", "backbone=deit_t", f"input={tmp_path / 'a.png'}", "image_size=32"]
    assert analyse.main(["attributions", *network, "steps=4", "class=3", f"out={out}"]) == 0
    with (out / "attributions.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["image"], row["class"]) == ("a.png", "class 3")
    expected_missing = float(row["difference"]) - float(row["sum"])
    assert float(row["missing"]) == pytest.approx(expected_missing)
    assert (out / "attributions.png").stat().st_size > 3000
    capsys.readouterr()
    assert analyse.main(["attributions", *network, "class=7", f"out={out}"]) == 2
    assert "classes 0 to 6, got 7" in capsys.readouterr().err
    assert analyse.main(["attributions", "backbone=deit_t", *network[2:], f"out={out}"]) == 2
    assert "lacks an image classifier" in capsys.readouterr().err
