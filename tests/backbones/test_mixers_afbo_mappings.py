"""AFBO's channel mappings against Eq. 5 to 7: worked integers, dense matrices, products."""

import pytest
import torch

from backbones.mixers.afbo import (
    BlockDiagonalMapping,
    DenseMapping,
    GroupedCrossMapping,
    OverlappedCycleMapping,
)
from tests.references import afbo as reference


def fill_by_position(weight, group):
    """Entry = 100 (group + 1) + 10 (row + 1) + (column + 1)."""
    rows, columns = weight.shape
    row = torch.arange(1, rows + 1)[:, None]
    weight.data.copy_(100.0 * (group + 1) + 10 * row + torch.arange(1, columns + 1))


def gccm(dim, hidden, groups, rounds=2, pairing="anti"):
    return GroupedCrossMapping(dim, hidden, groups, rounds, pairing).double()


def occm(dim, hidden, groups, window=None):
    return OverlappedCycleMapping(dim, hidden, groups, window).double()


def integers(mapping):
    """The mapping of (1, ..., 6) with weights filled by position and no bias."""
    for group, weight in enumerate(getattr(mapping, "weights", None) or mapping.weight):
        fill_by_position(weight, group)
    torch.nn.init.zeros_(mapping.bias)
    return mapping(torch.arange(1.0, 7.0, dtype=torch.float64)).tolist()


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (gccm(6, 12, 2), "674 734 794 3182 3332 3482 1682 1832 1982 1274 1334 1394"),
        # Odd G: the middle weight meets the same group twice, so blocks 1 and 4 coincide.
        (gccm(6, 12, 3), "335 365 1481 1551 3427 3537 1227 1337 1481 1551 935 965"),
        (occm(6, 12, 3, 2), "1130 1230 1330 1430 3830 4010 4190 4370 4368 4508 4648 4788"),
        (occm(6, 10, 4, 3), "1705 1855 2005 3830 4010 4190 4368 4508 6606 6766"),
    ],
    ids=["gccm_2", "gccm_3", "occm_3_2", "occm_4_3_uneven"],
)
def test_worked_examples(mapping, expected):
    assert integers(mapping) == [float(number) for number in expected.split()]


def assert_equals_matrix(mapping, matrix):
    torch.testing.assert_close(mapping.dense_weight(), matrix, rtol=0, atol=0)
    torch.nn.init.normal_(mapping.bias)
    x = torch.randn(2, 3, 5, mapping.dim, dtype=torch.float64)
    expected = x @ matrix.T + mapping.bias
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(mapping(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("groups", "rounds", "pairing"),
    [
        *[(groups, 2, "anti") for groups in (1, 2, 3, 4, 5, 6)],
        *[(groups, 1, "anti") for groups in (2, 5)],
        *[(groups, rounds, "cyclic") for groups in (2, 3, 4) for rounds in range(1, groups + 1)],
    ],
)
def test_gccm_equals_its_matrix(groups, rounds, pairing):
    mapping = gccm(2 * groups, 3 * groups * rounds, groups, rounds, pairing)
    assert_equals_matrix(mapping, reference.gccm_matrix(mapping.weight.detach(), rounds, pairing))


@pytest.mark.parametrize("widths", [(12, 24), (13, 23), (7, 20)], ids=str)
@pytest.mark.parametrize(
    ("groups", "window"), [(g, k) for g in (1, 2, 3, 4, 5, 7) for k in range(1, g + 1)]
)
def test_occm_equals_its_matrix(widths, groups, window):
    mapping = occm(*widths, groups, window)
    weights = [weight.detach() for weight in mapping.weights]
    assert_equals_matrix(mapping, reference.occm_matrix(weights, *widths, window))


@pytest.mark.parametrize(("groups", "window"), [(1, 1), (2, 1), (3, 2), (4, 3), (6, 5)])
def test_occm_reads_all_groups_but_one_by_default(groups, window):
    assert torch.equal(
        occm(12, 24, groups).dense_weight() != 0, occm(12, 24, groups, window).dense_weight() != 0
    )


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_block_diagonal_equals_its_matrix(groups):
    mapping = BlockDiagonalMapping(2 * groups, 3 * groups, groups).double()
    assert_equals_matrix(mapping, torch.block_diag(*mapping.weight.detach()))


def test_dense_equals_its_matrix():
    mapping = DenseMapping(5, 7).double()
    assert_equals_matrix(mapping, mapping.weight.detach())


def test_weights_start_at_one_over_the_columns_read():
    for mapping in (DenseMapping(64, 256), gccm(64, 256, 2), occm(64, 256, 3)):
        columns = (mapping.dense_weight() != 0).sum(1, keepdim=True)
        scaled = mapping.dense_weight() * columns**0.5
        assert scaled[scaled != 0].std().item() == pytest.approx(1, abs=0.05)
        assert not mapping.bias.any()
