"""Every task of README for some steps, with its test and a prediction, as a user types it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator

from tasks.engine.family import find_family
from tools.cli.paths import ROOT
from tools.gpu.extent import ABSENT, FAIL, PASS, Record, Setting
from tools.installation.packages import installed_version

COMMAND = re.compile(r"^python tools/run\.py (task=(\w+) [^#\n]*)", re.MULTILINE)
FOLDER = "Run folder: "


def readme_commands() -> dict[str, list[str]]:
    """Return the words of README's command of each task."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return {task: shlex.split(words) for words, task in COMMAND.findall(text)}


def task_groups(setting: Setting) -> list[list[str]]:
    """Return the tasks of each process; a task that starts from another's network follows it."""
    names = list(readme_commands())
    started = {name: find_family(name).started_by for name in names}
    return [
        [name, *(other_name for other_name in names if started[other_name] == name)]
        for name in names if started[name] not in names
    ]  # fmt: skip


def check_task(name: str, setting: Setting) -> Iterator[Record]:
    """Yield the verdict on a task that trains, tests and predicts, or the last line of its run."""
    missing = [package for package in find_family(name).needs if installed_version(package) is None]
    if missing:
        yield {"verdict": ABSENT, "note": f"not installed: {', '.join(missing)}"}
        return
    runs = setting.folder / "runs"
    shared = [
        f"trainer={'gpu' if setting.device == 'cuda' else setting.device}",
        "trainer.limit_val_batches=2", f"output_dir={runs}",
    ]  # fmt: skip
    words = [word.replace("=outputs/", f"={runs}/") for word in readme_commands()[name]]
    steps = f"trainer.max_steps={setting.extent.steps}"
    record: Record = {"verdict": PASS, "note": ""}
    last = ""
    for step in ("training", "prediction"):
        if step == "prediction":
            words, steps = ["mode=predict"], f"ckpt={last.removeprefix(FOLDER)}"
        started = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "tools/run.py", *words, steps, *shared],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        record[f"{step} s"] = round(time.perf_counter() - started, 1)
        last = ((run.stderr if run.returncode else run.stdout).strip() or "-").splitlines()[-1]
        if run.returncode or not last.startswith(FOLDER):
            record |= {"verdict": FAIL, "note": f"{step}: {last}"}
            print(run.stdout, run.stderr, sep="\n", file=sys.stderr)  # into the log
            break
    yield record
