"""Manipulated checkpoints are refused with the name of the changed part."""

import copy
import functools
import operator

import pytest
import torch

from backbones.checkpoints.opening import open_checkpoint
from backbones.checkpoints.seal import DamagedCheckpoint, seal
from tests.running.tiny import tiny_data, tiny_task
from tools.runs import trainer as trainers
from tools.runs.resume import find_start

pytestmark = pytest.mark.usefixtures("one_thread")


def task_of():
    return tiny_task(schedule={"name": "cosine", "warmup": 0.5}, ema={"decay": 0.5})


@pytest.fixture(scope="module")
def trained(sample_cache, trainer_options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    options = trainer_options | {"max_epochs": 9, "max_steps": 3}
    options |= {"limit_train_batches": 2, "limit_val_batches": 1}
    data, task = tiny_data(sample_cache, digits=2), task_of()
    trainer = trainers.make_trainer(options, folder, task.monitor, task.mode, training=True)
    trainers.fit(trainer, task, data)
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True), options


@pytest.fixture
def start(trained, tmp_path):
    def start(change, sealed=True):
        content = copy.deepcopy(trained[0])
        change(content)
        del content["mixerlab"]
        file = tmp_path / "checkpoints" / "last.ckpt"
        file.parent.mkdir(exist_ok=True)
        torch.save(seal(content) if sealed else content, file)
        return find_start(tmp_path, None, task_of(), trained[1])

    return start


def put(path, value):
    def change(content):
        *parents, last = (int(key) if key.isdecimal() else key for key in path.split("/"))
        functools.reduce(operator.getitem, parents, content)[last] = value

    return change


@pytest.mark.parametrize("loops", [None, "x", {}, {"fit_loop": {"state_dict": 3}}])
def test_lightnings_counters_in_the_file_are_ignored(loops, start):
    opened = start(put("loops", loops))
    assert opened.position.step == 3
    assert opened.take().content["loops"] == loops


@pytest.mark.parametrize(
    "name",
    ["random_state", "callbacks", "optimizer_states", "lr_schedulers", "state_dict", "ema_steps",
     "pytorch-lightning_version"],
)  # fmt: skip
def test_a_missing_part_is_named(name, start):
    with pytest.raises(ValueError, match=f"last.ckpt .*{name}"):
        start(lambda content: content.pop(name))


def looped():
    content = {}
    content["a"] = [content]
    return content


KINDS = {
    "float8": lambda: torch.zeros(2).to(torch.float8_e4m3fn),
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.zeros(2, 2).to_sparse(),
    "sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
    "complex": lambda: torch.zeros(2, dtype=torch.complex64),
    "stored ones": lambda: torch.zeros(1).expand(10**12),
    "nested deeper": looped,
    "more than": lambda: functools.reduce(lambda inner, _: [inner] * 20, range(9), 0),
    "64 bits": lambda: 10**30,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["state_dict", pytest.param("anywhere", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*(Sparse|prototype|nested|TypedStorage).*")
def test_unexpected_tensors_and_infinite_values_are_named(kind, place, tmp_path):
    content = {"state_dict": {"a": torch.zeros(2)}, "anywhere": {}}
    content[place]["odd"] = KINDS[kind]()
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DamagedCheckpoint, match=rf"a\.pt.*{kind}"):
        open_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "odd", [{"network": 3}, {"class_names": {1: "a"}}, {"global_step": "x"}, {"callbacks": []}]
)
def test_foreign_files_may_use_our_names_differently(odd, tmp_path):
    torch.save({"state_dict": {"a": torch.zeros(2)}, **odd}, tmp_path / "a.pt")
    opened = open_checkpoint(tmp_path / "a.pt")
    assert list(opened.tensors) == ["a"]
    assert (dict(opened.record), opened.class_names, opened.step) == ({}, None, None)


def test_a_last_checkpoint_of_another_form_is_skipped(start, trained, tmp_path, caplog):
    (tmp_path / "checkpoints").mkdir()
    torch.save(trained[0], tmp_path / "checkpoints" / "last.previous.ckpt")
    torch.save(seal(trained[0] | {"position": 3}), tmp_path / "checkpoints" / "last.ckpt")
    with caplog.at_level("INFO"):
        found = find_start(tmp_path, None, task_of(), trained[1])
    assert found.path.name == "last.previous.ckpt"
    assert "position must be a dictionary" in caplog.text
