"""Two claims about mixers in cells, a cell being a host on a data set.

*Within* the cells: they are fixed, and the error is that of the seeds. The effect of a mixer is the
mean over its cells of its difference from the baseline, cell by cell. Each cell's error variance is
pooled over its mixers, after their means are removed, so that neither a difference between cells
nor a mixer that suits one host enters it. All mixers are compared with the one baseline, which
makes the differences correlated: Dunnett's test, for any numbers of runs and cells. With a single
cell it equals ``scipy.stats.dunnett``. That function itself, on values without their cells' means,
would count the mixers' interactions with cells as error and forget the degrees of freedom of the
means. Cells may differ in their error, so that the degrees of freedom are Satterthwaite's. Where
the runs of one mixer deviate far more than those of the others, as if some of them diverged, its
own variances stand for its error and stay out of the pooled ones.

*Beyond* the cells: hosts and data sets are drawn from many, and a mixer may suit single ones. The
error is that of a mixer's differences between hosts plus that between data sets, both as clusters;
the sum counts what they share twice, which errs on the side of caution. Student's t has the
degrees of freedom of the smaller number of clusters, and Bonferroni's correction is for the
number of mixers.

Sources: Dunnett, JASA 50 (1955); Satterthwaite, Biometrics Bulletin 2 (1946); 't Lam, Analytica
Chimica Acta 659 (2010) (outlying variances, Cochran's test for unequal numbers); Cameron, Gelbach
and Miller, JBES 29 (2011), Sec. 2.3 (two-way clusters).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq

from tools.comparison.answers import Answers
from tools.comparison.plan import AGAIN

Cell = tuple[str, str]  # host and data set
Values = Mapping[str, Mapping[Cell, Sequence[float]]]  # mixer -> cell -> a value per seed
Verdict = Literal["better", "equivalent", "worse", "cannot tell"]
Variance = tuple[float, float]  # with its degrees of freedom
LEVEL = 0.05  # of all comparisons of a table together
OUTLIER_LEVEL = 0.01  # of all variances of a table together, to be outlying
POWER = 0.8
DRAWS, SEED = 16, 0  # the power of two of points of the correlated variables
SCALES = 1_000  # quantiles of a deviation
FEWEST = 2  # clusters and runs, below which a deviation is unknown
EQUAL_REASON = "the differences are equal in all cells, so that their deviation is unknown"
EQUAL = 1e-9  # differences this close are equal, apart from rounding


@dataclass(frozen=True)
class Effect:
    """Difference of a mixer from the baseline, in the metric's unit; above 0 is better.

    Attributes:
        mean: Mean over cells.
        low: Lower end of the simultaneous interval; NaN if nothing can be concluded.
        high: Its upper end.
        p: Adjusted probability of a difference this large without any effect.
        cells: Number of cells that both have.
        verdict: By the region of equivalence.
        reason: Why nothing can be concluded; empty otherwise.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    cells: int = 0
    verdict: Verdict = "cannot tell"
    reason: str = ""


def judge(low: float, high: float, region: float) -> Verdict:
    """Return the verdict of an interval of a difference.

    Args:
        low: Lower end.
        high: Upper end.
        region: Differences up to this size count as none.
    """
    if -region < low and high < region:
        return "equivalent"
    if low > 0:
        return "better"
    return "worse" if high < 0 else "cannot tell"


def within(values: Values, baseline: str, region: float, sign: int = 1) -> dict[str, Effect]:
    """Return the effect of each other mixer within the cells of the table.

    Args:
        values: The metric of each run.
        baseline: Mixer to compare with.
        region: See ``judge``.
        sign: 1 if a higher metric is better, else -1.
    """
    errors = estimate_errors(values)
    base, names, effects = values[baseline], [], {}
    for name in values:
        if name != baseline:
            cells = [cell for cell in values[name] if values[name][cell] and base.get(cell)]
            mean = _mean_difference(values[name], base, cells, sign)
            reason = "" if cells else "it has no cell in common with the baseline"
            if cells and not all(cell in errors.pooled for cell in cells):
                reason = (
                    "a cell has one run per mixer with the common error, so that the seeds' "
                    "deviation is unknown"
                )
            effects[name] = Effect(mean, cells=len(cells), reason=reason)
            names += [] if reason else [name]
    if not names:
        return effects
    covariance, freedom = _covariance(values, names, baseline, errors)
    deviations = np.sqrt(np.diag(covariance))
    positive = np.where(deviations > 0, deviations, 1)
    correlation = covariance / np.outer(positive, positive)
    np.fill_diagonal(correlation, 1)
    for name, error, degrees in zip(names, deviations.tolist(), freedom, strict=True):
        effect, quantile = effects[name], critical(correlation, degrees)
        if not error:
            reason = "the runs of each mixer are equal, so that the seeds' deviation is unknown"
            effects[name] = replace(effect, reason=reason)
            continue
        low, high = effect.mean - quantile * error, effect.mean + quantile * error
        p = exceedance(correlation, degrees, abs(effect.mean) / error)
        verdict = judge(low, high, region)
        effects[name] = Effect(effect.mean, low, high, p, effect.cells, verdict)
    return effects


@dataclass(frozen=True)
class Errors:
    """Variances of runs around their mixer's mean.

    Attributes:
        pooled: By cell, over its mixers; cells without a repeated run are left out.
        outliers: By mixer, then by cell, where its runs deviate far more than the others'; these
            are pooled without them.
    """

    pooled: dict[Cell, Variance]
    outliers: dict[str, dict[Cell, Variance]]

    def of(self, mixer: str, cell: Cell) -> Variance:
        """Return the variance of a mixer's runs in a cell; (NaN, 0) if it is unknown.

        An outlier without repeated runs in a cell gets the mean of its own variances.
        """
        if mixer not in self.outliers:
            return self.pooled.get(cell, (math.nan, 0))
        variances = self.outliers[mixer]
        sums = [sum(v**power * n for v, n in variances.values()) for power in (0, 1, 2)]
        return variances.get(cell, (sums[1] / sums[0], sums[1] ** 2 / sums[2]))


def estimate_errors(values: Values) -> Errors:
    """Return the variances of the runs of a table.

    A mixer stands apart by an F test: its variances over those of all others in their cells, on
    average, with the degrees of freedom of the cell that has the fewest. The one with the smallest
    probability goes first; Bonferroni's correction is for the number of mixers. The baseline and
    its copy are one mixer here.
    """
    networks: dict[str, list[str]] = {}
    for mixer in values:
        networks.setdefault(mixer.removesuffix(f" {AGAIN}"), []).append(mixer)
    squares = {
        network: _pool(_squares(values[mixer]) for mixer in mixers)
        for network, mixers in networks.items()
    }
    outliers: dict[str, dict[Cell, Variance]] = {}
    pooled = _pool(squares.values())
    while len(squares) > FEWEST:
        chances = {network: _chance(of_cells, pooled) for network, of_cells in squares.items()}
        network = min(squares, key=lambda name: chances[name])
        if chances[network] >= OUTLIER_LEVEL / len(networks):
            break
        variances = _variances(squares.pop(network))
        outliers |= dict.fromkeys(networks[network], variances)
        pooled = _pool(squares.values())
    return Errors(_variances(pooled), outliers)


def _squares(cells: Mapping[Cell, Sequence[float]]) -> dict[Cell, Variance]:
    """Return a mixer's sum of squares around its mean in each cell, and its degrees of freedom."""
    squares: dict[Cell, Variance] = {}
    for cell, runs in cells.items():
        if len(runs) >= FEWEST:
            # From the first run, so that equal runs deviate by exactly 0.
            deviation = np.asarray(runs, float) - runs[0]
            deviation -= deviation.mean()
            squares[cell] = float(deviation @ deviation), len(runs) - 1
    return squares


def _variances(squares: Mapping[Cell, Variance]) -> dict[Cell, Variance]:
    return {cell: (square / degrees, degrees) for cell, (square, degrees) in squares.items()}


def _pool(squares: Iterable[Mapping[Cell, Variance]]) -> dict[Cell, Variance]:
    """Return the sum of squares of each cell, and its degrees of freedom."""
    pooled: dict[Cell, Variance] = {}
    for of_mixer in squares:
        for cell, (square, freedom) in of_mixer.items():
            before = pooled.get(cell, (0.0, 0))
            pooled[cell] = before[0] + square, before[1] + freedom
    return pooled


def _chance(squares: Mapping[Cell, Variance], pooled: Mapping[Cell, Variance]) -> float:
    """Return the probability of a mixer's variances if they are those of all others.

    It is 0 if the mixer alone deviates in a cell.
    """
    ratio, freedom, fewest = 0.0, 0.0, math.inf
    for cell, (square, degrees) in squares.items():
        rest, rest_degrees = pooled[cell][0] - square, pooled[cell][1] - degrees
        if rest_degrees and square > 0 >= rest:
            return 0.0
        if rest_degrees and rest > 0:
            ratio += square / (rest / rest_degrees)
            freedom, fewest = freedom + degrees, min(fewest, rest_degrees)
    return float(stats.f.sf(ratio / freedom, freedom, fewest)) if freedom else 1.0


def _mean_difference(
    ours: Mapping[Cell, Sequence[float]],
    base: Mapping[Cell, Sequence[float]],
    cells: Sequence[Cell],
    sign: int,
) -> float:
    differences = [np.mean(ours[cell]) - np.mean(base[cell]) for cell in cells]
    return sign * float(np.mean(differences)) if differences else math.nan


def _covariance(
    values: Values, names: Sequence[str], baseline: str, errors: Errors
) -> tuple[NDArray[np.float64], list[float]]:
    """Return the covariance of the mean differences of mixers, and the degrees of each."""
    estimates, base = [errors.pooled, *errors.outliers.values()], values[baseline]
    cells = list(dict.fromkeys(cell for variances in estimates for cell in variances))
    # An unknown error has a weight of 0 in each mean.
    variances = np.nan_to_num([[errors.of(name, cell) for cell in cells] for name in names])
    shared = np.nan_to_num([errors.of(baseline, cell) for cell in cells])
    has_cell = np.array([[bool(values[n].get(c) and base.get(c)) for c in cells] for n in names])
    count = np.array([[len(values[name].get(cell, ())) for cell in cells] for name in names])
    base_count = np.array([len(base.get(cell, ())) for cell in cells])
    weight = has_cell / has_cell.sum(1, keepdims=True)
    of_base = shared[:, 0] / np.maximum(base_count, 1)
    of_mixer = variances[..., 0] / np.maximum(count, 1)
    covariance = (weight * of_base) @ weight.T + np.diag((weight**2 * of_mixer).sum(1))
    # Parts of one estimate are added before they are squared.
    is_pooled = (variances == shared).all(2)
    base_part = _move(weight**2 * of_base, cells, errors.outliers.get(baseline))
    mixer_part = np.array([
        _move(part, cells, errors.outliers.get(name))
        for name, part in zip(names, weight**2 * of_mixer, strict=True)
    ])  # fmt: skip
    degrees, base_degrees = (np.maximum(array[..., 1], 1) for array in (variances, shared))
    together = (base_part + mixer_part) ** 2 / base_degrees
    separately = base_part**2 / base_degrees + mixer_part**2 / degrees
    spread = np.where(is_pooled, together, separately).sum(1)
    total = (base_part + mixer_part).sum(1)
    freedom = np.divide(total**2, spread, out=np.ones(len(names)), where=spread > 0)
    return covariance, freedom.tolist()


def _move(
    parts: NDArray[np.float64], cells: Sequence[Cell], outlier: Mapping[Cell, Variance] | None
) -> NDArray[np.float64]:
    """Return parts of a variance (..., cells) in the cells that their estimates are from.

    An outlier without repeated runs in a cell has its estimate from its other cells.
    """
    if outlier is None:
        return parts
    squares = np.array([math.prod(outlier.get(cell, (0.0, 0))) for cell in cells])
    borrowed = parts * [cell not in outlier for cell in cells]
    return parts - borrowed + borrowed.sum(-1, keepdims=True) * squares / squares.sum()


@functools.lru_cache(maxsize=64)
def _largest(content: bytes, size: int) -> NDArray[np.float64]:
    """Return draws of the largest absolute value of correlated normal variables, sorted."""
    roots, vectors = np.linalg.eigh(np.frombuffer(content).reshape(size, size))
    factor = vectors * np.sqrt(np.maximum(roots, 0))
    uniform = stats.qmc.Sobol(size, rng=np.random.default_rng(SEED)).random_base2(DRAWS)
    normal = stats.norm.ppf(np.clip(uniform, 1e-9, 1 - 1e-9)) @ factor.T
    return np.sort(np.abs(normal).max(1))


@functools.lru_cache(maxsize=256)
def _scales(degrees: float) -> NDArray[np.float64]:
    """Return the quantiles of an estimated deviation over the true one."""
    shares = (np.arange(SCALES) + 0.5) / SCALES
    return np.sqrt(stats.chi2.ppf(shares, degrees) / degrees)


def exceedance(correlation: NDArray[np.float64], degrees: float, size: float) -> float:
    """Return the probability that the largest of correlated |t| is at least ``size``.

    Args:
        correlation: (M, M), of M comparisons.
        degrees: Degrees of freedom.
        size: Absolute value of a t statistic.
    """
    if len(correlation) == 1:
        return float(2 * stats.t.sf(size, degrees))
    largest = _largest(np.round(correlation, 6).tobytes(), len(correlation))
    return float(1 - np.searchsorted(largest, size * _scales(degrees)).mean() / len(largest))


def critical(correlation: NDArray[np.float64], degrees: float, level: float = LEVEL) -> float:
    """Return the size that the largest of correlated |t| exceeds with probability ``level``."""
    if len(correlation) == 1:
        return float(stats.t.isf(level / 2, degrees))
    # Bonferroni's size is too large, that of a single comparison too small.
    low, high = (float(stats.t.isf(level / 2 / n, degrees)) for n in (1, len(correlation)))
    return float(
        brentq(lambda size: exceedance(correlation, degrees, size) - level, low * 0.9, high * 1.1)
    )


def beyond(values: Values, baseline: str, region: float, sign: int = 1) -> dict[str, Effect]:
    """Return the effect of each other mixer on hosts and data sets such as those of the table.

    Args:
        values: The metric of each run.
        baseline: Mixer to compare with.
        region: See ``judge``.
        sign: 1 if a higher metric is better, else -1.
    """
    base, effects = values[baseline], {}
    comparisons = max(len(values) - 1, 1)
    for name in values:
        if name == baseline:
            continue
        cells = [cell for cell in values[name] if values[name][cell] and base.get(cell)]
        differences = {c: _mean_difference(values[name], base, [c], sign) for c in cells}
        effects[name] = _cluster_effect(differences, comparisons, region)
    return effects


def _cluster_effect(differences: Mapping[Cell, float], comparisons: int, region: float) -> Effect:
    mean = float(np.mean(list(differences.values()))) if differences else math.nan
    count, variance, fewest = len(differences), 0.0, math.inf
    for axis, name in enumerate(("host", "data set")):
        clusters: dict[str, float] = {}
        for cell, difference in differences.items():
            clusters[cell[axis]] = clusters.get(cell[axis], 0.0) + difference - mean
        size = len(clusters)
        if size < FEWEST:
            reason = f"{size} {name} says nothing about others"
            return Effect(mean, cells=count, reason=reason)
        fewest = min(fewest, size)
        variance += size / (size - 1) * sum(r**2 for r in clusters.values()) / count**2
    ends = min(differences.values()), max(differences.values())
    if not variance or math.isclose(*ends, rel_tol=EQUAL, abs_tol=EQUAL):
        return Effect(mean, cells=count, reason=EQUAL_REASON)
    error, degrees = math.sqrt(variance), fewest - 1
    quantile = float(stats.t.isf(LEVEL / 2 / comparisons, degrees))
    low, high = mean - quantile * error, mean + quantile * error
    p = min(1.0, comparisons * 2 * float(stats.t.sf(abs(mean) / error, degrees)))
    return Effect(mean, low, high, p, count, judge(low, high, region))


def visible_difference(mixers: int, cells: int, seeds: int, power: float = POWER) -> float:
    """Return the smallest difference that a plan finds, in deviations of a seed.

    Its degrees of freedom are those that Satterthwaite's formula gives for estimated variances that
    are truly equal: the ratio of the means of its numerator and denominator.

    Args:
        mixers: Mixers besides the baseline.
        cells: Hosts times data sets.
        seeds: Runs of each mixer in each cell.
        power: Probability with which a mixer of this difference gets its verdict.
    """
    of_cell = (mixers + 1) * (seeds - 1)
    degrees = of_cell * (of_cell * cells + 2) / (of_cell + 2)
    return visible_by(mixers, 2 / (cells * seeds), degrees, power)


def visible_by(mixers: int, variance: float, degrees: float, power: float = POWER) -> float:
    """Return the smallest visible difference for a variance of the mean differences.

    Args:
        mixers: Mixers besides the baseline, with correlations of 1/2 between their differences.
        variance: Of a mean difference, in units of an error's.
        degrees: Degrees of freedom of the error.
        power: See ``visible_difference``.
    """
    quantile = critical(np.full((mixers, mixers), 0.5) + 0.5 * np.eye(mixers), degrees)

    def lack(shift: float) -> float:
        return float(stats.nct.sf(quantile, degrees, shift)) - power

    return float(brentq(lack, 0.0, quantile + 40)) * math.sqrt(variance)


def visible_within(values: Values, baseline: str) -> float:
    """Return the smallest difference that a table finds within its cells, in the metric's unit.

    It is that of the mixer with the median error; NaN where no cell has repeated runs.

    Args:
        values: The metric of each run.
        baseline: Mixer to compare with.
    """
    errors, base = estimate_errors(values), values[baseline]
    names = [
        name
        for name, cells in values.items()
        if name != baseline
        and (shared := [cell for cell in cells if cells[cell] and base.get(cell)])
        and all(cell in errors.pooled for cell in shared)
    ]
    if not names:
        return math.nan
    covariance, freedom = _covariance(values, names, baseline, errors)
    middle = int(np.argsort(np.diag(covariance))[len(names) // 2])
    return visible_by(len(names), float(covariance[middle, middle]), freedom[middle])


def repeat_interval(
    published: Sequence[float], repeats: int, variance: float, degrees: float, cells: int = 1
) -> tuple[float, float]:
    """Return where the mean of repeated runs is expected with 95 % in all cells together.

    Args:
        published: The metric of each run.
        repeats: Number of repeated runs.
        variance: Of runs, see ``Errors``.
        degrees: Its degrees of freedom.
        cells: Cells that are repeated together, for which Bonferroni's correction is.
    """
    quantile = float(stats.t.isf(LEVEL / 2 / cells, degrees))
    width = quantile * math.sqrt(variance * (1 / len(published) + 1 / repeats))
    mean = float(np.mean(published))
    return mean - width, mean + width


def interval(
    runs: Sequence[float], variance: float, degrees: float, answers: Answers | None = None
) -> tuple[float, float]:
    """Return the 95 % interval of a mean over runs, by the deviation of seeds and test samples.

    The widths of both are added in quadrature.

    Args:
        runs: The metric of each run.
        variance: Of runs, see ``Errors``.
        degrees: Its degrees of freedom; NaN is returned for 0.
        answers: Of their test samples; None leaves the seeds alone.
    """
    if degrees < 1 or not variance:
        return math.nan, math.nan
    width = float(stats.t.isf(LEVEL / 2, degrees)) * math.sqrt(variance / len(runs))
    mean = float(np.mean(runs))
    low, high = samples_interval(runs, answers) if answers else (mean, mean)
    return mean - math.hypot(width, mean - low), mean + math.hypot(width, high - mean)


def samples_interval(runs: Sequence[float], answers: Answers) -> tuple[float, float]:
    """Return the 95 % interval of a mean over runs, by resampling the test samples of all runs.

    Args:
        runs: The metric of each run.
        answers: Of their test samples.
    """
    moves = answers.moves(np.random.default_rng(SEED))
    low, high = np.nanquantile(moves, [LEVEL / 2, 1 - LEVEL / 2])
    mean = float(np.mean(runs))
    return mean + float(low), mean + float(high)


def mean_ranks(values: Values, sign: int = 1) -> dict[str, float]:
    """Return each mixer's mean rank over its cells, 1 for the best; ties share their ranks."""
    ranks: dict[str, list[float]] = {name: [] for name in values}
    for cell in dict.fromkeys(cell for cells in values.values() for cell in cells):
        names = [name for name in values if values[name].get(cell)]
        order = stats.rankdata([-sign * float(np.mean(values[name][cell])) for name in names])
        for name, rank in zip(names, order, strict=True):
            ranks[name].append(float(rank))
    return {name: float(np.mean(row)) if row else math.nan for name, row in ranks.items()}
