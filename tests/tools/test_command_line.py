"""Help, sweeps, and one-line errors."""

import re

import pytest

from backbones import list_backbones, list_mixers
from tasks.engine.run_folder.saved_runs import checkpoint_file
from tests.runs import arguments, command, summary
from tools.cli.errors import one_line_errors
from tools.cli.grammar import expand
from tools.config import help as run_help
from tools.config import overrides

pytestmark = pytest.mark.usefixtures("sample_cache")


def test_errors_are_one_line_and_bugs_keep_their_traceback(capsys, tmp_path):
    with pytest.raises(ZeroDivisionError), one_line_errors():
        1 / 0  # noqa: B018
    with pytest.raises(ValueError, match="not ours"), one_line_errors():
        raise ValueError("not ours")

    def library():
        try:
            checkpoint_file(tmp_path / "nowhere")
        except ValueError as error:
            raise RuntimeError("the library gave up") from error

    with pytest.raises(SystemExit) as ended, one_line_errors():
        library()
    assert ended.value.code == 2
    said = f"{tmp_path}/nowhere does not exist; pass a checkpoint or run folder"
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit), one_line_errors():
        raise OSError(28, "No space left on device", "/data/x")
    err = capsys.readouterr().err
    assert err.startswith("error: /data/x: No space left on device; free space there")
    assert err.count("\n") == 1


def test_help_fits_a_screen():
    text = run_help.help_text([])
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "python tools/run.py task=detection backbone=swin_t_afbo" in text
    words = set(re.findall(r"[\w{},]+", text.replace(", ", " ")))
    for word in ("deit_{t,s,b}", "poolformer_{s12,s24,s36,m36,m48}", "convnext_t", "glu", "sbm",
                 "dino", "sample_long", "ddp_cpu", "mask2former",
                 "afbo_t2_deit_t_afbo"):  # fmt: skip
        assert word in words
    assert f"all {len(list_backbones())} names" in text
    names = [f"name_{letter}" for letter in "abcdefgh"] + [f"other{n}" for n in range(20)]
    whole = run_help._fit_lines("list ", names, 9, "data")
    assert "more" not in whole
    cut = run_help._fit_lines("list ", names, 1, "data")
    assert cut == ("list name_{a,b,c,d,e,f,g,h}, other0, other1, other2, other3, other4, "
                   "... and 15 more: --help data")  # fmt: skip


def test_help_on_a_subject_is_complete():
    assert run_help.help_text(["backbone"]).split() == list_backbones()
    recipes = {path.stem for path in (run_help.CONFIGS / "recipe").glob("*.yaml")}
    said = run_help.help_text(["recipe"])
    assert {line.split()[0] for line in said.splitlines() if line[0] != " "} == recipes
    assert "300 epochs, 1e-3 for 1024 images" in said
    for name in list_mixers():
        assert f"\n  {name} " in run_help.help_text(["mixer"])
    config = run_help.help_text(["config", "task=detection", "backbone=swin_t_afbo", "seed=7"])
    assert "seed: 7" in config
    assert "task_name: detection" in config
    said = "unknown subject 'optimizr' of --help; known: backbone, mixer, experiment, task"
    with pytest.raises(ValueError, match=said):
        run_help.help_text(["optimizr"])


@pytest.mark.slow
def test_a_sweep_has_a_folder_per_run_and_continues_after_a_failure(tmp_path):
    typed = arguments("classification", tmp_path, "trainer.limit_train_batches=1")
    typed = [a for a in typed if not a.startswith(("backbone=", "data.batch_size="))]
    typed += ["backbone=deit_t,poolformer_s12", "data.batch_size=0,8"]
    ended = command(["-m", *typed], cwd=tmp_path)
    assert ended.status == 2
    *errors, last = ended.err.splitlines()
    assert len(errors) == 2
    assert all(error.startswith("error: data.batch_size=0 is too low") for error in errors)
    assert last.startswith("error: of the sweep 2 failed: task=classification ")
    heading, *table, _, _ = ended.out.strip().splitlines()[-5:]  # then what else differs
    assert heading.split()[:4] == ["backbone", "data.batch_size", "runs", "top1"]
    rows = [["deit_t", "8", "1"], ["poolformer_s12", "8", "1"]]
    assert [row.split()[:3] for row in table] == rows
    for name in ("deit_t", "poolformer_s12"):
        assert f"backbone={name} data.batch_size=0" in last
        assert summary(tmp_path / "classification" / name / "latest")["backbone"] == name
    assert {path.name for path in tmp_path.iterdir()} == {"classification", "multirun.yaml"}


def test_sweeps_check_their_names_and_list_each_run(tmp_path):
    typed = arguments("classification", tmp_path, backbone="deit_t,poolformer_s21")
    with pytest.raises(ValueError, match="did you mean poolformer_s24 or poolformer_s12"):
        overrides.read_command(["-m", *typed])
    jobs = expand(["backbone=a,b", "seed=range(0,2)", "x=1"])
    assert [sorted(job) for job in jobs] == [
        ["backbone=a", "seed=0", "x=1"], ["backbone=a", "seed=1", "x=1"],
        ["backbone=b", "seed=0", "x=1"], ["backbone=b", "seed=1", "x=1"],
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["data.root", "ckpt", "output_dir"])
def test_a_path_that_is_not_utf_8_is_rejected(key):
    with pytest.raises(ValueError, match=r"xff' must be UTF-8.* another name"):
        overrides.read_command([f"{key}=/data/\udcff"])
