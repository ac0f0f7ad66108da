"""Classifiers solved from features, against plain references and scikit-learn."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier

from heads.frozen.features import Features, SolveOptions
from heads.frozen.few_shot import STRENGTHS, FewShot
from heads.frozen.head import FrozenFeatures
from heads.frozen.logistic import COARSE, Logistic, best_decade
from heads.frozen.logistic import _split as split
from heads.frozen.neighbours import Neighbours


def clusters(count, classes=4, dim=6, seed=0, noise=1.0, offset=3.0):
    drawn = torch.Generator().manual_seed(100)  # the same clouds for every split
    centres = torch.randn(classes, dim, generator=drawn)
    scales = torch.linspace(0.5, 4, dim)
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    values = centres[labels] + noise * torch.randn(count, dim, generator=drawn)
    return Features((values * scales + offset).float(), labels)


def top1(classify, test):
    return 100 * float((classify(test.values).argmax(1) == test.labels).double().mean())


@pytest.mark.parametrize("classes", [2, 4])
def test_logistic_regression_has_zero_gradient(classes):
    """The loss by its formula: C times the sum of cross entropies, plus half the squared weights.

    In scikit-learn's two-class form one logit has all the weight, which changes the L2 term.
    """
    train, test = clusters(200, classes), clusters(100, classes, seed=1)
    c = 0.3
    solved = Logistic(c=c, max_iter=5000).solve(train, test, classes, SolveOptions())
    assert solved.metrics["top1_lbfgs"] == pytest.approx(top1(solved.classify, test))
    assert solved.headline["top1"] == "top1_lbfgs"
    assert ("top5_lbfgs" in solved.metrics) is False
    assert solved.metrics["lbfgs_c"] == c
    # The classifier is affine, so its outputs reveal its weights.
    mean, std = train.values.double().mean(0), train.values.double().std(0, correction=0)
    standard = (train.values.double() - mean) / std
    probes = torch.cat([torch.zeros(1, 6), torch.eye(6)]).double() * std + mean
    answers = solved.classify(probes)
    bias, weight = answers[0], (answers[1:] - answers[0]).T
    weight, bias = weight.requires_grad_(), bias.clone().requires_grad_()
    penalised = weight if classes > 2 else weight[1:]
    errors = F.cross_entropy(standard @ weight.T + bias, train.labels, reduction="sum")
    (c * errors + penalised.square().sum() / 2).backward()
    given = (weight.grad, bias.grad) if classes > 2 else (weight.grad[1:], bias.grad[1:])
    for gradient in given:
        assert gradient.abs().max() < 0.02 * c * len(train) ** 0.5
    start = torch.zeros_like(weight).requires_grad_()
    F.cross_entropy(standard @ start.T, train.labels, reduction="sum").mul(c).backward()
    assert start.grad.abs().max() > 100 * given[0].abs().max()


def test_the_strength_of_l2_is_found_by_halving():
    asked = []

    def accuracy_of_decade(decade):
        asked.append(decade)
        return -abs(decade - 1.3)

    assert best_decade(accuracy_of_decade) == 1.25
    assert asked[:7] == list(COARSE)
    assert len(asked) == len(set(asked)) <= 15
    assert best_decade(lambda decade: 50.0) == -6.0  # ties go to the strongest
    assert best_decade(lambda decade: decade) == 6.0


def test_the_strength_is_chosen_on_held_out_images():
    """With random labels, the training images alone would choose the weakest regularisation."""
    train = clusters(120)
    drawn = torch.Generator().manual_seed(3)
    noise, order = torch.randn(120, 60, generator=drawn), torch.randperm(120, generator=drawn)
    noisy = Features(torch.cat([train.values, noise], 1), train.labels[order])
    test = Features(torch.randn(40, 66, generator=drawn), torch.arange(40) % 4)
    method = Logistic(held_out=0.3)
    assert method.solve(noisy, test, 4, SolveOptions()).metrics["lbfgs_c"] < 1
    clear, other = clusters(120, noise=0.2), clusters(80, seed=5, noise=0.2)
    found = Logistic().solve(clear, other, 4, SolveOptions()).metrics
    assert found["top1_lbfgs"] > 90
    assert found == Logistic().solve(clear, other, 4, SolveOptions()).metrics


@pytest.mark.parametrize(
    ("images", "share", "held_out"),
    [(1, 0.5, 0), (2, 0.1, 1), (2, 0.9, 1), (3, 0.99, 2), (5, 0.1, 1), (10, 0.3, 3), (4, 0.6, 2)],
)
def test_each_class_holds_out_its_share_but_keeps_an_image(images, share, held_out):
    labels = torch.tensor([0] * images + [1] * 20)
    train = Features(torch.arange(len(labels))[:, None].float(), labels)
    kept, held = split(train, share, 3)
    assert int((held.labels == 0).sum()) == held_out
    assert int((kept.labels == 0).sum()) == images - held_out
    assert int((held.labels == 1).sum()) == min(max(round(20 * share), 1), 19)
    together = torch.cat([kept.values, held.values])[:, 0].sort().values
    assert together.tolist() == list(range(len(labels)))


def test_votes_equal_those_of_scikit_learn():
    train, test = clusters(150, offset=0.5), clusters(90, seed=1, offset=0.5)
    solved = Neighbours((3, 20, 50)).solve(train, test, 4, SolveOptions())
    for count in (3, 20, 50):
        other = KNeighborsClassifier(
            count, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07)
        ).fit(train.values.double().numpy(), train.labels.numpy())
        expected = 100 * other.score(test.values.double().numpy(), test.labels.numpy())
        assert solved.metrics[f"top1_knn{count}"] == pytest.approx(expected)
    assert 30 < solved.metrics["top1_knn3"] < 100
    assert solved.headline == {"top1": "top1_knn20"}
    shares = solved.classify(test.values).exp()
    assert shares.sum(1).numpy() == pytest.approx(1, abs=1e-5)
    assert top1(solved.classify, test) == pytest.approx(solved.metrics["top1_knn20"])


def plain_ridge(values, labels, classes):
    """Least squares to -1 and 1 by solving once per left-out image."""
    values = (values - values.mean(0)) / values.std(0)
    targets = np.where(np.eye(classes)[labels] > 0, 1.0, -1.0)

    def fit(x, y, strength):
        centre, middle = x.mean(0), y.mean(0)
        x, y = x - centre, y - middle
        weight = np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ y)
        return weight, middle - centre @ weight

    def left_out(strength):
        errors = []
        for row in range(len(values)):
            kept = np.arange(len(values)) != row
            weight, bias = fit(values[kept], targets[kept], strength)
            errors.append((values[row] @ weight + bias - targets[row]) ** 2)
        return np.mean(errors)

    return fit(values, targets, min(STRENGTHS, key=left_out))


@pytest.mark.parametrize("classes", [2, 4])
def test_least_squares_equal_those_of_the_formula(classes):
    train, test = clusters(5 * classes, classes), clusters(80, classes, seed=1)
    solved = FewShot(shots=(5,), draws=1).solve(train, test, classes, SolveOptions())
    values = train.values.double().numpy()
    weight, bias = plain_ridge(values, train.labels.numpy(), classes)
    scaled = (test.values.double().numpy() - values.mean(0)) / values.std(0)
    expected = scaled @ weight + bias
    assert solved.classify(test.values).numpy() == pytest.approx(expected, abs=1e-8)
    assert solved.metrics == {"top1_5shot": pytest.approx(top1(solved.classify, test))}


def test_draws_are_seeded_and_averaged():
    train, test = clusters(120), clusters(80, seed=1)

    def metrics(shots, seed):
        return FewShot(shots, 4).solve(train, test, 4, SolveOptions(seed=seed)).metrics

    found = metrics((1, 5), 3)
    assert set(found) == {"top1_1shot", "top1_1shot_std", "top1_5shot", "top1_5shot_std"}
    assert found == metrics((1, 5), 3)
    assert found != metrics((1, 5), 4)
    assert found["top1_1shot_std"] > 0
    assert found["top1_1shot"] < found["top1_5shot"]
    # The images of one shot are the same whatever other shots are in use.
    assert metrics((1,), 3)["top1_1shot"] == pytest.approx(found["top1_1shot"])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Neighbours, {"neighbours": (10, 200)}, r"exceeds the 40 training images"),
        (FewShot, {"shots": (1, 11)}, r"fewer than 11 training images, such as cla"),
        (Logistic, {}, "head.logistic.c=1"),
        (Logistic, {"c": 0.0}, "above 0"),
        (Logistic, {"held_out": 1.0}, "from 0 to below 1"),
        (Logistic, {"max_iter": 0}, "at least 1"),
        (Neighbours, {"neighbours": ()}, "at least 1"),
        (Neighbours, {"temperature": 0.0}, "above 0"),
        (FewShot, {"shots": (0,)}, "at least 1"),
        (FewShot, {"draws": 0}, "at least 1"),
        (partial(FrozenFeatures, torch.nn.Identity(), 4), {}, "needs a method"),
        (
            partial(FrozenFeatures, torch.nn.Identity(), 4),
            {"knn": {"k": 3}},
            "no option of head.knn called 'k'",
        ),
    ],
)
def test_invalid_options_are_rejected(make, options, message):
    test = clusters(40)
    train = test.select(torch.arange(4)) if make is Logistic else test  # an image per class
    with pytest.raises(ValueError, match=message):
        make(**options).solve(train, test, 4, SolveOptions())


def test_a_frozen_backbone_stays_as_it_is():
    backbone = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6))
    head = FrozenFeatures(backbone, 4, knn={"neighbours": [3]}, few_shot={"shots": [2]})
    head.train()
    assert not any(module.training for module in head.modules())
    assert not any(parameter.requires_grad for parameter in head.parameters())
    train, test = clusters(40), clusters(20, seed=1)
    metrics, remarks = head.solve(train, test, SolveOptions())
    assert list(metrics) == ["top1", "top1_knn3", "top1_2shot", "top1_2shot_std"]
    assert metrics["top1"] == metrics["top1_knn3"]
    assert remarks == ()
