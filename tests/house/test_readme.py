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
register_groups()
README = (ROOT / "README.md").read_text()
RUNS = re.findall(r"python tools/run\.py ([^`\n]*=[^`\n]*)", README)
RUNS = [command for command in RUNS if "tanh_ffn" not in command]  # exists once a reader wrote it
DATA = re.findall(r"`(task=\S+ data=\S+ data\.root=\S+)`", README)


@pytest.mark.parametrize("command", rest_slow([*RUNS, *DATA], [*RUNS[::3], *DATA[::3]]))
def test_commands_compose(command):
    parts = shlex.split(command, comments=True)
    if "-m" in parts:
        assert overrides.swept_keys(overrides.process_arguments(parts))
        return
    typed = [part for part in parts if not part.startswith("-")]
    assert run_config.compose_config(typed)["task_name"]


def test_readme_shows_commands_and_existing_files():
    assert len(RUNS) >= 5
    assert len(DATA) >= 7
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_number_of_backbones_is_no_exaggeration():
    """README counts in hundreds, so that a new mixer need not change it."""
    promised = int(re.search(r"over (\d+)00 names", README).group(1))
    assert promised <= len(list_backbones()) // 100 <= promised + 4


def test_python_examples_run_and_are_short():
    lines = next(block for block in _python_blocks() if "create_mixer" in block).splitlines()
    scope: dict = {}
    exec("\n".join(line for line in lines if "pretrained=" not in line), scope)
    assert [info.stride for info in scope["backbone"].feature_info] == [16]
    assert scope["mixer"]
    code = next(block for block in _python_blocks() if "register_mixer" in block)
    assert "register_mixer" in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 16


@pytest.mark.slow
def test_prediction_example_runs(trained, tmp_path):
    Image.new("RGB", (80, 60)).save(tmp_path / "photo.jpg")
    code = next(block for block in _python_blocks() if "from tasks import load" in block)
    code = code.replace("outputs/detection/swin_t_afbo/latest", str(trained("detection").folder()))
    scope: dict = {}
    exec(code.replace("photo.jpg", str(tmp_path / "photo.jpg")), scope)
    assert scope["detector"].class_names == tuple("0123456789")


def _python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)
