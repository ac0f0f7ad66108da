"""README and the pages of docs/: commands compose, examples run, links hold, the site builds."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from backbones import list_mixers
from tests.families import rest_slow
from tools.config import overrides, run_config
from tools.config.lazy_groups import register_groups

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "_ext"))
README = (ROOT / "README.md").read_text()
GENERATED = ("reference", "measurements")
WRITTEN = [path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in GENERATED]
PAGES = {path: path.read_text() for path in sorted([*ROOT.glob("*.md"), *WRITTEN])}
TEXT = "\n".join(PAGES.values())
# Without those that need a file of the reader's, the config of the run that they name, or timm's
# options of a model, which a command reads before it composes.
NEEDS = r"tanh_ffn|row_column|tiny_pool|<(host|name|run|this)|backbone=timm "
NEEDS += r"|ckpt=\S+ '?(data|head)\."
RUNS = dict.fromkeys(re.findall(r"python tools/run\.py ([^`\n\"]*=[^`\n]*)", TEXT))
RUNS = [command for command in RUNS if not re.search(NEEDS, command)]
DATA = re.findall(r"`(task=\S+ data=\S+ data\.root=\S+)`", TEXT)
NOTEBOOKS = sorted(DOCS.glob("examples/notebooks/*.py"))
TRAINERS = sorted(DOCS.glob("examples/trainer/*.py"))
EXAMPLES = sorted(DOCS.glob("examples/*.py")) + TRAINERS
QUICK = [DOCS / f"examples/{name}.py" for name in ("plain_pytorch", "global_filter")]
QUICK.append(DOCS / "examples/trainer/classification.py")
OPTIONAL = {"smp_encoder": "segmentation_models_pytorch", "lora": "peft",
            "conformal": "torch_uncertainty"}  # fmt: skip
MOST_LINES = 12  # of an example's cell that trains, tests and predicts
MOST_SECONDS = 1200  # of a notebook's cell
ERRORS_SHOWN = {"own_data": 1}  # a broken file


@pytest.fixture(scope="module")
def _backbones():
    register_groups()


@pytest.mark.usefixtures("_backbones")
@pytest.mark.parametrize("command", rest_slow([*RUNS, *DATA], [*RUNS[1::4], *DATA[::3]]))
def test_commands_compose(command):
    parts = shlex.split(command, comments=True)
    if "-m" in parts:
        assert overrides.swept_keys(overrides.read_command(parts).words)
        return
    typed = [part for part in parts if not part.startswith("-")]
    if "ckpt=" in command:  # the rest of the config comes from the run
        assert run_config.compose_config(typed)["task_name"]
    else:
        given = overrides.read_command(typed)
        assert run_config.job_config(given.words, given.config)["task_name"]


def test_pages_show_commands():
    assert len(RUNS) >= 40
    assert len(DATA) >= 7
    for name in re.findall(r"python (tools/\w+\.py)", TEXT):
        assert (ROOT / name).exists(), name
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target


def test_readme_fits_two_screens_without_timings():
    lines = README.splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 120
    assert len(README.split()) <= 1600
    assert not re.search(r"\d (ms|s|seconds|minutes|hours)\b", README)


def test_readme_shows_the_current_table_of_papers():
    import paper_pages

    assert paper_pages.papers_table() in README, "type: python docs/_ext/paper_pages.py"


def test_mixer_of_readme_is_the_tested_file_and_short():
    code = (DOCS / "examples/new/backbones/mixers/tanh_ffn.py").read_text()
    assert f"```python\n{code}```" in README
    assert len([line for line in code.splitlines() if line.strip()]) <= 16


def test_links_and_included_files_exist():
    pattern = re.compile(r"\]\(([^)#\s]+)|^```\{\w*include\} (\S+)", re.MULTILINE)
    for path, text in PAGES.items():
        for target in filter(None, (link or file for link, file in pattern.findall(text))):
            found = (path.parent / target).resolve()
            if not target.startswith("https://") and DOCS / "reference" not in found.parents:
                assert found.exists(), (path, target)


def test_files_of_the_site_are_small_and_measurements_complete():
    import measurement_pages

    for path in DOCS.rglob("*.*"):
        if "_build" not in path.parts:
            assert path.stat().st_size < 300_000, path
    for entries in measurement_pages.read().values():
        for entry in entries:
            assert entry["machine"]
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"]), entry["title"]
            assert {len(row) for row in entry["rows"]} == {len(entry["columns"])}, entry["title"]


def test_tables_of_accuracies_are_those_of_the_recorded_runs():
    import accuracies

    runs = accuracies.read_runs()
    assert len({accuracies.key_of(run) for run in runs}) == len(runs) > 0
    for name, content in accuracies.tables(runs).items():
        file = accuracies.FOLDER / name
        assert json.loads(file.read_text(encoding="utf-8")) == content, name


def test_a_figure_is_reproduced_by_its_digits_or_in_the_interval_of_three_seeds():
    import accuracies

    assert accuracies.is_reproduced([0.3594], 0.359, 3)
    assert not accuracies.is_reproduced([0.3596], 0.359, 3)
    assert not accuracies.is_reproduced([0.35, 0.37], 0.359, 3)
    assert accuracies.is_reproduced([0.35, 0.36, 0.37], 0.350, 3)
    assert not accuracies.is_reproduced([0.355, 0.356, 0.357], 0.359, 3)
    low, high = accuracies.interval([1.0, 2.0, 3.0])
    assert (round(low, 3), round(high, 3)) == (-0.484, 4.484)


@pytest.mark.parametrize("path", rest_slow(EXAMPLES, QUICK), ids=lambda path: path.stem)
def test_example_runs(path, request, tmp_path, monkeypatch, registering):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example"])
    if path.stem in OPTIONAL:
        pytest.importorskip(OPTIONAL[path.stem])
    if path.stem == "predict":
        Image.new("RGB", (80, 60)).save("photo.jpg")
        Path("outputs/detection/swin_t_afbo").mkdir(parents=True)
        folder = request.getfixturevalue("trained")("detection").folder()
        Path("outputs/detection/swin_t_afbo/latest").symlink_to(folder)
    if path.stem == "conformal":
        Path("outputs/classification/deit_t").mkdir(parents=True)
        folder = request.getfixturevalue("trained")("classification").folder()
        Path("outputs/classification/deit_t/latest").symlink_to(folder)
    runpy.run_path(str(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    """In a kernel of its own, from a folder without the checkout, and it shows a result."""
    for package in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"notebooks need {package}, of the extra notebooks")
    import nbclient
    import notebook_pages

    if path.stem == "export_and_serve":
        pytest.importorskip("onnxruntime")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    notebook = notebook_pages.read_notebook(path)
    folder = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=MOST_SECONDS, resources=folder).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("data" in output for output in outputs)
    printed = "".join(output.text for output in outputs if "text" in output)
    assert printed.count("error: ") == ERRORS_SHOWN.get(path.stem, 0), printed


def test_examples_of_the_four_tasks_are_short():
    assert [path.stem for path in TRAINERS] == [
        "classification", "detection", "segmentation", "transfer",
    ]  # fmt: skip
    for path in TRAINERS:
        lines = path.read_text().partition("# %% Train, test and predict\n")[2].splitlines()
        assert 8 <= len([line for line in lines if line.strip()]) <= MOST_LINES, path.stem


@pytest.mark.slow
def test_picture_of_a_mixer_shows_its_parts():
    import dataflow

    boxes = dataflow.trace("glu", dim=8, grid=(4, 4))
    assert [box.title for box in boxes] == ["x", "w1", "silu", "w2", "×", "w3", "y"]
    assert boxes[4].inputs == [2, 3]
    assert dataflow.draw(boxes, "GLU").count("<rect") == 7


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    """Sphinx checks all links between pages; every mixer has its page, and the search finds it."""
    pytest.importorskip("jupytext", reason="pages of notebooks need jupytext, of the extra docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    built = subprocess.run([*command, DOCS, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    index = (tmp_path / "searchindex.js").read_text()
    for name in list_mixers():
        page = (tmp_path / f"reference/mixers/{name}.html").read_text()
        assert '<svg xmlns="http://www.w3.org/2000/svg" class="dataflow"' in page, name
        assert f"reference/mixers/{name}" in index
    for stem in ("cheapest", "imbal", "tensorrt", "zoo", "serv"):  # of words that users look for
        assert f'"{stem}":' in index
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
        assert not loaded, page
