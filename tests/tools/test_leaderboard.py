"""The leaderboard: rows that comparisons publish, its page, and rows that are repeated."""

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.comparisons import WORDS, comparison_of, fill, network, registered_text
from tests.runs import ROOT, SHORTEST
from tools import compare as command
from tools.cli.network_names import config_network_name
from tools.comparison.cells import CellPlan, compose_run
from tools.comparison.leaderboard import publish, read_leaderboard
from tools.comparison.plan import read_plan
from tools.comparison.register import write_registered
from tools.comparison.statistics import repeat_interval, visible_by, visible_within
from tools.comparison.table import make_table
from tools.comparison.verify import verify

sys.path.append(str(ROOT / "docs" / "_ext"))

GRID = ("host=deit_t,swin_t", "data=sample_classification,cifar10", "seeds=4", "rates=1")
SMALL = tuple(word for word in SHORTEST if not word.startswith("task="))


def made(folder, *words, effects=None, seed=0, code=1.0, fingerprint="a", precision="32-true",
         prints=None):  # fmt: skip
    """A comparison whose runs have ended on some machine."""
    comparison = comparison_of(folder, *GRID, *words)
    for cell in comparison.cells:
        cell.prints["val"] = (prints or {}).get(cell.data, fingerprint)
        cell.samples = {"train": 100, "val": 40}
    fill(comparison, effects, seed)
    for number, run in enumerate(list(comparison.journal)):
        place = comparison.folder / "runs" / str(number)
        place.mkdir(parents=True, exist_ok=True)
        write_summary(place, run.value, code, precision, class_tokens=int(run.mixer != "iffn"))
        comparison.journal.add(run.model_copy(update={"folder": str(place), "seconds": 2.0}))
    return comparison, registered_text(comparison, begun=False)


def write_summary(folder, value, code, precision="32-true", class_tokens=1):
    summary = {
        "metrics": {"top1": value}, "parameters": 100, "backbone_macs": 1000,
        "seconds": 2.0, "task": "classification", "mode": "fit", "git_commit": "abc",
        "device": "a processor", "precision": precision, "learning_rate": 1e-3,
        "data": {"samples": {"train": 100, "val": 40}, "fingerprints": {"val": "a"}},
        "fingerprint": {"output": [code, 0.5]}, "pooling": "class token",
        "network": {"class_tokens": class_tokens, "norms": ["LayerNorm"]},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def said():
    return []


def test_rows_and_page_of_a_published_comparison(tmp_path, said):
    import leaderboard_page

    comparison, registered = made(tmp_path, "mixer=ffn,glu,iffn", effects={"glu": 6.0})
    board = tmp_path / "leaderboard"
    publish(comparison.folder, board, said.append)
    assert said[0] == "96 rows added, 0 there already"
    names = {"ffn", "glu", "iffn", "identity", "random", "ffn_again"}
    assert set(contents(board)) == {"plan.yaml", *(f"{name}.csv" for name in names)}
    rows = list(csv.DictReader((board / "glu.csv").open()))
    assert len(rows) == 16
    assert {row["plan"] for row in rows} == {registered.hash}
    stated = {"lr": "0.001", "parameters": "100", "macs": "1000", "samples": "40",
              "commit": "abc", "device": "a processor", "precision": "32-true", "seconds": "2.0",
              "code": "1 0.5"}  # fmt: skip
    assert all(row.items() >= stated.items() for row in rows)
    leaderboard = read_leaderboard(board)
    values = [run.value for run in comparison.journal if (run.mixer, run.host) == ("glu", "swin_t")]
    published = [row.value for row in leaderboard.finals()
                 if (row.mixer, row.host) == ("glu", "swin_t")]  # fmt: skip
    assert sorted(published) == sorted(values)
    page = leaderboard_page.pages(board)["leaderboard"]
    verdicts = {record["mixer"].rstrip("†‡"): record for record in make_table(comparison).records}
    for name, record in verdicts.items():
        line = next(line for line in page.splitlines() if line.startswith(f"| [{name}]"))
        cells = [cell.strip() for cell in line.split("|")]
        assert cells[4] == record["verdict"]
        assert cells[5] == record["beyond"]
        if name != "ffn":
            assert cells[2] == f"{record['difference']:+.2f}"
    assert "Smallest visible difference within the cells" in page
    assert "| [iffn](../leaderboard/iffn.csv) † |" in page
    assert "* † iffn in swin_t: class tokens 0; pooling class token; norms LayerNorm" in page
    assert page.count("† |") == 1
    assert "Self-test: ffn with other seeds is 'cannot tell'" in page
    before = contents(board)
    publish(comparison.folder, board, said.append)
    assert "0 rows added, 96 there already" in said
    assert contents(board) == before


def test_tuned_rates_and_parts_of_the_page(tmp_path, said):
    import leaderboard_page

    comparison, _ = made(tmp_path, "rates=1,4", "host=deit_t", "data=sample_classification")
    for place in ("leaderboard", "leaderboard/second"):
        publish(comparison.folder, tmp_path / place, said.append)
    page = leaderboard_page.pages(tmp_path / "leaderboard")["leaderboard"]
    headings = re.findall(r"^(#+ .*)", page, re.MULTILINE)
    names = ("Verdicts", "Cells", "Error of a cell", "Plans")
    expected = [*(f"## {name}" for name in names), "## second", *(f"### {name}" for name in names)]
    assert headings == ["# Leaderboard", *expected]
    assert page.count("[glu](../leaderboard/glu.csv)") == 1
    assert page.count("[glu](../leaderboard/second/glu.csv)") == 1
    heads = next(line for line in page.splitlines() if line.startswith("| mixer | difference"))
    place = heads.split("|").index(" sensitivity ")
    line = next(line for line in page.splitlines() if line.startswith("| [glu]"))
    tuned = [run.value for run in comparison.journal.finished("tune") if run.mixer == "glu"]
    assert float(line.split("|")[place]) == pytest.approx(max(tuned) - min(tuned), abs=0.005)
    assert {row.stage for row in read_leaderboard(tmp_path / "leaderboard").rows.values()} >= {
        "tune", "final"
    }  # fmt: skip


def test_another_machine_adds_rows_and_missing_cells_stay_missing(tmp_path, said):
    import leaderboard_page

    first, _ = made(tmp_path / "a")
    second, registered = made(
        tmp_path / "b", "mixer=ffn,iffn", "name=mine", "host=swin_t", "seeds=3", seed=1
    )
    board = tmp_path / "leaderboard"
    publish(first.folder, board, said.append)
    before = contents(board)
    publish(second.folder, board, said.append)
    after = contents(board)
    assert {name for name in after if before.get(name) != after[name]} == {"plan.yaml", "iffn.csv"}
    assert "6 rows added, 24 there already" in said
    leaderboard = read_leaderboard(board)
    assert [entry.hash for entry in leaderboard.publications][1] == registered.hash
    assert any("seeds: 4 before, 3 now" in line for line in leaderboard.publications[1].differences)
    page = leaderboard_page.pages(board)["leaderboard"]
    assert "| [iffn](../leaderboard/iffn.csv) † ‡ |" in page
    assert re.search(r"^\| iffn \|  \|  \| \d", page, re.MULTILINE)
    assert "2 cells of a mixer missing" in page
    path = board / "glu.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert "/glu.csv) ‡ |" in leaderboard_page.pages(board)["leaderboard"]
    assert "/glu.csv) |" in page


def test_rows_of_other_code_are_replaced(tmp_path, said):
    board = tmp_path / "leaderboard"
    for folder, code in (("a", 1.0), ("b", 1.0 + 1e-7), ("c", 1.1)):
        comparison, _ = made(tmp_path / folder, code=code)
        publish(comparison.folder, board, said.append)
    assert said.count("80 rows of other code removed") == 1
    assert {row.code for row in read_leaderboard(board).rows.values()} == {"1.1 0.5"}


@pytest.mark.parametrize(
    ("words", "facts", "message"),
    [
        ((), {"fingerprint": "b"}, "deit_t on sample_classification has other data"),
        ((), {"precision": "bf16-mixed"}, "trainer.precision: 32-true there, bf16-mixed here"),
        (("data.image_size=32",), {}, "data.image_size: None there, 32 here"),
        (("rates=1,4",), {}, "rates: [1.0] there, [1.0, 4.0] here"),
        (("metric=top5",), {}, "primary: top1 there, top5 here"),
        (("host=deit_s",), {}, "deit_s on sample_classification is outside of its cells"),
        (("mixer=attention,sbm", "baseline=attention"), {}, "baseline: ffn there, attention here"),
    ],
)
def test_another_plan_is_refused_in_one_line(tmp_path, said, words, facts, message):
    board = tmp_path / "leaderboard"
    publish(made(tmp_path / "a")[0].folder, board, said.append)
    before = contents(board)
    other, _ = made(tmp_path / "b", *words, **facts)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        publish(other.folder, board, said.append)
    assert "\n" not in str(caught.value)
    assert contents(board) == before


def test_rates_of_another_held_out_share_are_refused(tmp_path, said):
    words, board = ("rates=1,4", "host=deit_t", "data=sample_classification"), tmp_path / "board"
    publish(made(tmp_path / "a", *words)[0].folder, board, said.append)
    other, _ = made(tmp_path / "b", *words, "held_out=0.5")
    with pytest.raises(ValueError, match=r"held_out: 0\.2 there, 0\.5 here"):
        publish(other.folder, board, said.append)
    publish(made(tmp_path / "c", "rates=1")[0].folder, tmp_path / "one_rate", said.append)
    publish(made(tmp_path / "d", "held_out=0.5")[0].folder, tmp_path / "one_rate", said.append)


def test_new_cells_join_where_this_is_typed(tmp_path, said):
    """Rows keep their cell where a second folder makes the names of both longer."""
    board = tmp_path / "leaderboard"
    folders = ("host=deit_t", "data=folder data.root=/a")
    first = made(tmp_path / "a", *folders)[0]
    publish(first.folder, board, said.append)
    before = read_leaderboard(board)
    assert {row.cell for row in before.rows.values()} == {("deit_t", "folder")}
    more = made(tmp_path / "b", "host=swin_t,deit_t", "data=folder data.root=/b", seed=1,
                fingerprint="b")[0]  # fmt: skip
    with pytest.raises(ValueError, match=r"swin_t on folder is outside .* new_cells=true adds"):
        publish(more.folder, board, said.append)
    publish(more.folder, board, said.append, new_cells=True)
    after = read_leaderboard(board)
    cells = [("deit_t", "folder a"), ("deit_t", "folder b"), ("swin_t", "folder b")]
    assert sorted(after.cells) == sorted({row.cell for row in after.rows.values()}) == cells
    kept = {row.value for row in after.rows.values() if row.data == "folder a"}
    assert kept == {row.value for row in before.rows.values()}
    assert len(after.rows) == 3 * len(before.rows)
    assert after.plan.host == ["deit_t", "swin_t"]
    for again in (more, first):
        publish(again.folder, board, said.append, new_cells=True)
        assert read_leaderboard(board).rows == after.rows
        assert read_leaderboard(board).cells == after.cells
    other = made(tmp_path / "c", "host=deit_s", "data=folder data.root=/b", fingerprint="c")[0]
    with pytest.raises(ValueError, match="a set of the same name has other data"):
        publish(other.folder, board, said.append, new_cells=True)


def test_the_set_that_chooses_rates_keeps_its_role_under_a_new_name(tmp_path, said):
    """Two sets of one label are different ones, and a set with two labels is the same."""
    board, rates = tmp_path / "board", ("host=deit_t", "rates=1,4", "tuned_on=folder")
    clean = made(tmp_path / "a", *rates, "data=folder data.root=/clean")[0]
    publish(clean.folder, board, said.append)
    noisy = made(tmp_path / "b", *rates, "data=folder data.root=/noisy", fingerprint="b")[0]
    with pytest.raises(ValueError, match="tuned_on: folder clean there, folder noisy here"):
        publish(noisy.folder, board, said.append, new_cells=True)
    two_sets = ("data=folder data.root=/noisy,folder data.root=/clean", "tuned_on=folder clean")
    both = made(tmp_path / "c", *rates, *two_sets, prints={"folder noisy": "b"})[0]
    publish(both.folder, board, said.append, new_cells=True)
    assert read_plan([f"plan={board / 'plan.yaml'}"]).tuned_on == "folder clean"
    assert {row.data for row in read_leaderboard(board).rows.values() if row.stage == "tune"} == {
        "folder clean"
    }  # fmt: skip


def test_settings_of_the_machine_may_differ(tmp_path, said):
    board = tmp_path / "leaderboard"
    publish(made(tmp_path / "a")[0].folder, board, said.append)
    data = "data=sample_classification,cifar10 data.root=/elsewhere"
    other, _ = made(tmp_path / "b", "seeds=5", data, "trainer=cpu", "data.num_workers=2")
    publish(other.folder, board, said.append)
    assert "20 rows added, 80 there already" in said


def test_runs_without_folder_are_counted_and_published_ones_stay(tmp_path, said):
    comparison, _ = made(tmp_path)
    board = tmp_path / "leaderboard"
    publish(comparison.folder, board, said.append)
    before = contents(board)
    (comparison.folder / "runs/0/summary.json").unlink()
    publish(comparison.folder, board, said.append)
    assert "1 run left out, as their folders were moved or deleted" in said
    assert contents(board) == before


def test_a_registration_without_its_facts_is_one_line(tmp_path, said):
    comparison, registered = made(tmp_path)
    text = registered.text.partition("fixed:")[0]
    write_registered(comparison.folder, registered.model_copy(update={"text": text}))
    with pytest.raises(ValueError, match=r"registered\.json is damaged: 'fixed'$"):
        publish(comparison.folder, tmp_path / "board", said.append)


def typed(*words):
    with pytest.raises(SystemExit) as ended:
        command.main(list(words))
    return ended.value.code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["publish={folder}/none"], "none lacks finished runs of a comparison"),
        (["publish={folder}/none", "seeds=2"], "cannot use 'seeds=2'"),
        (["verify=glu", "leaderboard={folder}/none"], "none lacks a leaderboard"),
        (["verify=swiglu", "leaderboard={folder}/board"], "no mixer on the leaderboard called"),
        (["verify=glu", "host=deit_s", "leaderboard={folder}/board"], "host=there is no host"),
        (["verify=glu", "seeds=2", "leaderboard={folder}/board"], "cannot use 'seeds=2'"),
        (["verify=glu", "leaderboard={folder}/damaged"], "glu.csv is damaged: the entry host is"),
        (["verify=glu", "leaderboard={folder}/other"], "plan.yaml is damaged"),
    ],
)
def test_wrong_words_and_files_are_one_line(tmp_path, said, capsys, words, message):
    comparison, _ = made(tmp_path)
    for name in ("board", "damaged", "other"):
        publish(comparison.folder, tmp_path / name, said.append)
    (tmp_path / "damaged/glu.csv").write_text("mixer,stage\nglu,final\n")
    (tmp_path / "other/plan.yaml").write_text("mixer: [ffn]\n")
    assert typed(*(word.format(folder=tmp_path) for word in words)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_repeated_runs_fall_into_their_interval_as_often_as_it_says():
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(2_000):
        values = generator.normal(70, 2, (6, 3))
        variance = float(values.var(1, ddof=1).mean())
        low, high = repeat_interval(values[0].tolist(), 2, variance, 12)
        inside += low <= generator.normal(70, 2, 2).mean() <= high
    assert inside / 2_000 == pytest.approx(0.95, abs=0.015)


def test_the_visible_difference_of_a_table_is_that_of_its_errors():
    cells = [("h", "a"), ("h", "b")]
    values = {f"m{number}": {cell: [70.0, 72.0] for cell in cells} for number in range(5)}
    expected = visible_by(4, 2 / 4, 10) * 2**0.5
    assert visible_within(values, "m0") == pytest.approx(expected)


def test_the_published_plan_is_followed_by_comparisons_of_others(tmp_path, said):
    comparison, _ = made(tmp_path)
    publish(comparison.folder, tmp_path / "board", said.append)
    plan = read_plan([f"plan={tmp_path / 'board/plan.yaml'}", "mixer=ffn,iffn", "name=mine"])
    assert plan.folder == Path("outputs/comparisons/mine")
    assert (plan.host, plan.seeds) == (["deit_t", "swin_t"], 4)


@pytest.fixture
def repeat(tmp_path, monkeypatch, capsys):
    """Repeat rows with runs that end at once; return their number, what is printed, the status."""
    here = {"code": 1.0, "value": 70.0, "steps": 40}
    started = []

    def measure_cell(plan, host, data, mixers):
        measured = replace(network(), answers={"output": [here["code"], 0.5]}, steps=here["steps"])
        return CellPlan(
            host.label, data.label, prints={"val": "a"}, samples={"train": 100, "val": 40},
            networks={mixer.label: measured for mixer in mixers},
        )  # fmt: skip

    def run_plan(verification, *, tables):
        for run in verification.remaining():
            config, number = compose_run(verification.words(run)), f"{len(started):03d}"
            place = verification.folder / "runs/classification"
            place = place / config_network_name(config.backbone) / number
            place.mkdir(parents=True)
            (place / "config.yaml").write_text(yaml.safe_dump(config.plain()))
            write_summary(place, here["value"], here["code"])
            facts = {"status": "finished", "value": here["value"], "folder": str(place)}
            verification.journal.add(run.model_copy(update=facts))
            started.append(run)

    def repeat(board, **changes):
        here.update(changes)
        before, status = len(started), 0
        try:
            verify("ffn", folder=board, output_dir=str(tmp_path / "here"))
        except SystemExit as end:
            status = end.code
        return len(started) - before, capsys.readouterr().out, status

    monkeypatch.setattr("tools.comparison.verify.measure_cell", measure_cell)
    monkeypatch.setattr("tools.comparison.verify.run_plan", run_plan)
    return repeat


ONE_CELL = ("host=deit_t", "data=sample_classification", "seeds=2")


def test_only_runs_of_the_same_settings_and_code_repeat_a_row(tmp_path, said, repeat):
    boards = []
    for batches in (12, 1):
        words = (*ONE_CELL, f"trainer.limit_train_batches={batches}")
        boards.append(tmp_path / f"board{batches}")
        publish(made(tmp_path / str(batches), *words)[0].folder, boards[-1], said.append)
    assert [repeat(board)[0] for board in (boards[0], boards[0], boards[1], boards[0])] == [
        2, 0, 2, 0
    ]  # fmt: skip
    assert [repeat(boards[0], code=code)[0] for code in (1.1, 1.1)] == [2, 0]


@pytest.mark.parametrize(("value", "count"), [(0.0, 0), (99.99, 0), (99.996, 1), (100.0, 1)])
def test_rows_without_deviation_are_repeated_to_rounding(tmp_path, said, repeat, value, count):
    comparison, _ = made(tmp_path, *ONE_CELL)
    for run in list(comparison.journal):
        comparison.journal.add(run.model_copy(update={"value": 100.0}))
    publish(comparison.folder, tmp_path / "board", said.append)
    _, printed, status = repeat(tmp_path / "board", value=value)
    assert f"{count} of 1 cell within" in printed
    assert status == 1 - count


def test_repeated_runs_take_the_published_steps(tmp_path, said, repeat):
    comparison, _ = made(tmp_path, *ONE_CELL, "budget=seconds")
    publish(comparison.folder, tmp_path / "board", said.append)
    assert [repeat(tmp_path / "board", steps=steps)[0] for steps in (41, 42)] == [2, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("sample_cache")
def test_a_published_row_is_repeated(tmp_path):
    def compare(*words, status=0):
        line = [sys.executable, str(ROOT / "tools/compare.py"), *words]
        ended = subprocess.run(line, capture_output=True, text=True, timeout=900)
        assert (ended.returncode, ended.stderr) == (status, "")
        return ended.stdout

    out, board = f"output_dir={tmp_path}", f"leaderboard={tmp_path / 'board'}"
    compare(*WORDS, "rates=1", *SMALL, out)
    assert "10 rows added" in compare(f"publish={tmp_path / 'comparisons/comparison'}", board)
    printed = compare("verify=glu", board, out)
    assert "1 of 1 cell within the interval" in printed
    assert "computes another function" not in printed
    folders = (tmp_path / "comparisons/verify_glu/runs").glob("*/*/2*/summary.json")
    assert len(list(folders)) == 2
    # A table that claims other values, and data that are others.
    path = tmp_path / "board/glu.csv"
    rows = list(csv.DictReader(path.open()))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"value": f"{float(row['value']) + 500}"} for row in rows)
    assert "0 of 1 cell within the interval" in compare("verify=glu", board, out, status=1)
    words = ["verify=glu", board, out, "data=sample_classification data.sample_seed=3"]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tools/compare.py"), *words], capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "the data of deit_t on sample_classification differ from those of" in ended.stderr
    assert ended.stderr.count("\n") == 1
