"""Garbage collection of a run excludes its imports; a run keeps freed memory."""

import contextlib
import gc
import platform
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest

from tasks.engine import loading
from tests.runs import arguments, completed
from tools import run
from tools.runs import components, garbage

BLOCK = 64 * 2**20
# Page faults on filling a large block again.
FAULTS = f"""
import ctypes, resource
from tools.runs.freed_memory import keep_freed_memory
KEPT = keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def fill():
    block = libc.malloc(ctypes.c_size_t({BLOCK}))
    ctypes.memset(block, 1, {BLOCK})
    libc.free(block)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
before = faults()
fill()
print(KEPT, faults() - before)
"""


@pytest.fixture(autouse=True)
def collecting():
    """Isolate these tests from the collector's state in other tests."""
    gc.unfreeze()
    gc.enable()
    yield
    gc.freeze()
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_restored(enabled):
    (gc.enable if enabled else gc.disable)()
    with contextlib.suppress(KeyError), garbage.paused_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() == enabled


def test_imports_are_frozen_once():
    garbage.freeze_heap()
    kept = gc.get_freeze_count()
    assert kept > 0
    later = [[] for _ in range(1000)]
    garbage.freeze_heap()
    assert gc.get_freeze_count() < kept + len(later)


@pytest.mark.slow
def test_a_run_freezes_its_imports(sample_cache, tmp_path, monkeypatch, capsys):
    seen = []

    def noted(call, *given, **options):
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        return call(*given, **options)

    for name in ("build_components", "execute"):
        monkeypatch.setattr(components, name, partial(noted, getattr(components, name)))
    once = ("trainer.limit_train_batches=1", "trainer.limit_val_batches=1")
    completed(arguments("classification", tmp_path, *once), capsys)
    assert seen == [(True, True)] * 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc here")
def test_freed_memory_is_reused_without_page_faults():
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    assert kept == "True"
    assert int(faults) < 100  # of 16,384 pages


@pytest.mark.parametrize("keep", [True, False])
def test_an_option_decides_if_a_run_keeps_freed_memory(keep, monkeypatch):
    asked = mock.Mock()
    monkeypatch.setattr(run, "keep_freed_memory", asked)
    monkeypatch.setattr(loading, "check_options", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(run.automatic, "apply_fixed_schedule", lambda config: config)
    with pytest.raises(KeyboardInterrupt):
        run.run({"keep_memory": keep})
    assert asked.called == keep
