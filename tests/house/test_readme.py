"""What README tells a user to type exists."""

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from backbones import list_backbones
from tests.families import rest_slow
from tools.config import overrides
from tools.config import run_config as run_config
from tools.config.lazy_groups import register_groups

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
RUNS = re.findall(r"python tools/run\.py ([^`\n]*=[^`\n]*)", README)
RUNS = [command for command in RUNS if "tanh_ffn" not in command]  # exists once a reader wrote it
DATA = re.findall(r"`(task=\S+ data=\S+ data\.root=\S+)`", README)


@pytest.fixture(autouse=True, scope="module")
def _backbones():
    register_groups()


@pytest.mark.parametrize("command", rest_slow([*RUNS, *DATA], [*RUNS[::3], *DATA[::3]]))
def test_commands_compose(command):
    parts = shlex.split(command, comments=True)
    if "-m" in parts:
        assert overrides.swept_keys(overrides.process_arguments(parts))
        return
    typed = [part for part in parts if not part.startswith("-")]
    assert run_config.compose_config(typed)["task_name"]


def test_readme_shows_commands():
    assert len(RUNS) >= 5
    assert len(DATA) >= 7


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_number_of_backbones_is_no_exaggeration():
    """README counts in hundreds, so that a new mixer need not change it."""
    promised = int(re.search(r"over (\d+)00 names", README).group(1))
    assert promised <= len(list_backbones()) // 100


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_python_example_runs():
    lines = next(block for block in _python_blocks() if "create_mixer" in block).splitlines()
    scope: dict = {}
    exec("\n".join(line for line in lines if "pretrained=" not in line), scope)
    assert [info.stride for info in scope["backbone"].feature_info] == [16]
    assert scope["mixer"]


@pytest.mark.slow
def test_prediction_example_runs(trained, tmp_path):
    Image.new("RGB", (80, 60)).save(tmp_path / "photo.jpg")
    code = next(block for block in _python_blocks() if "from tasks import load" in block)
    code = code.replace("outputs/detection/swin_t_afbo/latest", str(trained("detection").folder()))
    scope: dict = {}
    exec(code.replace("photo.jpg", str(tmp_path / "photo.jpg")), scope)
    assert scope["detector"].class_names == tuple("0123456789")


def test_mixer_example_is_as_short_as_promised():
    code = next(block for block in _python_blocks() if "register_mixer" in block)
    assert "register_mixer" in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 16


def _python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)
