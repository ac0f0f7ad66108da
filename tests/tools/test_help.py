"""What every command says of itself and of a misspelt word, without waiting for torch."""

import subprocess
import sys

from tests.runs import ROOT
from tools.command_line import catalogue

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


def test_help_of_commands_with_tables_does_not_import_torch():
    code = (
        "import importlib, sys\n"
        f"for name in {COMMANDS}:\n"
        "    assert importlib.import_module(f'tools.{name}').main(['--help']) == 0\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"usage: python tools/{name}.py" in run.stdout for name in COMMANDS)


def test_run_answers_from_the_catalogue_without_torch():
    """The first catalogue of a checkout is made by the registry, here and with torch."""
    catalogue.refreshed()
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
