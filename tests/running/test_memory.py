"""A run's memory: garbage collection excludes imports, freed memory is kept, batches are not."""

import gc
from pathlib import Path

import pytest
import torch

from datamodules.loading.workers import Loader
from tasks.engine.family import families
from tests.runs import SMALLEST, completed, single_words


@pytest.fixture(autouse=True)
def collecting():
    """Isolate these tests from the collector's state in other tests."""
    gc.unfreeze()
    gc.enable()
    yield
    gc.freeze()
    gc.enable()


# Words of each family's smallest run by which it has eight batches of validation or more.
PAIRS, SINGLE = ("data.eval_batch_size=2",), ("data.eval_batch_size=1",)
EIGHT = {
    "classification": PAIRS, "detection": ("data.num_val=16", *PAIRS),
    "forecasting": ("data.eval_batch_size=4",), "generation": PAIRS,
    "glue": ("data.num_train=16", "data.num_val=16", "data.batch_size=8", *PAIRS),
    "multi_label": ("data.num_train=8", "data.batch_size=8", *PAIRS),
    "point_segmentation": ("data.num_val=8", *SINGLE),
    "segmentation": ("data.num_val=16", *PAIRS), "super_resolution": SINGLE,
    "transfer": ("protocol=knn", "data.train_per_class=2", *PAIRS),
}  # fmt: skip


def move_to_shared_memory(part, done):
    """Move the tensors of a batch to where those of worker processes are."""
    if id(part) in done:
        return
    done.add(id(part))
    if isinstance(part, torch.Tensor):
        part.share_memory_()
    elif isinstance(part, dict | list | tuple):
        for value in part.values() if isinstance(part, dict) else part:
            move_to_shared_memory(value, done)
    elif hasattr(part, "__dict__"):  # a sample of a toolkit
        move_to_shared_memory(vars(part), done)


def shared_tensors():
    """Return the number of files that tensors in shared memory keep open."""
    files = Path("/proc/self/fd").iterdir()
    return sum("torch_" in str(file.readlink()) for file in files if file.is_symlink())


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
@pytest.mark.usefixtures("sample_cache")
def test_batches_are_not_kept_after_their_step(family, tmp_path, capsys, monkeypatch):
    """Each tensor of a worker keeps a file open, and 1,024 are the usual limit."""
    make, loaders = Loader.__iter__, []

    def shared_batches(loader):
        loaders.append([])
        for batch in make(loader):
            move_to_shared_memory(batch, set())
            loaders[-1].append(shared_tensors())
            yield batch
            del batch

    monkeypatch.setattr(Loader, "__iter__", shared_batches)
    few = ("trainer=cpu", "trainer.max_epochs=1", "trainer.limit_train_batches=2",
           "trainer.limit_val_batches=8", "schedule.warmup=0", "logger=csv")  # fmt: skip
    words = [f"task={family}", *SMALLEST[family], *EIGHT[family], *few, f"output_dir={tmp_path}"]
    typed = single_words(words)
    if family == "transfer":  # needs the features of all images
        typed = [word for word in typed if "limit" not in word]
    folder = completed(typed, capsys).folder()
    if family not in ("generation", "transfer"):  # draws; solves from features
        completed(["mode=predict", f"ckpt={folder}", f"output_dir={tmp_path}"], capsys)
    assert sum(len(counts) >= 8 for counts in loaders) >= 2
    for counts in loaders:
        assert max(counts[2:], default=0) <= max(counts[:3])
