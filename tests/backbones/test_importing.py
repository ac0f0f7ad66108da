"""Import errors in the file of a mixer or host name the file and the line."""

import importlib
import sys

import pytest

from backbones import importing
from backbones.registry import find_mixer
from tools.cli.command import run_command
from tools.cli.errors import one_line_errors

REGISTERED = """
from torch import Tensor
from backbones import PointwiseMixer, register_mixer

@register_mixer("brief", kind="channel", source="a test")
class Brief(PointwiseMixer):
    def mix(self, x: Tensor) -> Tensor:
        return x
"""
# Content of a file -> expected message after the file's path.
BROKEN = {
    "x = (1\n": ":1: SyntaxError: '(' was never closed",
    "x = 1\n\n  y = 2\n": ":3: IndentationError: unexpected indent",
    "import missing_module\n": ":1: ModuleNotFoundError: No module named 'missing_module'",
    "from backbones import no_such_name\n": ":1: ImportError: cannot import name 'no_such_name'",
    "def f():\n    return 1 / 0\n\nf()\n": ":2: ZeroDivisionError: division by zero",
    "class A:\n    x = y\n": ":2: NameError: name 'y' is not defined",
    "import json\njson.loads('{')\n": ":2: JSONDecodeError: Expecting property name",
    "from trial.layers import part\n": "layers.py:2: KeyError: 'a'",
    "import trial.other\n": "other/folder.py:1: SyntaxError: invalid syntax",
    REGISTERED.replace(', source="a test"', ""): ":5: TypeError: register_mixer() missing 1",
    REGISTERED.replace("brief", "ffn"): ":5: ValueError: the name 'ffn' is taken by backbones.mix",
    b"x = '\xff'\n": ": SyntaxError: (unicode error) 'utf-8' codec can't decode byte 0xff",
    b"x = 1\0\n": "SyntaxError: source code ",
}  # fmt: skip


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "trial"
    for name in ("mixers", "other"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            "from backbones.importing import import_files\nimport_files(__name__)\n"
        )
    (folder / "other" / "folder.py").write_text("for\n")
    (folder / "layers.py").write_text("table = {}\npart = table['a']\n")
    (folder / "mixers" / "good.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importing, "PACKAGE", folder)
    before = set(sys.modules)
    yield folder / "mixers"
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "trial":
            del sys.modules[name]


@pytest.mark.parametrize("content", BROKEN, ids=BROKEN.values())
def test_a_broken_file_is_named_with_its_line(package, registering, content):
    file = package / "mine.py"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ImportError) as caught:
        importlib.import_module("trial.mixers")
    text = str(caught.value)
    assert BROKEN[content] in text
    assert text.startswith("trial/") or "trial.mixers.mine" in text
    assert ("mine" in text) != ("trial." in str(content))
    assert len(text.splitlines()) == 1
    assert caught.value.__cause__ is not None


def test_errors_take_one_line_and_fixed_files_load(package, capsys, registering):
    (package / "mine.py").write_text("x = y\n")
    message = "trial/mixers/mine.py:1: NameError: name 'y' is not defined\n"

    def load(_):
        importlib.import_module("trial.mixers")

    assert run_command("some.py", "", load, ["x"]) == 2
    assert capsys.readouterr().err == f"some.py: {message}"
    with pytest.raises(SystemExit), one_line_errors():
        load([])
    assert capsys.readouterr().err == f"error: {message}"
    (package / "mine.py").write_text(f"{REGISTERED}\nx = y\n")
    for _ in range(2):
        with pytest.raises(ImportError, match=r"mine\.py:10: NameError"):
            importlib.import_module("trial.mixers")
    (package / "mine.py").write_text(f"{REGISTERED}\nx = 10\n")
    importlib.import_module("trial.mixers")
    assert find_mixer("brief").build is sys.modules["trial.mixers.mine"].Brief
