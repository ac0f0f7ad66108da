"""Order, shares and random numbers of samples."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from datamodules.base import BaseDataModule
from datamodules.loading.sampling import EpochSampler, EvalSampler, SeededDataset
from tests.datamodules import loading


class Noise:
    def __len__(self):
        return 11

    def __getitem__(self, index):
        if index == 10:
            raise KeyError("lost")
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()])


class NoiseModule(BaseDataModule):
    def build(self):
        data = self.seeded(torch.utils.data.Subset(Noise(), range(10)), lambda i: f"noise{i}.jpg")
        return {"train": data, "val": data}


_, ready, *_ = loading.bound(NoiseModule, num_workers=0)


def epochs(module, count):
    loader = module.train_dataloader()
    for epoch in range(count):
        loader.sampler.set_epoch(epoch)
        yield [batch.tolist() for batch in loader]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("workers", [0, 2])
def test_memory_is_pinned_for_gpus_that_a_run_uses(device, workers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module = NoiseModule(None, batch_size=2, num_workers=workers)
    module.setup()
    assert not module.val_dataloader().pin_memory
    strategy = SimpleNamespace(root_device=torch.device(device))
    module.trainer = SimpleNamespace(strategy=strategy)
    for loader in (module.train_dataloader(), module.val_dataloader()):
        assert loader.pin_memory == (device == "cuda")
        assert loader.persistent_workers == (workers > 0)


@pytest.mark.parametrize(("length", "world_size"), [(10, 1), (10, 3), (2, 4)])
def test_epoch_sampler_shares_equally(length, world_size):
    samplers = [EpochSampler(length, 5, rank=r, world_size=world_size) for r in range(world_size)]
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])} == {max(length // world_size, 1)}
    indices = [index for share in shares for _, index in share]
    assert set(indices) <= set(range(length))
    assert len(set(indices)) == min(len(indices), length)


def test_epoch_sampler_orders_and_offsets():
    sampler = EpochSampler(50, seed=1)
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert {epoch for epoch, _ in second} == {1}
    assert [index for _, index in first] != [index for _, index in second]
    sampler = EpochSampler(10, seed=3, rank=1, world_size=2)
    whole = list(sampler)
    sampler.set_offset(2)
    assert list(sampler) == whole[2:]
    assert list(sampler) == whole  # the offset counts once
    assert len(sampler) == 5


@pytest.mark.parametrize("size", [1, 2, 3])
def test_repeats_are_spread_over_ranks_and_differ(size):
    samplers = [EpochSampler(12, 5, repeats=3, rank=r, world_size=size) for r in range(size)]
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])} == {12 // size}
    order = [key for turn in zip(*shares, strict=True) for key in turn]
    once = [index for _, index in EpochSampler(12, 5)]
    assert [index for _, index in order] == [index for index in once[:4] for _ in range(3)]
    assert len(set(order)) == 12  # all with different random numbers
    samplers[0].set_epoch(1)
    assert not {number for number, _ in samplers[0]} & {number for number, _ in order}
    samplers[0].set_epoch(0)
    samplers[0].set_offset(2)
    assert list(samplers[0]) == shares[0][2:]


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_keys_equal_those_of_the_formula(repeats):
    """Repetition r of epoch e has the unique number e * repeats + r."""
    sampler, numbers = EpochSampler(12, 5, repeats=repeats), []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        keys = list(sampler)
        order = np.random.default_rng([5, epoch]).permutation(12).tolist()
        of_formula = [(epoch * repeats + r, index) for index in order for r in range(repeats)]
        assert keys == of_formula[:12]
        numbers += sorted({number for number, _ in keys})
    assert numbers == list(range(6 * repeats))


@pytest.mark.parametrize("world_size", [1, 2, 3, 10])
def test_eval_sampler_sees_each_sample_once(world_size):
    shares = [EvalSampler(10, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(key for share in shares for key in share) == [(0, index) for index in range(10)]
    assert sum(len(share) for share in shares) == 10


def test_samples_depend_on_key_and_seed_only():
    data = SeededDataset(Noise(), 7, str)
    fourth = data[(0, 4)].tolist()
    assert data[(0, 3)].tolist()[1:] != fourth[1:]
    assert data[(0, 4)].tolist() == fourth
    assert data[(1, 4)].tolist() != fourth
    assert SeededDataset(Noise(), 8, str)[(0, 4)].tolist() != fourth
    keys = [(0, 1), (0, 3), (2, 1), (0, 1)]
    batch = [sample.tolist() for sample in data.__getitems__(keys)]
    assert batch == [data[key].tolist() for key in keys]
    assert batch[0] == batch[3] != batch[2]


def test_global_generators_are_restored():
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    data = SeededDataset(Noise(), 0, str)
    data[(0, 1)]
    with pytest.raises(ValueError, match="lost"):
        data[(0, 10)]
    list(ready("unused", batch_size=2).train_dataloader())
    assert draw() == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_resume_within_an_epoch(workers):
    module = ready("unused", batch_size=3, num_workers=workers)
    unbroken = list(epochs(module, 3))
    module.resume_at(epoch=1, batches=2)
    loader = module.train_dataloader()
    rest = [batch.tolist() for batch in loader]
    assert rest == unbroken[1][2:]
    loader.sampler.set_epoch(2)
    assert [batch.tolist() for batch in loader] == unbroken[2]


def test_processes_share_the_samples(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    trained, evaluated = [], []
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        module = ready("unused", batch_size=2)
        trained.append(sorted(int(i) for b in module.train_dataloader() for i in b[:, 0]))
        evaluated.append([int(i) for b in module.val_dataloader() for i in b[:, 0]])
    assert evaluated == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert not set(trained[0]) & set(trained[1])
    assert len(trained[0]) == len(trained[1]) == 4
