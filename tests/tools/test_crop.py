"""tools/crop.py: boxes of a detection set as class folders."""

import numpy as np
import pytest
from PIL import Image

from datamodules import ClassFoldersDataModule
from tools.crop import main, square

OBJECT = """<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax>
<ymax>{}</ymax></bndbox></object>"""
BOXES = [("cell", 10, 4, 20, 10), ("dot", 30, 1, 34, 3), ("cell", 0, 0, 1, 1)]


@pytest.fixture
def voc(tmp_path):
    """Four photographs in Pascal VOC's layout, with lists of two splits."""
    root = tmp_path / "voc"
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"JPEGImages/{number}.png")
        objects = "".join(OBJECT.format(*box) for box in BOXES)
        text = f"<annotation><filename>{number}.png</filename>{objects}</annotation>"
        (root / f"Annotations/{number}.xml").write_text(text)
    for split, names in (("train", "0\n1\n2\n"), ("test", "3\n")):
        (root / f"ImageSets/Main/{split}.txt").write_text(names)
    return root


def test_crops_are_squares_around_the_boxes(voc, tmp_path, capsys):
    out = tmp_path / "crops"
    assert main([f"root={voc}", f"out={out}"]) == 0
    assert f"{out / 'train'}: 3 cell, 3 dot" in capsys.readouterr().out
    with (
        Image.open(voc / "JPEGImages/3.png") as photo,
        Image.open(out / "test/dot/JPEGImages_3_001.png") as dot,
    ):
        whole, dot = np.asarray(photo), np.asarray(dot)
    assert dot.shape == (4, 4, 3)
    assert (dot == whole[0:4, 30:34]).all()
    with Image.open(out / "test/cell/JPEGImages_3_000.png") as cell:
        assert (np.asarray(cell) == whole[2:12, 10:20]).all()
    data = ClassFoldersDataModule(out, val_split="test", image_size=32, num_workers=0)
    data.setup()
    assert (data.class_names, data.sizes()) == (("cell", "dot"), {"train": 6, "val": 2})


def test_a_margin_reaches_beyond_the_image():
    assert square((10, 4, 10, 6), 0.0) == (10, 2, 20, 12)
    assert square((0, 0, 10, 10), 0.2) == (-2, -2, 12, 12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out={out}"], "root=FOLDER is missing"),
        (["root={voc}", "out={voc}"], "is not empty; pass a new folder"),
        (["root={voc}", "out={out}", "margin=-1"], "margin=-1 must be at least 0"),
        (["root={voc}", "out={out}", "margin=x"], "margin: "),
        (["root={voc}/JPEGImages", "out={out}"], "is not an export of a known tool"),
        (["root={out}", "out={out}"], "crops"),
    ],
)
def test_mistakes_are_one_line(words, message, voc, tmp_path, capsys):
    typed = [word.format(voc=voc, out=tmp_path / "crops") for word in words]
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "crops").exists()
