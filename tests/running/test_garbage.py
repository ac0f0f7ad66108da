"""Garbage collection of a run excludes its imports and components."""

import contextlib
import gc

import pytest

from tests.runs import arguments, run_here
from tools.runs import components as parts
from tools.runs import garbage


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
def test_a_run_freezes_what_it_imports(sample_cache, tmp_path, monkeypatch, capsys):
    seen = {}
    for name in ("build_components", "execute"):
        monkeypatch.setattr(parts, name, noting(seen, name, getattr(parts, name)))
    once = ("trainer.limit_train_batches=1", "trainer.limit_val_batches=1")
    ended = run_here(arguments("classification", tmp_path, *once), capsys)
    assert ended.status == 0, ended
    assert seen == {"build_components": (True, True), "execute": (True, True)}


def noting(seen, name, call):
    def noted(*given, **options):
        seen[name] = (gc.isenabled(), gc.get_freeze_count() > 0)
        return call(*given, **options)

    return noted
