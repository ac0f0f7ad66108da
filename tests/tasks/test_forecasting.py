"""Forecasting: metrics, losses, the authors' schedule, checkpoints and written forecasts."""

import numpy as np
import pytest
import torch

from backbones import create_backbone
from backbones.checkpoints.opening import Checkpoint
from datamodules.series.sample import SampleForecasting
from heads.forecasting import Forecaster, pinball
from tasks.forecasting.errors import ForecastErrors, point_forecast
from tasks.forecasting.task import ForecastingTask, to_csv
from tests.references import ffnet_1d as reference
from tests.runs import RECIPE
from tests.tensors import tokens

QUANTILES = (0.1, 0.4, 0.9)


def make_task(horizon=4, targets=2, quantiles=(), backbone="nlinear", **options):
    network = create_backbone(backbone, img_size=12)
    model = Forecaster(network, horizon, targets, quantiles=quantiles)
    return ForecastingTask(model, **{**RECIPE, **options})


@pytest.mark.parametrize("sizes", [(10,), (3, 3, 3, 1), (1, 9)])
def test_errors_are_means_over_all_elements_whatever_the_batches(sizes):
    predicted, truth = tokens(10, 4, 2), tokens(10, 4, 2, seed=2)
    errors = ForecastErrors(4)
    for one, other in zip(predicted.split(sizes), truth.split(sizes), strict=True):
        errors.update(one, other)
    difference = (predicted - truth).numpy()
    found = errors.compute()
    np.testing.assert_allclose(found["mse"], (difference**2).mean(axis=(0, 2)), rtol=1e-12)
    np.testing.assert_allclose(found["mae"], np.abs(difference).mean(axis=(0, 2)), rtol=1e-12)


def test_metrics_of_a_task_are_those_of_torchmetrics_over_everything():
    from torchmetrics.functional import mean_absolute_error, mean_squared_error

    task = make_task()
    predicted, truth = torch.randn(7, 4, 2), torch.randn(7, 4, 2)
    for part in (slice(0, 5), slice(5, 7)):
        task.update_metrics({"future": truth[part]}, predicted[part])
    found = task.compute_metrics()
    assert found.keys() == {"mse", "mae"}
    torch.testing.assert_close(found["mse"], mean_squared_error(predicted, truth))
    torch.testing.assert_close(
        found["mae"], mean_absolute_error(predicted.flatten(), truth.flatten())
    )
    assert [row["step"] for row in task.class_figures] == ["1", "2", "3", "4"]
    mean = np.mean([row["mse"] for row in task.class_figures])
    np.testing.assert_allclose(mean, found["mse"], rtol=1e-5)
    assert task.shown_figures("fit")[0]["steps of the horizon"] == "1"


def test_quantiles_are_scored_by_pinball_loss_and_coverage():
    predicted, truth = tokens(50, 4, 2, 3).sort(-1).values, tokens(50, 4, 2, seed=2)
    losses = np.zeros((50, 4, 2, 3))
    for index, level in enumerate(QUANTILES):
        difference = (truth - predicted[..., index]).numpy()
        losses[..., index] = np.where(difference > 0, level * difference, (level - 1) * difference)
    np.testing.assert_allclose(pinball(predicted, truth, QUANTILES), losses, rtol=1e-12)
    errors = ForecastErrors(4, QUANTILES)
    errors.update(predicted[:20], truth[:20])
    errors.update(predicted[20:], truth[20:])
    found = errors.compute()
    np.testing.assert_allclose(found["pinball"], losses.mean(axis=(0, 2, 3)), rtol=1e-12)
    inside = ((predicted[..., 0] <= truth) & (truth <= predicted[..., 2])).double()
    np.testing.assert_allclose(found["coverage"], inside.mean(dim=(0, 2)), rtol=1e-12)
    assert torch.equal(point_forecast(predicted, QUANTILES), predicted[..., 1])
    assert make_task(quantiles=QUANTILES).headline == ("mse", "mae", "pinball", "coverage")


def test_the_pinball_loss_finds_quantiles():
    """The constant that minimises it over a sample is the sample's quantile."""
    truth = tokens(400, 1, 1)
    grid = torch.linspace(-3, 3, 601, dtype=torch.float64)
    losses = [pinball(grid[i].expand(400, 1, 1, 1), truth, [0.8]).mean() for i in range(601)]
    best = float(grid[int(torch.stack(losses).argmin())])
    assert best == pytest.approx(float(truth.flatten().quantile(0.8)), abs=0.02)


def test_forecasts_with_quantiles_have_their_axis_last_and_sorted():
    model = Forecaster(create_backbone("nlinear", img_size=12), 4, 2, quantiles=QUANTILES)
    batch = {"series": torch.randn(3, 12, 5), "future": torch.randn(3, 4, 2)}
    assert model(batch["series"]).shape == (3, 4, 2, 3)
    found = model.predict(batch)
    assert torch.equal(found, found.sort(-1).values)
    assert model.loss(batch).keys() == {"loss_pinball"}
    for wrong in ([0.9, 0.1], [0.0, 0.5], [0.5, 1.0]):
        with pytest.raises(ValueError, match=r"head\.quantiles must ascend between 0 and 1"):
            Forecaster(create_backbone("nlinear", img_size=12), 4, 2, quantiles=wrong)


@pytest.mark.parametrize(("loss", "value"), [("mse", 4.0), ("mae", 2.0), ("huber", 1.5)])
def test_losses_and_the_loss_of_evaluation(loss, value):
    model = Forecaster(create_backbone("last_value", img_size=12), 4, 2, loss=loss)
    batch = {"series": torch.ones(3, 12, 2), "future": torch.full((3, 4, 2), 3.0)}
    assert float(model.loss(batch)[f"loss_{loss}"]) == pytest.approx(value)
    task = ForecastingTask(model, **RECIPE)
    total, count = task.evaluation_loss(batch, model.predict(batch))
    assert (float(total / count), int(count)) == (pytest.approx(value), 24)


SCHEDULE = {
    "name": "step", "warmup": 3, "warmup_start": 1.0, "decay_epochs": 1, "gamma": 0.9,
    "by_epoch": True,
}  # fmt: skip


@pytest.mark.parametrize("side_effect", [False, True])
def test_the_authors_schedule_and_its_side_effect(side_effect):
    """The rate after epoch E is lr up to 3 and lr 0.9^(E - 3) from then on."""
    task = make_task(
        optimizer={"name": "adam", "lr": 1e-4}, schedule=SCHEDULE, onecycle_side_effect=side_effect
    )
    factor = task.schedule_factor(80, 8, 1e-4)
    rates = [factor(8 * epoch) for epoch in range(8)]
    first = 1 / 25 if side_effect else 1.0
    wanted = [first, *(1.0 if after < 3 else 0.9 ** (after - 3) for after in range(1, 8))]
    assert rates == pytest.approx(wanted)
    assert factor(7) == pytest.approx(first)
    assert task.optimizer_options.get("betas", (0.9, 0.999))[0] == (0.95 if side_effect else 0.9)


def test_torchs_one_cycle_has_this_side_effect():
    """What the option does is what torch does to an optimiser that never steps the schedule."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=1e-4)
    torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-4, steps_per_epoch=10, epochs=100, pct_start=0.3
    )
    (group,) = optimizer.param_groups
    assert group["lr"] == pytest.approx(1e-4 / 25)
    assert group["betas"] == (0.95, 0.999)


def test_checkpoints_of_other_targets_are_refused(tmp_path):
    task = make_task()
    task.series_facts = {"names": ["a", "b"], "targets": 2, "mean": [0, 0], "std": [1, 1]}
    state = task.target_state()
    task.check_targets(Checkpoint("here", state))
    with pytest.raises(ValueError, match=r"predicts 4 steps, but data\.horizon=5; pass"):
        make_task(horizon=5).check_targets(Checkpoint("here", state))
    with pytest.raises(ValueError, match=r"predicts 2 variables \(a, b\), but the data have 3"):
        make_task(targets=3).check_targets(Checkpoint("here", state))


def test_files_in_the_authors_layout_load(tmp_path):
    """The whole network by the task, the backbone alone as pretrained weights."""
    sizes = {"m": 3, "d": 4, "e": 3, "horizon": 5, "lookback": 24, "kernels": (11, 5)}
    tensors = reference.draw(**sizes)
    file = tmp_path / "checkpoint.pth"
    torch.save({f"model.{key}": value for key, value in tensors.items()}, file)
    options = {"img_size": 24, "variables": 3, "dim": 4, "expansion": 3, "kernel_size": 11}
    task = ForecastingTask(Forecaster(create_backbone("ffnet_1d", **options), 5, 3), **RECIPE)
    task.double().eval().load_weights(file)
    series = 2 + tokens(2, 24, 3)
    wanted = reference.forecast(series, tensors, 3)
    torch.testing.assert_close(task.model(series), wanted, rtol=1e-9, atol=1e-9)
    alone = create_backbone("ffnet_1d", pretrained=file, **options).eval()
    own = task.model.backbone.float()
    torch.testing.assert_close(alone(series.float()), own(series.float()))


def test_forecasts_are_in_the_files_units_with_their_times(tmp_path):
    """A seasonal naive forecast repeats the file's last values after its last time stamp."""
    data = SampleForecasting(tmp_path, hours=400, lookback=24, horizon=6, batch_size=8)
    data.setup()
    network = create_backbone("seasonal_naive", img_size=24, period=3)
    task = ForecastingTask(Forecaster(network, 6, 7, quantiles=[]), **RECIPE)
    task.take_targets(data)
    (batch,) = data.predict_dataloader()
    (row,) = task.describe(batch, data)
    table = data.table()
    assert row["times"][0] == "2024-01-17 16:00:00"
    assert len(row["times"]) == 6
    for index, name in enumerate(table.names):
        wanted = [*table.values[-3:, index]] * 2
        np.testing.assert_allclose(row["forecast"][name], wanted, rtol=1e-4)
    lines = to_csv(row).splitlines()
    assert lines[0] == "date," + ",".join(table.names)
    assert len(lines) == 7
    assert task.answer(row).startswith("2024-01-17 16:00:00 to 2024-01-17 21:00:00: HUFL ")
    (picture,) = task.preview(batch, data)
    assert picture.size[0] > 600


def test_covariates_are_seen_but_not_predicted():
    """NLinear predicts each target from itself; iTransformer uses the covariates, too."""
    series = torch.randn(2, 12, 3)
    changed = series.clone()
    changed[..., 2] += 1 + torch.rand(2, 12)
    for name, uses in (("nlinear", False), ("itransformer", True)):
        options = {"dim": 16, "heads": 2} if uses else {}
        model = Forecaster(create_backbone(name, img_size=12, **options), 4, 2).eval()
        assert model(series).shape == (2, 4, 2)
        assert torch.allclose(model(series), model(changed), atol=1e-6) != uses


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["dlinear", "nlinear", "last_value", "ffnet_1d"])
def test_series_of_float32_are_forecast_by_weights_of_other_types(name, dtype):
    model = Forecaster(create_backbone(name, img_size=96), 12, 7).to(dtype)
    assert model(torch.randn(2, 96, 7)).isfinite().all()
