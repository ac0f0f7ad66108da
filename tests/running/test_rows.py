"""Rows of point clouds, text and generation run to an evaluation on stand-ins of their data.

The narrow host of each task takes the place of the row's; recipe, data and figures are the row's.
"""

import itertools
import json
import math

import numpy as np
import pytest

from datamodules.text.wordpiece import SPECIAL
from tests.glue_sets import write_sets
from tests.runs import completed
from tests.stand_ins import write_cloud

pytestmark = pytest.mark.slow


def s3dis(root):
    for area, room in itertools.product(range(1, 7), ("office_1", "hallway_1")):
        write_cloud(root / f"Area_{area}" / room)
    return ()


def scannet(root):
    for split in ("train", "val"):
        write_cloud(root / split / "scene0000_00", label="segment20")
    return ()


def scannet200(root):
    for split in ("train", "val"):
        write_cloud(root / split / "scene0000_00", label="segment200")
    return ()


def glue(root):
    write_sets(root, 12)
    letters = 'abcdefghijklmnopqrstuvwxyz,"'
    pieces = [*SPECIAL, "the", "dog", "cat", *letters, *(f"##{letter}" for letter in letters)]
    (root / "vocab.txt").write_text("\n".join(pieces) + "\n")
    return f"data.tokenizer={root}", "data.max_tokens=32"


def latents(root):
    """Means and deviations of a VAE at 256 pixels; samples would need the VAE itself."""
    generator = np.random.default_rng(0)
    for split, name in itertools.product(("train", "val"), ("n01440764", "n01443537")):
        (root / split / name).mkdir(parents=True)
        for number in range(2):
            values = generator.normal(size=(8, 32, 32)).astype(np.float16)
            np.save(root / split / name / f"{number}.npy", np.abs(values))
    return ("task.num_samples=0",)


POINTS = (
    "backbone=ffnet_3d_tiny",
    "data.grid_size=0.1",
    "head.votes=1",
    "trainer.precision=32-true",
)
# The function that writes the stand-in, further options, and the figure of the evaluation.
ROWS = {
    "ffnet_t5_ffnet_3d_s3dis_act_relu": (s3dis, POINTS, "mIoU"),
    "ffnet_t5_ffnet_3d_scannet": (scannet, POINTS, "mIoU"),
    "ffnet_t5_ffnet_3d_scannet200": (scannet200, POINTS, "mIoU"),
    "afbo_t12_bert_base_cola": (glue, ("backbone=bert_tiny",), "matthews"),
    "afbo_t12_bert_base_afbo_mnli": (glue, ("backbone=bert_tiny_afbo",), "accuracy"),
    "ffnet_t7_u_dit_b": (latents, ("backbone=u_dit_tiny",), "mse"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_runs_to_its_first_evaluation(name, tmp_path, capsys):
    write, options, figure = ROWS[name]
    root = tmp_path / "data"
    root.mkdir()
    typed = [f"experiment={name}", f"data.root={root}", *options, *write(root), "trainer=cpu",
             "data.batch_size=2", "data.num_workers=0", "trainer.max_epochs=1",
             "trainer.max_steps=-1", "trainer.limit_train_batches=2", "logger=csv",
             "trainer.check_val_every_n_epoch=1", f"output_dir={tmp_path / 'runs'}"]  # fmt: skip
    ended = completed(typed, capsys)
    assert "does not compare" in ended.out
    found = json.loads((ended.folder() / "summary.json").read_text())
    assert math.isfinite(found["metrics"][figure])
    assert found["paper"]["experiment"] == name
    assert found["paper"]["why_not"]
