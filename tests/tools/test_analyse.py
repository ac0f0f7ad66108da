"""tools/analyse.py: from checkpoints to figures and tables, and its errors."""

import csv
import types

import pytest
import torch
from PIL import Image

from backbones import create_backbone
from heads.linear import LinearClassifier
from tests.families import build_short
from tests.tensors import tokens
from tools import analyse
from tools.analyses import analyses
from tools.analyses.classification_errors import confused_pairs, confusion, reliability
from tools.analyses.coco_errors import KINDS, precision_curves
from tools.analyses.kinds import relations

ENDINGS = {".csv", ".png", ".svg"}


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        noise = (tokens(80, 112, 3, seed=number).clamp(-2, 2) * 60 + 128).byte().numpy()
        Image.fromarray(noise).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def released(tmp_path):
    """Return the path of a classifier's checkpoint outside run folders."""
    path = tmp_path / "deit.pth"
    torch.manual_seed(0)
    torch.save(LinearClassifier(create_backbone("deit_t"), 7).state_dict(), path)
    return path


def error_text(arguments, capsys):
    assert analyse.main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("analyse.py: ")
    assert "\n" not in error
    return error


def test_help_lists_every_analysis(capsys):
    assert analyse.main(["--help"]) == 0
    text = capsys.readouterr().out
    known = analyses()
    assert {"cam", "entropy", "erf", "relations", "activations"} <= set(known)
    for one in known.values():
        assert f"{one.name:14} {one.summary}" in text
        assert one.summary
        assert analyse.main([one.name, "--help"]) == 0
        own = capsys.readouterr().out
        assert all(f"{key}={value}" in own for key, value in one.options.items())


def test_wrong_arguments(capsys, pictures, released):
    shown, checkpoint, host = f"input={pictures}", f"ckpt={released}", "backbone=resnet18"
    for typed, said in (
        (["entrpy"], "did you mean"),
        (["cam"], "backbone=NAME is missing"),
        (["entropy", "backbone=deit_t", "bims=3"], "cannot use 'bims=3'"),
        (["cam", checkpoint], "is not in a run folder"),
        (["entropy", "backbone=deit_t"], "pass its images"),
        (["cam", host, shown], "lacks an image classifier"),
        (["activations", host, shown], ""),
        *(([name, host, shown], "resnet18") for name in ("relations", "mappings", "attention")),
        (["errors", checkpoint, "backbone=deit_t", shown], "labelled images"),
    ):
        assert said in error_text(typed, capsys)


def test_images_of_any_size_and_networks_side_by_side(tmp_path, capsys, pictures):
    out = tmp_path / "out"
    typed = ["backbone=resnet18,edgevit_xxs", f"input={pictures}", "image_size=64x96"]
    assert analyse.main(["entropy", *typed, f"out={out}"]) == 0
    assert {path.suffix for path in out.iterdir()} == ENDINGS
    found = rows(out / "entropy.csv")
    assert {row["backbone"] for row in found} == {"resnet18 (random)", "edgevit_xxs (random)"}
    assert all(0 < float(row["entropy"]) < 8 and row["images"] == "3" for row in found)
    shown = capsys.readouterr().out
    assert "stages.3.blocks.1" in shown
    with Image.open(out / "entropy.png") as picture:
        assert min(picture.size) > 200


def test_class_maps_of_a_released_checkpoint(tmp_path, pictures, released):
    out = tmp_path / "out"
    typed = [f"ckpt={released}", "backbone=deit_t", f"input={pictures}", "image_size=64"]
    assert analyse.main(["cam", *typed, "class=3", f"out={out}"]) == 0
    found = rows(out / "cam.csv")
    assert [row["image"] for row in found] == ["0.png", "1.png", "2.png"]
    assert {row["class"] for row in found} == {"class 3"}
    assert {row["layer"] for row in found} == {"blocks.11.norm1"}
    assert all(0 <= float(row["probability"]) <= 1 for row in found)


def test_relations_of_any_token():
    """Maps show the token's row of each matrix; layers with smaller windows are skipped."""
    backbone = build_short("posmlp_t", token_mixer="lrpe_m")
    backbone.name = "posmlp"
    subject = types.SimpleNamespace(backbone=backbone, label="posmlp", size=(224, 224), config=None)
    relation = backbone.get_submodule("stages.2.blocks.0.mixer.gate.relation")
    options = {**relations.OPTIONS, "token": "150", "layers": "2"}
    found = relations.analyse([subject], options)
    matrix, _ = relation.token_matrix()
    for title, expected in (("group 1", matrix[0, 150]), ("free", relation.weight[150])):
        own = ("stages.2.blocks.0.mixer.gate.relation", title)
        values = [row["value"] for row in found.rows if (row["layer"], row["map"]) == own]
        assert values == pytest.approx(expected.tolist())
    assert {"relations", "matrices", "bias", "distance"} == set(found.figures)
    images = [axis.images[0].get_array() for axis in found.figures["matrices"].axes if axis.images]
    assert [image.shape for image in images] == 6 * [(196, 196)]
    (note,) = found.notes
    assert "2 of 8 layers are not drawn, because their windows lack token 150" in note
    for text in ("196", "-1", "centre"):
        with pytest.raises(ValueError, match="from 0 to 195"):
            relations.analyse([subject], {**options, "token": text})
    with pytest.raises(ValueError, match="singular must be a number from 0"):
        relations.analyse([subject], {**options, "singular": "all"})


def test_reliability_and_confusions_by_hand():
    shares = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.65, 0.35], [0.22, 0.78], [0.0, 1.0]])
    labels = torch.tensor([0, 1, 0, 1, 1])
    found = reliability(shares, labels, bins=5)
    assert found.counts.tolist() == [0, 0, 0, 3, 2]
    assert found.accuracy[3].item() == pytest.approx(2 / 3)
    assert found.confidence[3].item() == pytest.approx((0.7 + 0.65 + 0.78) / 3)
    expected = (abs(0.7 + 0.65 + 0.78 - 2) + abs(0.9 + 1.0 - 2)) / 5
    assert found.error == pytest.approx(expected)
    labels, guesses = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([0, 1, 1, 0, 0, 2])
    counts = confusion(guesses, labels, 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [2, 0, 1]]
    assert confused_pairs(counts) == [(2, 0, 2), (0, 1, 1)]
    assert confused_pairs(counts, 1) == [(2, 0, 2)]


def coco(*boxes):
    """Return annotations of one image; categories 1 and 2 share a supercategory, 3 has another."""
    groups = {1: "animal", 2: "animal", 3: "thing"}
    return {
        "images": [{"id": 5, "width": 100, "height": 100}],
        "categories": [{"id": k, "name": str(k), "supercategory": v} for k, v in groups.items()],
        "annotations": [
            {"id": i, "image_id": 5, "category_id": category, "bbox": list(box),
             "area": box[2] * box[3], "iscrowd": 0}
            for i, (category, box) in enumerate(boxes, start=1)
        ],
    }  # fmt: skip


def detections(*rows):
    return [
        {"image_id": 5, "category_id": category, "bbox": list(box), "score": score}
        for score, category, box in rows
    ]


def test_breakdown_of_detection_errors_by_hand():
    """A false positive that scores higher than the true positive halves the precision."""
    pytest.importorskip("pycocotools")
    own, near, other, empty = (0, 0, 40, 40), (60, 0, 30, 30), (0, 60, 30, 30), (60, 60, 30, 30)
    truth = coco((1, own), (2, near), (3, other))
    right = (0.5, 1, own)
    cases = {
        "C75": (right,),
        "Sim": ((0.9, 1, near), right),
        "Oth": ((0.9, 1, other), right),
        "BG": ((0.9, 1, empty), right),
        "Loc": ((0.9, 1, (0, 0, 40, 16)),),  # an IoU of 0.4
        "FN": (),
    }
    for kind, found in cases.items():
        curve = dict(zip(KINDS, precision_curves(truth, detections(*found), [5])[1], strict=True))
        before = 0.0 if kind in ("Loc", "FN") else 0.5
        for place, name in enumerate(KINDS):
            forgiven = place >= KINDS.index(kind)
            expected = [1.0 if forgiven else before] * 101
            assert curve[name].tolist() == pytest.approx(expected), (kind, name)
    assert set(precision_curves(coco((1, own)), [], [5])) == {1}
    # A dataset restricted to one class ignores other objects.
    found = detections((0.9, 1, near), right)
    (alone,) = precision_curves(truth, found, [5], [1]).values()
    assert alone[KINDS.index("Oth")].tolist() == pytest.approx([0.5] * 101)
    assert alone[KINDS.index("BG")].tolist() == pytest.approx([1.0] * 101)


@pytest.mark.slow
def test_analyses_of_a_run(reported, tmp_path):
    larger = ["image_size=96", "images=2", f"out={tmp_path / 'larger'}"]
    assert analyse.main(["entropy", f"ckpt={reported}", *larger]) == 0
    for name in ("errors", "cam", "coefficients", "attention"):
        assert analyse.main([name, f"ckpt={reported}", "images=4", f"out={tmp_path / name}"]) == 0
        assert {path.suffix for path in (tmp_path / name).iterdir()} == ENDINGS
    keys = [row for row in rows(tmp_path / "coefficients" / "coefficients.csv") if row["top_keys"]]
    assert keys
    assert all(len(row["top_keys"].split()) == 5 for row in keys)
