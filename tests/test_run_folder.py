"""Run folders: new ones, the latest, and who writes."""

import pytest

from tools import run_folder


def test_two_runs_within_a_second_have_their_own_folders(tmp_path):
    folders = {run_folder.new_run_folder(tmp_path, "fit") for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() for folder in folders)


def test_latest_leads_to_the_newest_run(tmp_path):
    for _ in range(2):
        folder = run_folder.new_run_folder(tmp_path, "fit")
        run_folder.mark_latest(folder)
        assert (tmp_path / "latest").resolve() == folder
    assert len(list(tmp_path.iterdir())) == 3


def folder_config(output_dir):
    return {"output_dir": str(output_dir), "task_name": "t", "backbone": {"name": "b"},
            "resume": False, "mode": "fit", "ckpt": None}  # fmt: skip


def refuse_a_run(config):
    with pytest.raises(ValueError, match="refused"), run_folder.opened(config):
        raise ValueError("refused")


def test_a_refused_run_leaves_no_folder_that_was_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv(run_folder.ENVIRONMENT, "")  # opened sets it; this puts it back
    refuse_a_run(folder_config(tmp_path / "made" / "outputs"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "t").mkdir()
    refuse_a_run(folder_config(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["t"]
    with run_folder.opened(folder_config(tmp_path)) as folder:
        refuse_a_run(folder_config(tmp_path))
    assert folder.is_dir()


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    config = folder_config(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(run_folder.ENVIRONMENT, str(tmp_path / "of_the_first"))
    with run_folder.opened(config) as folder:
        assert folder == tmp_path / "of_the_first"
    assert not list(tmp_path.iterdir())
