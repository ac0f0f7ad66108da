"""Time mixers on this machine and add the results to docs/measurements.

usage: python docs/_ext/measure.py [benchmark.py's options ...]
       python docs/_ext/measure.py tokens [benchmark.py's options ...]
       python docs/_ext/measure.py gpu [extent=quick] [parts=hosts,tokens,tasks,kernels,mixers]

Without options, AFBO, IFFN and GLU are timed against the FFN of three hosts on one thread. tokens
times token mixers of linear cost over maps of 196 to 12,544 tokens, for the catalogue of mixers.
``make measurements OPTIONS="device=cuda dtype=bfloat16"`` measures a GPU. The files of other
machines stay as they are. gpu checks numbers, kernels, tasks and speed of a GPU and ends with their
verdicts, as ``make gpu`` does; ``extent=tiny device=cpu`` tries the command.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import math
import re
import signal
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

import torch  # noqa: E402
from catalogue_page import MEASURED, order  # noqa: E402
from gpu_report import check_device  # noqa: E402
from measurement_pages import FOLDER, pages  # noqa: E402

from backbones import list_mixers  # noqa: E402
from tools import benchmark  # noqa: E402
from tools.cli.arguments import parse_options  # noqa: E402
from tools.gpu.extent import EXTENTS  # noqa: E402
from tools.gpu.work import PARTS  # noqa: E402
from tools.installation.packages import installed_version  # noqa: E402
from tools.runs.run_facts import device_name  # noqa: E402

USUAL = ["mixer=afbo,iffn,glu", "batch=1,8", "threads=1", "rounds=11"]
TOKENS = ["grid=14,56,112", "dim=64", "threads=1", "rounds=5", "clock=process"]


def main(options: list[str]) -> int:
    """Measure, write the json file, and return the exit status."""
    if options[:1] == ["gpu"]:
        return check_gpu(options[1:])
    kind = "tokens" if options[:1] == ["tokens"] else "mixers"
    options = options[kind == "tokens" :] or ([] if kind == "tokens" else USUAL)
    if kind == "tokens":
        typed = [option.partition("=")[0] for option in options]
        options += [one for one in usual_tokens() if one.partition("=")[0] not in typed]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = benchmark.main([kind, *options, "format=json"])
    if status:
        return status
    machine = device_name(torch.device("cuda" if "device=cuda" in options else "cpu"))
    folder = folder_of(machine)
    folder.mkdir(exist_ok=True)
    if kind == "tokens":
        content = growth(machine, options, json.loads(printed.getvalue()))
    else:
        content = measurement(machine, options, json.loads(printed.getvalue()))
    file = folder / (MEASURED if kind == "tokens" else "mixers.json")
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (FOLDER / f"{folder.name}.md").write_text(pages()[folder.name], encoding="utf-8")
    print(f"wrote {file.relative_to(DOCS.parent)}; make docs shows it")
    return 0


def folder_of(machine: str, folder: Path = FOLDER) -> Path:
    """Return the folder of a machine's files."""
    return folder / re.sub(r"[^a-z0-9]+", "_", machine.lower()).strip("_")


def check_gpu(typed: list[str]) -> int:
    """Check a GPU, write its page, and return the exit status."""
    defaults = {"device": "cuda", "extent": "quick", "parts": ",".join(PARTS)}
    try:
        options = parse_options(typed, defaults, {"device": ("cuda", "cpu"), "extent": EXTENTS})
        if set(parts := options["parts"].split(",")) - set(PARTS):
            raise ValueError(f"parts must be of {', '.join(PARTS)}; got {options['parts']}")
        if options["device"] == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch finds no GPU; device=cpu extent=tiny tries the command")
    except ValueError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # keeps the figures, as Ctrl-C does
    machine = device_name(torch.device(options["device"]))
    # A trial of the command stays out of the measurements.
    place = FOLDER if options["device"] == "cuda" else DOCS.parent / "outputs" / "gpu_trial"
    folder = folder_of(machine, place)
    command = " ".join(["python docs/_ext/measure.py gpu", *typed])
    status = check_device(options["device"], options["extent"], parts, folder, command, machine)
    page = place / f"{folder.name}.md"
    page.write_text(pages(place)[folder.name], encoding="utf-8")
    print(f"wrote {page.relative_to(DOCS.parent)}; make docs shows it")
    return status


def usual_tokens() -> list[str]:
    """Return the options that time all token mixers of linear cost."""
    linear = [name for name in list_mixers("token") if "N^2" not in order(name).split()]
    return [f"mixer={','.join(linear)}", *TOKENS]


def growth(machine: str, options: list[str], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a file: the exponents of time over N of each token mixer."""
    timed: dict[str, list[dict[str, Any]]] = {}
    for one in records:
        timed.setdefault(one["mixer"], []).append(one)
    rows = []
    for name, (first, *_, before, last) in sorted(timed.items()):
        micros = [f"{one['us_per_token']:.3f}" for one in (first, before, last)]
        step = math.log(last["us_per_token"] / before["us_per_token"])
        step /= math.log(_tokens(last) / _tokens(before))
        rows.append([f"`{name}`", *micros, f"{last['exponent']:.2f}", f"{1 + step:.2f}"])
    grids = [records[0]["grid"], records[-2]["grid"], records[-1]["grid"]]
    return {
        "title": "Growth of token mixers with the map",
        "machine": machine,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python tools/benchmark.py tokens", *options]),
        "versions": {name: installed_version(name) for name in ("torch", "timm")},
        "notes": [
            "Time grows as N to the exponent: from the first map to the last, and in the last step."
        ],
        "columns": [
            "mixer", f"us per token at {grids[0]}", *(f"at {grid}" for grid in grids[1:]),
            "exponent", f"exponent from {grids[1]}",
        ],
        "rows": rows,
    }  # fmt: skip


def _tokens(record: dict[str, Any]) -> int:
    return math.prod(map(int, record["grid"].split("x")))


def measurement(machine: str, options: list[str], records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a file: one row for each network, size and step."""
    rows = [
        [f"`{one['backbone']}`", one["step"], one["image_size"], str(one["batch"]),
         f"{one['ratio']:.2f}", f"{one['ratio_p10']:.2f} to {one['ratio_p90']:.2f}"]
        for one in records
    ]  # fmt: skip
    return {
        "title": "Mixers over the host's own FFN",
        "machine": machine,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python tools/benchmark.py mixers", *options]),
        "versions": {name: installed_version(name) for name in ("torch", "timm")},
        "notes": ["The plain host is timed twice; its ratio shows the noise."],
        "columns": ["network", "step", "pixels", "batch", "ratio", "10 % to 90 % of the rounds"],
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
