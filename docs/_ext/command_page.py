"""Reference of the command line: the help of every command."""

from __future__ import annotations

import contextlib
import importlib
import io
import re

from markup import code, table

from tools.cli.paths import ROOT

NOT_COMMANDS = {"__init__"}
INTRODUCTION = """# Command line

The commands run from the checkout as `python tools/<command>.py`. This page shows their help.

Options are typed as `key=value`. Names of networks, data, heads and recipes are listed by
`python tools/run.py --help <group>`.
"""


def pages() -> dict[str, str]:
    """Return the page."""
    names = sorted(
        path.stem for path in (ROOT / "tools").glob("*.py") if path.stem not in NOT_COMMANDS
    )
    names.sort(key=lambda name: name != "run")
    helps = {name: command_help(name) for name in names}
    listed = table(
        ["command", "what it does"],
        [[f"[{name}.py](#{name}py)", _summary(name)] for name in names],
    )
    parts = [
        INTRODUCTION,
        listed,
        *(f"## {name}.py\n\n{code(text)}" for name, text in helps.items()),
    ]
    kinds = sorted(path.stem for path in (ROOT / "tools/analyses/kinds").glob("[a-z]*.py"))
    parts.append("## analyse.py by kind")
    parts += [f"### analyse.py {kind}\n\n{code(command_help('analyse', kind))}" for kind in kinds]
    parts.append("## make\n\n" + table(["target", "what it does"], _targets()))
    return {"command_line": "\n\n".join(parts) + "\n"}


def command_help(name: str, *words: str) -> str:
    """Return what a command prints for ``--help``."""
    output = io.StringIO()
    module = importlib.import_module(f"tools.{name}")
    if name == "run":
        from tools.config.help import help_text

        return help_text([])
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        module.main([*words, "--help"])
    return re.sub(r"^usage: \S+ \[-h\]", f"usage: {name}.py [-h]", output.getvalue())


def _summary(name: str) -> str:
    if name == "run":
        return "Train, evaluate or apply a backbone on a task."
    return (importlib.import_module(f"tools.{name}").__doc__ or "").strip().split("\n\n")[0]


def _targets() -> list[list[str]]:
    found = re.findall(r"^([a-z-]+):.*  ## (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return [[f"`make {name}`", text] for name, text in found]
