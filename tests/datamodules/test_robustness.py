"""ImageNet's robustness datasets on disk: classes, columns and completeness."""

import shutil

import pytest

from datamodules import RobustnessDataModule
from datamodules.corruptions import KINDS
from datamodules.images.robustness_sets import SYNSETS, subset_classes
from tests.datamodules import loading
from tests.errors import refuses
from tests.stand_ins import write_c, write_classes, write_subset, write_v2

DIGITS = ("eight", "five", "one")


def robustness(root, *sets, **options):
    options = {"published_counts": False, "image_size": 32, "num_workers": 0, **options}
    return RobustnessDataModule(root, **({"sets": sets} if sets else {}), **options)


module, ready, rejected, not_found = loading.bound(robustness)


def test_classes_are_the_published_ones():
    assert len(SYNSETS) == 1000
    assert list(SYNSETS) == sorted(SYNSETS)
    a, r = set(subset_classes("imagenet_a")), set(subset_classes("imagenet_r"))
    assert (len(a), len(r), len(a & r)) == (200, 200, 86)


@pytest.mark.parametrize("name", ["imagenet_a", "imagenet_r"])
def test_labels_and_columns_of_200_classes(tmp_path, name):
    root = tmp_path / "set"
    write_subset(root, name)
    data = ready(root, name)
    (part,) = data.parts
    assert data.class_names == SYNSETS
    assert part.columns == part.labels == subset_classes(name)
    assert [file.split("/")[0] for file in part.files] == [SYNSETS[i] for i in part.labels]
    assert data.dataset("val")[0, 3]["label"] == part.labels[3]
    message = r"are incomplete \(restore .*200 images instead of (7,500|30,000)"
    rejected(root, name, message, published_counts=True)
    shutil.rmtree(root / SYNSETS[part.labels[5]])
    rejected(root, name, rf"no images of 1 classes: {SYNSETS[part.labels[5]]}")
    write_classes(root, ["n00000000"])
    rejected(root, name, r"not among the 200 classes of .*: n00000000")


def test_v2_is_read_by_number(tmp_path):
    write_v2(tmp_path)
    (part,) = ready(tmp_path, "imagenet_v2").parts
    assert part.labels == tuple(range(1000))
    assert part.files[10].startswith("10/")
    assert not part.columns
    (tmp_path / "1000").mkdir()
    rejected(tmp_path, "imagenet_v2", r"other than ImageNetV2's 0 to 999 .*: 1000")


@pytest.mark.parametrize("grouped", [False, True])
def test_c_has_75_parts(tmp_path, grouped, caplog):
    write_c(tmp_path, DIGITS, grouped)
    data = ready(tmp_path, "imagenet_c", published_counts=True)
    assert data.class_names == DIGITS
    assert [part.name for part in data.parts] == [
        f"imagenet_c/{kind}/{severity}" for kind in KINDS for severity in range(1, 6)
    ]
    assert not data.found["imagenet_c"].lacks
    assert data.sizes() == {"imagenet_c": 225}
    assert "resized to 32" in caplog.text or not caplog.text
    data.choose(data.parts[74])
    assert data.dataset("val").describe(2).endswith("jpeg_compression/5/one/0.JPEG")
    assert data.dataset("val")[0, 2]["label"] == 2
    assert {len(part.fingerprint) for part in data.parts} == {16}


def test_incomplete_c(tmp_path):
    write_c(tmp_path, DIGITS)
    shutil.rmtree(tmp_path / "fog/3")
    data = ready(tmp_path, "imagenet_c")
    assert len(data.parts) == 74
    assert data.found["imagenet_c"].lacks == ("no imagenet_c/fog/3",)
    (tmp_path / "snow/1/one/0.JPEG").unlink()
    lacks = ready(tmp_path, "imagenet_c").found["imagenet_c"].lacks
    assert lacks == ("no imagenet_c/fog/3", "imagenet_c/snow/1 has 2 images instead of 3")
    rejected(tmp_path / "fog", "imagenet_c", r"lacks <kind>/<severity>/<class>/")


def test_wrong_folders_are_rejected(tmp_path):
    not_found(tmp_path, r"must hold one of the folders imagenet or")
    absent = tmp_path / "absent"
    message = f"data.roots.imagenet_a={absent} is not a folder"
    not_found(tmp_path, message, roots={"imagenet_a": str(absent)})
    rejected(tmp_path, "imagenet_z", "must be sets of imagenet, imagenet_c")
    write_c(tmp_path / "imagenet-c", DIGITS)
    write_subset(tmp_path / "imagenet-a", "imagenet_a")
    rejected(tmp_path, "pass data=imagenet_c to evaluate it alone")
    data = ready(tmp_path, "imagenet_c")
    refuses("only evaluate: pass mode=test", data.check_files)
