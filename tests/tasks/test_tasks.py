"""Treatment of batches, weights and losses by the tasks."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from timm.data.random_erasing import RandomErasing
from timm.utils import ModelEmaV3
from torch import nn

from tasks.classification.task import ClassificationTask
from tasks.engine.callbacks.ema import WeightEMA
from tasks.engine.classes import ClassesTask
from tasks.engine.loops.batch_norm import share_statistics
from tests.runs import RECIPE


@pytest.mark.parametrize(
    ("group", "options"),
    [("optimizer", {"name": "lionn", "lr": 1}), ("schedule", {"name": "stairs"})],
)
def test_tasks_refuse_bad_recipes_at_once(group, options):
    with pytest.raises(ValueError, match=rf"{group}\.name"):
        ClassesTask(nn.Linear(2, 2), "ab", **{**RECIPE, group: options})


def classifier(names="abcdef", model=None, **options):
    return ClassificationTask(model or nn.Linear(1, 1), names, **RECIPE, **options)


MIXUP = {"mixup_alpha": 1.0}


def test_mixup_mixes_images_and_labels_or_is_refused():
    batch = {"image": torch.randn(4, 3, 8, 8), "label": torch.arange(4)}
    assert classifier().prepare_batch(batch) is batch
    mixed = classifier(mixup=MIXUP).prepare_batch({**batch, "sample_id": 7})
    assert mixed["label"].shape == (4, 6)
    torch.testing.assert_close(mixed["label"].sum(1), torch.ones(4))
    assert mixed["sample_id"] == 7
    odd = {"image": torch.randn(3, 3, 8, 8), "label": torch.arange(3)}
    with pytest.raises(ValueError, match=r"this one has 3; pass an even data\.batch_size that the"):
        classifier(mixup=MIXUP).prepare_batch(odd)
    model = nn.Linear(1, 1)
    model.label_smoothing = 0.2
    for options, said in (
        ({"mixup": {"alpha": 1.0}}, "no option of task.mixup called 'alpha'; did you mean"),
        ({"mixup": MIXUP, "model": model}, r"set one of them to 0"),
        ({"random_erasing": 2}, r"task\.random_erasing must be from 0 to 1, got 2"),
    ):
        with pytest.raises(ValueError, match=said):
            classifier(**options)
    plain = {"mixup_alpha": 1.0, "label_smoothing": 0.0}
    assert classifier(model=model, mixup=plain).mixup.label_smoothing == 0


def test_images_are_erased_after_mixing_by_timms_rule():
    batch = {"image": torch.randn(8, 3, 32, 32), "label": torch.arange(8)}
    results = []
    for task in [classifier("abcdefgh", mixup=MIXUP, random_erasing=rate) for rate in (0, 0.5)]:
        np.random.seed(0)
        random.seed(1)
        torch.manual_seed(0)
        results.append(task.prepare_batch({**batch, "image": batch["image"].clone()}))
    mixed, erased = results
    torch.testing.assert_close(mixed["label"], erased["label"])
    random.seed(1)
    torch.manual_seed(0)
    expected = RandomErasing(0.5, mode="pixel", device="cpu")(mixed["image"].clone())
    assert torch.equal(erased["image"], expected)
    changed = (erased["image"] != mixed["image"]).flatten(1).any(1)
    assert 0 < changed.sum() < 8


def exchange(models):
    """Simulate the exchange between the processes of these models."""
    sent = []

    def keep(flat, reduce_op):
        sent.append(flat.clone())
        return flat

    for model in models:
        share_statistics(model, keep)
    mean = torch.stack(sent).mean(0)
    for model in models:
        share_statistics(model, lambda flat, reduce_op: mean)


def test_running_statistics_are_the_mean_over_processes():
    """Shared after each step, they equal the result of timm's distribute_bn at the end."""
    torch.manual_seed(0)
    apart = [nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)) for _ in range(2)]
    together = copy.deepcopy(apart)
    for _ in range(4):
        inputs = [torch.randn(5, 3) + rank for rank in range(2)]
        for models in (apart, together):
            for model, x in zip(models, inputs, strict=True):
                model(x)
        exchange(together)
    for name in ("running_mean", "running_var"):
        for index in range(2):
            one, two = (getattr(model[index], name) for model in apart)
            assert not torch.equal(one, two)
            for model in together:
                torch.testing.assert_close(getattr(model[index], name), (one + two) / 2)

    def refuse(*args, **options):
        raise AssertionError

    share_statistics(nn.Sequential(nn.SyncBatchNorm(3), nn.LayerNorm(3)), refuse)
    share_statistics(nn.BatchNorm1d(3, track_running_stats=False), refuse)


@pytest.mark.parametrize("warmup", [False, True])
def test_weight_average_is_timms(warmup):
    """timm's average also starts with a copy, averages buffers and copies counters."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    theirs = ModelEmaV3(model, decay=0.8, use_warmup=warmup)
    ours = WeightEMA(decay=0.8, warmup=warmup)
    for step in range(1, 7):
        model(torch.randn(5, 3))
        with torch.no_grad():
            model[0].weight += torch.randn(4, 3)
        ours.update(model)
        theirs.update(model, step)
    expected = theirs.module.state_dict()
    torch.testing.assert_close(dict(ours.tensors), dict(expected))
    assert ours.tensors["1.num_batches_tracked"] == 6


def test_weight_average_is_swapped_in_and_out():
    model, average = nn.Linear(2, 2).bfloat16(), WeightEMA(decay=0.5)
    average.swap_in(model)  # before the first update
    before = model.weight.clone()
    average.update(model)
    with torch.no_grad():
        model.weight.zero_()
    average.update(model)
    assert average.tensors["weight"].dtype == torch.float32
    average.swap_in(model)
    torch.testing.assert_close(model.weight, before / 2)
    average.swap_out(model)
    assert not model.weight.any()
    average = WeightEMA()
    average.update(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="average belongs to another model"):
        WeightEMA().load_state_dict(average.state_dict(), nn.Linear(2, 2, bias=False))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite(value):
    class Broken(nn.Linear):
        def loss(self, batch):
            return {"loss_a": self.weight.sum(), "loss_b": torch.tensor(value)}

    task = ClassesTask(Broken(2, 2), "ab", **RECIPE)
    with pytest.raises(ValueError, match=rf"the loss is {value} at step 0.*optimizer\.lr"):
        task.training_step({"image": torch.zeros(1)}, 0)


def test_batches_and_rates_that_do_not_train_are_refused():
    optimizer = {"name": "sgd", "lr": 0.1, "reference_batch": 8}
    schedule = {"name": "poly", "min_lr": 0.2}
    task = ClassesTask(nn.Linear(2, 2), "ab", optimizer=optimizer, schedule=schedule)
    task.check_training(None, 16)
    with pytest.raises(ValueError, match=r"min_lr=0\.2 must be .* which is 0\.1 for this batch"):
        task.check_training(None, 8)

    class Normed(nn.BatchNorm1d):
        def loss(self, batch):
            return {"loss": self(batch["image"]).sum()}

    task = ClassesTask(Normed(2), "ab", **RECIPE)
    with pytest.raises(ValueError, match=r"the batch is of 1; pass data\.batch_size=2 or more"):
        task.training_step({"image": torch.zeros(1, 2)}, 0)


@pytest.mark.parametrize(("decay", "steps", "fitting"), [(0.99996, 18, "0.4444"),
                                                        (0.9999, 20_000, "0.9995")])  # fmt: skip
def test_a_decay_too_slow_for_the_run_names_a_suitable_one(decay, steps, fitting):
    said = WeightEMA(decay=decay).decay_warning(steps)
    assert f"decay={decay:g} is slow for {steps} steps" in said
    assert f"task.ema.decay={fitting} or" in said
    for change in ({"decay": float(fitting)}, {"warmup": True}, {"report": "best"}):
        assert WeightEMA(**{"decay": decay, **change}).decay_warning(steps) is None
    assert WeightEMA(decay=decay).decay_warning(375_000) is None  # 300 epochs of ImageNet
