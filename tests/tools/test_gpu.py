"""The checks of make gpu, on the CPU at tiny size: verdicts, failures that let the rest go on."""

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from backbones import create_mixer
from tools.bench import timed_networks as networks
from tools.gpu import numbers, schedule, speed, tasks, work
from tools.gpu.extent import EXTENTS, Goals, Setting
from tools.gpu.schedule import Worker, run_workers

DOCS = Path(__file__).resolve().parents[2] / "docs"
TINY = EXTENTS["tiny"]
LOOSE = Goals(forward=1e9, training=1e9, memory=1e9, attention=1e9)
ABOUT = {"machine": "a card", "date": "2026-11-27", "command": "make gpu", "versions": {}}


@pytest.fixture
def setting(tmp_path):
    return Setting("cpu", dataclasses.replace(TINY, goals=LOOSE), tmp_path)


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """The command, which writes to another folder."""
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    import gpu_report
    import measure

    monkeypatch.setattr(measure, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    return measure


def verdicts(records):
    return {record["name"]: (record["verdict"], record["note"]) for record in records}


def worker(names, code, part="mixers", is_timed=False):
    """A process that runs some lines with ``name`` for each name; ``passed`` prints a record."""
    start = "import json, sys, os, time\ndef passed(): print(json.dumps("
    start += "{'part': 'mixers', 'name': name, 'verdict': 'pass', 'note': ''}), flush=True)\n"
    loop = "for name in sys.argv[1:]:\n print(json.dumps({'name': name}), flush=True)\n "
    return Worker(part, names, [sys.executable, "-SEc", start + loop + code], is_timed)


def test_a_crash_costs_its_own_name_only(tmp_path):
    code = "os.write(2, b'no such kernel'), os._exit(7) if name == 'b' else passed()"
    kept = []
    records = run_workers([worker(["a", "b", "c"], code)], tmp_path, TINY,
                          lambda records: kept.append(len(records)))  # fmt: skip
    assert verdicts(records) == {
        "a": ("pass", ""), "c": ("pass", ""),
        "b": ("fail", "process ended with status 7: no such kernelno such kernel"),
    }  # fmt: skip
    assert kept == [2, 3, 3]


def test_a_fault_that_breaks_the_device_is_not_the_next_name_s(tmp_path):
    code = "passed(); name == 'a' and os._exit(1)"
    records = run_workers([worker(["a", "b"], code)], tmp_path, TINY, list)
    assert verdicts(records) == dict.fromkeys("ab", ("pass", ""))
    broken = Worker("mixers", ["a", "b"], [sys.executable, "-SEc", "import nothing"], False)
    records = run_workers([broken], tmp_path, TINY, list)
    note = "process ended with status 1: ModuleNotFoundError: No module named 'nothing'"
    assert verdicts(records) == dict.fromkeys("ab", ("fail", note))


def test_every_name_of_a_part_has_a_process(setting):
    for extent in EXTENTS.values():
        some = dataclasses.replace(extent, only=("afbo", "sbm", "attention", "lstm2d"))
        at = dataclasses.replace(setting, extent=some)
        groups = {part: work.PARTS[part].groups(at) for part in work.PARTS if part != "kernels"}
        names = {part: sorted(itertools.chain(*found)) for part, found in groups.items()}
        assert names["mixers"] == ["afbo", "attention", "lstm2d", "sbm"]
        assert {f"eager {one}" for one in ("attention", "lstm2d", "sbm")} <= set(names["tokens"])
        assert ("compiled lstm2d" in names["tokens"]) == (extent is not TINY)
        assert ("compiled sbm" in names["tokens"]) == (extent is EXTENTS["full"])
        assert {f"eager {host}" for host in extent.hosts} <= set(names["hosts"])
        workers = schedule.plan(at, "tiny", ["tokens", "tasks"])
        assert {one.is_timed for one in workers if one.part == "tokens"} == {True}


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is 39 % off below float64."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if grad.dtype is torch.float64 else 1.39 * grad


def test_a_wrong_gradient_fails(setting, monkeypatch):
    (found,) = numbers.check_mixer("pooling", setting)
    assert found["verdict"] == "pass"
    assert 0 < found["float32"] < 1e-6
    assert "tf32" not in found

    def create(*arguments, **options):
        mixer = create_mixer(*arguments, **options)
        mixer.register_forward_pre_hook(lambda _, given: (WrongGradient.apply(given[0]),))
        return mixer

    monkeypatch.setattr(numbers, "create_mixer", create)
    (found,) = numbers.check_mixer("pooling", setting)
    assert found["verdict"] == "fail"
    assert "float32 gradient 0.3" in found["note"]
    assert "bfloat16 gradient 0.3" in found["note"]


def test_a_kernel_that_raises_and_one_that_is_absent(setting, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(numbers, "WAYS", {"eager": numbers.compute_eagerly})
    assert numbers.kernel_names(setting) == ["trials", "afbo", "nonlinear_sum"]
    (found,) = numbers.check_kernel("trials", setting)
    assert (found["verdict"], found["note"]) == (
        "absent",
        "there is no GPU, no Triton or no kernel",
    )
    found = {one["type"]: one for one in numbers.check_kernel("afbo", setting)}
    assert {one["verdict"] for one in found.values()} == {"pass"}
    assert found["bfloat16"]["served"] == ""  # operators of the CPU are for float32
    assert 1e-4 < found["bfloat16"]["eager"] < 0.05
    monkeypatch.setitem(numbers.WAYS, "compiled", fail)
    (found, *_) = numbers.check_kernel("nonlinear_sum", setting)
    assert (found["verdict"], found["served"]) == ("fail", "FastNonlinearSum")
    assert found["note"] == "compiled: RuntimeError: out of resource: shared memory"


def test_speed_of_token_mixers_and_hosts(setting, monkeypatch):
    found = list(speed.check_tokens("eager pooling", setting))
    assert [one["map"] for one in found] == ["4x4", "7x7"]
    assert {one["verdict"] for one in found} == {"measured"}
    assert all(one["attention"] > 0 and one["peak_mb"] > 0 for one in found)
    monkeypatch.setattr(networks, "build_network", lambda *_: nn.Conv2d(3, 2, 3))
    (host,) = TINY.hosts
    found = list(speed.check_host(f"eager {host}", setting))
    assert [(one["mixer"], one["verdict"]) for one in found] == [("afbo", "pass"), ("iffn", "pass")]
    assert all(one["memory"] == 1 and one["forward"] > 0 for one in found)
    goals = dataclasses.replace(LOOSE, memory=0.5)
    strict = dataclasses.replace(setting, extent=dataclasses.replace(TINY, goals=goals))
    assert [one["note"] for one in speed.check_host(f"eager {host}", strict)] == [
        "memory 1 > 0.5"
    ] * 2


def test_tasks_of_the_readme(setting):
    commands = tasks.readme_commands()
    assert len(commands) >= 9
    assert commands["glue"] == ["task=glue", "backbone=bert_tiny_afbo"]
    groups = tasks.task_groups(setting)
    assert sorted(itertools.chain(*groups)) == sorted(commands)
    assert ["classification", "transfer"] in groups


def test_a_task_that_fails_shows_its_last_line(setting, monkeypatch):
    monkeypatch.setattr(tasks, "readme_commands", lambda: {"glue": ["task=glue", "backbone=x"]})
    (found,) = tasks.check_task("glue", setting)
    assert found["verdict"] == "fail"
    assert found["note"].startswith("training: error: there is no backbone called 'x'")
    monkeypatch.setattr(tasks, "installed_version", lambda name: None)
    (found,) = tasks.check_task("detection", setting)
    assert found["verdict"] == "absent"
    assert "onedl-mmdetection" in found["note"]


def test_a_page_shows_verdicts_figures_and_plots(measure, setting, tmp_path, capsys):
    import gpu_report

    folder = tmp_path / "a_card"
    folder.mkdir()
    records = [
        {"part": "tokens", "name": "compiled lstm2d", "map": "56x56", "attention": 37.0,
         "verdict": "fail", "note": "attention 37 > 5"},
        {"part": "mixers", "name": "afbo", "float32": 1e-7, "verdict": "pass", "note": ""},
        {"part": "tasks", "name": "glue", "verdict": "fail", "note": "prediction: a|b"},
        {"part": "packages", "name": "triton", "verdict": "absent", "note": "serves kernels"},
    ]  # fmt: skip
    gpu_report.draw(records, folder, setting.extent)
    gpu_report.store(records, list(work.PARTS), ABOUT, folder, setting.extent)
    assert gpu_report.print_verdicts(records) == 1
    assert gpu_report.print_verdicts(records[1:2]) == 0
    assert "fail: tokens compiled lstm2d 56x56: attention 37 > 5" in capsys.readouterr().out
    page = measure.pages(tmp_path)["a_card"]
    assert "| tokens | 0 | 1 | 0 | 0 |" in page
    assert "| tasks | glue | fail | prediction: a\\|b |" in page
    assert "| packages | triton | absent | serves kernels |" in page
    assert "| `afbo` | 1e-07 |" in page or "| afbo | 1e-07 |" in page
    for picture in ("gpu_3_tokens.png", "gpu_6_mixers.png"):
        assert f"(a_card/{picture})" in page
        assert 5_000 < (folder / picture).stat().st_size < 300_000
    assert "gpu_2_hosts" not in page
    gpu_report.store(records[1:2], ["mixers"], ABOUT, folder, setting.extent)
    assert not (folder / "gpu_1_failures.json").exists()
    assert (folder / "gpu_3_tokens.json").exists()


def test_without_a_gpu_one_line_says_so(measure, capsys):
    if torch.cuda.is_available():
        pytest.skip("a GPU is present")
    assert measure.main(["gpu"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "make gpu: torch finds no GPU; device=cpu extent=tiny tries the command"
    ]


@pytest.mark.slow
def test_the_command_writes_a_page(measure, tmp_path, capsys):
    measure.main(["gpu", "device=cpu", "extent=tiny", "parts=tokens,mixers"])
    out = capsys.readouterr().out
    (file,) = (tmp_path / "outputs" / "gpu_trial").glob("*.md")
    page = file.read_text()
    for line in ("| mixers | 4 | 0 | 0 | 0 |", "| eager pooling | 7x7 |", "compiled pooling"):
        assert line in page
    assert "mixers     4     0       0         0" in out
