"""Extensions from the tutorials, added to a copy of the checkout, pass all tests."""

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.checkout import ROOT, copied, output

# Tests that look at every name, file or config there is; the rest does not know what is new.
OVER_ALL = (
    "tests/house/test_architecture.py",
    "tests/backbones/test_registry.py",
    "tests/tools/test_configs.py",
    "tests/tools/test_command_line.py",
    "tests/datamodules/test_options.py",
    "tests/tasks/test_instantiate.py",
)

# Mixers of tests/newcomers and the files that they are put into, two of them named like libraries.
NEWCOMERS = {"gated_star": "gated_star", "fourier_filter": "fft", "linear_attention": "timm"}


def examples() -> dict[str, str]:
    """File -> content, from docs/examples/new, which has the folders of the checkout."""
    new = ROOT / "docs/examples/new"
    return {
        str(path.relative_to(new)): path.read_text()
        for path in sorted(new.rglob("*"))
        if path.is_file()
    }


def test_there_is_an_example_of_each_kind():
    folders = list(dict.fromkeys(str(Path(name).parent) for name in examples()))
    assert folders == ["backbones/hosts", "backbones/mixers", "configs/data", "datamodules"]


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the checkout with the examples in it."""
    copy = copied(tmp_path_factory.mktemp("copy"))
    for name, code in examples().items():
        (copy / name).write_text(code)
    return copy


@pytest.fixture(scope="module")
def populated(tmp_path_factory):
    """A copy of the checkout with the mixers of tests/newcomers in it."""
    copy = copied(tmp_path_factory.mktemp("copy"))
    for name, file in NEWCOMERS.items():
        shutil.copy(ROOT / f"tests/newcomers/{name}.py", copy / f"backbones/mixers/{file}.py")
    return copy


@pytest.mark.slow
def test_new_files_pass_the_linters(extended):
    names = [name for name in examples() if name.endswith(".py")]
    for command in (("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)):
        output(extended, "-m", *command, *names)


def passed(copy, *words):
    """Return the number of tests that pass in a copy, all that were chosen."""
    printed = output(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words)
    return int(re.search(r"(\d+) passed", printed).group(1))


@pytest.mark.slow
def test_all_that_looks_at_everything_stays_green_and_picks_the_new_parts_up(extended):
    assert passed(extended, "-x", *OVER_ALL)
    chosen = "tanh_ffn or row_column or tiny_pool or named_files or example_of_the_tutorial"
    assert passed(extended, "tests", "-k", chosen) > 30


@pytest.mark.slow
def test_every_correct_mixer_passes_the_tests_over_the_registries(populated):
    """A gated star and its sum, a filter bound to the grid, and attention over all tokens."""
    assert passed(
        populated, *OVER_ALL, "tests/house/test_tests.py", "tests/tools/test_catalogue.py"
    )
    both = ("-m", "slow or not slow", "-k", " or ".join(NEWCOMERS))
    rooms = "tests/backbones tests/tasks/test_compilation.py tests/tools/test_export_onnx.py"
    assert passed(populated, *both, *rooms.split()) > 120


@pytest.mark.slow
def test_all_of_it_trains_together(extended, tmp_path):
    """The new mixer in the new host on files in the new layout."""
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number in range(16):
            colour, name = (("red", "warm"), ("blue", "cold"))[number % 2]
            Image.new("RGB", (64, 64), colour).save(tmp_path / split / f"{name}_{number}.png")
    output(
        extended, "-m", "tools.run", "task=classification", "backbone=tiny_pool_tanh_ffn",
        "data=named_files", f"data.root={tmp_path}", "data.image_size=64", "data.batch_size=8",
        "data.num_workers=0", "trainer=cpu", "trainer.max_epochs=1", "schedule.warmup=0",
        f"output_dir={tmp_path}/out",
    )  # fmt: skip
