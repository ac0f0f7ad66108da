"""The surface of an objective: quadratics, whose values and curvature are known."""

import pytest
import torch
from torch import nn

from backbones.analysis.landscape import filter_normalised, largest_curvature, moved, surface
from tests.tensors import tokens


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(tokens(3, 2))
        self.bias = nn.Parameter(tokens(3, seed=2))


def test_directions_are_as_long_as_the_filters():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 6)).double()
    parameters = list(network.parameters())
    for parameter, part in zip(parameters, filter_normalised(parameters, 1), strict=True):
        if parameter.ndim == 1:
            assert not part.any()
        else:
            own, its = (t.detach().flatten(1).norm(dim=1) for t in (parameter, part))
            torch.testing.assert_close(its, own)
    other = filter_normalised(parameters, 2)
    assert not torch.equal(other[0], filter_normalised(parameters, 1)[0])


def test_the_surface_of_a_quadratic_leaves_its_parameters():
    network = Point()
    before = {k: v.clone() for k, v in network.state_dict().items()}

    def objective():
        return network.weight.square().sum() + network.bias.sum()

    points = [-1.0, 0.0, 0.5]
    values = surface(network, objective, points, seed=3)
    first, second = (filter_normalised(list(network.parameters()), seed) for seed in (6, 7))
    for row, a in enumerate(points):
        for column, b in enumerate(points):
            weight = network.weight + a * first[0] + b * second[0]
            expected = weight.square().sum() + network.bias.sum()
            assert values[row, column].item() == pytest.approx(expected.item())
    assert all(torch.equal(before[k], v) for k, v in network.state_dict().items())
    network = Point()
    parameters, one = list(network.parameters()), [torch.ones(3, 2), torch.ones(3)]
    before = network.weight.detach().clone()

    def fail():
        with moved(parameters, [(1.0, one)]):
            torch.testing.assert_close(network.weight.detach(), before + 1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(network.weight, before)


@pytest.mark.parametrize("extreme", [7.0, -9.0])
def test_the_largest_eigenvalue_of_a_known_hessian(extreme):
    """1/2 w' H w with eigenvalues 1 to 5 and one that is largest in size, of either sign."""
    network = Point().requires_grad_(False)
    turned = torch.linalg.qr(tokens(6, 6, seed=4))[0]
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, extreme], dtype=torch.float64)
    hessian = turned @ torch.diag(values) @ turned.T

    def objective():
        w = network.weight.flatten()
        return w @ hessian @ w / 2 + network.bias.sum()

    found, change = largest_curvature(network, objective, iterations=200)
    assert found == pytest.approx(extreme, rel=5e-3)
    assert change < 1e-3
    assert not network.weight.requires_grad
