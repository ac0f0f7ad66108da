"""Tasks without run.py: a plain trainer, single checkpoints, images in memory."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from lightning import Trainer
from PIL import Image
from torch.utils.data import DataLoader

import tasks
from backbones import create_backbone, list_mixers
from heads.linear import LinearClassifier
from tasks import ClassificationTask, SegmentationTask
from tests.runs import QUIET
from tools.cli.paths import ROOT

NAMES = ["a", "b", "c", "d"]
SAMPLES = [{"image": torch.randn(3, 64, 64), "label": i % 4} for i in range(8)]


class Own(torch.nn.Module):
    """Model of a user."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def predict(self, batch):
        return self.layer(batch["image"].mean((2, 3)))

    def loss(self, batch):
        return {"loss": torch.nn.functional.cross_entropy(self.predict(batch), batch["label"])}


def network(head=LinearClassifier):
    options = {"img_size": 64, "mixer": {"g2": 3}, "token_mixer": {"name": "sbm"}}
    return head(create_backbone("deit_t_afbo", **options), 4)


def trained(task, folder):
    trainer = Trainer(max_epochs=1, default_root_dir=folder, **QUIET)
    loader = DataLoader(SAMPLES, batch_size=4)
    trainer.fit(task, loader, loader)
    trainer.save_checkpoint(folder / "task.ckpt")
    return trainer


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("python")
    task = ClassificationTask(network(), NAMES, optimizer={"lr": 1e-3}, ema={"decay": 0.5})
    return task, trained(task, folder), folder / "task.ckpt"


GREY = np.arange(50 * 40, dtype=np.uint8).reshape(50, 40)
RGB = np.stack([GREY] * 3, -1)
FLOAT = torch.from_numpy(RGB).permute(2, 0, 1) / 255
FORMS = {
    "grey": GREY, "grey with an axis": GREY[..., None], "grey floats": GREY / 255,
    "grey tensor": FLOAT[0], "tensor with one channel": FLOAT[:1], "floats": FLOAT,
    "half": FLOAT.double(), "bytes": (FLOAT * 255).round().byte(), "array": RGB,
    "float array": (RGB / 255).astype(np.float32), "with gradient": FLOAT.clone().requires_grad_(),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_predict_takes_images_in_every_usual_form(example, form):
    task = example[0]
    ((row,), (expected,)) = task.predict(FORMS[form]), task.predict(RGB)
    assert row == expected
    assert sorted(row["classes"]) == NAMES


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a folder of seven images, of which two share a stem, and one broken file."""
    folder = tmp_path_factory.mktemp("photos")
    for index in range(7):
        suffix = "png" if index == 6 else "jpg"
        Image.fromarray(np.roll(RGB, index, 0)).save(folder / f"{index % 6}.{suffix}")
    (folder / "broken.jpg").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_predictions_are_written_as_they_come(example, photos, workers, tmp_path, caplog):
    task, images = example[0], sorted(photos.glob("[0-9]*"))
    rows = task.predict(photos, batch_size=3, num_workers=workers, out=tmp_path)
    assert caplog.text.count("1 of 8 images cannot be read and are left out:") == 1
    assert len(rows) == 7
    assert list(rows) == json.loads((tmp_path / "predictions.json").read_text())
    assert rows[-1]["input"] == str(images[-1])
    assert rows[1:3] == list(rows)[1:3]
    for row, alone in zip(rows, task.predict(images), strict=True):
        assert row["input"] == alone["input"]
        assert row["probabilities"] == pytest.approx(alone["probabilities"], abs=1e-5)
    table = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [line["class_1"] for line in table] == [row["classes"][0] for row in rows]


def test_a_stream_goes_on_after_a_broken_photo(example, photos, caplog):
    task = example[0]
    names = [row["input"] for row in task.stream(photos, batch_size=2)]
    assert names == [str(path) for path in sorted(photos.iterdir()) if path.stem != "broken"]
    assert "broken.jpg" in caplog.text
    assert "it is left out" in caplog.text
    with pytest.raises(ValueError, match="broken"):
        list(task.stream(photos / "broken.jpg"))
    with pytest.raises(ValueError, match="broken"):
        task.predict(photos)


@pytest.mark.parametrize("image", [FLOAT * 255, FLOAT - 0.5, FLOAT * float("nan")])
def test_floats_outside_their_range_are_refused(example, image):
    with pytest.raises(ValueError, match=r"from .* to .* is not an image; .* floats from 0 to 1"):
        example[0].predict(image)


def test_a_plain_checkpoint_opens_without_a_run_folder(example):
    task, _, path = example
    opened = tasks.load(path)
    assert opened.predict(RGB) == task.predict(RGB)
    assert not opened.training
    again = ClassificationTask.load_from_checkpoint(path)
    assert again.predict(RGB) == task.predict(RGB)
    assert any(parameter.requires_grad for parameter in again.parameters())
    assert again.optimizer_options == {"name": "adamw", "lr": 1e-3}
    assert again.model.backbone.record == task.model.backbone.record
    with pytest.raises(ValueError, match="belongs to a ClassificationTask, not to a Seg"):
        SegmentationTask.load_from_checkpoint(path)
    with pytest.raises(ValueError, match="pass the model and all other arguments of the class"):
        ClassificationTask.load_from_checkpoint(path, ema=None)
    path = example[2]
    loaded = ClassificationTask.load_from_checkpoint(path, strict=True, weights_only=True)
    assert list(loaded.class_names) == NAMES
    with pytest.raises(ValueError, match="strict=False is refused"):
        ClassificationTask.load_from_checkpoint(path, strict=False)


def test_a_checkpoint_builds_only_listed_targets(example, tmp_path):
    content = torch.load(example[2], weights_only=True)
    for group, target in (("head", "os.system"), ("task", "torch.hub.load"), ("data", "io.open")):
        changed = content | {"config": content["config"] | {group: {"_target_": target}}}
        torch.save(changed, tmp_path / "a.ckpt")
        with pytest.raises(ValueError, match=rf"{group}\._target_={target} is refused"):
            tasks.load(tmp_path / "a.ckpt")
    torch.save(content | {"config": 3}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="lacks the config of its task"):
        tasks.load(tmp_path / "a.ckpt")


def test_a_users_model_is_passed_when_loading(tmp_path):
    task = ClassificationTask(Own(), NAMES)
    trained(task, tmp_path)
    path = tmp_path / "task.ckpt"
    with pytest.raises(ValueError, match=r"lacks the config of its task; .*model=\.\.\."):
        tasks.load(path)
    opened = ClassificationTask.load_from_checkpoint(path, model=Own())
    assert opened.class_names == task.class_names
    assert opened.predict(RGB) == task.predict(RGB)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([torch.zeros(2, 3, 4, 4), torch.zeros(2)], "this batch is a list without names"),
        ({"img": torch.zeros(2, 3, 4, 4)}, r"a dict with the keys \['img'\]"),
    ],
)
def test_a_batch_of_another_form_is_refused_with_the_form(batch, said):
    with pytest.raises(ValueError, match=f"{said}; a batch for classification is a dictionary "):
        ClassificationTask(Own(), NAMES).on_before_batch_transfer(batch, 0)


def test_a_users_files_do_not_shadow_the_packages(tmp_path):
    (tmp_path / "tools").mkdir()
    for shadow in ("tasks.py", "tools/__init__.py"):
        (tmp_path / shadow).write_text("raise SystemExit('shadowed')")
    script = tmp_path / "script.py"
    script.write_text("import mixerlab\nprint(sorted(mixerlab.__all__), mixerlab.list_mixers()[0])")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    names = ["create_backbone", "create_mixer", "list_backbones", "list_mixers", "load"]
    assert done.stdout.strip() == f"{names} {list_mixers()[0]}"


def test_loading_imports_with_the_garbage_collector_paused():
    code = """
import gc, sys
from tasks.engine.quick_imports import quick_imports
with quick_imports():
    assert not gc.isenabled()
    import tasks.engine.loading, tasks.classification.task, datamodules.images.class_folders
assert "sklearn" not in sys.modules
assert gc.isenabled()
gc.disable()
with quick_imports():
    pass
assert not gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
