"""Fixtures of several test files.

What takes long to import is imported in them: the process that hands out the tests needs none.
"""

import copy
import ctypes
import dataclasses
import gc
import json
import os
import resource
import sys
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

# Until all is imported: looking for garbage among it takes a quarter of the collection's time.
gc.disable()

MUCH, MORE = 3 * 2**30, 2**29  # bytes of a process, and by how many it grows between collections


def pytest_terminal_summary(terminalreporter):
    """Says what the session took of all processors, its own processes and theirs included."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    minutes = sum(one.ru_utime + one.ru_stime for one in used) / 60
    terminalreporter.write_line(f"{minutes:.1f} minutes of processor time in all")


def pytest_collection_modifyitems(items):
    """Reject names of tests that change from process to process: xdist needs the same in each."""
    if changing := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{changing[0]} holds an address; give its parameters ids")


@pytest.fixture(scope="module", autouse=True)
def freeze_imported_objects(request):
    """Exclude imported objects from garbage collection, which mmengine runs at each dataset.

    Scanning them takes half a second. Networks cached by a file's functions are freed after it.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    yield
    from tests import families

    for value in (*vars(request.module).values(), *vars(families).values()):
        own = str(getattr(value, "__module__", "")).startswith("tests.")
        if own and hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture(scope="session")
def memory_limit():
    """Limit of a process's memory above which garbage is collected; collections are slow."""
    return {"bytes": MUCH}


@pytest.fixture(autouse=True)
def collect_garbage(memory_limit):
    """Free the networks of runs: they lie in cycles, and the collector ignores their size."""
    yield
    if psutil.Process().memory_info().rss > memory_limit["bytes"]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        memory_limit["bytes"] = max(MUCH, psutil.Process().memory_info().rss + MORE)


@pytest.fixture(autouse=True)
def leave_deterministic_mode():
    """Switch the mode off that trainers on a CPU leave on: resizing has other operators in it."""
    yield
    if (torch := sys.modules.get("torch")) and torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def config_files_are_parsed_once():
    """Hydra parses every file anew for every config: a quarter of the time that composing takes."""
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # registers the sources, of classes that no import would give
    sources = SourcesRegistry.instance().types
    kept = {}

    def keeping(load, changed):
        def load_config(source, config_path):
            key = (source.path, config_path, changed(source, config_path))
            if key not in kept:
                kept[key] = load(source, config_path)
            return copy.deepcopy(kept[key])

        return load_config

    def written(source, config_path):
        path = Path(source.path, source._normalize_file_name(config_path))
        return path.stat().st_mtime_ns if path.exists() else None

    with pytest.MonkeyPatch.context() as patch:
        for scheme, changed in {"file": written, "pkg": lambda *_: None}.items():
            load = sources[scheme].load_config
            patch.setattr(sources[scheme], "load_config", keeping(load, changed))
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder for what the test processes of a session make once for all of them."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def sample_cache(shared):
    """One folder for the sample data of all runs."""
    with pytest.MonkeyPatch.context() as patch:
        cache = shared / "sample_data"
        cache.mkdir(exist_ok=True)
        patch.setenv("MIXERLAB_CACHE", str(cache))
        yield cache


@pytest.fixture
def registering():
    """Remove everything that a test registers, after the test."""
    from backbones.registry import temporary_registrations

    with temporary_registrations():
        yield


@pytest.fixture
def newcomer(registering):
    """Registers a mixer of tests/newcomers for one test, unless its file is in backbones/mixers."""
    import importlib
    import sys

    from backbones import list_mixers

    names = []

    def register(name):
        if name in list_mixers():
            return None
        names.append(f"tests.newcomers.{name}")
        sys.modules.pop(names[-1], None)
        return importlib.import_module(names[-1])

    yield register
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def one_thread():
    """As many threads as the subprocesses of the tests have, for results equal to the bit."""
    from tests.threads import torch_threads

    with torch_threads(1):
        yield


@pytest.fixture(scope="session")
def outputs(shared):
    folder = shared / "outputs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def trained(outputs, sample_cache):
    """task -> how its run ended; each is trained once, the first by the real command."""
    from tests.runs import Ended, arguments, command, run_shared

    def train(task):
        more = []
        if task == "transfer":
            train("classification")
            more = [f"backbone.pretrained={outputs}/classification/deit_t/latest"]
        done = outputs / f"{task}.json"
        with FileLock(outputs / f"{task}.lock"):
            if not done.exists():
                start = command if task == "classification" else run_shared
                ended = start(arguments(task, outputs, *more, epochs=2))
                done.write_text(json.dumps(dataclasses.asdict(ended)))
        return Ended(**json.loads(done.read_text()))

    return train
