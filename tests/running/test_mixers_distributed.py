"""Every mixer in two gloo processes: one step, equal gradients, and every parameter is used."""

import json

import pytest
import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from backbones import create_mixer, list_mixers

PROCESSES = 2


def one_step(name):
    """Return what is wrong with a mixer's step in this process; empty if nothing is."""
    torch.manual_seed(0)
    mixer = create_mixer(name, 64, grid=(8, 8))
    if not list(mixer.parameters()):
        return ""
    plain = create_mixer(name, 64, grid=(8, 8))
    plain.load_state_dict(mixer.state_dict())
    wrapped = DistributedDataParallel(mixer)
    images = torch.randn(2 * PROCESSES, 8, 8, 64)
    rank = distributed.get_rank()
    for _ in range(2):  # the second pass fails if the first left parameters out
        wrapped.zero_grad()
        torch.manual_seed(1)
        wrapped(images[2 * rank : 2 * rank + 2]).square().mean().backward()
    unused = [key for key, value in mixer.named_parameters() if value.grad is None]
    if unused:
        return f"unused: {unused}"
    total = torch.stack([value.grad.double().norm() for value in mixer.parameters()]).norm()
    others = [torch.zeros_like(total) for _ in range(PROCESSES)]
    distributed.all_gather(others, total)
    return "" if torch.equal(others[0], others[1]) else f"gradients differ: {others}"


def work(rank, folder, names):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    found = {}
    for name in names:
        try:
            found[name] = one_step(name)
        except RuntimeError as error:
            found[name] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_every_mixer_trains_in_two_processes(tmp_path):
    names = list_mixers()
    multiprocessing.spawn(work, (tmp_path, names), PROCESSES)
    for rank in range(PROCESSES):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.keys() == set(names)
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
