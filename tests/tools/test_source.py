"""Code outside of the commit that a run folder keeps, and how it is found again."""

import subprocess

import pytest

from tasks.engine.run_folder.saved_runs import open_saved
from tasks.engine.run_folder.source_copies import check_sources
from tests.runs import write_run
from tools.config.name_checks import compose_checked
from tools.runs.source import Source, keep_source, read_source

MINE = "backbones/mixers/mine.py"
IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@b"]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A clean checkout of a project with two of our files."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    root = tmp_path / "checkout"
    for name in ("backbones/__init__.py", "backbones/mixers/ffn.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("one = 1\n")
    (root / ".gitignore").write_text("outputs/\n")
    for command in (["init", "-q"], ["add", "."], [*IDENTITY, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def test_a_clean_checkout_has_a_commit_and_nothing_is_kept(checkout, tmp_path):
    source = read_source(checkout)
    assert len(source.commit) == 12
    for name in ("notes.txt", "backbones/notes.txt", "outputs/x.py", "x.py"):  # of other kinds
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("x")
    assert read_source(checkout) == source
    keep_source(tmp_path / "run", source, checkout)
    assert not (tmp_path / "run").exists()


def test_untracked_source_files_are_a_change_and_kept(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "absent"))  # as of a hook's repository
    clean = read_source(checkout).commit
    (checkout / MINE).write_text("mine = 1\n")
    source = read_source(checkout)
    assert clean
    assert source == Source(f"{clean}-dirty", (MINE,))
    keep_source(tmp_path, source, checkout)
    assert (tmp_path / "source" / MINE).read_text() == "mine = 1\n"


def test_changes_are_kept_as_a_diff_that_can_be_applied(checkout, tmp_path):
    file = checkout / "backbones" / "mixers" / "ffn.py"
    for content in ("two = 2\n", "three = 3\n"):
        file.write_text(content)
        source = read_source(checkout)
        assert source.commit.endswith("-dirty")
        keep_source(tmp_path, source, checkout)
        keep_source(tmp_path, source, checkout)
    kept = sorted(path.name for path in (tmp_path / "source").iterdir())
    assert kept == ["changes-2.diff", "changes.diff"]
    subprocess.run(["git", "checkout", "-q", "."], cwd=checkout, check=True)
    diff = tmp_path / "source" / "changes.diff"
    subprocess.run(["git", "apply", str(diff)], cwd=checkout, check=True)
    assert file.read_text() == "two = 2\n"


@pytest.mark.parametrize(
    "backbone",
    [{"name": "deit_t_mine"}, {"name": "deit_t", "token_mixer": "mine"},
     {"name": "deit_t", "token_mixer": {"name": "mine"}}],
)  # fmt: skip
def test_a_run_with_a_missing_mixer_names_its_file(backbone, tmp_path):
    """All readers of run folders name it: tests, predictions, exports, analyses and tasks.load."""
    parts = {part: {"_target_": "x"} for part in ("head", "data", "task")}
    config = {"task_name": "t", "backbone": backbone, **parts}
    write_run(tmp_path, config)
    assert open_saved(tmp_path).run.config == config  # without the file the registry raises
    kept = tmp_path / "source" / MINE
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(ValueError, match=rf"lacks: {MINE} is missing .* kept in .*/source\. Read"):
        open_saved(tmp_path)
    if "token_mixer" not in backbone:  # the same command resumes without naming a network
        with pytest.raises(ValueError, match=f"lacks: {MINE} is missing"):
            compose_checked([f"backbone={backbone['name']}", "resume=true", f"ckpt={tmp_path}"])
    check_sources(tmp_path, {"name": "deit_t_afbo", "token_mixer": "sbm"})
