"""A run that is killed anywhere and resumed equals an unbroken one: weights, best, metrics."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import timer

from backbones.checkpoints.seal import DamagedCheckpoint
from datamodules import PaperAugmentation
from tasks.classification.task import ClassificationTask
from tasks.engine.callbacks import checkpoints as keeping
from tasks.engine.callbacks.loggers import read_rows
from tasks.engine.callbacks.monitors import TopCheckpoints
from tests.families import rest_slow_pairs
from tests.running.tiny import tiny_data, tiny_task
from tests.runs import same
from tools.runs import trainer as trainers
from tools.runs.resume import find_start

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(BaseException):
    """Ends a run like kill -9: files stay unchanged and cleanup is skipped."""


class KillAt(Callback):
    def __init__(self, hook, number):
        self.left = number
        setattr(self, hook, self._count)

    def _count(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise Killed


@pytest.fixture
def train(sample_cache, trainer_options, tmp_path):
    def train(
        folder,
        resume=False,
        kill=None,
        every=None,
        ckpt=None,
        keep="all",
        data=None,
        extra=(),
        **given,
    ):
        folder = tmp_path / folder
        folder.mkdir(exist_ok=True)
        data, task = (
            tiny_data(sample_cache, **data or {}),
            tiny_task(schedule={"name": "cosine", "warmup": 0.5}),
        )
        chosen = {**trainer_options, "max_epochs": 3, "limit_val_batches": 2, **given}
        trainer = trainers.make_trainer(
            chosen, folder, task.monitor, task.mode, training=True, checkpoint_every=every,
            callbacks=extra,
        )  # fmt: skip
        if kill is not None:
            trainer.callbacks.insert(0, KillAt(*kill))
        try:
            start = find_start(folder, ckpt, task, chosen) if resume else None
            trainers.fit(trainer, task, data, start=start, keep=keep)
        except Killed:
            assert kill is not None
        return task.model.seen, folder

    return train


def checkpoint(folder, name="last"):
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


def kept(folder):
    return {path.name for path in (folder / "checkpoints").iterdir()}


def rows(folder):
    merged = {}
    for row in read_rows(folder / "metrics.csv"):
        merged.setdefault(row["step"], {}).update(row)
    return list(merged.values())


def assert_same(broken, whole):
    for name in ("last", "best"):
        got, expected = checkpoint(broken, name), checkpoint(whole, name)
        assert got["epoch"] == expected["epoch"]
        assert same(got["state_dict"], expected["state_dict"]), name
        assert got.keys() == expected.keys()
    assert not {"optimizer_states", "callbacks", "position"} & got.keys()  # of the best one
    got, expected = checkpoint(broken), checkpoint(whole)
    assert got["position"] == expected["position"]
    states = [one["optimizer_states"][0]["state"] for one in (got, expected)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert got["lr_schedulers"] == expected["lr_schedulers"]
    lines = [row["step"] for row in read_rows(broken / "metrics.csv") if "val/top1" in row]
    assert len(lines) == len(set(lines))  # each validation is logged once
    assert rows(broken) == rows(whole)


EPOCH = 6  # batches
BATCH, BEFORE, WITHIN, AFTER, END = (
    "on_train_batch_start", "on_validation_start", "on_validation_batch_start",
    "on_validation_end", "on_train_epoch_end",
)  # fmt: skip
STEPS = {"max_steps": 20, "max_epochs": 10}
WHOLE = {
    "epochs": {},
    "steps": STEPS,
    "steps at an end": {"max_steps": 12},
    "steps below an epoch": {"max_steps": 4, "max_epochs": 10},
    "steps alone": {"max_steps": 8, "max_epochs": -1},
    "accumulation": {"accumulate_grad_batches": 2, "max_steps": 7},
    "odd accumulation": {"accumulate_grad_batches": 4, "max_steps": 5},
    "rare validation": {"check_val_every_n_epoch": 2},
    "validation by steps": {"val_check_interval": 0.5, "max_steps": 10},
    "validation within a step": {"accumulate_grad_batches": 4, "val_check_interval": 3},
    "double precision": {"precision": "64-true", "max_epochs": 2},
}
SOME = [
    ("steps", (BATCH, 10)),
    ("steps below an epoch", (BEFORE, 0)),
    ("accumulation", (BATCH, 9)),
    ("validation by steps", (WITHIN, 4)),
    ("validation within a step", (BATCH, 9)),
    ("double precision", (BATCH, 9)),
]
ALL = [
    (name, (hook, number))
    for name in WHOLE
    for hook, numbers in ((BATCH, (1, 5, 6, 7, 12, 17)), (BEFORE, (0, 2)), (WITHIN, (1, 4)),
                          (AFTER, (0, 2)), (END, (0, 2)))
    for number in numbers
] + [("rare validation", (WITHIN, 2))]  # fmt: skip
REST = [case for case in ALL if case not in SOME]


@pytest.fixture(scope="module")
def wholes():
    return {}


@pytest.mark.parametrize(("name", "kill"), rest_slow_pairs([*SOME, *REST], SOME), ids=str)
def test_a_killed_run_resumes_exactly(train, name, kill, wholes, tmp_path_factory):
    whole_options = WHOLE[name]
    if name not in wholes:
        _, wholes[name] = train(tmp_path_factory.mktemp("whole"), every=1e-9, **whole_options)
    first, broken = train("broken", every=1e-9, kill=kill, **whole_options)
    if not (broken / "checkpoints" / "last.ckpt").exists():
        assert len(first) <= 1 or "accumulate_grad_batches" in whole_options
        return
    train("broken", resume=True, every=1e-9, **whole_options)
    assert_same(broken, wholes[name])
    assert kept(broken) == {"best.ckpt", "last.ckpt"}


AUGMENTED = PaperAugmentation(auto_augment=None, random_erasing=1.0)


@pytest.mark.parametrize("resident", [False, True])
def test_augmented_images_resume_exactly(train, resident):
    """Noise is drawn before the batch starts, when a resumed run sets its random state."""
    data = {"augmentation": AUGMENTED, "resident": resident}
    options = {"every": 1e-9, "max_epochs": 2, "data": data}
    _, whole = train("whole", **options)
    train("broken", kill=(BATCH, 9), **options)
    train("broken", resume=True, **options)
    assert_same(whole.with_name("broken"), whole)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_is_written_by_the_clock(train, monkeypatch):
    now = iter(range(0, 10_000, 25))
    monkeypatch.setattr(keeping, "time", SimpleNamespace(monotonic=lambda: next(now)))
    _, folder = train("run", every=1, kill=(BATCH, 5))
    # Read as training starts, after each step and after a save.
    assert checkpoint(folder)["global_step"] == 3
    assert not (folder / "checkpoints" / "best.ckpt").exists()


def test_without_a_clock_the_end_of_an_epoch_comes_before_its_validation(train):
    assert not (train("none", kill=(BATCH, 5))[1] / "checkpoints").exists()
    _, folder = train("run", kill=(WITHIN, 0))
    assert checkpoint(folder)["position"]["validation_due"]
    assert checkpoint(folder)["global_step"] == EPOCH


def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(train, caplog):
    _, whole = train("whole")
    _, broken = train("broken", kill=(BATCH, 14), every=1e-9)
    folder = broken / "checkpoints"
    damage(folder / "last.ckpt")
    with caplog.at_level("INFO"):
        train("broken", resume=True)
    assert "last.ckpt is damaged" in caplog.text
    assert "the run continues from last.previous.ckpt, step 13" in caplog.text
    assert_same(broken, whole)
    damage(folder / "last.ckpt")
    with pytest.raises(DamagedCheckpoint, match=r"last\.ckpt is damaged"):
        train("broken", resume=True)  # best.ckpt holds weights only
    (folder / "last.ckpt").unlink()
    with pytest.raises(ValueError, match=r"neither last\.ckpt nor last\.previous\.ckpt"):
        train("broken", resume=True)


def test_a_named_checkpoint_is_resumed(train):
    _, whole = train("whole")
    _, broken = train("broken", kill=(BATCH, 14), every=1e-9)
    best, previous = (broken / "checkpoints" / name for name in ("best.ckpt", "last.previous.ckpt"))
    with pytest.raises(ValueError, match=r"holds weights only .*; pass the run's last\.ckpt"):
        train("broken", resume=True, ckpt=str(best))
    seen, _ = train("broken", resume=True, ckpt=str(previous))
    assert len(seen) == 18 - 13
    assert_same(broken, whole)
    damage(best)
    with pytest.raises(DamagedCheckpoint, match=r"best\.ckpt is damaged"):
        train("broken", resume=True, ckpt=str(best))


@pytest.mark.parametrize(
    ("keep", "left", "more"),
    [
        ("all", {"best.ckpt", "last.ckpt"}, {}),
        ("best", {"best.ckpt"}, {}),
        ("best", {"best.ckpt"}, {"limit_val_batches": 0}),  # the latest, without metrics
        ("last", {"last.ckpt"}, {}),
    ],
)
def test_an_option_selects_the_files_of_a_finished_run(train, keep, left, more, monkeypatch):
    evaluated, evaluate = [], trainers.evaluate
    monkeypatch.setattr(trainers, "evaluate", lambda *a: evaluated.append(a[-1]) or evaluate(*a))
    _, folder = train("run", keep=keep, every=1e-9, max_epochs=1, **more)
    assert kept(folder) == left
    if not more:
        assert evaluated[0].name == ("last.ckpt" if keep == "last" else "best.ckpt")


def test_a_lower_number_of_best_checkpoints_removes_the_surplus(train, tmp_path):
    """Two validations an epoch have files of their own."""
    tops = []

    def scores(count, **options):
        tops.append(TopCheckpoints(tmp_path / "run" / "checkpoints", "val/top1", "max", count))
        train("run", extra=tops[-1:], val_check_interval=0.5, **options)
        names = {name for name in kept(tmp_path / "run") if name.startswith("top_")}
        assert names == {Path(path).name for path in tops[-1].best_k_models}
        return sorted(map(float, tops[-1].best_k_models.values()))

    before = scores(3, max_epochs=2)
    assert len(before) == 3
    (best,) = scores(1, resume=True)
    assert best >= before[-1]


@pytest.mark.parametrize(
    ("given", "text"),
    [({"max_epochs": 1}, "max_epochs=1, but the run to resume is in or past epoch 2"),
     ({"max_steps": 11}, "max_steps=11, but the run to resume is in or past step 12")],
)  # fmt: skip
def test_a_run_stays_as_long_as_its_progress(train, given, text):
    train("run", max_epochs=2)
    with pytest.raises(ValueError, match=text):
        train("run", resume=True, **given)


def test_a_checkpoint_of_another_model_is_refused(train, tmp_path):
    _, folder = train("run", max_epochs=1)
    other = tiny_task(classes=7)
    other.class_names = tiny_task(classes=10).class_names
    with pytest.raises(ValueError, match=r"holds another model: 2 keys differ .*net\.5\.weight"):
        find_start(folder, None, other, {"max_epochs": 2, "max_steps": -1, "strategy": "auto"})


def test_a_run_folder_that_was_moved_keeps_its_best(train, monkeypatch):
    scores = iter((3.0, 2.0, 1.0, 0.0))
    monkeypatch.setattr(
        ClassificationTask, "compute_metrics", lambda _: {"top1": torch.tensor(next(scores))}
    )
    _, folder = train("run", kill=(BATCH, 14))
    folder.rename(folder.with_name("moved"))
    _, moved = train("moved", resume=True)
    assert checkpoint(moved, "best")["global_step"] == EPOCH
    assert not folder.exists()
    (state,) = checkpoint(moved)["callbacks"].values()
    assert state["best_model_path"] == str(moved / "checkpoints" / "best.ckpt")


class Clock:
    """A second passes at each look."""

    now = 0.0

    def monotonic(self):
        self.now += 1
        return self.now


def test_time_ends_a_run_between_steps_and_more_time_continues_it(train, monkeypatch):
    """Each step of the optimiser, of two batches, looks at the clock; an epoch has three."""
    whole, _ = train("whole", accumulate_grad_batches=2)
    monkeypatch.setattr(timer, "time", Clock())
    timed = {"accumulate_grad_batches": 2, "max_time": "00:00:00:05"}
    seen, folder = train("run", **timed)
    last = checkpoint(folder)
    assert (last["position"]["step"], last["position"]["batches"]) == (4, 8)
    assert not last["position"]["validation_due"]
    assert "val/top1" in rows(folder)[-2]  # before that of the test
    assert train("run", resume=True, **timed)[0] == []  # its time is over
    more, _ = train("run", resume=True, **timed | {"max_time": "00:01:00:00"})
    assert seen + more == whole
    assert checkpoint(folder)["position"]["step"] == 9
    spent = checkpoint(folder)["callbacks"]["Timer"]["time_elapsed"]["train"]
    assert spent >= 9


class Remembers(Callback):
    def __init__(self, value):
        self.value, self.loaded = value, None

    def state_dict(self):
        return {"value": {"nested": [self.value]}}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict["value"]["nested"][0]


def test_states_of_users_callbacks_are_resumed(train):
    for value in (3, (2.0, 1), torch.ones(2)):
        _, folder = train(f"run {value}", extra=[Remembers(value)], max_epochs=1)
        after = Remembers(value)
        train(folder.name, resume=True, extra=[after], max_epochs=2)
        torch.testing.assert_close(after.loaded, value)
