"""Time mixers on this machine and add the results to docs/measurements.

usage: python docs/_ext/measure.py [benchmark.py's options ...]

Without options, AFBO, IFFN and GLU are timed against the FFN of three hosts on one thread.
``make measurements OPTIONS="device=cuda dtype=bfloat16"`` measures a GPU. The files of other
machines stay as they are.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

import torch  # noqa: E402
from measurement_pages import FOLDER, pages  # noqa: E402

from tools import benchmark  # noqa: E402
from tools.installation.packages import installed_version  # noqa: E402
from tools.runs.run_facts import device_name  # noqa: E402

USUAL = ["mixer=afbo,iffn,glu", "batch=1,8", "threads=1", "rounds=11"]


def main(options: list[str]) -> int:
    """Measure, write the json file, and return the exit status."""
    options = options or USUAL
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = benchmark.main(["mixers", *options, "format=json"])
    if status:
        return status
    machine = device_name(torch.device("cuda" if "device=cuda" in options else "cpu"))
    folder = FOLDER / re.sub(r"[^a-z0-9]+", "_", machine.lower()).strip("_")
    folder.mkdir(exist_ok=True)
    content = measurement(machine, options, json.loads(printed.getvalue()))
    file = folder / "mixers.json"
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (FOLDER / f"{folder.name}.md").write_text(pages()[folder.name], encoding="utf-8")
    print(f"wrote {file.relative_to(DOCS.parent)}; make docs shows it")
    return 0


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
