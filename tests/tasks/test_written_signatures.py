"""Signatures that are read from files: equal to those of the imported classes, and cheap."""

import inspect
import subprocess
import sys
from typing import Any

import pytest

from backbones.options.signatures import _parameters, keywords
from backbones.options.values import _description
from tasks.engine.family import imported
from tasks.engine.instantiate import CALLED, allowed_targets
from tasks.engine.written_signatures import ANYTHING, read_signature
from tests.runs import ROOT
from tools.config.option_checks import CALLBACKS, TRAINER

FUNCTIONS = [*CALLED.values(), TRAINER, *CALLBACKS.values()]
GROUPS = ("data", "data.augmentation", "head", "task")
TARGETS = sorted({target for group in GROUPS for target in allowed_targets(group)})
OBJECTS = {"backbone", "model", "logger"}  # their types stand in other packages

# Options that the door refuses, with a part of its message.
REFUSED = {
    "data.crop_scal=0.3": "no option of data called 'crop_scal'",
    "data.augmentation.flipp=1": "did you mean flip",
    "data.batch_size=x": "data.batch_size=x is not a whole number",
    "head.foo=1": "no option of head called 'foo'",
    "task.foo=1": "no option of task called 'foo'",
    "trainer.foo=1": "no option of trainer called 'foo'",
    "trainer.max_epochs=x": "trainer.max_epochs=x is not a whole number or null",
    "optimizer.lr=abc": "optimizer.lr=abc is not a number",
    "schedule.warmup=abc": "schedule.warmup=abc is not a number",
    "callbacks.foo=1": "no option of callbacks called 'foo'",
    "callbacks.early_stopping.foo=1": "no option of callbacks.early_stopping called 'foo'",
    "callbacks.top_k=x": "callbacks.top_k=x is not a whole number",
}


@pytest.mark.parametrize("name", [*TARGETS, *FUNCTIONS])
def test_a_written_signature_is_the_imported_one(name):
    target, written = imported(name), read_signature(name)
    hints, takes_more = _parameters(target)
    assert set(written.types) == set(hints)
    assert written.takes_more == takes_more
    needed = [key for key, value in keywords(target).items() if value is inspect.Parameter.empty]
    assert list(written.required) == needed
    for key in hints.keys() - OBJECTS:
        words = _description(hints[key]).replace("dict", "a group of options")
        assert _description(written.types[key]) == words, key


def test_wrong_options_are_refused_before_torch_is_imported():
    program = (
        "import sys\n"
        "from tools import run\n"
        "for word in sys.argv[1:]:\n"
        "    try:\n"
        "        run.main(['task=classification', 'data=cifar10', 'data.root=/data', word])\n"
        "    except SystemExit as refused:\n"
        "        assert refused.code == 2\n"
        "    assert 'torch' not in sys.modules, word\n"
    )
    command = [sys.executable, "-c", program, *REFUSED]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line]
    assert len(lines) == len(REFUSED), ended.stderr
    for line, message in zip(lines, REFUSED.values(), strict=True):
        assert message in line


PLUGIN = {
    "plugin_data/__init__.py": (
        "from plugin_data import parts\nfrom .parts import Folder as Photographs\n"
    ),
    "plugin_data/parts.py": (
        "import datamodules.images.image_folder as folders\n"
        "from . import sizes\n"
        "class Folder(sizes.Sized, folders.ImageFolderDataModule):\n"
        "    def __init__(self, *, lens: 'int | None' = None, **options): ...\n"
        "class Generated(make_class()):\n"
        "    def __init__(self, *, lens: int, **options): ...\n"
    ),
    "plugin_data/sizes.py": "class Sized:\n    pass\n",
    "one_file_data.py": "class Mine:\n    def __init__(self, *, lens: float, count=3): ...\n",
}


def test_signatures_of_installed_packages(tmp_path, monkeypatch):
    """Relative and dotted imports, a package of one file, and classes that no file defines."""
    for name, text in PLUGIN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    parent = read_signature("datamodules.images.image_folder.ImageFolderDataModule")
    photographs = read_signature("plugin_data.Photographs")
    assert list(photographs.types) == ["lens", *parent.types]
    assert photographs.types["lens"] == int | None
    assert not photographs.takes_more
    mine = read_signature("one_file_data.Mine")
    assert (mine.types, list(mine.required)) == ({"lens": float, "count": Any}, ["lens"])
    assert read_signature("plugin_data.parts.Generated").takes_more
    assert read_signature("plugin_data.Absent") == read_signature("plugin_data.parts") == ANYTHING
    assert read_signature("absent_package.module.Class") == ANYTHING
    assert not sys.modules.keys() & {"plugin_data", "one_file_data"}
