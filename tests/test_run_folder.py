"""Run folders: new ones, the latest, and who writes."""

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


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    config = {"output_dir": str(tmp_path), "task_name": "t", "backbone": {"name": "b"},
              "resume": False, "mode": "fit", "ckpt": None}  # fmt: skip
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(run_folder.ENVIRONMENT, str(tmp_path / "of_the_first"))
    with run_folder.opened(config) as folder:
        assert folder == tmp_path / "of_the_first"
    assert not list(tmp_path.iterdir())
