"""What every command says of itself, without waiting for torch."""

import subprocess
import sys

from tests.runs import ROOT

COMMANDS = ("analyse", "benchmark", "complexity", "export", "lipschitz", "results", "search")


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
