"""AFBO against its equations: worked integers, dense matrices, and the whole mixer by loops."""

import pytest
import torch

from backbones import create_mixer
from backbones.mixers.afbo import GroupedCrossMapping, OverlappedCycleMapping
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


def test_worked_rows_of_the_dense_matrices():
    mapping = occm(6, 12, 3, 2)
    integers(mapping)
    assert mapping.dense_weight()[8].tolist() == [313, 314, 0, 0, 311, 312]
    mapping = occm(6, 10, 4, 3)
    integers(mapping)
    assert mapping.dense_weight()[8].tolist() == [412, 413, 414, 415, 0, 411]
    mapping = gccm(6, 12, 2)
    integers(mapping)
    assert mapping.dense_weight()[3].tolist() == [0, 0, 0, 211, 212, 213]
    assert mapping.dense_weight()[9].tolist() == [211, 212, 213, 0, 0, 0]


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


def test_gccm_with_two_groups_is_the_same_in_both_pairings():
    anti, cyclic = gccm(8, 16, 2), gccm(8, 16, 2, 2, "cyclic")
    cyclic.load_state_dict(anti.state_dict())
    torch.testing.assert_close(anti.dense_weight(), cyclic.dense_weight(), rtol=0, atol=0)


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


OPTIONS = [
    {},
    {"g2": 3, "hidden_ratio": 2},
    {"g1": 4, "g2": 5, "window": 2, "kernel_size": 5},
    {"g1": 4, "rounds": 4, "pairing": "cyclic", "g2": 7, "kernel_size": 1},
    {"g1": 2, "g2": 2, "kernel_size": 7},
]


def mixer_and_window(options):
    torch.manual_seed(0)
    mixer = create_mixer("afbo", 8, **options).double()
    for parameter in mixer.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    groups = options.get("g2", 4)
    return mixer, options.get("window", max(1, groups - 1))


@pytest.mark.parametrize("num_prefix", [0, 1, 2])
@pytest.mark.parametrize("size", [(3, 5), (1, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whole_mixer_equals_the_loops(options, size, num_prefix):
    mixer, window = mixer_and_window(options)
    x = torch.randn(2, *size, 8, dtype=torch.float64, requires_grad=True)
    prefix = torch.randn(2, num_prefix, 8, dtype=torch.float64, requires_grad=True)
    tensors = dict(mixer.named_parameters())
    expected, expected_prefix = reference.afbo(
        x,
        prefix,
        tensors,
        window=window,
        rounds=options.get("rounds", 2),
        pairing=options.get("pairing", "anti"),
    )
    found, found_prefix = mixer(x, prefix)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(found_prefix, expected_prefix, rtol=0, atol=1e-9)

    def gradients(mixed, mixed_prefix):
        total = mixed.sin().sum() + mixed_prefix.cos().sum()
        return torch.autograd.grad(total, [x, prefix, *tensors.values()])

    pairs = zip(gradients(found, found_prefix), gradients(expected, expected_prefix), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_gradcheck():
    mixer, _ = mixer_and_window({"hidden_ratio": 1, "g2": 3})
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    prefix = torch.randn(1, 1, 8, dtype=torch.float64, requires_grad=True)
    names, values = zip(*mixer.named_parameters(), strict=True)

    def run(x, prefix, *values):
        return torch.func.functional_call(mixer, dict(zip(names, values, strict=True)), (x, prefix))

    assert torch.autograd.gradcheck(run, (x, prefix, *values), fast_mode=True)


@pytest.mark.parametrize(("kernel_size", "reach"), [(1, 0), (3, 1), (5, 2)])
def test_receptive_field_is_the_kernel(kernel_size, reach):
    mixer, _ = mixer_and_window({"kernel_size": kernel_size})
    x = torch.randn(1, 7, 9, 8, dtype=torch.float64)
    changed = x.clone()
    changed[0, 3, 4] += 1
    rows, columns = (mixer(x) - mixer(changed))[0].abs().sum(-1).nonzero(as_tuple=True)
    assert (rows.min(), rows.max()) == (3 - reach, 3 + reach)
    assert (columns.min(), columns.max()) == (4 - reach, 4 + reach)


@pytest.mark.parametrize(("g1", "g2"), [(2, 4), (2, 3), (4, 6), (1, 1)])
def test_parameters_follow_the_closed_form(g1, g2):
    dim, hidden, kernel = 24, 96, 3
    mixer = create_mixer("afbo", dim, g1=g1, g2=g2)
    share = 1 / (2 * g1) + max(1, g2 - 1) / g2 + 1
    expected = dim * hidden * share + 2 * hidden * kernel**2 + 4 * hidden + dim
    assert sum(p.numel() for p in mixer.parameters()) == round(expected)


def test_starts_at_a_scale_that_lets_gradients_through():
    torch.manual_seed(0)
    mixer = create_mixer("afbo", 192)
    x = torch.randn(2, 14, 14, 192, requires_grad=True)
    y = mixer(x)
    y.backward(torch.randn_like(y))
    assert 0.2 < y.std() < 0.5
    assert 0.3 < x.grad.std() < 0.7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"g1": 5}, r"g1 must be one of \[1, 2, 3, 4, 6, 8, 12, 24\] with 2 rounds, got 5"),
        ({"g1": 0}, r"g1 must be one of \[1, 2, 3, 4, 6, 8, 12, 24\] with 2 rounds, got 0"),
        ({"g1": 3, "hidden_ratio": 8 / 3}, r"hidden width 64: g1 must be one of \[1, 2, 4, 8\]"),
        ({"g1": 1, "hidden_ratio": 25 / 24}, r"hidden width 25: g1 must be one of \[\]"),
        ({"g2": 4, "window": 5}, r"window must be from 1 to g2 = 4, got 5"),
        ({"g2": 4, "window": 0}, r"window must be from 1 to g2 = 4, got 0"),
        ({"g2": 25}, r"g2 must be from 1 to 24, got 25"),
        ({"g2": 0}, r"g2 must be from 1 to 24, got 0"),
        ({"kernel_size": 4}, r"kernel_size must be odd \(1, 3, 5, 7, \.\.\.\), got 4"),
        ({"kernel_size": 0}, r"kernel_size must be odd .* got 0"),
        ({"pairing": "mirror"}, r"pairing=mirror is not one of anti, cyclic"),
        ({"rounds": 3}, r"1 or 2 with pairing anti and from 1 to g1 = 2 .*; got 3 with anti"),
        ({"rounds": 0}, r"rounds must be 1 or 2 with pairing anti .* got 0"),
        (
            {"rounds": 3, "pairing": "cyclic"},
            r"to g1 = 2 with pairing cyclic; got 3 with cyclic",
        ),
    ],
    ids=str,
)
def test_refused_options_name_the_valid_ones(options, message):
    with pytest.raises(ValueError, match=message):
        create_mixer("afbo", 24, **options)
