"""Run folders: new ones, the latest, and locks."""

import json
import os
import subprocess
import time

import pytest
import yaml

from tasks.engine.optimisation import automatic
from tasks.engine.run_folder.run_config import RunConfig
from tools.runs import folder as run_folder
from tools.runs import lock as run_lock


def test_new_folders_of_runs_and_the_latest(tmp_path):
    for _ in range(2):
        folder = run_folder.new_run_folder(tmp_path, "fit")
        run_folder.mark_latest(folder)
        assert (tmp_path / "latest").resolve() == folder
    assert len(list(tmp_path.iterdir())) == 3
    folders = {run_folder.new_run_folder(tmp_path, "fit") for _ in range(5)}
    assert len(folders) == 5
    assert all(folder.is_dir() for folder in folders)


def folder_config(output_dir):
    return {"output_dir": str(output_dir), "task_name": "t", "backbone": {"name": "b"},
            "resume": False, "mode": "fit", "ckpt": None, "head": {"_target_": "h"},
            "task": {"_target_": "t"}, "data": {"_target_": "d"}}  # fmt: skip


def open_folder(config):
    return run_folder.open_run_folder(RunConfig(**config))


def fail_in_a_run(config):
    with pytest.raises(ValueError, match="refused"), open_folder(config):
        raise ValueError("refused")


def test_a_rejected_run_leaves_no_new_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(run_folder.ENVIRONMENT, "")  # pytest restores the variable that the run sets
    fail_in_a_run(folder_config(tmp_path / "made" / "outputs"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "t").mkdir()
    fail_in_a_run(folder_config(tmp_path))
    assert [path.name for path in tmp_path.rglob("*")] == ["t"]
    with open_folder(folder_config(tmp_path)) as folder:
        fail_in_a_run(folder_config(tmp_path))
    assert folder.is_dir()


def test_only_the_first_process_writes(tmp_path, monkeypatch):
    config = folder_config(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(run_folder.ENVIRONMENT, str(tmp_path / "first_process"))
    with open_folder(config) as folder:
        assert folder == tmp_path / "first_process"
    assert not list(tmp_path.iterdir())


def find(config, **options):
    return run_folder.find_run_to_resume(RunConfig(**config), **options)


def refused(said, config, **change):
    with pytest.raises(ValueError, match=said):
        find({**config, **change})


class TestResume:
    """Choice of the run to resume; runs here are folders with a config and a checkpoint."""

    @pytest.fixture
    def config(self, tmp_path):
        return {**folder_config(tmp_path), "seed": 0, "trainer": {"max_epochs": 2},
                "data": {"_target_": "d", "batch_size": 8, "num_workers": 2},
                "checkpoint_every": 15}  # fmt: skip

    @pytest.fixture
    def run(self, config):
        def run(day=1, name="", begun=True, **different):
            folder = run_folder._parent(RunConfig(**config)) / f"2026-01-{day:02}_00-00-00{name}"
            (folder / "checkpoints").mkdir(parents=True)
            (folder / "config.yaml").write_text(yaml.safe_dump({**config, **different}))
            if begun:
                (folder / "checkpoints" / "last.ckpt").touch()
            return folder

        return run

    def test_the_newest_run_with_the_same_settings_is_found(self, config, run):
        run()
        own, other = run(2, "_seed-0"), run(3, "_seed-1", seed=1)
        run(4, "_test", mode="test")
        run_folder.mark_latest(other)
        assert find({**config, "resume": True}) == own
        assert find({**config, "seed": 1}, sweep=True) == other

    def test_loading_logging_and_length_may_change(self, config, run):
        own = run()
        now = {**config, "trainer": {"max_epochs": 20}, "checkpoint_every": 1,
               "logger": {"name": "csv"},
               "data": {**config["data"], "num_workers": 0, "eval_batch_size": 99}}  # fmt: skip
        assert find(now) == own
        assert (
            run_folder.describe_new_length(own, RunConfig(**now))
            == "trainer.max_epochs=20, before 2"
        )
        run_folder.update_config(own, RunConfig(**{**now, "resume": True}), resumed=True)
        assert run_folder.describe_new_length(own, RunConfig(**now)) is None
        kept = yaml.safe_load((own / "config.yaml").read_text())
        assert (kept["trainer"], kept["resume"]) == ({"max_epochs": 20}, False)

    def test_the_error_names_different_settings(self, config, run):
        own = run()
        for ckpt in (None, str(own), str(own / "checkpoints" / "last.ckpt")):
            refused(r"other settings .seed: 0 then, 5 now", config, seed=5, ckpt=ckpt)

    def test_a_new_option_at_its_default_counts_as_equal(self, config, run):
        data = {"_target_": "datamodules.dense.coco.CocoDataModule", "root": "r", "batch_size": 8}
        own = run(data=data)
        assert find({**config, "data": {**data, "skip_unusable_boxes": False}}) == own
        newer = {**data, "skip_unusable_boxes": True}
        refused("skip_unusable_boxes: None then, True now", config, data=newer)

    def test_a_run_older_than_auto_keeps_its_values(self, config, run):
        """Older data configs have numbers where current ones have auto."""
        then = {"optimizer": {"lr": 1e-3, "reference_batch": 1024}, "schedule": {"warmup": 5},
                "data": {**config["data"], "batch_size": 128},
                "trainer": {"max_epochs": 100, "check_val_every_n_epoch": 1}}  # fmt: skip
        now = {"optimizer": {"lr": "auto", "reference_batch": None}, "schedule": {"warmup": "auto"},
               "data": {**config["data"], "batch_size": "auto"},
               "trainer": {"max_epochs": "auto", "check_val_every_n_epoch": "auto"}}  # fmt: skip
        own = run(**then, overrides=["data=folder", "data.root=/data"])
        resumed = RunConfig(**{**config, **now})
        assert find({**config, **now}) == own
        automatic.reuse_choices(resumed, own)
        assert {key: getattr(resumed, key) for key in then} == then
        assert run_folder.describe_new_length(own, resumed) is None

    def test_what_pretrained_weights_decided_stays(self, config, run):
        kind = {"_target_": "datamodules.images.transforms.PaperAugmentation"}
        statistics = {"mean": [0.5, 0.5, 0.5], "crop_pct": 0.95}
        data = {**config["data"], "augmentation": {**kind, **statistics}}
        head = {**config.get("head", {}), "model": {"data_preprocessor": {"std": [127.5] * 3}}}
        groups = {"optimizer": {}, "schedule": {}, "trainer": {}}
        data["batch_size"] = 8
        own = run(data=data, head=head, **groups)
        now = {**config, **groups, "data": {**data, "augmentation": dict(kind)}}
        now["head"] = {**config.get("head", {}), "model": {}}
        assert find(now) == own
        resumed = RunConfig(**now)
        automatic.reuse_choices(resumed, own)
        assert (resumed.data, resumed.head) == (data, head)

    def test_initial_weights_and_teachers_may_have_moved(self, config, run, tmp_path):
        there, other = tmp_path / "there.ckpt", str(tmp_path / "other.ckpt")
        there.touch()
        begun = {"name": "b", "pretrained": str(there)}
        own = run(backbone=begun)
        now = {**config, "backbone": {"name": "b", "pretrained": other}}
        refused(r"backbone\.pretrained: .*there\.ckpt then", now)
        there.unlink()
        assert find(now) == own
        for start in (None, False, True):
            now["backbone"] = {"name": "b", "pretrained": start}
            refused(r"backbone\.pretrained: ", now)
            named = RunConfig(**{**now, "ckpt": str(own)})
            assert run_folder.find_run_to_resume(named) == own
            run_folder.restore_start(named, own)
            assert named.backbone == begun
        task = {"_target_": "t", "distillation": {"checkpoint": str(there)}}
        own = run(2, task=task)
        now = {**config, "task": {**task, "distillation": {"checkpoint": "other.ckpt"}}}
        assert find(now) == own
        there.touch()
        for ckpt in (None, str(own)):
            refused(r"task\.distillation\.checkpoint: ", now, ckpt=ckpt)

    def test_an_unstarted_job_of_a_sweep_starts(self, config, run, caplog):
        refused("has no run to resume", config)
        run(seed=1)
        run(2, begun=False)
        with caplog.at_level("INFO"):
            assert find(config, sweep=True) is None
        assert "a new one starts" in caplog.text
        refused("ended before its first checkpoint", config)

    def test_a_running_run_is_rejected(self, config, run):
        own = run()
        with run_lock.acquire(own):
            for ckpt in (None, str(own)):
                refused(f"in use by process {os.getpid()} on .*since", config, ckpt=ckpt)
        assert find(config) == own


class TestLock:
    def write(self, folder, **content):
        own = run_lock._entry({"since": "2026-01-01T00:00:00"})
        (folder / run_lock.LOCK).write_text(json.dumps({**own, **content}))

    def test_a_lock_is_acquired_and_released(self, tmp_path):
        with (
            run_lock.acquire(tmp_path),
            pytest.raises(ValueError, match=f"process {os.getpid()} on"),
        ):
            run_lock.refuse_if_held(tmp_path)
        run_lock.refuse_if_held(tmp_path)
        self.write(tmp_path, host="another\none")
        with pytest.raises(ValueError, match="on another one, training"):
            run_lock.refuse_if_held(tmp_path)
        (tmp_path / run_lock.LOCK).unlink()
        with pytest.raises(SystemExit), run_lock.acquire(tmp_path):
            raise SystemExit(143)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("kind", ["ended", "reused process id"])
    def test_a_lock_of_an_ended_process_is_taken_over(self, tmp_path, caplog, kind):
        process = subprocess.Popen(["true"])
        process.wait()
        ended = {"pid": process.pid} if kind == "ended" else {"born": 1}
        self.write(tmp_path, **ended)
        with caplog.at_level("INFO"), run_lock.acquire(tmp_path):
            assert f"Taking over {tmp_path.name} from process" in caplog.text
        assert not list(tmp_path.iterdir())

    def test_a_lock_of_another_machine_expires_with_age(self, tmp_path):
        self.write(tmp_path, host="elsewhere", pid=1)
        with pytest.raises(ValueError, match="process 1 on elsewhere, training since 2026"):
            run_lock.refuse_if_held(tmp_path)
        old = time.time() - 2 * run_lock.SILENCE
        os.utime(tmp_path / run_lock.LOCK, (old, old))
        run_lock.refuse_if_held(tmp_path)

    def test_other_processes_and_evaluations_acquire_none(self, tmp_path, monkeypatch):
        with run_lock.acquire(tmp_path, "test"):
            assert not list(tmp_path.iterdir())
        with run_lock.acquire(tmp_path):
            monkeypatch.setenv("LOCAL_RANK", "1")
            with run_lock.acquire(tmp_path):
                pass
            assert (tmp_path / run_lock.LOCK).exists()
            monkeypatch.delenv("LOCAL_RANK")
