"""Parts that tests of whole graphs share: runs, their inputs, and answers of infer.py."""

import numpy as np
import pytest
from PIL import Image

from tasks.engine.family import families
from tests.runs import SCENES, SMALLEST

WHOLE = [name for name, family in families().items() if family.whole_graph]
IMAGES = [name for name in WHOLE if name not in ("forecasting", "glue")]
WORDS = {
    **SMALLEST,
    "classification": (*SMALLEST["classification"], "task.calibrate=true"),
    # A low threshold, so that a network of a few steps detects something.
    "detection": (
        "backbone=resnet18", "head=retinanet", *SCENES,
        "++head.options={test_cfg:{score_thr:0.005}}",
    ),
}  # fmt: skip
CALL = """
import json, sys
sys.path.insert(0, sys.argv[1])
from infer import predict
def plain(x):
    x = x.tolist() if hasattr(x, "tolist") else x
    return [plain(y) for y in x] if isinstance(x, list | tuple) else x
print(json.dumps([plain(answer) for answer in predict(sys.argv[2:])]))
"""


def write_images(folder):
    """Write images of each mode that decoders treat in a way of their own."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((64, 64))
    turned = Image.Exif()
    turned[0x0112] = 6
    image.resize((64, 48)).save(folder / "exif.jpg", exif=turned)
    image.convert("L").save(folder / "grey.png")
    image.convert("CMYK").save(folder / "cmyk.jpg")
    image.quantize(32).save(folder / "palette.png")
    Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(
        folder / "deep.png"
    )
    return sorted(map(str, folder.iterdir()))


def inputs_of(family, task, folder):
    """Return inputs to predict."""
    if family in IMAGES:
        return write_images(folder / "images")
    if family == "glue":
        return ["The cat sees dogs.", "Ünknown wörds, 日本 and $5!", "many words " * 99]
    facts = task.series_facts
    values = np.random.default_rng(0).normal(size=(40, len(facts["names"])))
    lines = [
        f"2026-01-{1 + hour // 24:02} {hour % 24:02}:00:00,{','.join(map(str, row))}"
        for hour, row in enumerate(values.tolist())
    ]
    header = ",".join([task.data.time_column, *facts["names"]])
    (folder / "table.csv").write_text("\n".join([header, *lines]))
    return [str(folder / "table.csv")]


def plain_answers(family, row):
    """Return what infer.py returns for a row of the task's predictions."""
    if family in ("classification", "transfer"):
        return dict(zip(row["classes"], row["probabilities"], strict=True))
    if family == "multi_label":
        return row["scores"]
    if family == "glue":
        return {row["class"]: row["share"]}
    if family == "segmentation":
        return row["labels"]
    if family == "super_resolution":
        return row["enlarged"].squeeze().astype(float)
    if family == "detection":
        return [(x["class"], x["score"], x["bbox"]) for x in row["detections"]]
    levels = [list(quantiles.values()) for quantiles in row["quantiles"].values()]
    return np.moveaxis(np.array(levels), (0, 1, 2), (1, 2, 0))


def check_alike(family, answer, expected):
    """Compare an answer of infer.py with the checkpoint's."""
    if isinstance(expected, dict):
        assert {name: answer[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    elif family == "segmentation":  # resizing differs by one grey value at most
        assert (np.array(answer[0]) == expected).mean() > 0.98
    elif family == "detection":
        assert expected
        assert len(answer) == len(expected)
        for (name, score, box, *_), (expected_name, expected_score, corner) in zip(
            answer, expected, strict=True
        ):
            assert name == expected_name
            assert score == pytest.approx(expected_score, abs=1e-3)
            sides = [box[2] - box[0], box[3] - box[1]]
            assert [*box[:2], *sides] == pytest.approx(corner, abs=0.1)
    else:
        np.testing.assert_allclose(answer, expected, atol=1 if family in IMAGES else 1e-3)
