"""Predictions for a user's images, by command and in Python, from the run folder alone."""

import csv
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from backbones.checkpoints.opening import open_checkpoint
from datamodules.files import load_rgb
from tasks import load
from tests.families import rest_slow
from tests.runs import ROOT, TINY, completed, run_here, summary

TASKS = rest_slow(tuple(TINY), ("classification",))


@pytest.fixture
def far_from_its_data(trained, tmp_path, monkeypatch):
    """Return the run folder of a task, as on a machine without the data set."""

    def take(task):
        folder = trained(task).folder()
        monkeypatch.setenv("MIXERLAB_CACHE", str(tmp_path / "no_cache"))
        return folder

    yield take
    assert not (tmp_path / "no_cache").exists()


@pytest.fixture
def images(tmp_path):
    """Create images of several sizes, with names that differ in their suffix; one is rotated."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name, size in (("b.png", (90, 70)), ("a.jpg", (64, 64)), ("b.jpg", (70, 90))):
        picture = Image.effect_mandelbrot(size, (-2, -1, 1, 1), 30).convert("RGB")
        exif = picture.getexif()
        exif[0x0112] = 6 if name == "b.jpg" else 1
        picture.save(folder / name, exif=exif)
    return folder


def rows_of(folder):
    return json.loads((folder / "predictions.json").read_text())


@pytest.mark.parametrize("task", TASKS)
def test_prediction_needs_the_run_folder_and_the_images_only(
    task, far_from_its_data, images, tmp_path, capsys, caplog, one_thread
):
    run = far_from_its_data(task)
    caplog.set_level("INFO")
    base = ["mode=predict", f"ckpt={run}", f"output_dir={tmp_path / 'out'}", "trainer=cpu"]
    ended = completed([*base, f"input={images}"], capsys)
    folder, rows = ended.folder(), rows_of(ended.folder())
    assert [row["input"] for row in rows] == [str(images / n) for n in ("a.jpg", "b.jpg", "b.png")]
    assert list((folder / "preview").glob("*.png"))
    classes = list(
        open_checkpoint(run / "checkpoints" / "best.ckpt", values_only=True).values["class_names"]
    )
    CHECKS[task](folder, rows, classes, caplog.text)

    # The same in Python, from any form of the images.
    network = load(run)
    assert plain(network.predict(images), folder) == plain(rows, folder)
    path, picture = images / "b.jpg", Image.open(images / "b.jpg")
    # Arrays lack EXIF data, by which dense tasks rotate images.
    array = np.asarray(load_rgb(path, upright=task in ("detection", "segmentation")))
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    forms = [str(path), path, picture, array, tensor]
    found = network.predict(forms)
    assert [row["input"] for row in found[:3]] == [str(path), str(path), "image 2"]
    # One by one, since products round differently within a batch.
    alone = [row for form in forms for row in network.predict(form)]
    assert len(alone) == len(forms)
    assert len({json.dumps(nameless(row)) for row in alone}) == 1


def plain(rows, folder):
    rows = [dict(row) for row in rows]
    for row in rows:
        labels = row.get("labels")
        if isinstance(labels, str):
            row["labels"] = np.asarray(Image.open(folder / labels)).astype(int) - 1
        if labels is not None:
            row["labels"] = row["labels"].tolist()
    return rows


def nameless(row):
    row = {key: value for key, value in row.items() if key not in ("input", "image_id")}
    return row | ({"labels": row["labels"].tolist()} if "labels" in row else {})


def check_classification(folder, rows, classes, said):
    assert all(set(row["classes"]) <= set(classes) for row in rows)
    shares = rows[0]["probabilities"]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 1
    with (folder / "predictions.csv").open(newline="") as file:
        table = list(csv.reader(file))
    assert table[0][:3] == ["input", "class_1", "probability_1"]
    assert table[1][:3] == [rows[0]["input"], rows[0]["classes"][0], str(shares[0])]
    assert len(table) == 4
    assert f"a.jpg: {rows[0]['classes'][0]} ({shares[0]:.3f}), " in said


def check_detection(folder, rows, classes, said):
    results = json.loads((folder / "coco_results.json").read_text())
    assert len(results) == sum(len(row["detections"]) for row in rows) > 0
    first, found = results[0], rows[0]["detections"][0]
    assert first["category_id"] == classes.index(found["class"]) + 1  # the sample set's own ids
    assert first.keys() == {"image_id", "category_id", "bbox", "score", "segmentation"}
    # The rotated image has EXIF orientation 6.
    sizes = [row["detections"][0]["segmentation"]["size"] for row in rows]
    assert sizes == [[64, 64], [70, 90], [70, 90]]
    assert re.search(r"a\.jpg: \d+ objects? above 0\.3", said)


def check_segmentation(folder, rows, classes, said):
    names = ["a.png", "b.jpg.png", "b.png.png"]
    assert [row["labels"] for row in rows] == [f"labels/{name}" for name in names]
    for row, size in zip(rows, [(64, 64), (90, 70), (90, 70)], strict=True):
        labels = Image.open(folder / row["labels"])
        assert (labels.mode, labels.size) == ("P", size)
        # As in the set's masks: 0 is ignored, the first class is 1.
        shares = np.bincount(np.ravel(labels), minlength=len(classes) + 1)[1:] / np.prod(size)
        found = {name: share for name, share in zip(classes, shares, strict=True) if share}
        assert found == pytest.approx(row["shares"], abs=1e-6)
    assert re.search(r"a\.jpg: \S+ [\d.]+ %", said)


CHECKS = {
    "classification": check_classification, "transfer": check_classification,
    "detection": check_detection, "segmentation": check_segmentation,
}  # fmt: skip


def test_prediction_takes_a_checkpoint_alone(far_from_its_data, images, tmp_path, capsys):
    run = far_from_its_data("classification")
    shutil.copy(run / "checkpoints" / "best.ckpt", tmp_path / "lone.ckpt")
    typed = ["mode=predict", f"ckpt={tmp_path / 'lone.ckpt'}", f"input={images / 'a.jpg'}",
             "backbone=deit_t", f"output_dir={tmp_path}", "trainer=cpu"]  # fmt: skip
    ended = completed(typed, capsys)
    assert len(rows_of(ended.folder())) == 1
    assert summary(ended.folder())["metrics"] == {"images": 1.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "the input {} must be an image or a folder of images"),
        ("empty", "the input {} must be an image or a folder of images; known endings"),
        ("broken.jpg", "{} is truncated or damaged"),
        ("text.png", "{} is not an image, despite its name"),
    ],
)
def test_other_inputs_than_images_are_named(
    name, message, far_from_its_data, images, tmp_path, capsys
):
    run = far_from_its_data("classification")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jpg").write_bytes((images / "a.jpg").read_bytes()[:700])
    (tmp_path / "text.png").write_text("no image")
    given = tmp_path / name
    typed = ["mode=predict", f"ckpt={run}", f"input={given}", f"output_dir={tmp_path / 'out'}"]
    ended = run_here(typed, capsys)
    assert (ended.status, len(ended.err.splitlines())) == (2, 1)
    assert message.format(given) in ended.err
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message.format(given))):
        load(run).predict(given)


@pytest.mark.parametrize(
    "given",
    [[], 3, np.zeros((4, 4), np.int64), np.zeros((3, 8, 8), np.uint8), np.zeros((0, 0), np.uint8),
     torch.zeros(2, 2, 3, 4, 4), torch.zeros(8, 8, 3, dtype=torch.uint8)],
)  # fmt: skip
def test_images_in_other_forms_are_refused(given, trained, shared_network):
    with pytest.raises(ValueError, match=r"an image is a path, a PIL image, an array"):
        shared_network.predict(given)


@pytest.fixture(scope="module")
def shared_network(trained):
    return load(trained("classification").folder())


def test_refused_paths_and_devices(trained, tmp_path):
    run = trained("classification").folder()
    shutil.copy(run / "checkpoints" / "best.ckpt", tmp_path / "lone.ckpt")
    photo = Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 30).convert("RGB")
    assert load(tmp_path / "lone.ckpt").predict(photo) == load(run).predict(photo)
    with pytest.raises(ValueError, match="does not exist; pass a checkpoint or run folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="device='gpu' is not a device of torch"):
        load(run, device="gpu")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "lone.ckpt").rename(tmp_path / "run" / "checkpoints" / "best.ckpt")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["head"]["_target_"] = "os.system"
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match=r"head\._target_=os\.system is refused"):
        load(tmp_path / "run")


def test_importing_tasks_is_light():
    code = "import sys, tasks; print(tasks.load.__name__, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "load False\n"
