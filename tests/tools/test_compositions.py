"""Number of Hydra compositions per command, and the output of ``--cfg job``."""

import sys

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from tests.runs import composed, write_run
from tools import run as command


@pytest.fixture
def compositions(monkeypatch):
    """Record the overrides of every composition."""
    original, counted = ConfigLoaderImpl.load_configuration, []

    def load_configuration(loader, config_name, overrides, *args, **options):
        counted.append(list(overrides))
        return original(loader, config_name, overrides, *args, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", load_configuration)
    return counted


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


def test_a_fit_is_composed_once(monkeypatch, compositions, runs):
    assert run_command_line(monkeypatch, "backbone=swin_t", "seed=3") == 0
    assert compositions == [["backbone=swin_t", "seed=3"]]
    assert [(run["backbone"]["name"], run["seed"]) for run in runs] == [("swin_t", 3)]
    assert runs[0]["overrides"] == ["backbone=swin_t", "seed=3"]


def test_an_evaluation_composes_groups_then_values(monkeypatch, compositions, runs, run_folder):
    compositions.clear()
    assert run_command_line(monkeypatch, "mode=test", f"ckpt={run_folder}", "seed=3") == 0
    groups, values = compositions
    assert "head=retinanet" in groups
    assert values == ["mode=test", f"ckpt={run_folder}", "seed=3"]
    assert [(run["head"]["name"], run["seed"]) for run in runs] == [("retinanet", 3)]


def test_a_sweep_composes_each_run_for_the_check_and_for_the_run(
    monkeypatch, compositions, runs, tmp_path
):
    swept = ["-m", "backbone=swin_t,deit_t", f"output_dir={tmp_path}"]
    assert run_command_line(monkeypatch, *swept) == 0
    assert [run["backbone"]["name"] for run in runs] == ["swin_t", "deit_t"]
    # The settings of the first run are checked. Hydra also composes its own options: the folder and
    # launcher of the runs.
    assert len(compositions) == 2 + 1 + 1 + 2 + 3
    compositions.clear()
    assert run_command_line(monkeypatch, "-m", "seed=0,1", f"output_dir={tmp_path}") == 0
    assert len(compositions) == 1 + 1 + 1 + 2 + 3  # one check covers all seeds


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["-c", "job"], ["--cfg=job", "--resolve"]])
def test_cfg_shows_the_config_of_the_run(
    monkeypatch, compositions, runs, run_folder, capsys, flags
):
    compositions.clear()
    arguments = ["mode=test", f"ckpt={run_folder}", "head.anchor_scale=8"]
    assert run_command_line(monkeypatch, *arguments, *flags) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert len(compositions) == 2
    assert not runs
    assert (shown["task_name"], shown["head"]["name"]) == ("detection", "retinanet")
    assert shown["head"]["anchor_scale"] == 8
    assert shown["backbone"]["name"] == "swin_t_afbo"


def test_cfg_of_a_training_is_composed_once(monkeypatch, compositions, runs, capsys):
    assert run_command_line(monkeypatch, "--cfg", "job", "backbone=swin_t") == 0
    assert len(compositions) == 1
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["backbone"]["img_size"] == "${oc.select:data.image_size}"
    assert run_command_line(monkeypatch, "--help", "config", "backbone=swin_t") == 0
    assert yaml.safe_load(capsys.readouterr().out) == shown
    assert len(compositions) == 2
