"""Released networks: tensors by the authors' names, parameters and MACs."""

import pytest
import torch

from backbones import create_backbone
from backbones.analysis.counting import count_macs, count_parameters
from heads.linear import LinearClassifier


def assert_tensors_and_counts(name, shapes, parameters, macs):
    """Compare a classification network with (authors' key, shape) pairs and counts, MACs in G."""
    with torch.device("meta"):
        model = LinearClassifier(create_backbone(name), 1000)
    assert count_parameters(model) == parameters
    assert count_macs(model) / 1e9 == pytest.approx(macs, abs=5e-5)
    own = {key.removeprefix("backbone."): tuple(p.shape) for key, p in model.state_dict().items()}
    assert own == {key.replace("head.", "classifier."): shape for key, shape in shapes}
