"""When a run looks for garbage: not among what it imports and builds."""

import contextlib
import gc

import pytest

from tests.runs import arguments, run_here
from tools.runs import components as parts
from tools.runs import garbage


@pytest.fixture(autouse=True)
def collecting():
    """What tests of other files have switched off or kept is none of these tests' business."""
    gc.unfreeze()
    gc.enable()
    yield
    gc.freeze()
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_afterwards_it_is_as_before(enabled):
    (gc.enable if enabled else gc.disable)()
    with contextlib.suppress(KeyError), garbage.paused_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() == enabled


def test_what_is_imported_is_kept_once():
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
    """The call, which notes whether garbage is collected and whether imports are left out of it."""

    def noted(*given, **options):
        seen[name] = (gc.isenabled(), gc.get_freeze_count() > 0)
        return call(*given, **options)

    return noted
