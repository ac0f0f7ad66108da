"""The contract of every export target: a whole folder, one that is replaced, and refusals."""

import pytest
import torch

from backbones import create_backbone
from heads.linear import LinearClassifier
from tests.families import rest_slow
from tools import export
from tools.export import OF_BACKBONES
from tools.exports.requests import MARK, TARGETS


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Files of classifiers: of a larger host, and of the host without its mixers."""
    folder = tmp_path_factory.mktemp("weights")
    for name in ("deit_s", "deit_t"):
        network = LinearClassifier(create_backbone(name, img_size=64), 10)
        torch.save(network.state_dict(), folder / f"{name}.pth")
    return folder


@pytest.mark.parametrize("to", rest_slow(OF_BACKBONES, ["timm"]))
def test_a_target_writes_a_whole_folder_and_replaces_its_own(to, tmp_path, capsys):
    for package in TARGETS[to].needs:
        pytest.importorskip(package)
    out = tmp_path / "out"
    typed = ["backbone=resnet18", f"to={to}", "image_size=64", f"out={out}"]
    assert export.main(typed) == 0
    printed = capsys.readouterr().out.splitlines()
    files = {path for path in out.rglob("*") if path.is_file()}
    assert {out / name.removeprefix(f"{out}/") for name in printed} <= files
    assert {out / "README.md", out / MARK} <= files
    assert "resnet18" in (out / "README.md").read_text()
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}
    assert export.main(typed) == 2
    assert "exists; pass overwrite=true" in capsys.readouterr().err
    (out / "mine.txt").write_text("mine")
    first = next(iter(files - {out / MARK}))
    first.unlink()
    assert export.main([*typed, "overwrite=true"]) == 0
    assert {path for path in out.rglob("*") if path.is_file()} == files | {out / "mine.txt"}


@pytest.mark.parametrize("to", OF_BACKBONES)
def test_a_target_refuses_weights_of_another_network(to, weights, tmp_path, capsys):
    """And those without the mixers, which an evaluation would leave at random."""
    lacking = "lacks the weights of the mixers of deit_t_afbo (blocks.0.mlp, "
    for name, said in (("deit_s", "keys differ"), ("deit_t", lacking)):
        typed = ["backbone=deit_t_afbo", "backbone.img_size=64", f"to={to}"]
        file = weights / f"{name}.pth"
        assert export.main([*typed, f"ckpt={file}", f"out={tmp_path / 'out'}"]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
