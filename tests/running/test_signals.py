"""Signals: saved files, remaining processes and exit status of a run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from datamodules.loading import workers
from tasks.engine.loops import signals
from tasks.engine.loops.signals import SIGNALS, STOP, RunStopped
from tests.families import rest_slow_pairs
from tests.runs import ROOT, arguments, session_processes, wait_for

TERM, INT, HUP, USR1, KILL = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL,
)  # fmt: skip
SCRIPT = Path(__file__).with_name("phases.py")
SECONDS = 10  # after which all processes must have ended


class TestListening:
    @pytest.fixture(autouse=True)
    def terminal(self):
        """Take HUP as in a terminal: nohup and some schedulers start tests with HUP ignored."""
        before = signal.signal(HUP, signal.SIG_DFL)
        yield
        signal.signal(HUP, before)

    def test_handlers_are_restored(self):
        before = [signal.getsignal(signum) for signum in SIGNALS]
        with STOP.listening():
            assert STOP.handled == set(SIGNALS)
        assert [signal.getsignal(signum) for signum in SIGNALS] == before
        assert not STOP.handled

    def test_nohup_lets_a_run_outlive_its_terminal(self, monkeypatch):
        before = signal.signal(HUP, signal.SIG_IGN)
        try:
            with STOP.listening():
                assert STOP.handled == set(SIGNALS) - {HUP}
        finally:
            signal.signal(HUP, before)

    @pytest.mark.parametrize("signum", SIGNALS)
    def test_a_signal_stops_at_once_outside_of_training(self, signum):
        with STOP.listening(), pytest.raises(RunStopped) as stopped:
            os.kill(os.getpid(), signum)
        assert stopped.value.code == 128 + signum

    def test_training_finishes_its_step_and_a_second_signal_stops_it(self, monkeypatch):
        with STOP.listening():
            STOP.finishing = True
            os.kill(os.getpid(), INT)
            assert STOP.signum == INT
            STOP.raise_if_signalled()
            os.kill(os.getpid(), TERM)  # like timeout, which sends it twice
            monkeypatch.setattr(signals, "ONCE", 0.0)
            with pytest.raises(RunStopped) as stopped:
                os.kill(os.getpid(), TERM)
            STOP.finishing = False
            with pytest.raises(RunStopped):
                STOP.raise_if_signalled()
        assert stopped.value.code == 143

    @pytest.mark.parametrize(("joined", "ends"), [(True, False), (False, False), (True, True)])
    def test_a_step_that_waits_for_another_process_ends_after_a_signal(
        self, joined, ends, monkeypatch, capsys
    ):
        statuses, killed = [], []
        monkeypatch.setattr(signals, "STEP", 0.2)
        monkeypatch.setattr(signals.os, "_exit", statuses.append)
        monkeypatch.setattr(STOP, "others", [SimpleNamespace(kill=lambda: killed.append(1))])
        monkeypatch.setattr(STOP, "_longest_step", 0.0)
        with STOP.listening():
            STOP.finishing, STOP.joined = True, joined
            STOP.begin_step()
            os.kill(os.getpid(), TERM)
            if ends:
                STOP.end_step()
            time.sleep(0.6)
            STOP.end_step()
        waited = joined and not ends
        assert set(statuses) == ({143} if waited else set())
        assert bool(killed) == waited
        assert ("a step that waits for another process" in capsys.readouterr().err) == waited

    def test_a_wait_for_data_ends_soon_after_a_signal(self, monkeypatch):
        monkeypatch.setattr(signals, "HANG", 0.05)
        with STOP.listening():
            STOP.finishing = True
            STOP.begin_wait()
            os.kill(os.getpid(), TERM)
            STOP.end_wait()  # a batch arrived
            time.sleep(0.1)
            STOP.begin_wait()
            with pytest.raises(RunStopped) as stopped:
                time.sleep(5)
            STOP.end_wait()
        assert (stopped.value.code, stopped.value.waiting) == (143, True)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

    def test_uninterruptible_code_is_ended(self):
        """Such as a library's wait for another process, which blocks Python's handlers."""
        code = (
            f"import hashlib, sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from tasks.engine.loops import signals\n"
            "signals.GRACE = 0.1\n"
            "with signals.STOP.listening():\n"
            "    print('begun', flush=True)\n"
            "    hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(TERM)
        assert process.wait(timeout=20) == 143


class Hanging(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index:
            time.sleep(1000)
        return os.getpid()


class TestWorkers:
    @pytest.fixture
    def worker(self):
        """Return a hanging worker and its iterator."""
        loader = workers.Loader(Hanging(), num_workers=1, worker_init_fn=workers.init_worker)
        iterator = iter(loader)
        (worker,) = workers._alive()
        assert next(iterator).item() == worker.pid
        yield worker
        workers.end_workers()

    def test_workers_ignore_signals_and_all_end(self, worker):
        assert set(workers.IGNORED) == set(SIGNALS)
        for signum in SIGNALS:
            os.kill(worker.pid, signum)
        worker.join(0.2)
        assert worker.is_alive()
        workers.end_workers()
        assert (worker.is_alive(), worker.exitcode) == (False, -KILL)

    def test_a_run_that_fails_waits_a_little_for_its_workers(self, worker, monkeypatch):
        monkeypatch.setattr(workers, "PATIENCE", 0.1)
        before = signal.getsignal(signal.SIGCHLD)
        try:
            workers.end_slow_workers()
            worker.join(5)
        finally:
            signal.signal(signal.SIGCHLD, before)
        assert worker.exitcode == -KILL


# Each pair of values of two columns stands in a row.
STOPS = [
    ("train", TERM, "group", 1, 1),
    ("train", TERM, "group", 2, 2), ("train", INT, "alone", 0, 1), ("train", HUP, "group", 2, 1),
    ("train", USR1, "alone", 2, 2), ("train", KILL, "alone", 2, 2),
    ("data", TERM, "alone", 0, 1), ("data", INT, "alone", 1, 1),
    ("validation", TERM, "alone", 0, 2), ("validation", INT, "group", 2, 2),
    ("validation", HUP, "alone", 2, 1), ("validation", USR1, "group", 0, 1),
    ("validation", KILL, "alone", 2, 1),
    ("test", TERM, "alone", 2, 1), ("test", INT, "group", 0, 2), ("test", HUP, "group", 2, 2),
    ("test", USR1, "alone", 0, 2), ("test", KILL, "alone", 2, 2),
    ("checkpoint", TERM, "group", 2, 1), ("checkpoint", INT, "alone", 2, 2),
    ("checkpoint", HUP, "alone", 0, 2), ("checkpoint", USR1, "group", 2, 1),
    ("checkpoint", KILL, "alone", 2, 1),
]  # fmt: skip


@pytest.mark.usefixtures("sample_cache")
@pytest.mark.parametrize(
    ("phase", "signum", "to", "num_workers", "processes"),
    rest_slow_pairs(STOPS, STOPS[:1]),
    ids=str,
)
def test_all_processes_end_and_save(phase, signum, to, num_workers, processes, tmp_path):
    mark = tmp_path / "mark"
    more = ["++data.train_copies=2", f"data.num_workers={num_workers}", "logger=csv"]
    trainer = "ddp_cpu" if processes == 2 else "cpu"
    typed = arguments("classification", tmp_path / "runs", *more, trainer=trainer, epochs=2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PHASE": phase, "MARK": str(mark)}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *typed], env=environment, cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(process, mark.exists)
        assert len(session_processes(process.pid)) >= processes * (1 + num_workers)
        (os.killpg if to == "group" else os.kill)(process.pid, signum)
        until = time.monotonic() + SECONDS
        while session_processes(process.pid) and time.monotonic() < until:
            process.poll()
            time.sleep(0.05)
        assert not session_processes(process.pid)
    finally:
        for pid in session_processes(process.pid):
            os.kill(pid, KILL)
    status, err = process.wait(), process.communicate()[1]
    if signum == KILL:
        assert status == -KILL
        assert err.startswith("error: the first process of this run was killed") or not err
    else:
        assert (status, err) == (128 + signum, "")
        assert list(tmp_path.rglob("last.ckpt"))
        assert not list(tmp_path.rglob("*.partial"))
