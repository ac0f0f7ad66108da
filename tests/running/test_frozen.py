"""Runs with classifiers solved from features of a frozen backbone."""

import pytest
import torch
from torch.utils.data import default_collate

from backbones import create_backbone
from datamodules.sample.datamodules import SampleTransfer
from heads.frozen.features import Features, SolveOptions
from heads.frozen.head import FrozenFeatures
from heads.frozen.neighbours import Neighbours
from tests.runs import arguments, completed, refused, run_here, summary

# One training image per class, as in all tiny runs.
FEW = ("protocol=frozen", "head.logistic.c=1", "head.knn.neighbours=[10,20]",
       "head.few_shot.shots=[1]", "head.few_shot.draws=2")  # fmt: skip


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "weights.pth"
    torch.save(create_backbone("deit_t").state_dict(), path)
    return path


def typed(weights, tmp_path, *more, trainer="cpu"):
    start = f"backbone.pretrained={weights}"
    return arguments("transfer", tmp_path / "runs", *FEW, start, *more, trainer=trainer)


@pytest.mark.slow
def test_figures_equal_those_of_the_features(weights, sample_cache, tmp_path, capsys, monkeypatch):
    taken, solve = [], FrozenFeatures.solve

    def recorded(head, train, test, draw):
        taken[:] = train, test
        return solve(head, train, test, draw)

    monkeypatch.setattr(FrozenFeatures, "solve", recorded)
    ended = completed(typed(weights, tmp_path), capsys)
    found = summary(ended.folder())["metrics"]
    data = SampleTransfer(
        sample_cache, train_per_class=1, val_per_class=1, image_size=64, num_workers=0
    )
    data.setup()
    backbone = create_backbone("deit_t", img_size=64, pretrained=str(weights)).eval()

    def features(split):
        images = data.dataset(split)
        transform = data.augmentation.eval(64)
        images.dataset.transform = transform
        batch = data.normalise(default_collate([images[0, row] for row in range(len(images))]))
        with torch.no_grad():
            values = backbone.embed(batch["image"])
        return Features(values, batch["label"])

    train, test = features("train"), features("val")
    for given, expected in zip(taken, (train, test), strict=True):
        torch.testing.assert_close(given.values, expected.values)
        assert torch.equal(given.labels, expected.labels)
    metrics = Neighbours((10, 20)).solve(train, test, 100, SolveOptions()).metrics
    assert {name: found[name] for name in metrics} == pytest.approx(dict(metrics))
    assert found["top1"] == found["top1_lbfgs"]
    assert {"top5", "top1_1shot", "top1_1shot_std"} < set(found)
    assert "top1_knn20" in ended.out
    assert list((ended.folder() / "preview").glob("*.png"))
    assert not (ended.folder() / "checkpoints").exists()


def test_options_that_need_weights_are_refused(weights, tmp_path, capsys):
    told = refused([*typed(weights, tmp_path), "resume=true"], tmp_path / "runs", capsys)
    assert "protocol=frozen saves no checkpoint to resume" in told
    other = [word for word in typed(weights, tmp_path) if not word.startswith("backbone.pre")]
    told = refused([*other, "mode=test", f"ckpt={weights}"], tmp_path / "runs", capsys)
    assert "pass backbone.pretrained=<run folder or checkpoint file>" in told
    ended = run_here(typed(weights, tmp_path, "trainer.limit_val_batches=1"), capsys)
    assert ended.status == 2
    assert "features of 64 of 100 images were extracted, but all are needed" in ended.err
