"""Checkpoints survive a kill, execute no code and restore the random state."""

import errno
import random

import numpy as np
import pytest
import torch

from backbones.checkpoints.opening import open_checkpoint
from backbones.checkpoints.seal import DamagedCheckpoint, checksum, seal
from tasks.engine.checkpoints.exact_resume import random_state, set_random_state
from tasks.engine.checkpoints.files import AtomicCheckpointIO


def test_checkpoint_round_trip(tmp_path):
    (tmp_path / "epoch=1.ckpt.partial").write_bytes(b"half a file")
    AtomicCheckpointIO().save_checkpoint({"epoch": 2}, tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    target = tmp_path / "new" / "last.ckpt"
    content = {"state_dict": {"w": torch.arange(3.0)}, "epoch": 2, "notes": ["a", None]}
    AtomicCheckpointIO().save_checkpoint(content, target)
    loaded = AtomicCheckpointIO().load_checkpoint(target)
    assert loaded["state_dict"]["w"].equal(content["state_dict"]["w"])
    assert (loaded["epoch"], loaded["notes"]) == (2, ["a", None])
    assert [path.name for path in target.parent.iterdir()] == ["last.ckpt"]
    with pytest.raises(ValueError, match="there is no checkpoint at"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "absent.ckpt")


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


def flips(raw, count):
    """Yield the bytes with one bit flipped, at evenly spread places."""
    for place in range(0, 8 * len(raw), 8 * len(raw) // count + 1):
        turned = bytearray(raw)
        turned[place // 8] ^= 1 << place % 8
        yield bytes(turned)


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    """Flipped bits of padding and dates have the same content."""
    target = tmp_path / "a.ckpt"
    content = {"state_dict": {"w": torch.arange(200.0)}, "notes": ["a", None, (1, 2.5)], "n": 3}
    AtomicCheckpointIO().save_checkpoint(content, target)
    whole, refused = AtomicCheckpointIO().load_checkpoint(target), []
    for turned in flips(target.read_bytes(), 300):
        target.write_bytes(turned)
        try:
            loaded = AtomicCheckpointIO().load_checkpoint(target)
        except DamagedCheckpoint as error:
            refused.append(str(error))
            continue
        assert loaded["state_dict"]["w"].equal(whole["state_dict"]["w"])
        assert (loaded["notes"], loaded["n"]) == (whole["notes"], whole["n"])
    assert len(refused) > 100
    for text in refused:
        assert text.startswith(f"{target} is ")
        assert "pass another checkpoint of the run" in text


def test_damaged_newer_and_foreign_checkpoints_are_named(tmp_path):
    target = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(5000)}}, target)
    raw = bytearray(target.read_bytes())
    raw[len(raw) // 2] ^= 1
    target.write_bytes(raw)
    with pytest.raises(ValueError, match="is damaged: its checksum differs from its content"):
        open_checkpoint(target)
    target = tmp_path / "a.ckpt"
    torch.save(seal({"w": torch.zeros(2)}) | {"mixerlab": {"format": 9, "version": "7.0"}}, target)
    with pytest.raises(ValueError, match=r"MixerLab 7\.0 in a newer format .*update MixerLab"):
        AtomicCheckpointIO().load_checkpoint(target)
    torch.save({"epoch": 1}, tmp_path / "old.ckpt")
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "old.ckpt") == {"epoch": 1}
    (tmp_path / "text.ckpt").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DamagedCheckpoint, match=r"text\.ckpt is truncated or no checkpoint"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "text.ckpt")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float16])
def test_the_checksum_is_of_all_types_and_of_the_order(dtype):
    value = torch.tensor([0, 1, 1]).to(dtype)
    assert checksum({"a": value}) == checksum({"a": value.clone()})
    different = [{"a": value.flip(0)}, {"b": value}, {"a": value[:2]}, {"a": value.reshape(3, 1)}]
    assert len({checksum(content) for content in [{"a": value}, *different]}) == 5


def test_the_previous_checkpoint_stays(tmp_path):
    for epoch in range(3):
        AtomicCheckpointIO().save_checkpoint({"epoch": epoch}, tmp_path / "last.ckpt")
    loaded = {path.name: torch.load(path)["epoch"] for path in tmp_path.iterdir()}
    assert loaded == {"last.ckpt": 2, "last.previous.ckpt": 1}


def draw():
    numbers = np.random.randn(3).tolist(), torch.rand(3).tolist()
    return [random.random(), random.gauss(0, 1), *numbers]


def test_random_state_goes_through_a_safe_checkpoint(tmp_path):
    own = random_state()
    random.gauss(0, 1)  # caches a second number
    np.random.randn()
    torch.save(random_state(), tmp_path / "state.pt")
    expected = draw()
    draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == expected
    set_random_state(own)
