"""Segmentation of point clouds: losses, votes, metrics and runs."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tasks
from backbones import create_backbone
from datamodules.points.clouds import read_cloud
from heads.point_segmentation import (
    VIEWS,
    PointSegmenter,
    first_points,
    fragments,
    lovasz_softmax,
)  # fmt: skip
from tasks.point_segmentation.task import PointSegmentationTask, paired
from tests.families import rest_slow
from tests.runs import composed, run_here, run_shared

NAN = float("nan")
TINY = ("data.num_train=3", "data.num_val=2", "data.density=30", "data.grid_size=0.15",
        "data.crop_points=1500", "trainer.max_epochs=1", "schedule.warmup=0")  # fmt: skip


def segmenter(classes=3, **options):
    torch.manual_seed(0)
    host = create_backbone("ffnet_3d_tiny", fast=False)
    return PointSegmenter(host, classes, 0.1, **options).eval()


def cloud(count=120):
    torch.manual_seed(1)
    return torch.cat([torch.rand(count, 3), torch.randn(count, 6)], dim=1)


def test_lovasz_is_the_jaccard_loss_at_corners():
    """At 0 and 1 the Lovasz extension equals the set function that it extends."""
    labels = torch.tensor([0, 0, 1, 2, 1, 0])
    for guess in itertools.product(range(3), repeat=4):
        predicted = torch.tensor([*guess, 1, 0])
        hard = torch.nn.functional.one_hot(predicted, 3).double()
        wanted = [
            1 - ((predicted == k) & (labels == k)).sum() / ((predicted == k) | (labels == k)).sum()
            for k in range(3)
        ]
        torch.testing.assert_close(
            lovasz_softmax(hard, labels), torch.stack(wanted).double().mean()
        )


def test_fragments_hold_every_point_and_one_per_voxel():
    points = cloud()
    parts = list(fragments(points, 0.3))
    assert torch.cat(parts).unique().tolist() == list(range(len(points)))
    for part in parts:
        voxels = (points[part, :3] / 0.3).floor()
        assert len(voxels.unique(dim=0)) == len(voxels) == len(parts[0])
    first, inverse = first_points(points, 0.3)
    assert torch.equal(parts[0], first)
    voxels = (points[:, :3] / 0.3).floor()
    assert torch.equal(voxels[first][inverse], voxels)


@pytest.mark.parametrize("votes", rest_slow(sorted(VIEWS), [10]))
def test_votes_average_views_of_all_points(votes):
    model = segmenter(votes=votes)
    points = cloud(40)
    points[:, :2] *= 0.3  # several points per voxel
    views = list(model.views(points))
    assert len(views) == votes
    turned = views[1 if votes == 13 else 7]  # a quarter, or the mirrored view of scale 1
    x, y, sign = (1, 0, 1) if votes == 13 else (0, 1, -1)
    torch.testing.assert_close(turned[:, 0], -points[:, x])
    torch.testing.assert_close(turned[:, 1], sign * points[:, y])
    assert torch.equal(turned[:, 2:6], points[:, 2:6])  # height and colours stay
    torch.testing.assert_close(turned[:, 6], -points[:, 6 + x])  # normals turn
    scales = [(view[:, 2] / points[:, 2]).mean().item() for view in views]
    wanted = {10: [0.9, 0.95, 1, 1.05, 1.1] * 2, 13: [*[1] * 4, *[0.95] * 4, *[1.05] * 4, 1]}
    assert scales == pytest.approx(wanted[votes])
    padded = torch.full((2, 50, 9), NAN)
    padded[:, :40] = points
    with torch.no_grad():
        found = model.predict({"points": padded})
        assert found.shape == (2, 50, 3)
        torch.testing.assert_close(found[0].exp().sum(-1), torch.ones(50))
        total = sum(
            torch.zeros(40, 3).index_add(0, part, model(view[part][None])[0].softmax(-1))
            for view in views
            for part in fragments(view, 0.1)
        )
        for weights in (torch.float64, torch.bfloat16):
            other = segmenter(votes=votes).to(weights).predict({"points": padded})
            torch.testing.assert_close(other.exp(), found.exp(), rtol=0.05, atol=0.02)
    torch.testing.assert_close(found[0, :40].exp(), total / total.sum(-1, keepdim=True))
    # Validation during training takes one view.
    task, batch = PointSegmentationTask(model, ["a", "b", "c"]), {"points": points[None]}
    with torch.no_grad():
        torch.testing.assert_close(task.predict_for_metrics(batch), found[:1, :40])
        task._trainer = SimpleNamespace(state=SimpleNamespace(fn="fit"))
        alone = task.predict_for_metrics(batch)
        torch.testing.assert_close(alone, segmenter().predict(batch))
    with pytest.raises(ValueError, match=r"head\.votes must be 1, 10 or 13, got 4"):
        segmenter(votes=4)


def test_losses_and_metrics_leave_unlabelled_points_out():
    model = segmenter()
    labels = torch.randint(0, 3, (1, 120))
    labels[0, :60] = -1
    points = cloud()[None]
    losses = model.loss({"points": points, "labels": labels})
    logits = model(points)[0, 60:]
    wanted = torch.nn.functional.cross_entropy(logits, labels[0, 60:])
    torch.testing.assert_close(losses["loss_ce"], wanted)
    assert losses["loss_lovasz"] > 0
    task = PointSegmentationTask(model, ["a", "b", "c"])
    predictions = torch.nn.functional.one_hot(labels.clamp(min=0), 3).float()
    task.update_metrics({"labels": labels}, predictions)
    found = task.compute_metrics()
    assert {name: value.item() for name, value in found.items()} == {
        "mIoU": 100, "mAcc": 100, "allAcc": 100,
    }  # fmt: skip
    assert sum(row["points"] for row in task.class_figures) == 60
    assert task.summary_facts()["counts"]["target"] == labels[0, 60:].bincount().tolist()


# a: 1 of 2, b: 2 of 3 points of the union; 1 of 2 and 2 of 2 labelled points.
@pytest.mark.parametrize(("absent", "wanted"), [("skip", (700 / 12, 75)), ("zero", (700 / 18, 50))])
def test_the_rule_of_absent_classes(absent, wanted, caplog):
    task = PointSegmentationTask(segmenter(), ["a", "b", "sofa"], absent=absent)
    predictions = torch.nn.functional.one_hot(torch.tensor([[0, 1, 1, 1]]), 3).float()
    task.update_metrics({"labels": torch.tensor([[0, 0, 1, 1]])}, predictions)
    caplog.set_level("INFO")
    figures = task.compute_metrics()
    assert (figures["mIoU"].item(), figures["mAcc"].item()) == pytest.approx(wanted)
    assert "1 of 3 classes neither occur nor are predicted (sofa)" in caplog.text
    assert "38.89 counts them as 0, as Pointcept and the papers do; 58.33 skips" in caplog.text


def test_pairs_of_clouds_are_merged():
    values = torch.arange(3 * 2 * 9.0).view(3, 2, 9)
    merged = paired(values, NAN)
    assert torch.equal(merged[0], values[:2].flatten(0, 1))
    assert merged[1, 2:].isnan().all()


@torch.no_grad()
def test_coordinates_form_their_voxels_before_weights_in_bfloat16():
    """In bfloat16 65 % of the points of an 8 m room would change their voxel of 4 cm."""
    torch.manual_seed(0)
    points = torch.cat([8 * torch.rand(1, 4000, 3), torch.randn(1, 4000, 6)], dim=2)
    model, counts = segmenter(), []
    model.grid_size = 0.04
    encode = model.backbone.encode
    model.backbone.encode = lambda x, level: counts.append(len(x)) or encode(x, level)
    exact = model(points)
    coarse = model.bfloat16()(points)
    voxels = (points[0, :, :3].double() / 0.04).floor().unique(dim=0)
    assert counts == [len(voxels)] * 2
    assert coarse.dtype == torch.float32
    torch.testing.assert_close(coarse, exact, rtol=0.05, atol=0.05)


def test_the_published_recipe():
    config = composed("experiment=ffnet_t5_ffnet_3d_s3dis_act_relu", "data.root=/d")
    assert config.trainer["max_epochs"] == 3000
    assert config.backbone["act"] == "relu"
    assert (config.head["votes"], config.task["mix"]) == (10, 0.8)
    keys = ("elastic", "crop_share", "crop_points")
    assert [config.data[key] for key in keys] == [False, 0.6, 204_800]
    config = composed("experiment=ffnet_t5_ffnet_3d_scannet200", "data.root=/d")
    assert (config.trainer["max_epochs"], config.schedule["warmup"]) == (800, 40)
    assert [config.data[key] for key in keys] == [True, 1.0, 102_400]
    assert config.head["votes"] == 13


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = ["task=point_segmentation", "backbone=ffnet_3d_tiny", "trainer=cpu", "logger=csv"]
    ended = run_shared([*words, *TINY, "task.mix=0.5", f"output_dir={folder}"])
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.slow
def test_a_run_ends_with_figures_and_pictures(trained):
    folder = trained.folder()
    found = json.loads((folder / "summary.json").read_text())
    assert {"mIoU", "mAcc", "allAcc", "loss"} == found["metrics"].keys()
    assert found["data"]["classes"] == 20
    assert {len(values) for values in found["counts"].values()} == {20}
    written = sorted(file.name for file in (folder / "preview").iterdir())
    assert written == ["00.ply", "00.png", "01.ply", "01.png"]
    cloud = read_cloud(folder / "preview" / "01.ply")
    assert 0 <= cloud.labels.min() <= cloud.labels.max() < 20


@pytest.mark.slow
def test_it_predicts_clouds_as_ply_files(trained, tmp_path, capsys):
    random = np.random.default_rng(0)
    np.save(tmp_path / "a.npy", np.column_stack(
        [random.uniform(0, 1, (50, 3)), random.uniform(0, 255, (50, 3))]))  # fmt: skip
    typed = ["mode=predict", f"ckpt={trained.folder()}", f"output_dir={tmp_path / 'out'}"]
    ended = run_here([*typed, f"input={tmp_path / 'a.npy'}"], capsys)
    assert ended.status == 0, ended.err
    (row,) = json.loads((ended.folder() / "predictions.json").read_text())
    written = read_cloud(ended.folder() / row["labels"])
    assert len(written) == 50
    (same,) = tasks.load(trained.folder()).predict(tmp_path / "a.npy")
    assert np.array_equal(same["labels"], written.labels)
