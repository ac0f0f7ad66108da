"""Steps of run.py against a plain loop on small networks: what is timed, not how long it takes."""

import copy

import pytest
import torch

from tools.bench import loop
from tools.bench.timing import CLOCKS
from tools.config.config_checks import resolve_config
from tools.config.overrides import read_command
from tools.config.run_config import job_config
from tools.runs.components import build_components

pytestmark = pytest.mark.usefixtures("sample_cache")
SMALL = ("data.image_size=64", "data.batch_size=2", "data.train_copies=1",
         "++data.digits_per_class=4")  # fmt: skip


@pytest.mark.slow
def test_the_bare_loop_trains_the_network_as_the_run_does(tmp_path, monkeypatch):
    """Both reach the same weights from the same images after each step."""
    monkeypatch.setattr(loop, "OTHER_EPOCH", 0)
    typed = [
        "task=classification", "backbone=resnet18", "trainer=cpu", "logger=csv",
        f"trainer.max_epochs={loop.ENDLESS}", *SMALL,
    ]  # fmt: skip
    command = read_command(typed)
    config = resolve_config(job_config(command.words, command.config))
    parts = build_components(config, tmp_path, resumed=False)
    turns = loop.PlainSteps(copy.deepcopy(parts.task), 3, CLOCKS["process"])
    parts.engine.callbacks.append(turns)
    with pytest.raises(loop.EnoughRounds):
        parts.engine.fit(parts.task, datamodule=parts.datamodule)
    own, other = (task.model.state_dict() for task in (parts.task, turns.twin))
    for name, weight in own.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=0)
    assert len(turns.bare) == len(turns.ours) == 3
    assert all(seconds > 0 for seconds in (*turns.bare, *turns.ours))
