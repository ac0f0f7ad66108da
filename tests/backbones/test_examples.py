"""The examples in the docstrings of the public functions run and print what they show."""

import doctest
import importlib

import pytest
from PIL import Image

PUBLIC = {
    "backbones.base": {"Backbone.embed"},
    "backbones.factory": {"create_backbone", "create_mixer"},
    "backbones.registry": {"list_backbones", "list_mixers", "register_host", "register_mixer"},
    "heads.linear": {"LinearClassifier.from_pretrained"},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_in_docstrings_run(registering, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_examples(name, PUBLIC[name])


@pytest.mark.slow  # a run is trained first
def test_the_example_of_a_run_folder_runs(trained, outputs, tmp_path, monkeypatch):
    trained("classification")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/latest").symlink_to(outputs / "classification/deit_t/latest")
    Image.new("RGB", (64, 64)).save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    run_examples("tasks", {"load"})


def run_examples(name, expected):
    module = importlib.import_module(name)
    examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert {test.name.removeprefix(f"{name}.") for test in examples} == expected
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in examples:
        assert not runner.run(test).failed, test.name
