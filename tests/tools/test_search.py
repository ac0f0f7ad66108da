"""tools/search.py: search spaces in Hydra's syntax, and continued searches."""

import json
import subprocess
import sys

import pytest

from tests.runs import ROOT, SHORTEST
from tools import search
from tools.search_spaces.space import Space, read_spaces


def test_spaces_are_separated_from_settings():
    spaces, fixed = read_spaces(
        ["backbone=deit_t", "optimizer.lr=interval(1e-4,1e-2,log)", "a.b=tag(log,interval(1,10))",
         "x=interval(0,0.5)", "y=range(0,5,2)", "z=choice(a,b)", "w=1,2.5"]
    )  # fmt: skip
    assert fixed == ["backbone=deit_t"]
    assert spaces == [
        Space("optimizer.lr", low=1e-4, high=1e-2, log=True),
        Space("a.b", low=1, high=10, log=True),
        Space("x", low=0, high=0.5),
        Space("y", low=0, high=4, step=2),
        Space("z", ("a", "b")),
        Space("w", ("1", "2.5")),
    ]


@pytest.mark.parametrize(
    ("typed", "message"),
    [(["backbone=deit_t"], "the search has one candidate"), (["x=interval(1,0)"], "is empty"),
     (["x=interval(0,1,log)"], "is empty"), (["x=interval(0,inf)"], "is empty or endless"),
     (["x=range(0,1,0.5)"], "must be a range of whole numbers"),
     (["x=glob(a*)"], "cannot be searched"), (["-m", "x=1,2"], "leave -m out")],
)  # fmt: skip
def test_wrong_spaces_are_one_sentence(typed, message):
    with pytest.raises(ValueError, match=message):
        read_spaces(typed)


@pytest.fixture
def searched(tmp_path, monkeypatch, capsys):
    """A search with simulated runs: the metric is highest at a rate of 0.01."""
    pytest.importorskip("optuna")
    ran = []

    def run(overrides, log):
        ran.append(dict(one.split("=", 1) for one in overrides))
        rate = float(ran[-1]["optimizer.lr"])
        if rate > 0.5:
            return None
        folder = tmp_path / f"run_{len(ran)}"
        folder.mkdir()
        content = {"metrics": {"top1": 100 - abs(rate - 0.01)}}
        content |= {"parameters": 1, "backbone_macs": 1, "seconds": 1}
        (folder / "summary.json").write_text(json.dumps(content))
        return folder

    monkeypatch.setattr(search, "_run_trial", run)

    def go(*typed):
        own = ["backbone=deit_t", f"output_dir={tmp_path}"]
        try:
            status = search.main([*own, *typed])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return go, ran


def test_a_search_continues(searched):
    go, ran = searched
    space = "optimizer.lr=interval(1e-4,1,log)"
    status, out, _ = go(space, "trials=4")
    assert status == 0
    done = [one for one in ran if float(one["optimizer.lr"]) <= 0.5]
    best = min(done, key=lambda one: abs(float(one["optimizer.lr"]) - 0.01))
    assert f"best: optimizer.lr={best['optimizer.lr']}" in out
    assert len(done) == 4
    assert go(space, "trials=4")[0] == 0
    assert go(space, "trials=6")[0] == 0
    rates = [one["optimizer.lr"] for one in ran]
    assert len(set(rates)) == len(rates), "trials were drawn twice"
    assert len([rate for rate in rates if float(rate) <= 0.5]) == 6
    status, _, err = go("optimizer.lr=interval(1e-4,2,log)", "trials=4")
    assert status == 2
    assert "has a search with other settings" in err


def test_wrong_names_are_rejected_before_any_run(searched):
    go, ran = searched
    assert "adamw has no option" in go("optimizer.lrr=interval(0.1,1)")[2]
    assert "must be the name of a folder" in go("head=linear,linear_probe", "name=/etc/x")[2]
    assert "no head called" in go("head=linear,linea", "trials=1")[2]
    assert "did you mean trials=?" in go("optimizer.lr=0.1,0.2", "trials=")[2] or not ran
    assert not ran
    go, _ = searched
    status, _, err = go("optimizer.lr=0.1,0.2", "metric=top7", "trials=1")
    assert status == 2
    assert "metric 'top7' is unknown to the runs; known: top1" in err


@pytest.mark.slow
@pytest.mark.usefixtures("sample_cache")
def test_the_real_command(tmp_path):
    pytest.importorskip("optuna")
    typed = [*SHORTEST, "backbone=deit_t", "optimizer.lr=interval(1e-4,1e-2,log)", "trials=2",
             f"output_dir={tmp_path}"]  # fmt: skip
    command = [sys.executable, str(ROOT / "tools" / "search.py"), *typed]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert (ended.returncode, ended.stderr) == (0, "")
    runs = {path.resolve() for path in tmp_path.rglob("summary.json")}
    assert len(runs) == 2
    assert "best: optimizer.lr=0.00" in ended.stdout
