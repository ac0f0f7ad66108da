"""Random words and damaged files, by a fixed seed: each is accepted or refused in one line."""

import json
import pickle
import random
import re

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from backbones.checkpoints.opening import open_checkpoint
from datamodules.dense.coco import CocoDataModule
from datamodules.files import load_rgb
from datamodules.images.cifar100 import CIFAR100DataModule
from tasks.engine.run_folder.saved_runs import read_config
from tools.cli.errors import one_line_errors
from tools.comparing.run_records import read_run
from tools.config import overrides
from tools.config import run_config as run_config
from tools.config.config_checks import resolve_config
from tools.runs.components import check_config

SEED = 7
COUNT = [pytest.param(60, id="some"), pytest.param(400, id="many", marks=pytest.mark.slow)]
KEYS = (
    "seed", "mode", "ckpt", "resume", "output_dir", "task", "head", "data", "trainer", "recipe",
    "backbone", "backbone.mixer", "backbone.img_size", "backbone.drop_path_rate", "data.root",
    "data.batch_size", "data.augmentation", "data._target_", "head._target_", "head.options",
    "optimizer.lr", "optimizer", "schedule", "schedule.warmup", "trainer.devices", "logger",
    "trainer.max_epochs", "callbacks", "callbacks.top_k", "task.mixup", "task.ema", "paper", "a.b",
    "hydra.run.dir", "hydra", "experiment", "protocol", "", "backbone.name", "task_name",
)  # fmt: skip
VALUES = (
    "", "null", "3", "-1", "0", "1e999", "nan", "true", "x", "deit_t", "detection", "[1,2]", "[",
    "{a:1}", "{", "{a:{b:[1]}}", "'", '"x"', "${x}", "${oc.env:NO}", "???", "os.system", "a=b",
    "1,2", "\u00e9", "\\", "a b", "../x", "/", "~", "*", "{_target_:os.system}", "99999999999999",
)  # fmt: skip


def refused(call, capsys, case="the whole file"):
    """Return True if a call is refused in one sentence; fail for any other error."""
    capsys.readouterr()
    try:
        with one_line_errors():
            call()
    except SystemExit as ended:
        said, status = capsys.readouterr().err, ended.code
    except Exception as error:
        raise AssertionError(f"{case} ends in {error!r}") from error
    else:
        return False
    assert status == 2
    assert re.match(r"error: ..", said), said
    return True


@pytest.mark.parametrize("count", COUNT)
def test_words(count, capsys):
    chance = random.Random(SEED)

    def word():
        sign = chance.choice(["", "", "", "+", "++", "~"])
        key, value = chance.choice(KEYS), chance.choice(VALUES)
        return chance.choice([f"{sign}{key}={value}", f"{sign}{key}={value}", f"{sign}{key}"])

    seen = 0
    for _ in range(count):
        words = [word() for _ in range(chance.choice([1, 1, 2]))]

        def read(words=words):
            given = overrides.read_command(words)
            config = resolve_config(run_config.job_config(given.words, given.config))
            check_config(config)

        seen += refused(read, capsys, words)
    assert seen > count / 2


def damaged(content, chance):
    """Return bytes that are truncated, changed, duplicated or shuffled."""
    content = bytearray(content)
    for _ in range(chance.choice([1, 1, 3, 20])):
        place = chance.randrange(len(content) or 1)
        kind = chance.choice(["set", "cut", "drop", "double"])
        if kind == "set" and content:
            content[place] = chance.randrange(256)
        elif kind == "cut":
            del content[max(place, len(content) // 2) :]
        elif kind == "drop":
            del content[place : place + chance.randrange(8)]
        else:
            content[place:place] = content[place : place + 8]
    return bytes(content)


@pytest.fixture
def files(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    for name in ("a.png", "a.jpg"):
        Image.fromarray(pixels).save(tmp_path / name)
    torch.save({"state_dict": {"w": torch.zeros(3)}, "epoch": 1}, tmp_path / "a.ckpt")
    config = {"task_name": "x", "seed": 0, "mode": "fit", "backbone": {"name": "x"},
              **{part: {"_target_": "x"} for part in ("head", "data", "task")}}  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {"metrics": {"top1": 1.0}, "parameters": 1, "backbone_macs": 2, "seconds": 3}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return {
        "a.png": lambda: load_rgb(tmp_path / "a.png", upright=True),
        "a.jpg": lambda: load_rgb(tmp_path / "a.jpg", upright=True),
        "a.ckpt": lambda: open_checkpoint(tmp_path / "a.ckpt").tensors,
        "config.yaml": lambda: (read_config(tmp_path / "config.yaml"), read_run(tmp_path)),
        "summary.json": lambda: read_run(tmp_path),
    }


@pytest.mark.parametrize("count", COUNT)
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.ckpt", "config.yaml", "summary.json"])
def test_files(name, count, files, tmp_path, capsys):
    chance = random.Random(SEED)
    whole = (tmp_path / name).read_bytes()
    assert not refused(files[name], capsys)
    for case in range(count):
        (tmp_path / name).write_bytes(damaged(whole, chance))
        refused(files[name], capsys, case)


@pytest.mark.parametrize("count", COUNT)
def test_coco(count, tmp_path, capsys):
    pytest.importorskip("mmdet")
    chance = random.Random(SEED)
    whole = json.dumps({
        "images": [{"id": 1, "file_name": "1.jpg", "width": 16, "height": 16}],
        "categories": [{"id": 3, "name": "cat"}],
        "annotations": [{"id": 9, "image_id": 1, "category_id": 3, "bbox": [1, 1, 9, 9], "area": 81,
                         "iscrowd": 0, "segmentation": [[1, 1, 9, 1, 9, 9]]}],
    })  # fmt: skip
    (tmp_path / "annotations").mkdir()
    for split in ("train2017", "val2017"):
        (tmp_path / split).mkdir()
        Image.new("RGB", (16, 16)).save(tmp_path / split / "1.jpg")
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(whole)
    values = ["null", "-1", "0", '"x"', "[]", "{}", "1e999", "NaN", "1e30", "true", "[[]]"]
    places = [found.span() for found in re.finditer(r'(?<=: )[\d.]+|"[^"]*"|\[[^\[\]]*\]', whole)]
    for _ in range(count):
        start, end = chance.choice(places)
        text = whole[:start] + chance.choice(values) + whole[end:]
        (tmp_path / "annotations" / "instances_train2017.json").write_text(text)
        refused(lambda: CocoDataModule(tmp_path, num_workers=0).setup(), capsys, text)


@pytest.mark.parametrize("count", COUNT)
def test_cifar(count, tmp_path, capsys):
    chance = random.Random(SEED)
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    names = [f"c{i}" for i in range(100)]
    images = {b"data": np.zeros((4, 3072), np.uint8), b"fine_labels": [0, 1, 2, 3]}
    whole = pickle.dumps(images)
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": names}))
    (folder / "test").write_bytes(whole)
    for case in range(count):
        # Bytes around the pixels decide what is built.
        head = whole[:200] if chance.random() < 0.5 else whole
        (folder / "train").write_bytes(damaged(head, chance) + whole[len(head) :])
        refused(lambda: CIFAR100DataModule(tmp_path, num_workers=0).setup(), capsys, case)
