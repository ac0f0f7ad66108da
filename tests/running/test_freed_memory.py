"""A run keeps freed memory, as the benchmark does."""

import platform
import subprocess
import sys

import pytest

from tasks.engine import loading
from tools import run

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc here")
def test_freed_memory_is_reused_without_page_faults():
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    assert kept == "True"
    assert int(faults) < 100  # of 16,384 pages


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_keeps_it_by_default(keep, monkeypatch):
    class Stop(Exception):
        pass

    def stop(config):
        raise Stop

    asked = []
    monkeypatch.setattr(run, "keep_freed_memory", lambda: asked.append(True))
    monkeypatch.setattr(loading, "check_options", stop)
    monkeypatch.setattr(run.automatic, "apply_fixed_schedule", lambda config: config)
    with pytest.raises(Stop):
        run.run({"keep_memory": keep})
    assert asked == [True] * keep
