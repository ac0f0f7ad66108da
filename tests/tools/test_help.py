"""Help of every command, and its answer to misspelt names, without importing torch."""

import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.runs import ROOT
from tools import benchmark, complexity, results
from tools.cli import catalogue
from tools.config.help import help_text

COMMANDS = ("analyse", "benchmark", "complexity", "export", "lipschitz", "results", "search")
ANSWERED = (
    ["--help"],
    ["--help", "backbone"],
    ["--help", "mixer"],
    ["--help", "config", "task=detection"],
    ["--cfg", "job", "backbone=swin_t_afbo", "recipe=swin"],
    ["--cfg", "job", "experiment=afbo_t2_deit_t_afbo"],
    ["backbone=swin_t_afb"],
    ["backbone=swin_t_ffn"],
    ["task=detektion"],
    ["recipe=swim"],
    ["experiment=afbo_t2_deit_t_afb"],
    ["backbone.mixer.g3=2"],
    ["-m", "backbone=swin_u*"],
)


def test_help_of_commands_with_tables_names_their_keys_without_torch():
    code = (
        "import importlib, sys\n"
        f"for name in {COMMANDS}:\n"
        "    assert importlib.import_module(f'tools.{name}').main(['--help']) == 0\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    texts = run.stdout.split("usage: python tools/")[1:]
    said = {text.partition(".py")[0]: text for text in texts}
    assert list(said) == [*COMMANDS]
    timed = {key for options in benchmark.DEFAULTS.values() for key in options}
    counted = {*complexity.DEFAULTS, *complexity.CHOICES["rule"], "json", "csv", "afbo"}
    for name, words in (
        ("results", results.DEFAULTS),
        ("benchmark", timed),
        ("complexity", counted),
    ):
        assert all(word in said[name] for word in words), name
    assert benchmark.main([]) == 2


def test_run_answers_from_the_catalogue_without_torch():
    """The registry builds a checkout's first catalogue, here and with torch."""
    catalogue.load_catalogue()
    code = (
        "import sys\n"
        "from tools import run\n"
        f"for arguments in {ANSWERED}:\n"
        "    try:\n"
        "        assert run.main(arguments) == 0\n"
        "    except SystemExit as ended:\n"
        "        assert ended.code == 2, arguments\n"
        "    print(*arguments)\n"
        "    assert not {'torch', 'timm', 'lightning'} & set(sys.modules), arguments\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stderr.count("error: ") == 7
    assert "did you mean swin_t_afbo or" in run.stderr
    assert "pass backbone=swin_t" in run.stderr


@pytest.mark.parametrize("kind", ["channel", "token"])
def test_help_on_one_mixer_gives_each_option_with_its_meaning(kind):
    for name in catalogue.catalogue().list_mixers(kind):
        subject = "token_mixer" if kind == "token" else "mixer"
        lines = help_text([subject, name]).splitlines()
        assert lines[0].startswith(f"{name}, a {kind} mixer: backbone")
        assert max(map(len, lines)) <= 100
        for option, default in catalogue.catalogue().mixer(name)["options"].items():
            place = next(i for i, line in enumerate(lines) if f"mixer.{option}=" in line)
            assert lines[place + 1].strip(), f"{name} does not describe {option}"
            typed = lines[place].split()[0].partition("=")[2]
            value = OverridesParser.create().parse_override(f"x={typed}").value()
            assert value == (list(default) if isinstance(default, tuple) else default)
        assert help_text(["mixer", name]).splitlines()[0] == lines[0]


@pytest.mark.parametrize("subject", [["mixer", "abo"], ["token_mixer", "afbo"]])
def test_help_on_an_unknown_mixer_names_those_there_are(subject):
    with pytest.raises(ValueError, match=rf"no (token )?mixer called '{subject[1]}'"):
        help_text(subject)


def test_help_on_token_mixers_lists_them():
    text = help_text(["token_mixer"])
    assert "sbm" in text
    assert "channel mixers" not in text
