"""Claims of tools/compare.py: against published values, and in simulated tables."""

import math

import numpy as np
import pytest
from scipy import stats

from tasks.engine.answers import mean_share
from tools.comparison.answers import Means, Shares
from tools.comparison.statistics import (
    beyond,
    critical,
    estimate_errors,
    interval,
    judge,
    mean_ranks,
    samples_interval,
    visible_by,
    visible_difference,
    within,
)

# Dunnett (1955), blood counts of animals, also the example of R's DescTools and of scipy.
CONTROL = [7.40, 8.50, 7.20, 8.24, 9.84, 8.32]
DRUGS = {"a": [9.76, 8.80, 7.68, 9.36], "b": [12.80, 9.68, 12.16, 9.20, 10.55]}
ALONE = ("host", "data")


def simulated(generator, *, mixers=5, hosts=3, sets=4, seeds=2, interaction=0.0, effect=0.0):
    """A table of deviation 1 per seed, in which mixer m1 is better by an effect."""
    cells = [(f"h{host}", f"d{number}") for host in range(hosts) for number in range(sets)]
    level = {cell: generator.normal(0, 10) for cell in cells}
    table = {}
    for mixer in range(mixers):
        suits = {f"h{host}": generator.normal(0, interaction) for host in range(hosts)}
        shift = effect if mixer == 1 else 0.0
        table[f"m{mixer}"] = {
            cell: generator.normal(level[cell] + suits[cell[0]] + shift, 1, seeds).tolist()
            for cell in cells
        }
    return table


def share_of_claims(claim, tables, **options):
    generator = np.random.default_rng(0)
    claims = [claim(simulated(generator, **options), "m0", 0.0) for _ in range(tables)]
    return np.mean([any(e.verdict in ("better", "worse") for e in c.values()) for c in claims])


def test_one_cell_gives_dunnetts_published_values():
    values = {name: {ALONE: runs} for name, runs in {"c": CONTROL, **DRUGS}.items()}
    effects = within(values, "c", 0.0)
    assert [round(effects[name].p, 3) for name in "ab"] == [0.620, 0.006]  # R: DunnettTest
    reference = stats.dunnett(*DRUGS.values(), control=CONTROL, rng=np.random.default_rng(0))
    ends = reference.confidence_interval()
    for number, name in enumerate(DRUGS):
        effect = effects[name]
        assert effect.mean == pytest.approx(np.mean(DRUGS[name]) - np.mean(CONTROL))
        assert effect.p == pytest.approx(reference.pvalue[number], abs=2e-3)
        assert (effect.low, effect.high) == pytest.approx(
            (ends.low[number], ends.high[number]), abs=5e-3
        )
    assert [effects[name].verdict for name in "ab"] == ["cannot tell", "better"]


@pytest.mark.parametrize(
    ("comparisons", "degrees", "value"),
    [(2, 10, 2.57), (3, 12, 2.68), (9, 20, 2.95), (5, 60, 2.58), (1, 10, 2.23)],
)
def test_critical_values_are_those_of_dunnetts_table(comparisons, degrees, value):
    """Dunnett (1964), Table III: two-sided, 5 %, equal numbers of runs."""
    correlation = np.full((comparisons, comparisons), 0.5) + 0.5 * np.eye(comparisons)
    assert critical(correlation, degrees) == pytest.approx(value, abs=0.012)


def test_two_cells_by_hand():
    """Cells' means and a mixer that suits one cell leave the error of the seeds alone."""
    first, second = ("h", "p"), ("h", "q")
    values = {
        "base": {first: [10.0, 12.0], second: [50.0, 50.0]},
        "mixer": {first: [13.0, 13.0], second: [49.0, 51.0]},
    }
    # Per cell a variance of 2 / 2 with 2 degrees of freedom; the difference has (1 + 1) / 4.
    assert estimate_errors(values).pooled == {first: (1.0, 2), second: (1.0, 2)}
    effect = within(values, "base", 0.5)["mixer"]
    assert effect.mean == 1.0
    error, degrees = math.sqrt(0.5), 4  # Satterthwaite: equal errors add their degrees
    width = stats.t.isf(0.025, degrees) * error
    assert (effect.low, effect.high) == pytest.approx((1 - width, 1 + width))
    assert effect.p == pytest.approx(2 * stats.t.sf(1 / error, degrees))
    assert within(values, "base", 0.5, sign=-1)["mixer"].mean == -1.0


def test_clusters_by_hand():
    base = {(host, data): [0.0] for host in "xy" for data in "pq"}
    differences = {("x", "p"): [3.0], ("x", "q"): [1.0], ("y", "p"): [1.0], ("y", "q"): [-1.0]}
    effect = beyond({"base": base, "mixer": differences}, "base", 0.0)["mixer"]
    assert effect.mean == 1.0
    # Means of hosts 2 and 0, of sets 2 and 0: each has a variance of 2 / 2 of its mean.
    width = stats.t.isf(0.025, 1) * math.sqrt(2.0)
    assert (effect.low, effect.high) == pytest.approx((1 - width, 1 + width))


@pytest.mark.parametrize("claim", [within, beyond])
def test_copies_of_the_baseline_stay_without_a_verdict(claim):
    assert share_of_claims(claim, 120) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 120)


@pytest.mark.slow
@pytest.mark.parametrize("interaction", [0.0, 1.0])
@pytest.mark.parametrize(("hosts", "sets", "mixers"), [(3, 4, 13), (6, 4, 5), (5, 5, 13)])
def test_a_mixer_that_suits_single_hosts_is_no_claim_beyond(interaction, hosts, sets, mixers):
    sizes = {"hosts": hosts, "sets": sets, "mixers": mixers}
    assert share_of_claims(beyond, 2_000, interaction=interaction, **sizes) <= 0.05


@pytest.mark.slow
def test_copies_are_told_apart_in_5_percent_of_tables():
    assert share_of_claims(within, 2_000) == pytest.approx(0.05, abs=0.015)


def test_pooled_blocks_would_claim_an_interaction():
    """The reason for two claims: within the cells an interaction is a difference."""
    assert share_of_claims(within, 60, interaction=2.0) > 0.5
    assert share_of_claims(beyond, 60, interaction=2.0) <= 0.1


def test_a_planted_difference_is_seen_as_often_as_the_power_says():
    effect, generator = visible_difference(4, 12, 2), np.random.default_rng(1)
    tables = [simulated(generator, effect=effect) for _ in range(150)]
    share = np.mean([within(t, "m0", 0.0)["m1"].verdict == "better" for t in tables])
    assert share == pytest.approx(0.8, abs=0.08)


@pytest.mark.slow
def test_a_planted_difference_is_seen_in_a_small_table():
    effect, generator = visible_difference(3, 4, 2), np.random.default_rng(1)
    sizes = {"mixers": 4, "hosts": 2, "sets": 2, "effect": effect}
    tables = [simulated(generator, **sizes) for _ in range(1_000)]
    share = np.mean([within(t, "m0", 0.0)["m1"].verdict == "better" for t in tables])
    assert share == pytest.approx(0.8, abs=0.025)


def test_the_visible_difference_expects_the_degrees_of_estimated_variances():
    """Four rows, four cells and two seeds: variances with 4 degrees in each cell."""
    variances = np.random.default_rng(0).chisquare(4, (10_000, 4)) / 4
    degrees = float(np.mean(variances.sum(1) ** 2 / (variances**2 / 4).sum(1)))
    assert degrees == pytest.approx(12.5, abs=0.2)
    expected = visible_by(3, 2 / 8, degrees)
    assert visible_difference(3, 4, 2) == pytest.approx(expected, rel=0.01)


def unsteady(generator, **options):
    """A simulated table in which the runs of m2 deviate by 30."""
    table = simulated(generator, **options)
    for cell, runs in table["m2"].items():
        table["m2"][cell] = (runs + generator.normal(0, 30, len(runs))).tolist()
    return table


def test_a_mixer_whose_runs_diverge_leaves_the_error_of_the_others():
    cell, other = ("h", "p"), ("h", "q")
    values = {name: {cell: [0.0, 1.0], other: [0.0, 1.0]} for name in "abcdefghijkl"}
    before = within(values, "a", 0.0)["b"]
    assert estimate_errors(values).outliers == {}
    values["c"] = {cell: [0.0, 40.0], other: [0.0, 2.0]}
    errors = estimate_errors(values)
    assert errors.outliers == {"c": {cell: (800.0, 1), other: (2.0, 1)}}
    assert errors.pooled == {cell: (0.5, 11), other: (0.5, 11)}
    assert (errors.of("c", cell), errors.of("b", cell)) == ((800.0, 1), (0.5, 11))
    after = within(values, "a", 0.0)
    assert after["b"].high == pytest.approx(before.high, rel=0.1)
    # By hand: variances of two runs of c in both cells, of which one with a degree prevails.
    assert after["c"].high - after["c"].mean > 12 * math.sqrt((800 + 2) / 2 / 4)
    assert after["c"].verdict == "cannot tell"
    assert within({"a": values["a"], "c": values["c"]}, "a", 0.0)["c"].verdict == "cannot tell"


def test_the_only_mixer_whose_runs_deviate_is_an_outlier():
    values = {name: {ALONE: [33.3, 33.3]} for name in "abcd"}
    values["identity"] = {ALONE: [0.0, 33.3]}
    errors = estimate_errors(values)
    assert list(errors.outliers) == ["identity"]
    assert errors.pooled == {ALONE: (0.0, 4)}
    effects = within(values, "a", 0.5)
    assert effects["identity"].high - effects["identity"].low > 30
    assert "runs of each mixer are equal" in effects["b"].reason


def test_an_outlier_has_its_own_error_where_it_has_one_run():
    first, second, third = ("h", "p"), ("h", "q"), ("h", "r")
    values = {name: {first: [0.0, 0.1], second: [0.0, 0.1], third: [0.0]} for name in "abdefghi"}
    values["c"] = {first: [0.0, 4.0, 8.0], second: [0.0], third: [0.0]}
    errors = estimate_errors(values)
    assert errors.outliers == {"c": {first: (16.0, 2)}}
    assert [errors.of("c", cell) for cell in (first, second)] == [(16.0, 2), (16.0, 2)]
    assert errors.of("a", second)[0] < 0.01
    without_third = {name: {c: cells[c] for c in (first, second)} for name, cells in values.items()}
    effect = within(without_third, "a", 0.5)["c"]
    error = math.sqrt((16 / 3 + 16) / 4)  # with the 2 degrees of a single estimate
    assert effect.p > 2 * stats.t.sf(effect.mean / error, 2) - 1e-3
    assert effect.high - effect.mean > stats.t.isf(0.025, 2.01) * error
    values["c"][third] = [0.0, 5.0]
    reason = within(values, "a", 0.5)["c"].reason
    assert reason.startswith("a cell has one run per mixer with the common error")


def test_the_baseline_and_its_copy_have_one_error():
    cell, second = ("h", "p"), ("h", "q")
    values = {name: {cell: [0.0, 1.0], second: [0.0, 1.0]} for name in "bcdefghi"}
    values["a"] = {cell: [0.0, 10.0], second: [0.0, 10.0]}
    values["a again"] = {cell: [0.0, 20.0], second: [0.0, 10.0]}
    errors = estimate_errors(values)
    assert set(errors.outliers) == {"a", "a again"}
    assert errors.of("a", cell) == errors.of("a again", cell) == (125.0, 2)
    assert errors.pooled == {cell: (0.5, 8), second: (0.5, 8)}
    effect = within(values, "a", 0.0)["a again"]
    # Variances of 125 and 50 with 2 degrees each, and a mean difference of half their sum.
    quantile = (effect.high - effect.mean) / math.sqrt((125 + 50) / 4)
    assert quantile > stats.t.isf(0.025, 175**2 * 2 / (125**2 + 50**2))


def test_a_baseline_whose_runs_diverge_is_noticed_beside_its_copy():
    """Four cells, two seeds and ten times the deviation of three mixers."""
    generator, noticed = np.random.default_rng(0), 0
    for _ in range(400):
        table = simulated(generator, hosts=2, sets=2)
        runs = {cell: generator.normal(0, 10, (2, 2)).tolist() for cell in table["m0"]}
        table |= {name: {cell: pair[place] for cell, pair in runs.items()}
                  for place, name in enumerate(("m0", "m0 again"))}  # fmt: skip
        noticed += {"m0", "m0 again"} <= set(estimate_errors(table).outliers)
    assert noticed >= 0.9 * 400


@pytest.mark.slow
def test_a_mixer_whose_runs_diverge_claims_no_more_than_others():
    """Copies of the baseline, one of which deviates by 30: 5 % of tables, as without it."""
    generator, tables = np.random.default_rng(0), 600
    claims = [within(unsteady(generator), "m0", 0.0) for _ in range(tables)]
    verdicts = [{name: effect.verdict for name, effect in claim.items()} for claim in claims]
    claimed = [{n for n, v in table.items() if v in ("better", "worse")} for table in verdicts]
    assert np.mean([bool(table) for table in claimed]) <= 0.05 + 0.02
    effect = visible_difference(4, 12, 2)
    tables_with = [unsteady(generator, effect=effect) for _ in range(200)]
    share = np.mean([within(t, "m0", 0.0)["m1"].verdict == "better" for t in tables_with])
    assert share == pytest.approx(0.8, abs=0.08)


@pytest.mark.parametrize(("blocks", "size"), [(3, 3.3), (9, 1.9), (12, 1.6), (20, 1.24)])
def test_visible_difference_of_forty_mixers(blocks, size):
    """Blocks of one run: the error has (mixers - 1)(blocks - 1) degrees of freedom."""
    visible = visible_by(40, 2 / blocks, 40 * (blocks - 1))
    assert visible == pytest.approx(size, abs=0.05)


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [((0.6, 2.0), "better"), ((0.1, 0.6), "better"), ((0.1, 0.4), "equivalent"),
     ((-0.4, 0.4), "equivalent"), ((-2.0, -0.1), "worse"), ((-0.6, 0.4), "cannot tell"),
     ((math.nan, math.nan), "cannot tell")],
)  # fmt: skip
def test_verdicts_by_region(ends, verdict):
    assert judge(*ends, region=0.5) == verdict


def test_a_missing_cell_stays_missing():
    generator = np.random.default_rng(0)
    table = simulated(generator, effect=50.0)
    lost = ("h0", "d0")
    del table["m1"][lost]
    table["m2"] = {}
    effects = within(table, "m0", 0.5)
    assert effects["m1"].cells == 11
    assert effects["m1"].verdict == "better"
    assert "no cell in common" in effects["m2"].reason
    assert effects["m3"].cells == 12
    assert beyond(table, "m0", 0.5)["m1"].cells == 11
    assert mean_ranks(table)["m1"] == 1.0


def test_too_few_runs_or_clusters_conclude_nothing():
    values = {name: {("h", "d"): [number]} for number, name in enumerate("ab")}
    assert "one run per mixer" in within(values, "a", 0.5)["b"].reason
    assert beyond(values, "a", 0.5)["b"].reason == "1 host says nothing about others"
    assert within(values, "a", 0.5)["b"].verdict == "cannot tell"


@pytest.mark.parametrize("value", [10.0, 71.3, 12.34, 0.1])
@pytest.mark.parametrize("seeds", [2, 3, 7])
def test_equal_runs_conclude_nothing(value, seeds):
    cells = [("h", "d"), ("h", "e"), ("i", "d"), ("i", "e")]
    equal = {
        name: {cell: [value + 5 * number + shift] * seeds for number, cell in enumerate(cells)}
        for name, shift in (("a", 0.0), ("b", 0.1), ("c", 0.0))
    }
    for claim, reason in ((within, "runs of each mixer are equal"), (beyond, "are equal in all")):
        for effect in claim(equal, "a", 0.5).values():
            assert effect.verdict == "cannot tell"
            assert reason in effect.reason
            assert math.isnan(effect.low)
    assert all(map(math.isnan, interval([value] * seeds, 0.0, seeds - 1)))


def test_intervals_add_seeds_and_samples_in_quadrature():
    generator = np.random.default_rng(0)
    answers = [(generator.random(523) < 0.5).astype(float) for _ in range(2)]
    equal = [answers[0], answers[0]]
    runs = [100 * float(row.mean()) for row in equal]
    low, high = samples_interval(runs, Means(equal, 100))
    assert (high - low) / 2 == pytest.approx(196 * math.sqrt(0.25 / 523), rel=0.1)  # 4.3 points
    mean, seeds = runs[0], stats.t.isf(0.025, 5) * 2 / math.sqrt(2)
    assert interval(runs, 4.0, 5) == pytest.approx((mean - seeds, mean + seeds))
    both = mean - math.hypot(seeds, mean - low), mean + math.hypot(seeds, high - mean)
    assert interval(runs, 4.0, 5, Means(equal, 100)) == pytest.approx(both)


def test_intervals_of_seeds_cover_the_mean_as_often_as_they_say():
    """Two runs of each of five mixers, whose pooled deviation is known to five degrees."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(1_000):
        table = {name: {("h", "d"): generator.normal(70, 2, 2).tolist()} for name in "abcde"}
        variance, degrees = estimate_errors(table).of("a", ("h", "d"))
        low, high = interval(table["a"]["h", "d"], variance, degrees)
        covered += low < 70 < high
    assert degrees == 5
    assert covered == pytest.approx(950, abs=25)
    assert all(map(math.isnan, interval([70.0], math.nan, 0)))


@pytest.mark.parametrize("samples", [1_000, 10_000, 100_000])
def test_intervals_of_seeds_and_samples_cover_the_mean_as_often_as_they_say(samples):
    """Two runs of each of five mixers: a deviation of 1 by seed, and samples of equal difficulty.

    A run is right on a sample that is easy enough for it. The mean is over seeds and samples.
    """
    generator, tables, covered = np.random.default_rng(0), 400, 0
    for _ in range(tables):
        levels, difficulties = generator.normal(0.7, 0.01, (5, 2)), generator.random(samples)
        right = (difficulties < levels[..., None]).astype(float)
        table = {f"m{number}": {ALONE: runs} for number, runs in enumerate(100 * right.mean(2))}
        error = estimate_errors(table).of("m0", ALONE)
        low, high = interval(table["m0"][ALONE], *error, Means(list(right[0]), 100))
        covered += low < 70 < high
    assert covered / tables == pytest.approx(0.95, abs=0.025)


def test_intervals_of_a_whole_set_resample_its_samples():
    """Shares of one class with wholes of 1 are means; equal images have a width of 0."""
    generator = np.random.default_rng(0)
    value = (generator.random(200) < 0.5).astype(float)
    counts = np.stack([value, np.ones(200)], 1)[:, :, None]
    mean = 100 * float(value.mean())
    found, expected = (samples_interval([mean], answers) for answers in (
        Shares([counts], 100), Means([value], 100)))  # fmt: skip
    assert found == pytest.approx(expected, abs=1.5)
    assert found[1] - found[0] > 10
    equal = np.tile(np.array([[3.0, 5.0, 0.0], [4.0, 10.0, 0.0]]), (20, 1, 1))
    assert mean_share(equal[0]) == pytest.approx(0.625)
    assert samples_interval([62.5], Shares([equal], 100)) == pytest.approx((62.5, 62.5))
    parts = [generator.integers(0, 5, (30, 2, 3)).astype(float) for _ in range(2)]
    weights = generator.multinomial(30, np.full(30, 1 / 30), 4).astype(float)
    drawn = Shares(parts).measure(1, weights)
    for row, metric in zip(weights, drawn, strict=True):
        sums = np.repeat(parts[1], row.astype(int), 0).sum(0)
        assert metric == pytest.approx((sums[0] / sums[1]).mean())
