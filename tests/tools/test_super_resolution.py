"""Commands on networks that enlarge images: counts, published rows, timing, export, analyses."""

import json

import pytest
import torch

from backbones import create_backbone
from backbones.analysis.counting import count_macs, count_parameters
from heads.super_resolution import SuperResolver
from tests.families import rest_slow
from tools import benchmark, complexity, export, run
from tools.papers.published import load_rows

ROWS = load_rows("ffnet", "super_resolution")


@pytest.mark.parametrize("row", rest_slow(ROWS, ROWS[:1]), ids=lambda row: row.backbone)
def test_rows_have_the_counts_of_the_network(row):
    with torch.device("meta"):
        model = SuperResolver(create_backbone(row.backbone, **row.options), 4)
    assert count_parameters(model) == row.params
    assert count_macs(model, shape=(3, *row.counted_at)) == row.exact_macs
    assert row.name == f"ffnet_t4_{row.backbone}"


def test_complexity_counts_whole_networks(capsys):
    typed = ["task=super_resolution", "backbone=edsr_baseline,bicubic", "format=json"]
    assert complexity.main(typed) == 0
    edsr, bicubic = json.loads(capsys.readouterr().out)
    assert (edsr["params"], round(edsr["macs_g"], 1)) == (1_517_571, 114.2)
    assert (bicubic["params"], bicubic["macs_g"]) == (0, 0)


def test_hosts_of_images_are_not_timed(capsys):
    assert benchmark.main(["backbones", "task=super_resolution", "backbone=deit_t"]) == 2
    assert "takes low resolution images, but deit_t" in capsys.readouterr().err
    assert benchmark.main(["backbones", "task=detection", "backbone=deit_t"]) == 2
    assert "task must be one of classification" in capsys.readouterr().err


TINY = ("task=super_resolution", "backbone=edsr_baseline", "trainer=cpu", "logger=csv",
        "data.patches_per_image=1", "data.patch_size=8", "data.batch_size=4", "data.scale=2",
        "trainer.max_epochs=1", "schedule.warmup=0")  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of a few steps."""
    folder = tmp_path_factory.mktemp("trained")
    assert run.main([*TINY, f"output_dir={folder}"]) == 0
    return next(folder.glob("*/*/2*"))


@pytest.mark.slow
@pytest.mark.parametrize(("to", "file"), [("onnx", "model.onnx"), ("torch_export", "model.pt2")])
def test_whole_networks_are_exported_for_any_size(trained, to, file, tmp_path):
    typed = [f"to={to}", "what=both", f"ckpt={trained}", f"out={tmp_path / 'made'}"]
    assert export.main(typed) == 0
    assert (tmp_path / "made" / file).is_file()
    text = (tmp_path / "made/README.md").read_text()
    assert f"`{file}` returns `enlarged`: any batch, any height and width from 64." in text
    prepared = json.loads((tmp_path / "made/preprocessing.json").read_text())
    assert (prepared["mean"], prepared["std"]) == ([0.0] * 3, [1.0] * 3)
    assert "enlarged.png" in (tmp_path / "made/infer.py").read_text()
