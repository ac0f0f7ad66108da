"""tools/verify.py on stand-ins of ImageNet and of published files."""

import pytest
import timm
import torch

from datamodules.images.synsets import SYNSETS
from tests.stand_ins import write_classes
from tools.verify import NETWORKS, judge, main

SMALL = ("data.published_counts=false", "data.image_size=64", "data.num_workers=0", "trainer=cpu")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenet")
    write_classes(root / "val", SYNSETS)
    return root


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    network = timm.create_model("deit_tiny_patch16_224")
    torch.save({"model": network.state_dict()}, folder / "deit_tiny_patch16_224-a1311bcf.pth")
    return folder


def ended(capsys, images, weights, *more):
    words = [f"data={images}", f"weights={weights}", f"out={weights.parent / 'runs'}"]
    status = main([*words, *more])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_files_and_options_are_checked_before_anything_runs(images, weights, tmp_path, capsys):
    status, out, err = ended(capsys, images, weights)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert NETWORKS["swin_t"].url in err
    (weights / "deit_tiny_patch16_224.pth").touch()
    assert "keep the file of deit_t alone" in ended(capsys, images, weights, "network=deit_t")[2]
    assert "got 'vit'" in ended(capsys, images, weights, "network=vit")[2]
    assert "nowhere" in ended(capsys, tmp_path / "nowhere", weights)[2]


def test_verdicts():
    assert judge(81.30, 81.376) == "agrees"
    assert judge(81.00, 81.376) == "differs by -0.376 points"
    assert judge(0.1, 81.376).startswith("has 0.100 % instead of 81.376 %, as by chance")


@pytest.mark.slow
def test_untrained_weights_are_measured_and_named(images, weights, capsys):
    status, out, err = ended(capsys, images, weights, "network=deit_t", *SMALL)
    assert status == 2
    assert "deit_tiny_patch16_224-a1311bcf.pth" in out
    assert err.startswith("verify.py: deit_t has 0.")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_wrong_files_classes_and_counts_end_in_one_line(images, weights, tmp_path, capsys):
    _, _, err = ended(capsys, images, weights, "network=deit_t", "trainer=cpu")
    assert err.startswith("verify.py: deit_t: all sets are incomplete")
    write_classes(tmp_path / "numbers/val", map(str, range(1000)))
    _, _, err = ended(capsys, tmp_path / "numbers", weights, "network=deit_t", *SMALL)
    assert "not among the 1000 classes of imagenet" in err
    assert err.count("\n") == 1
    network = timm.create_model("deit_small_patch16_224")
    torch.save(network.state_dict(), weights / "deit_tiny_patch16_224-a1311bcf.pth")
    _, _, err = ended(capsys, images, weights, "network=deit_t", *SMALL)
    assert "deit_tiny_patch16_224-a1311bcf.pth" in err
    assert err.count("\n") == 1
