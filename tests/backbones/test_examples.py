"""The examples in the docstrings of the public functions run and print what they show."""

import doctest
import importlib

import pytest

PUBLIC = {
    "base": {"Backbone.embed"},
    "factory": {"create_backbone", "create_mixer"},
    "registry": {"list_backbones", "list_mixers", "register_host", "register_mixer"},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_in_docstrings_run(registering, name):
    module = importlib.import_module(f"backbones.{name}")
    examples = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert {test.name.removeprefix(f"backbones.{name}.") for test in examples} == PUBLIC[name]
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in examples:
        assert not runner.run(test).failed, test.name
