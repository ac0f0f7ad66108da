"""Checkpoints that survive a kill and run no code, and the random state in them."""

import errno
import random

import numpy as np
import pytest
import torch

from tasks.checkpoint_io import AtomicCheckpointIO
from tasks.exact_resume import random_state, set_random_state


def test_checkpoint_round_trip(tmp_path):
    target = tmp_path / "new" / "last.ckpt"
    content = {"state_dict": {"w": torch.arange(3.0)}, "epoch": 2, "notes": ["a", None]}
    AtomicCheckpointIO().save_checkpoint(content, target)
    loaded = AtomicCheckpointIO().load_checkpoint(target)
    assert loaded["state_dict"]["w"].equal(content["state_dict"]["w"])
    assert (loaded["epoch"], loaded["notes"]) == (2, ["a", None])
    assert [path.name for path in target.parent.iterdir()] == ["last.ckpt"]


def test_what_a_kill_left_is_removed(tmp_path):
    (tmp_path / "epoch=1.ckpt.partial").write_bytes(b"half a file")
    AtomicCheckpointIO().save_checkpoint({"epoch": 2}, tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("short")])
def test_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch, error):
    target = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"epoch": 1}, target)
    before = target.read_bytes()

    def half(content, file):
        file.write(before[: len(before) // 2])
        raise error

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match=r"last\.ckpt could not be written .*the one before is kept"):
        AtomicCheckpointIO().save_checkpoint({"epoch": 2}, target)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    torch.save({"epoch": Harmful(tmp_path / "ran")}, tmp_path / "bad.ckpt")
    for weights_only in (True, False, None):
        with pytest.raises(ValueError, match=r"bad\.ckpt is truncated or no checkpoint of tensors"):
            AtomicCheckpointIO().load_checkpoint(tmp_path / "bad.ckpt", weights_only=weights_only)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.95])
def test_truncated_checkpoint(tmp_path, share):
    target = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(1000)}, target)
    content = target.read_bytes()
    target.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=r"last\.ckpt is truncated"):
        AtomicCheckpointIO().load_checkpoint(target)


def test_absent_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="there is no checkpoint at"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")


# Random state


def draw():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.randn(3).tolist(),
        torch.rand(3).tolist(),
    ]


def test_random_state_goes_through_a_safe_checkpoint(tmp_path):
    own = random_state()
    random.gauss(0, 1)  # leaves a second number cached
    np.random.randn()
    torch.save(random_state(), tmp_path / "state.pt")
    expected = draw()
    draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == expected
    set_random_state(own)
