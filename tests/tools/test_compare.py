"""tools/compare.py: plans, registration, the table from runs that ended, and the command."""

import base64
import contextlib
import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import yaml
from filelock import FileLock
from PIL import Image

from backbones import list_mixers
from tasks.engine.run_folder.bounded_reading import DamagedFile
from tests import checkout
from tests.comparisons import WORDS, comparison_of, fill, plan_of, registered_text
from tests.runs import ROOT, SHORTEST
from tools import compare as command
from tools.comparison import runner, work
from tools.comparison.answers import read_answers
from tools.comparison.cells import CellPlan, measure_cell, note_data
from tools.comparison.journal import Journal, Run
from tools.comparison.page import latex, write_files
from tools.comparison.plan import (
    CONTROLS,
    TUNING_SEED,
    data_entries,
    host_entries,
    mixer_entries,
    plan_changes,
    read_plan,
)
from tools.comparison.register import (
    fixed_entries,
    keep_labels,
    keep_lengths,
    locked,
    read_cell,
    read_registered,
    register,
    write_cell,
)
from tools.comparison.statistics import estimate_errors, interval
from tools.comparison.table import failed_runs, make_table
from tools.comparison.work import check_mixers, describe_plan, expected_deviation, show
from tools.comparison.workers import make_workers
from tools.runs.source import read_source

SMALL = tuple(word for word in SHORTEST if not word.startswith("task="))

TWO_BY_TWO = ("host=deit_t,swin_t", "data=sample_classification,cifar10", "seeds=4", "rates=1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mixer=ffn"], "host= is missing"),
        (["mixer="], "mixer= is missing"),
        ([*WORDS, "seeds=1"], "seeds must be greater than or equal to 2"),
        ([*WORDS, "seeds=two"], "seeds=two must be a number"),
        ([*WORDS, "budget=hours"], "budget must be 'steps', 'macs', 'params' or 'seconds'"),
        ([*WORDS, "baseline=iffn"], "^baseline=iffn must be one of mixer=ffn,glu"),
        ([*WORDS, "mixer=ffn,glu,glu"], "mixer names an entry twice"),
        ([*WORDS, "mixer=ffn"], "mixer needs a mixer besides the baseline"),
        ([*WORDS, "rates=2"], "with 1 among them"),
        ([*WORDS, "seed=3"], "seed=3 is set by the comparison itself"),
        ([*WORDS, "resume=true"], "resume=true is set by the comparison itself"),
        ([*WORDS, "name=../x"], "name string should match"),
        ([*WORDS, "name=.."], "name string should match"),
        ([*WORDS, "task=forecasting"], "is not in percent: pass equivalence="),
        ([*WORDS, "metric=top9"], "no metric called 'top9'"),
        ([*WORDS, "task=cooking"], "unknown task 'cooking'"),
        (["plan=missing.yaml"], "plan=missing.yaml does not exist"),
        ([*WORDS, "word"], "cannot read 'word'"),
    ],
)
def test_wrong_plans_are_one_sentence(words, message):
    with pytest.raises(ValueError, match="(?s)" + message.replace("(", "\\(")) as caught:
        read_plan(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mixers", "message"),
    [("ffn,glue", "glue"), ("ffn,sbm", "has channel and token mixers"), ("ffn,[ffn,sbm]", "token")],
)
def test_wrong_mixers_are_one_sentence(tmp_path, mixers, message):
    with pytest.raises(ValueError, match=message):
        mixer_entries(plan_of(tmp_path, f"mixer={mixers}"))


def test_a_file_and_typed_words_give_the_same_plan(tmp_path):
    content = {"mixer": ["ffn", "glu backbone.mixer.act=mish"], "host": "deit_t", "seeds": 3,
               "data": ["sample_classification"], "baseline": "ffn", "rates": [1]}  # fmt: skip
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(content))
    words = ["mixer=ffn,glu backbone.mixer.act=mish", "seeds=3", "rates=1", "name=my"]
    assert read_plan([f"plan={tmp_path / 'my.yaml'}"]) == read_plan([*WORDS, *words])
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(content | {"sedes": 3}))
    with pytest.raises(ValueError, match=r"my.yaml: there is no entry called 'sedes'.*seeds"):
        read_plan([f"plan={tmp_path / 'my.yaml'}"])


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ([], {"ffn": (), "glu": ("backbone.mixer.name=glu",)}),
        (["mixer=ffn,[ffn,glu,glu,ffn]"],
         {"ffn": (), "[ffn,glu,glu,ffn]": ("backbone.mixer=[ffn,glu,glu,ffn]",)}),
        (["mixer=glu,iffn", "baseline=glu", "budget=params"],
         {"glu": ("backbone.mixer.name=glu", "backbone.mixer.match=params"), "own": ()}),
        (["mixer=sbm,pooling", "baseline=pooling"],
         {"sbm": ("backbone.token_mixer.name=sbm",), "own": (),
          "random": ("backbone.token_mixer.name=random",),
          "identity": ("backbone.token_mixer.name=identity",)}),
    ],
)  # fmt: skip
def test_rows_are_mixers_and_controls(tmp_path, words, rows):
    plan = plan_of(tmp_path, *words)
    entries = {entry.label: entry for entry in mixer_entries(plan)}
    for label, typed in rows.items():
        assert entries[label].words == typed
    again = entries[f"{plan.baseline} again"]
    assert again.words == entries[plan.baseline].words
    assert again.later >= plan.seeds
    assert ("own" in entries) == ("ffn" not in plan.mixer)


def test_hosts_and_data_take_options(tmp_path):
    hosts = "host=timm backbone.model=vit_tiny_patch16_224 backbone.options={depth:2,num_heads:2}"
    data = "data=folder data.root=/a/cells data.val_share=0.2,cifar10,folder data.root=/b/pets"
    plan = plan_of(tmp_path, hosts, data)
    (host,) = host_entries(plan)
    assert host.label == "vit_tiny_patch16_224"
    assert host.words == ("backbone=timm", "backbone.model=vit_tiny_patch16_224",
                          "backbone.options={depth:2,num_heads:2}")  # fmt: skip
    sets = data_entries(plan)
    assert [entry.label for entry in sets] == ["folder cells", "cifar10", "folder pets"]
    assert sets[0].words == ("data=folder", "data.root=/a/cells", "data.val_share=0.2")


def test_final_runs_have_new_seeds_and_the_best_rate(tmp_path):
    comparison = comparison_of(tmp_path)
    planned = list(comparison.planned())
    tuned = [run for run in planned if run.stage == "tune"]
    assert {(run.mixer, run.factor) for run in tuned} == {
        (mixer, factor) for mixer in ("ffn", "glu", *CONTROLS) for factor in (0.25, 1.0, 4.0)
    }
    finals = [run for run in planned if run.stage == "final"]
    assert {run.seed for run in tuned} == {TUNING_SEED}
    assert not {run.seed for run in tuned} & {run.seed for run in finals}
    values = {0.25: 50.0, 1.0: 60.0, 4.0: 60.0}
    for run in tuned:
        facts = {"value": values[run.factor] - 30 * (run.mixer == "glu" and run.factor == 1)}
        comparison.journal.add(run.model_copy(update=facts | {"status": "finished"}))
    assert comparison.chosen_factor("ffn", finals[0].cell) == 1.0
    assert comparison.chosen_factor("ffn again", finals[0].cell) == 1.0
    assert comparison.chosen_factor("glu", finals[0].cell) == 4.0
    glu = next(run for run in finals if run.mixer == "glu")
    words = comparison.words(comparison.settled(glu))
    assert {"optimizer.lr=0.004", "start=host", "checkpoints=last"} <= set(words)
    assert not any(word.startswith("held_out") for word in words)
    assert "held_out=0.2" in comparison.words(tuned[0])


def test_a_model_of_timm_may_be_typed_for_all_runs(tmp_path):
    (host,) = host_entries(plan_of(tmp_path, "host=timm", "backbone.model=convnext_atto"))
    assert host.words == ("backbone=timm",)


def test_the_untuned_result_stands_beside_the_tuned_one(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1,4", "seeds=3")
    best = {"glu": 4.0}  # all others keep the recipe's rate
    for planned in comparison.planned():
        run = comparison.settled(planned)
        gain = 5.0 if run.factor == best.get(run.mixer, 1.0) else 0.0
        facts = {"value": 60.0 + gain + run.seed % 100, "status": "finished", "folder": "/gone"}
        comparison.journal.add(run.model_copy(update=facts))
    untuned = comparison.journal.finished("untuned")
    assert {(run.mixer, run.factor) for run in untuned} == {("glu", 1.0)}
    assert sorted(run.seed for run in untuned) == [0, 1, 2]
    assert "optimizer.lr=0.001" in comparison.words(untuned[0])
    assert comparison.remaining() == []
    table = make_table(comparison)
    glu = next(record for record in table.cells if record["mixer"] == "glu")
    assert (glu["metric"], glu["untuned"], glu["factor"]) == (66.0, 61.0, 4.0)
    rows = {record["mixer"]: record for record in table.records}
    assert (rows["glu"]["difference"], rows["glu"]["untuned"]) == (0.0, -5.0)
    assert rows["glu"]["sensitivity"] == 5.0
    assert rows["identity"]["untuned"] == 0.0
    assert "untuned" not in make_table(comparison_of(tmp_path, "rates=1")).columns


def test_one_data_set_chooses_the_rates_of_all(tmp_path):
    two_sets = ("data=sample_classification,cifar10", "rates=1,4", "tuned_on=cifar10")
    comparison = comparison_of(tmp_path, *two_sets)
    order = []
    for planned in comparison.planned():
        run = comparison.settled(planned)
        order.append((run.stage, run.data, run.factor))
        gain = 5.0 if run.mixer == "glu" and run.factor == 4 else -run.factor
        facts = {"value": 60.0 + gain, "status": "finished", "folder": "/gone"}
        comparison.journal.add(run.model_copy(update=facts))
    assert {(data, factor) for stage, data, factor in order if stage == "tune"} == {
        ("cifar10", 1.0), ("cifar10", 4.0)
    }  # fmt: skip
    assert [stage for stage, *_ in order].index("final") == 2 * 4
    chosen = {(run.mixer, run.data): run.factor for run in comparison.journal.finished()}
    for data in ("sample_classification", "cifar10"):
        assert (chosen["glu", data], chosen["ffn", data], chosen["ffn again", data]) == (4, 1, 1)
    assert {run.data for run in comparison.journal.finished("untuned")} == {
        "sample_classification", "cifar10"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"tuned_on: .*cifar100"):
        plan_of(tmp_path, *two_sets, "tuned_on=cifar100")


def test_equal_seconds_are_steps_at_the_measured_pace(tmp_path):
    words = comparison_of(tmp_path, "budget=seconds", "rates=1")
    run = next(run for run in words.planned() if run.mixer == "glu")
    assert {"trainer.max_epochs=-1", "trainer.max_steps=40"} <= set(words.words(run))


def test_the_journal_of_a_moved_comparison_finds_its_runs(tmp_path):
    first, last = tmp_path / "first", tmp_path / "last"
    run = Run(stage="final", mixer="glu", host="h", data="d", seed=1, factor=1)
    folders = {1: str(first / "runs/a"), 2: str(tmp_path / "elsewhere"), 3: ""}
    (first / "runs/a").mkdir(parents=True)
    journal = Journal(first)
    for seed, folder in folders.items():
        journal.add(run.model_copy(update={"seed": seed, "folder": folder}))
    first.rename(last)
    found = {row.seed: row.folder for row in Journal(last)}
    assert found == folders | {1: str(last / "runs/a")}


def test_the_journal_survives_and_refuses_damage(tmp_path):
    journal = Journal(tmp_path)
    run = Run(stage="final", mixer="glu, wide", host="h", data="d", seed=1, factor=0.25)
    failed = run.model_copy(update={"seed": 2, "status": "failed", "reason": 'a "reason", long'})
    for each in (run.model_copy(update={"status": "finished", "value": 71.5}), failed):
        journal.add(each)
    again = Journal(tmp_path)
    assert again.completed(run).value == 71.5
    assert again.completed(failed) is None
    assert again.runs[failed.key].reason == failed.reason
    (tmp_path / "runs.csv").write_text("stage,mixer\nfinal,glu\n")
    with pytest.raises(DamagedFile, match=r"runs.csv is damaged: the entry host is missing"):
        Journal(tmp_path)


def test_a_plan_is_hashed_once_and_changes_are_deviations(tmp_path):
    first = registered_text(comparison_of(tmp_path), begun=False)
    content = yaml.safe_load((tmp_path / "comparisons/comparison/plan.yaml").read_text())
    assert content["fixed"]["metric"] == "top1"
    assert content["fixed"]["equivalence"] == 0.5
    assert content["fixed"]["cells"]["deit_t on sample_classification"]["rate"] == 1e-3
    assert registered_text(comparison_of(tmp_path), begun=True) == first
    # Before the first run a plan may change, and has another hash.
    changed = registered_text(comparison_of(tmp_path, "seeds=3"), begun=False)
    assert changed.hash != first.hash
    assert changed.deviations == []
    later = registered_text(comparison_of(tmp_path, "seeds=4"), commit="d", begun=True)
    assert later.hash == changed.hash
    assert "seeds: 3 before, 4 now" in later.deviations[0]
    assert any("commit: c before, d now" in line for line in later.deviations)
    assert read_registered(tmp_path / "comparisons/comparison") == later


def test_an_edited_plan_is_a_deviation(tmp_path):
    registered_text(comparison_of(tmp_path), begun=False)
    path = tmp_path / "comparisons/comparison/plan.yaml"
    before = path.read_text()
    path.write_text(before.replace("equivalence: null", "equivalence: 2.0"))
    typed = registered_text(comparison_of(tmp_path), begun=True)
    assert "plan.yaml was edited (equivalence: None before, 2.0 now)" in typed.deviations[0]
    assert path.read_text() == before
    path.write_text(before.replace("equivalence: null", "equivalence: 2.0"))
    followed = read_plan([f"plan={path}"])
    assert (followed.equivalence, followed.folder) == (2.0, tmp_path / "comparisons/comparison")
    for damage in ("mixer: [ffn", "- ffn", "", "\t"):
        path.write_text(damage)
        last = registered_text(comparison_of(tmp_path), begun=True).deviations[-1]
        assert last.endswith("plan.yaml was damaged, and is written anew")
        assert path.read_text() == before
    path.unlink()
    assert "was removed" in registered_text(comparison_of(tmp_path), begun=True).deviations[-1]


def test_other_data_are_refused(tmp_path):
    registered_text(comparison_of(tmp_path), begun=False)
    comparison = comparison_of(tmp_path)
    comparison.cells[0].prints["val"] = "b"
    with pytest.raises(ValueError, match="has runs on other data"):
        registered_text(comparison, begun=True)


def test_measured_cells_are_kept_for_the_same_code_and_words(tmp_path):
    cell = comparison_of(tmp_path).cells[0]
    words = [["task=classification", "backbone=deit_t"], ["steps"]]
    for commit in (None, "abc-dirty"):  # other code may have the same name
        write_cell(tmp_path, words, commit, cell)
        assert read_cell(tmp_path, words, commit) is None
    write_cell(tmp_path, words, "abc", cell)
    assert read_cell(tmp_path, words, "abc") == cell
    assert read_cell(tmp_path, words, "abd") is None
    assert read_cell(tmp_path, [*words, ["seed=1"]], "abc") is None


def test_plan_changes_name_both_values():
    assert plan_changes("a: 1\nb: {c: 2}\n", "a: 1\nb: {d: 3}\n") == [
        "b.d: None before, 3 now", "b.c: 2 before, None now"
    ]  # fmt: skip


def test_two_commands_on_one_folder(tmp_path, capsys):
    plan = plan_of(tmp_path)
    plan.folder.mkdir(parents=True)
    with FileLock(plan.folder / "lock"):
        with pytest.raises(ValueError, match="another command compares in"), locked(plan.folder):
            pass
        with pytest.raises(SystemExit) as ended:
            command.main([*WORDS, f"output_dir={tmp_path}"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("error: another command compares")
    with locked(plan.folder):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data=sample_classification,sample_detection", "this data is for task=detection"),
        ("host=deit_t,deit_q", "there is no backbone called 'deit_q'"),
        ("host=deit_t,timm", "host=timm lacks its model"),
    ],
)
def test_wrong_last_cells_end_the_command_before_the_first_is_timed(
    tmp_path, capsys, words, message
):
    with pytest.raises(SystemExit) as ended:
        command.main([*WORDS, words, f"output_dir={tmp_path}"])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert message in printed.err
    assert not any(tmp_path.iterdir())


def test_the_table_tests_itself_and_finds_a_planted_difference(tmp_path):
    comparison = comparison_of(tmp_path, "mixer=ffn,glu,iffn", *TWO_BY_TWO)
    fill(comparison, {"glu": 6.0, "iffn": -6.0})
    table = make_table(comparison)
    rows = {record["mixer"].rstrip("†‡"): record for record in table.records}
    assert [rows[name]["verdict"] for name in ("ffn", "glu", "iffn")] == [
        "baseline", "better", "worse"
    ]  # fmt: skip
    assert rows["ffn again"]["verdict"] == "cannot tell"
    assert any("self-test: ffn with other seeds is 'cannot tell'" in line for line in table.notes)
    assert rows["glu"]["rank"] == 1.0
    assert rows["glu"]["runs"] == 16
    assert rows["glu"]["beyond"] in ("better", "cannot tell")
    # The mixer that forces another class token is marked, and the line names it.
    assert table.records[2]["mixer"] == "iffn†"
    assert any("† iffn has in deit_t on cifar10 class tokens 0" in line for line in table.notes)
    values = [run.value for run in comparison.journal.finished()
              if (run.mixer, run.host, run.data) == ("glu", "swin_t", "cifar10")]  # fmt: skip
    assert rows["glu"]["swin_t on cifar10"] == pytest.approx(np.mean(values))
    assert any("run folders moved or deleted" in line for line in table.notes)


def test_a_failed_self_test_is_said(tmp_path):
    comparison = comparison_of(tmp_path, *TWO_BY_TWO)
    fill(comparison, {"ffn again": 6.0})
    assert any("FAILED" in line for line in make_table(comparison).notes)


def test_a_missing_cell_and_a_failed_run_are_named(tmp_path):
    comparison = comparison_of(tmp_path, *TWO_BY_TWO, refused=[("glu", "swin_t")])
    fill(comparison, {"glu": 6.0})
    run = next(run for run in comparison.journal if run.mixer == "ffn")
    comparison.journal.add(run.model_copy(update={"status": "failed", "reason": "loss is NaN"}))
    table = make_table(comparison)
    glu = next(record for record in table.records if record["mixer"] == "glu‡")
    assert glu["swin_t on cifar10"] is None
    assert glu["verdict"] == "better"
    assert any("‡ glu does not fit swin_t on cifar10: dim 3" in line for line in table.notes)
    assert any("failed: ffn in" in line and "loss is NaN" in line for line in table.notes)
    assert {record["runs"] for record in table.records} >= {8, 15, 16}


def test_rows_with_failed_runs_are_marked(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1")
    fill(comparison)
    facts = {"status": "failed", "reason": "loss is NaN", "value": np.nan}
    for run in list(comparison.journal):
        if run.mixer == "random" or (run.mixer, run.seed) == ("glu", 1):
            comparison.journal.add(run.model_copy(update=facts))
    table = make_table(comparison)
    marked = [record["mixer"] for record in table.records if "‡" in record["mixer"]]
    assert marked == ["glu‡", "random‡"]
    assert [line for line in table.notes if line.startswith("‡")] == [
        "‡ glu: 1 of 2 runs in deit_t on sample_classification",
        "‡ random: 0 of 2 runs in deit_t on sample_classification",
    ]


def test_a_row_that_a_budget_could_not_match_is_marked(tmp_path):
    for budget, marked in (("steps", []), ("macs", ["random"]), ("params", ["random"])):
        comparison = comparison_of(tmp_path, f"budget={budget}", f"name={budget}")
        cell = comparison.cells[0]
        cell.networks["identity"] = cell.networks["ffn again"] = cell.networks["ffn"]
        differing = [label for label in cell.networks if cell.differing(label, comparison.plan)]
        assert differing == marked
    (line,) = cell.differing("random", comparison.plan)
    assert line == "1.03 of the baseline's parameters, despite budget=params"


def test_equal_runs_are_no_equivalence(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1", "seeds=3")
    for planned in comparison.planned():
        facts = {"value": 71.3, "status": "finished", "folder": "/gone"}
        comparison.journal.add(planned.model_copy(update=facts))
    table = make_table(comparison)
    assert all(record.get("interval") is None for record in [*table.records, *table.cells])
    assert {record["verdict"] for record in table.records} == {"baseline", "cannot tell"}
    reason = "nothing can be concluded, as the runs of each mixer are equal"
    (line,) = (line for line in table.notes if reason in line)
    assert line.startswith("glu, identity, random, ffn again: ")
    assert expected_deviation(comparison)[1] == "assumed; pass deviation="


def test_a_terminal_of_100_columns_shows_the_claims(tmp_path, capsys):
    for words in (TWO_BY_TWO, ["rates=1"]):
        comparison = comparison_of(tmp_path, "mixer=ffn,glu,iffn", *words)
        fill(comparison)
        table = make_table(comparison)
        show(table)
        describe_plan(comparison, [])
        lines = [*capsys.readouterr().out.splitlines(), *table.notes]
        assert not [line for line in lines if len(line) > 100]
        plurals = r"\b1 (cells|hosts|data sets|runs)\b"
        assert not [line for line in lines if re.search(plurals, line)]


def test_few_blocks_conclude_nothing(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1")
    fill(comparison, {"glu": 50.0})
    table = make_table(comparison)
    assert "nothing can be concluded beyond these cells: 1 host says nothing about others" in (
        table.notes
    )
    assert all(record["beyond"] in ("baseline", "cannot tell") for record in table.records)


def test_intervals_use_answers_per_sample(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1")
    generator = np.random.default_rng(0)
    for number, run in enumerate(comparison.planned()):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        value = (generator.random(100) < 0.5).astype(float)
        np.savez(folder / "answers.npz", ids=np.arange(100), value=value)
        facts = {"value": 100 * value.mean(), "status": "finished", "folder": str(folder)}
        comparison.journal.add(run.model_copy(update=facts))
    widths = []
    for _ in range(2):
        row = make_table(comparison).cells[0]
        low, high = map(float, row["interval"].split(" to "))
        widths.append(high - low)
        for path in tmp_path.glob("*/answers.npz"):
            path.unlink()
    values = {}
    for run in comparison.journal:
        values.setdefault(run.mixer, {}).setdefault(run.cell, []).append(run.value)
    low, high = interval([0.0, 0.0], *estimate_errors(values).of(run.mixer, run.cell))
    assert widths[1] == pytest.approx(high - low, abs=0.02)
    assert widths[0] > widths[1]


def test_intervals_of_percent_stay_between_0_and_100(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1")
    for planned in comparison.planned():
        value = {"ffn": 99.9, "glu": 0.1}.get(planned.mixer, 50.0)
        value += (planned.seed % 2) * np.sign(50 - value) * 20
        facts = {"value": value, "status": "finished", "folder": "/gone"}
        comparison.journal.add(planned.model_copy(update=facts))
    texts = {record["mixer"]: record["interval"] for record in make_table(comparison).cells}
    assert float(texts["ffn"].split()[-1]) == 100
    assert float(texts["glu"].split()[0]) == 0


def test_files_of_a_comparison(tmp_path):
    comparison = comparison_of(tmp_path, "mixer=ffn,glu,iffn", *TWO_BY_TWO)
    fill(comparison, {"glu": 6.0, "iffn": -6.0})
    registered = registered_text(comparison, begun=False)
    write_files(comparison, make_table(comparison), registered)
    page = (comparison.folder / "report.html").read_text()
    assert registered.hash in page
    assert "left out" not in page  # all of 64 runs are listed
    assert "http" not in page.replace("http://www.w3.org", "")
    for part in ("Cells", "Deviations from the plan", "Versions", "torch", "better"):
        assert part in page
    tex = (comparison.folder / "table.tex").read_text()
    glu = next(line for line in tex.splitlines() if line.startswith("glu"))
    assert glu.count(r"\textbf{") == 4
    assert r"\underline{" in tex
    assert r"iffn$^\dagger$" in tex
    assert r"\toprule" in tex
    assert registered.hash in (comparison.folder / "table.md").read_text()


@pytest.mark.filterwarnings("error")
def test_the_legend_of_many_mixers_lies_beside_their_curves(tmp_path):
    comparison = comparison_of(tmp_path, f"mixer={','.join(list_mixers('channel'))}", "rates=1")
    (tmp_path / "metrics.csv").write_text("epoch,step,val/top1\n0,9,50.0\n1,19,60.0\n")
    for run in comparison.planned():
        facts = {"value": 60.0, "status": "finished", "folder": str(tmp_path)}
        comparison.journal.add(run.model_copy(update=facts))
    write_files(comparison, make_table(comparison), registered_text(comparison, begun=False))
    page = (comparison.folder / "report.html").read_text()
    picture = base64.b64decode(re.search('image/png;base64,([^"]+)', page).group(1))
    width, height = Image.open(io.BytesIO(picture)).size
    assert (width, height) == (792, 360)


def typed(folder, *words):
    return [sys.executable, str(ROOT / "tools" / "compare.py"), *WORDS, "rates=1", *SMALL,
            f"output_dir={folder}", *words]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("sample_cache")
def test_a_killed_command_continues_and_reuses_runs(tmp_path):
    process = subprocess.Popen(typed(tmp_path), stdout=subprocess.PIPE, text=True)
    journal = tmp_path / "comparisons/comparison/runs.csv"
    while not journal.exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    first = Journal(journal.parent)
    assert 1 <= len(first.runs) < 10
    ended = subprocess.run(typed(tmp_path), capture_output=True, text=True, timeout=900)
    assert (ended.returncode, ended.stderr) == (0, "")
    last = Journal(journal.parent)
    assert len(last.finished()) == 10
    assert all(repr(last.runs[key]) == repr(run) for key, run in first.runs.items())
    assert not any(run.reused for run in last)
    for run in last:
        answers = read_answers([run], "top1")
        assert answers.scale * answers.table.mean() == pytest.approx(run.value, abs=1e-3)
    registered = json.loads((journal.parent / "registered.json").read_text())
    assert registered["deviations"] == []
    # Another seed is added, and another comparison finds all runs of this one.
    more = typed(tmp_path, "seeds=3", "name=more", "jobs=2", "hydra/launcher=submitit_local")
    ended = subprocess.run(more, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("made before: ") == 10
    assert len(Journal(tmp_path / "comparisons/more").finished()) == 15
    # What was measured is kept: the third command starts at once.
    ended = subprocess.run(more, capture_output=True, text=True, timeout=900)
    is_clean = not (read_source().commit or "-dirty").endswith("-dirty")
    assert ("measuring" in ended.stdout) is not is_clean


@pytest.mark.slow
@pytest.mark.usefixtures("sample_cache")
def test_a_killed_run_is_named_and_continues(tmp_path):
    """SIGKILL ends a run, as a full memory does; the others go on, and the next command ends it."""
    long = ["trainer.max_epochs=12", "checkpoint_every=0.01", "++data.train_copies=20"]
    process = subprocess.Popen(typed(tmp_path, *long), stdout=subprocess.PIPE, text=True)
    while not (saved := list(tmp_path.rglob("checkpoints/*.ckpt"))):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    killed = saved[0].parents[1]
    os.kill(json.loads((killed / "run.lock").read_text())["pid"], signal.SIGKILL)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0
    assert "failed: signal 9 ended it; repeat the command to continue it" in out
    journal = Journal(tmp_path / "comparisons/comparison")
    assert len(journal.finished()) == 9
    ended = subprocess.run(typed(tmp_path, *long), capture_output=True, text=True, timeout=900)
    assert (ended.returncode, ended.stderr) == (0, "")
    last = Journal(tmp_path / "comparisons/comparison")
    assert len(last.finished()) == 10
    assert str(killed.resolve()) in {run.folder for run in last}  # continued, not begun again
    assert all(repr(last.runs[run.key]) == repr(run) for run in journal.finished())


@pytest.mark.slow
@pytest.mark.usefixtures("sample_cache")
def test_a_run_that_outlives_its_command_is_not_repeated(tmp_path):
    words = typed(tmp_path, "trainer.max_epochs=1000")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while not (locks := list(tmp_path.rglob("run.lock"))):
        assert process.poll() is None
        time.sleep(0.2)
    process.kill()
    process.wait()
    run = json.loads(locks[0].read_text())["pid"]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    finally:
        os.kill(run, signal.SIGTERM)
    assert ended.returncode == 2
    assert f"is in use by process {run}" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("sample_cache")
def test_pairs_that_do_not_fit_and_wrong_words_are_named_before_any_run(tmp_path):
    mixer = "glu backbone.mixer.hidden_ratio=0"
    for words, message in (
        ([f"mixer=ffn,{mixer}", "only=plan"], f"mixer={mixer} fits no host of the plan: "),
        (["data=sample_detection"], "this data is for task=detection"),
        (["host=bicubic"], "bicubic"),
        (["optimizer.lrr=1"], "adamw has no option"),
    ):
        ended = subprocess.run(typed(tmp_path, *words), capture_output=True, text=True, timeout=300)
        assert ended.returncode == 2
        assert message in ended.stderr
        assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("summary.json"))


@pytest.mark.slow
def test_the_tutorial_of_an_own_table(tmp_path):
    """The commands of the page, with an own mixer, in few steps."""
    copy = checkout.copied(tmp_path)
    name = "backbones/mixers/tanh_ffn.py"
    shutil.copy(ROOT / "docs/examples/new" / name, copy / name)
    page = (ROOT / "docs/tutorials/compare.md").read_text()
    commands = re.findall(r"^python (tools/compare.py .*)$", page, re.MULTILINE)
    plan, table, more = (shlex.split(text) for text in commands)
    short = ["trainer=cpu", "trainer.limit_train_batches=2", "++data.digits_per_class=4"]
    out = checkout.output(copy, *plan, *short)
    assert "smallest difference that it can show" in out
    assert not list(copy.glob("outputs/comparisons/mine/runs/**/summary.json"))
    out = checkout.output(copy, *table, *short)
    assert "tanh_ffn" in out
    assert "self-test: ffn with other seeds" in out
    out = checkout.output(copy, *more)
    assert "deviation from the plan" in out
    assert "seeds: 2 before, 3 now" in out
    assert (copy / "outputs/comparisons/mine/report.html").stat().st_size > 10_000


def test_runs_in_the_queue_of_a_cluster(tmp_path):
    """By submitit's processes on this machine; the plan is without the launcher."""
    pytest.importorskip("submitit")
    words = ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5", "jobs=2")
    plan = plan_of(tmp_path, *words)
    assert plan.entries() == plan_of(tmp_path).entries()
    assert plan_of(tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=3").jobs == 3
    workers = make_workers(plan)
    commands = {"help": (["--help"], 0), "wrong": (["backbone=swin_x"], 2)}
    for name, (typed_words, _) in commands.items():
        log = tmp_path / f"{name}.log"
        workers.start(typed_words, log, partial(lambda name, status: (name, status), name))
    assert dict(workers.results(0)) == {name: status for name, (_, status) in commands.items()}
    assert "submitit INFO" not in (tmp_path / "help.log").read_text()
    assert "swin_x" in (tmp_path / "wrong.log").read_text().splitlines()[-1]
    os.mkfifo(tmp_path / "stopped.log")  # without a reader, the command waits until it is stopped
    workers.start(["--help"], tmp_path / "stopped.log", int)
    workers.stop()
    assert list(workers.results(0)) == [-signal.SIGTERM]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra/launcher=threads", r"takes hydra/launcher=basic\|joblib"),
        ("hydra.launcher.setup=[ls]", "is not allowed"),
        ("hydra.launcher.n_jobs=many", "jobs=many must be a number"),
        ("hydra/launcher=submitit_slurm", "needs SLURM's srun|mixerlab.sweep"),
    ],
)
def test_wrong_launchers_are_refused(word, message, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=message):
        plan_of(tmp_path, word)


FOLDERS = ("data=folder data.root=/x/a/images,folder data.root=/x/b/images",)


def test_sets_are_told_apart_by_as_much_of_their_path_as_it_takes(tmp_path):
    labels = [entry.label for entry in data_entries(plan_of(tmp_path, *FOLDERS))]
    assert labels == ["folder a/images", "folder b/images"]
    short = plan_of(tmp_path, "data=folder data.root=/x/a,folder data.root=/x/b")
    assert [entry.label for entry in data_entries(short)] == ["folder a", "folder b"]
    one_in_other = plan_of(tmp_path, "data=folder data.root=a,folder data.root=b/a")
    assert len({entry.label for entry in data_entries(one_in_other)}) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mixer=ffn,glu trainer.max_epochs=3",), "max_epochs=3 would change the terms"),
        (("mixer=ffn,glu seed=7",), "seed=7 would change the terms"),
        (("host=deit_t checkpoints=best",), "checkpoints=best is set by the comparison"),
        (("mixer=ffn,own",), "ffn and own are the same mixer"),
        (("backbone.mixer.name=swiglu",), "mixer.name=swiglu chooses a mixer, which mixer= does"),
        (("host=deit_t backbone.mixer=[glu,ffn]",), "chooses a mixer, which mixer= does"),
        (("mixer=ffn,glu backbone.mixer.name=kan",), "chooses a mixer, which mixer= does"),
        (("data=folder data.root=/x/a,folder data.root=/x/a/",), "folder /x/a is there twice"),
        (("rates=nan,1",), "rates must be factors"),
        (("rates=inf,1",), "rates must be factors"),
        (("first_seed=-1",), "first_seed"),
    ],
)
def test_unequal_terms_and_duplicates_are_refused(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        mixer_entries(plan_of(tmp_path, *words))


def test_later_words_of_an_option_count(tmp_path):
    path = tmp_path / "my plan.yaml"
    path.write_text("mixer: ffn, glu\nhost: deit_t\ndata: sample_classification\nbaseline: ffn\n"
                    "options: trainer.max_epochs=3 data.image_size=32\n")  # fmt: skip
    plan = read_plan([f"plan={path}", "trainer.max_epochs=1"])
    assert plan.options == ["trainer.max_epochs=1", "data.image_size=32"]
    assert (plan.name, plan.mixer) == ("my_plan", ["ffn", "glu"])
    path.write_text(path.read_text().partition("options")[0] + "options:\n")
    assert read_plan([f"plan={path}"]).options == []


def test_a_copied_plan_has_a_folder_of_its_own(tmp_path):
    registered_text(comparison_of(tmp_path), begun=False)
    copy = tmp_path / "copy.yaml"
    copy.write_text((tmp_path / "comparisons/comparison/plan.yaml").read_text())
    assert read_plan([f"plan={copy}"]).folder == plan_of("outputs", "name=copy").folder


def test_rows_without_a_width_take_part_in_a_budget(tmp_path):
    plan = plan_of(tmp_path, "mixer=ffn,glu,identity", "budget=params")
    words = {entry.label: entry.words for entry in mixer_entries(plan)}
    assert words["glu"] == ("backbone.mixer.name=glu", "backbone.mixer.match=params")
    assert words["identity"] == ("backbone.mixer.name=identity",)
    plan = plan_of(tmp_path, "mixer=attention,pooling", "baseline=attention", "budget=macs")
    assert "backbone.token_mixer.match=macs" not in mixer_entries(plan)[1].words


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ((), []),
        (("trainer.max_epochs=30",), ["tune", "final", "untuned"]),
        (("budget=seconds",), ["tune", "final", "untuned"]),
        (("held_out=0.5",), ["tune"]),
    ],
)
def test_runs_of_other_settings_run_again(words, changed, tmp_path):
    first = comparison_of(tmp_path, "rates=1,4")
    fill(first)
    before = len(list(first.journal))
    later = comparison_of(tmp_path, "rates=1,4", *words)
    lines = later.outdated(first.plan)
    counts = [sum(run.stage == stage for run in first.journal) for stage in changed]
    assert sum(counts) == before - len(list(later.journal))
    assert lines == [f"of other settings left the table: {sum(counts)} runs"] * bool(changed)


@pytest.mark.parametrize("only", ["", "table"])
def test_a_stop_after_a_change_brings_no_old_runs_back(only, tmp_path, monkeypatch):
    def stop(comparison):
        raise KeyboardInterrupt

    first = comparison_of(tmp_path, "rates=1")
    fill(first)
    registered_text(first, begun=False)
    monkeypatch.setattr(work, "_measured", lambda *_: first.cells[0])
    monkeypatch.setattr(work, "run_plan", stop)
    with contextlib.suppress(KeyboardInterrupt):
        work.compare(plan_of(tmp_path, "rates=1", "trainer.max_epochs=30"), only)
    assert "max_epochs=30" in read_registered(first.folder).text
    assert Journal(first.folder).finished() == []


@pytest.mark.parametrize(
    ("words", "is_used"),
    [
        ((), True),
        (("data=folder data.root=/x/y/../a",), True),
        (("data=folder data.root=/x/b",), False),
        (("trainer.max_epochs=30",), False),
        (("trainer.max_steps=9",), False),
        (("data.batch_size=9",), False),
    ],
)
def test_runs_of_before_have_the_same_length_and_data(words, is_used, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_summary", lambda folder: {"mode": "fit"})
    monkeypatch.setattr(runner.Comparison, "_is_same", lambda *_: True)
    usual = ("data=folder data.root=/x/a", "rates=1", "schedule.warmup=0", "trainer.max_epochs=1")
    first = comparison_of(tmp_path, *usual, "name=first")
    config = runner.compose_run(first.words(next(first.planned())))
    place = f"runs/classification/{runner.config_network_name(config.backbone)}/2026"
    (first.folder / place).mkdir(parents=True)
    (first.folder / place / "config.yaml").write_text(yaml.safe_dump(config.plain()))
    later = comparison_of(tmp_path, *usual, "name=later", *words)
    run = next(later.planned())
    made, _ = later._earlier(runner.compose_run(later.words(run)), later.cells[0], run)
    assert (made == (first.folder / place).resolve()) == is_used


def test_rates_that_left_the_plan_choose_nothing(tmp_path):
    comparison = comparison_of(tmp_path, "rates=0.25,1")
    fill(comparison)
    for run in comparison.journal.finished("tune"):
        better = run.model_copy(update={"value": 99.0 if run.factor == 0.25 else 1.0})
        comparison.journal.add(better)
    cell = comparison.cells[0].key
    assert comparison.chosen_factor("glu", cell) == 0.25
    assert comparison_of(tmp_path, "rates=1,2").chosen_factor("glu", cell) == 1.0
    assert "sensitivity" not in make_table(comparison_of(tmp_path, "rates=1")).columns


def test_lists_per_stage_are_no_options_of_a_line_break(tmp_path):
    comparison = comparison_of(tmp_path, "mixer=ffn,[ffn,glu]", "rates=1")
    fill(comparison)
    table = latex(comparison, make_table(comparison), registered_text(comparison, begun=False))
    assert "\n{[ffn,glu]} &" in table


def test_later_seeds(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1", "first_seed=10")
    seeds = {(run.mixer, run.seed) for run in comparison.planned()}
    assert {seed for mixer, seed in seeds if mixer == "ffn"} == {10, 11}
    assert {seed for mixer, seed in seeds if mixer == "ffn again"} == {110, 111}
    assert plan_of(tmp_path, "first_seed=98").run_seeds == range(98, 100)


@pytest.mark.parametrize("seed", [99, 100, TUNING_SEED])
def test_seeds_of_the_second_row_and_of_rates_are_refused(tmp_path, seed):
    with pytest.raises(ValueError, match=rf"first_seed={seed}: .*; pass first_seed=0 to 98$"):
        plan_of(tmp_path, f"first_seed={seed}")


def test_runs_keep_their_set_where_a_second_one_changes_its_name(tmp_path):
    """One set is "folder", two are "folder a" and "folder b", and one again is "folder"."""
    one, two = "data=folder data.root=/x/a", "data=folder data.root=/x/b,folder data.root=/x/a"
    first = comparison_of(tmp_path, one, "rates=1")
    fill(first)
    registered_text(first, begun=False)
    values = {run.key: run.value for run in first.journal}
    for words, label in ((two, "folder a"), (one, "folder"), (one.replace("/a", "/b"), None)):
        plan = plan_of(tmp_path, words, "rates=1")
        journal = Journal(plan.folder)
        registered = keep_labels(plan, read_registered(plan.folder), journal)
        labels = {run.data for run in journal}
        assert labels == {label or "data=folder data.root=/x/a"}
        assert sorted(run.value for run in journal) == sorted(values.values())
        assert label is None or f"deit_t on {label}:" in registered.text
        later = comparison_of(tmp_path, words, "rates=1")
        fixed = fixed_entries(later.plan, later.mixers, later.cells, "c")
        registered = register(later.folder, later.plan, fixed, registered, begun=True)
        assert [line for line in registered.deviations if "edited" in line] == []


def test_another_metric_needs_another_name(tmp_path):
    first = comparison_of(tmp_path, "rates=1")
    registered = registered_text(first, begun=False)
    with pytest.raises(ValueError, match=r"runs by top1; pass name=<another name> for metric=top5"):
        keep_labels(plan_of(tmp_path, "rates=1", "metric=top5"), registered, first.journal)


def test_a_removed_registration_is_a_deviation(tmp_path):
    comparison = comparison_of(tmp_path)
    registered_text(comparison, begun=False)
    (comparison.folder / "registered.json").unlink()
    assert "registered.json was removed" in registered_text(comparison, begun=True).deviations[0]


def test_steps_by_the_clock_are_a_part_of_the_plan(tmp_path):
    comparison = comparison_of(tmp_path, "budget=seconds")
    registered = registered_text(comparison, begun=False)
    again = comparison_of(tmp_path, "budget=seconds")
    for cell in again.cells:
        cell.networks = {label: replace(n, steps=7) for label, n in cell.networks.items()}
    keep_lengths(again.plan, again.cells, registered)
    assert again.cells == comparison.cells
    assert "steps" not in str(yaml.safe_load(registered_text(comparison_of(
        tmp_path / "other"), begun=False).text)["fixed"])  # fmt: skip


def test_failures_that_are_over_are_forgotten(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1", "seeds=3")
    runs = list(comparison.planned())
    for run in runs:
        comparison.journal.add(run.model_copy(update={"status": "failed", "reason": "gone"}))
    first = runs[0].model_copy(update={"status": "finished", "factor": 4.0, "value": 1.0})
    comparison.journal.add(first)
    assert len(failed_runs(comparison)) == len(runs) - 1
    fewer = comparison_of(tmp_path, "rates=1", "seeds=2")
    assert {run.seed for run in failed_runs(fewer)} == {0, 1, 100, 101}


def test_a_mixer_that_fits_nowhere_ends_the_command(tmp_path):
    check_mixers(plan_of(tmp_path), comparison_of(tmp_path).cells)
    with pytest.raises(ValueError, match="mixer=glu fits no host of the plan: dim 3 is not"):
        check_mixers(plan_of(tmp_path), comparison_of(tmp_path, refused=[("glu", "deit_t")]).cells)


def test_data_are_read_again_and_rates_need_data_that_divide(tmp_path):
    write_folders(tmp_path / "images")
    words = (f"data=folder data.root={tmp_path / 'images'}", "data.image_size=32")
    plan = plan_of(tmp_path, *words)
    host, data = host_entries(plan)[0], data_entries(plan)[0]
    cell = CellPlan(host.label, data.label)
    note_data(plan, host, data, cell)
    before = dict(cell.prints)
    next((tmp_path / "images/train/a").iterdir()).unlink()
    note_data(plan, host, data, cell)
    assert cell.prints["train"] != before["train"]
    assert cell.prints["val"] == before["val"]
    for task in ("segmentation", "multi_label"):
        undivided = plan_of(tmp_path, f"task={task}", f"data=sample_{task}", "host=deit_t")
        host, data = host_entries(undivided)[0], data_entries(undivided)[0]
        with pytest.raises(ValueError, match=r"cannot divide its training images; pass rates=1$"):
            measure_cell(undivided, host, data, mixer_entries(undivided))
        with pytest.raises(ValueError, match=r"cannot divide its training images; pass rates=1$"):
            note_data(undivided, host, data, cell)


def write_folders(folder):
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in "ab":
            (folder / split / name).mkdir(parents=True)
            for number in range(4):
                pixels = generator.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


def test_the_last_named_folder_of_a_log_is_that_of_the_run(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1")
    run = next(comparison.planned())
    log = tmp_path / "log"
    log.write_text(f"Run folder: {tmp_path / 'gone'}\nresource_tracker: 1 leaked semaphore\n")
    with pytest.raises(FileNotFoundError, match=r"gone/summary\.json"):
        comparison._result(run, 0, log)


def test_a_full_disk_stops_all_runs(tmp_path):
    comparison = comparison_of(tmp_path, "rates=1")
    log = tmp_path / "log"
    log.write_text("error: No space left on device: 'last.ckpt'\n")
    with pytest.raises(OSError, match=r"ffn in .* stopped: No space left") as caught:
        comparison._result(next(comparison.planned()), 2, log)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("metric", "lowest"), [("matthews", -100.0), ("score", -100.0), ("accuracy", 0.0)]
)
def test_correlations_may_be_negative(tmp_path, metric, lowest):
    plan = plan_of(tmp_path, "task=glue", "data=sample_glue", "host=bert", f"metric={metric}")
    assert plan.bounds == (lowest, 100.0)


def test_a_metric_of_1_at_most_has_half_a_point_too(tmp_path):
    words = ("task=detection", "data=sample_detection", "host=swin_t", "rates=1")
    plan = plan_of(tmp_path, *words)
    assert (plan.primary, plan.region, plan.bounds) == ("AP", 0.005, (0.0, 1.0))
