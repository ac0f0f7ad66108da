"""The output of ``--cfg job``."""

import sys

import pytest
import yaml

from tests.runs import composed, write_run
from tools import run as command


@pytest.fixture
def runs(monkeypatch):
    """Record the configs of the runs that a command starts."""
    started = []
    monkeypatch.setattr(command, "run", lambda config, swept=None: started.append(config))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None, raising=False)
    monkeypatch.setattr(command.logging, "basicConfig", lambda **_: None)  # keep pytest's logging
    monkeypatch.setattr("hydra.core.utils.configure_log", lambda *_: None)
    return started


def run_command_line(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    return command.main()


@pytest.fixture
def run_folder(tmp_path):
    """The part of a run folder that an evaluation needs."""
    config = composed("task=detection", "backbone=swin_t_afbo", "head=retinanet")
    return write_run(tmp_path, config)


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["-c", "job"], ["--cfg=job", "--resolve"]])
def test_cfg_shows_the_config_of_the_run(monkeypatch, runs, run_folder, capsys, flags):
    arguments = ["mode=test", f"ckpt={run_folder}", "head.anchor_scale=8"]
    assert run_command_line(monkeypatch, *arguments, *flags) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert not runs
    assert (shown["task_name"], shown["head"]["name"]) == ("detection", "retinanet")
    assert shown["head"]["anchor_scale"] == 8
    assert shown["backbone"]["name"] == "swin_t_afbo"


def test_cfg_of_a_training_shows_its_references(monkeypatch, runs, capsys):
    assert run_command_line(monkeypatch, "--cfg", "job", "backbone=swin_t") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["backbone"]["img_size"] == "${oc.select:data.image_size}"
    assert run_command_line(monkeypatch, "--help", "config", "backbone=swin_t") == 0
    assert yaml.safe_load(capsys.readouterr().out) == shown
