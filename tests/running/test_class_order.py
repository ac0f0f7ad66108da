"""Numbered class folders: classifiers of timm and ours score right, and a run keeps its order."""

import pytest
import yaml

from tests import numbered
from tests.numbered import CLASSES, TEXT, TYPED, classifier
from tests.runs import completed, run_here, summary

ONE_IN_TWELVE = 100 / CLASSES  # "1" is first in both orders


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return numbered.write_folders(tmp_path_factory.mktemp("numbered"))


@pytest.fixture(scope="module")
def natural(folders, tmp_path_factory):
    """Save a classifier in timm's order and format."""
    file = tmp_path_factory.mktemp("weights") / "timm.pth"
    numbered.save_foreign(classifier(folders, "natural"), file)
    return file


def top1(typed, capsys):
    return summary(completed(typed, capsys).folder())["metrics"]["top1"]


def test_a_classifier_that_timm_trained(folders, natural, tmp_path, capsys):
    typed = [*TYPED, "mode=test", f"ckpt={natural}", f"data.root={folders}",
             f"output_dir={tmp_path}", f"backbone.img_size={numbered.SIZE}"]  # fmt: skip
    with pytest.warns(UserWarning, match=r"class 1 is '10' here .* '2' in timm .*pass data\.class"):
        assert top1(typed, capsys) == pytest.approx(ONE_IN_TWELVE)
    ended = completed([*typed, "data.class_order=natural"], capsys)
    assert summary(ended.folder())["metrics"]["top1"] == 100
    assert "not used" not in ended.out + ended.err
    config = yaml.safe_load((ended.folder() / "config.yaml").read_text())
    assert config["data"]["class_order"] == "natural"
    ended = run_here([*typed, "data.class_order=size"], capsys)
    assert "data.class_order=size is not one of text, natural" in ended.err


def test_a_checkpoint_of_ours_in_the_other_order_is_refused(folders, tmp_path, capsys):
    file = tmp_path / "ours.ckpt"
    numbered.save_ours(classifier(folders, "text"), file, TEXT)
    typed = [*TYPED, "mode=test", f"ckpt={file}", f"data.root={folders}", f"output_dir={tmp_path}"]
    ended = run_here([*typed, "data.class_order=natural"], capsys)
    assert ended.status == 2
    assert "the same 12 classes in another order" in ended.err
    assert ended.err.endswith("; pass data.class_order=text\n")
