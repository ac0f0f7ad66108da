"""A training is refused at the start if its checkpoints exceed the disk space."""

import resource
from types import SimpleNamespace

import pytest
import torch

from tests.running.tiny import ADAMW, tiny_task
from tools.runs import disk

SGD = {"name": "sgd", "lr": 0.1}


@pytest.mark.parametrize(
    ("options", "states"),
    [(ADAMW, 2), (ADAMW | {"amsgrad": True}, 3), (SGD, 0), (SGD | {"momentum": 0.9}, 1),
     ({"name": "lamb", "lr": 1e-3}, 2)],
    ids=str,
)  # fmt: skip
def test_sizes_equal_those_of_the_saved_tensors(options, states):
    before = torch.get_rng_state()
    task = tiny_task(optimizer=options, ema={"decay": 0.9})
    drawn = torch.get_rng_state()
    weights, state = disk.checkpoint_sizes(task)
    assert torch.get_rng_state().equal(drawn)
    assert not drawn.equal(before)
    assert state == states * sum(p.nbytes for p in task.parameters())
    assert weights == 2 * sum(value.nbytes for value in task.state_dict().values())


def check(folder, monkeypatch, free, limit=resource.RLIM_INFINITY):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(disk.resource, "getrlimit", lambda _: (limit, limit))
    disk.check_space(folder, tiny_task(), top_k=1)


def test_free_space_must_fit_three_checkpoints_and_the_best_ones(tmp_path, monkeypatch):
    weights, state = disk.checkpoint_sizes(tiny_task())
    needed = 3 * (weights + state) + 2 * weights + disk.RESERVE
    check(tmp_path, monkeypatch, free=needed)
    with pytest.raises(ValueError, match=r"has 16 MiB of free space, but the checkpoints .* take"):
        check(tmp_path, monkeypatch, free=needed - 1)
    # A resumed run replaces existing files.
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b" ")
    check(tmp_path, monkeypatch, free=needed - 1)


def test_a_limit_of_a_files_size_is_named(tmp_path, monkeypatch):
    size = sum(disk.checkpoint_sizes(tiny_task()))
    check(tmp_path, monkeypatch, free=2**40, limit=size)
    with pytest.raises(ValueError, match=r"files are limited to 0 MiB \(ulimit -f\); raise"):
        check(tmp_path, monkeypatch, free=2**40, limit=size - 1)
