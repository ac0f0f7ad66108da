"""Check a GPU, print a table of verdicts, and write its figures and plots for docs/measurements."""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tools.cli.paths import ROOT
from tools.cli.tables import write
from tools.gpu.extent import ABSENT, EXTENTS, FAIL, MEASURED, PASS, Extent, Record, Setting
from tools.gpu.schedule import plan, run_workers
from tools.installation.packages import installed_version, list_packages

FIGURES = ("float32", "tf32", "bfloat16", "float16")
SHAPES: dict[str, tuple[str, dict[str, str]]] = {  # of a part: title, and heading of each key
    "hosts": ("AFBO and IFFN over their hosts", {
        "name": "host", "mixer": "mixer", "batch": "batch", "forward": "forward",
        "training": "training", "memory": "memory of training", "forward_ms": "forward ms",
        "training_ms": "training ms", "peak_mb": "training MB", "verdict": "verdict",
    }),
    "tokens": ("Token mixers over attention and their roofline", {
        "name": "mixer", "map": "map", "forward_ms": "forward ms", "over": "over attention",
        "training_ms": "training ms", "attention": "over attention in training",
        "roofline_ms": "roofline ms in training", "over_roofline": "over the roofline",
        "peak_mb": "training MB", "verdict": "verdict",
    }),
    "tasks": ("Tasks of the README", {
        "name": "task", "training s": "training and test, s", "prediction s": "prediction, s",
        "verdict": "verdict",
    }),
    "kernels": ("Fast forms against float64", {
        "name": "mixer", "type": "type", "served": "served in eager passes", "eager": "eager",
        "eager gradient": "gradient", "compiled": "compiled", "compiled gradient": "gradient",
        "graph": "CUDA graph", "graph gradient": "gradient", "verdict": "verdict",
    }),
    "mixers": ("Mixers against float64", {
        "name": "mixer",
        **{key: key for one in FIGURES for key in (one, f"{one} gradient")}, "verdict": "verdict",
    }),
}  # fmt: skip
SUMMARY = ("part", PASS, FAIL, ABSENT, MEASURED)


def check_device(
    device: str, extent: str, parts: list[str], target: Path, command: str, machine: str
) -> int:
    """Run the checks, keep their figures after each process, and return the exit status.

    Args:
        device: "cuda" or "cpu".
        extent: Key of ``EXTENTS``.
        parts: Keys of ``PARTS``.
        target: Folder of the machine in docs/measurements.
        command: As typed, for the page.
        machine: Name of the device.
    """
    folder = ROOT / "outputs" / "gpu"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    target.mkdir(parents=True, exist_ok=True)
    setting = Setting(device, EXTENTS[extent], folder)
    missing = missing_packages(device)
    about = {
        "machine": machine, "date": datetime.date.today().isoformat(), "command": command,
        "versions": versions(),
    }  # fmt: skip

    print("logs: outputs/gpu")
    start = time.monotonic()

    def keep(records: list[Record]) -> None:
        print(f"{len(records)} verdicts after {time.monotonic() - start:.0f} s", flush=True)
        store([*missing, *records], parts, about, target, setting.extent)

    records = run_workers(plan(setting, extent, parts), folder, setting.extent, keep)
    shutil.rmtree(folder / "runs", ignore_errors=True)  # some gigabytes of checkpoints
    draw(records, target, setting.extent)
    store([*missing, *records], parts, about, target, setting.extent)
    return print_verdicts([*missing, *records])


def missing_packages(device: str) -> list[Record]:
    """Return a record per package that the checks go without."""
    lacking = [(one.name, one.feature) for one in list_packages() if one.status == "missing"]
    if device == "cuda" and installed_version("triton") is None:
        lacking.append(("triton", "kernels and torch.compile"))
    return [
        {"part": "packages", "name": name, "verdict": ABSENT, "note": f"serves {feature}"}
        for name, feature in lacking
    ]


def versions() -> dict[str, str | None]:
    """Return the versions that the figures depend on."""
    return {
        "Python": platform.python_version(), "CUDA": torch.version.cuda,
        **{name: installed_version(name) for name in ("torch", "triton", "fla-core", "timm")},
    }  # fmt: skip


def store(
    records: list[Record], parts: list[str], about: dict[str, Any], target: Path, extent: Extent
) -> None:
    """Write a json file per part with records, and one of the verdicts; others stay."""
    goals = extent.goals
    notes = {
        "hosts": f"Bfloat16, eager and compiled; ratios to the plain host. Goals: forward "
        f"{goals.forward}, training {goals.training}, memory {goals.memory}.",
        "tokens": f"Bfloat16, batch {extent.batch}, {extent.dim} channels, against attention in "
        f"the same rounds. Goal: {goals.attention} compiled in training. The roofline is the time "
        "of the operations, or of the bytes of input, output and parameters, at the device's peak.",
        "tasks": f"{extent.steps} steps, test and prediction, several tasks side by side.",
        "kernels": "Relative errors; a form that has not served leaves torch's operations.",
        "mixers": f"Relative errors against float64 on the CPU. Limits of outputs: "
        f"{', '.join(f'{key} {value:g}' for key, value in goals.errors.items())}; gradients: "
        f"{goals.gradient:g} times as much.",
    }
    for number, part in enumerate(SHAPES, start=2):
        rows = [record for record in records if record["part"] == part]
        if part in parts:
            title, columns = SHAPES[part]
            content = _content(title, columns, rows, [notes[part]], about)
            if (target / f"gpu_{number}_{part}.png").exists():
                content["picture"] = f"gpu_{number}_{part}.png"
            _write(target / f"gpu_{number}_{part}.json", content)
    columns = {key: key for key in SUMMARY}
    summary = _content("Verdicts", columns, summarise(records), [], about)
    _write(target / "gpu_0_verdicts.json", summary)
    columns = {key: key for key in ("part", "name", "verdict", "note")}
    rows = [one | {"name": _label(one)} for one in records if one["verdict"] in (FAIL, ABSENT)]
    content = _content("What failed or is absent", columns, rows, [], about)
    _write(target / "gpu_1_failures.json", content)


def _content(
    title: str, columns: dict[str, str], rows: list[Record], notes: list[str], about: dict[str, Any]
) -> dict[str, Any]:
    cells = [[_format(record.get(key)) for key in columns] for record in rows]
    return {"title": title, **about, "notes": notes, "columns": [*columns.values()], "rows": cells}


def _format(value: Any) -> str:
    """Return a cell's text."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def _label(record: Record) -> str:
    """Return the name of a record, with what tells it from others of the name."""
    more = [str(record[key]) for key in ("mixer", "map", "type") if key in record]
    return " ".join([record["name"], *more])


def _write(file: Path, content: dict[str, Any]) -> None:
    """Write a file of figures, if there are any."""
    if not content["rows"]:
        file.unlink(missing_ok=True)
        return
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def summarise(records: list[Record]) -> list[Record]:
    """Return the number of each verdict per part."""
    counts = {
        part: Counter(one["verdict"] for one in records if one["part"] == part)
        for part in dict.fromkeys(one["part"] for one in records)
    }
    return [
        {"part": part, **{verdict: count[verdict] for verdict in SUMMARY[1:]}}
        for part, count in counts.items()
    ]


def print_verdicts(records: list[Record]) -> int:
    """Print what failed or is absent and the table of verdicts; return 1 after a failure."""
    for record in records:
        if record["verdict"] in (FAIL, ABSENT):
            print(f"{record['verdict']}: {record['part']} {_label(record)}: {record['note']}")
    write(summarise(records), "table", {key: (key, "{}") for key in SUMMARY})
    return int(any(record["verdict"] == FAIL for record in records))


def draw(records: list[Record], target: Path, extent: Extent) -> None:
    """Draw the figures of hosts, token mixers and mixers, beside their goals."""
    goals = extent.goals
    of_part = {part: [one for one in records if one["part"] == part] for part in SHAPES}
    largest = max((one["map"] for one in of_part["tokens"] if "map" in one), default="", key=len)
    tokens = [one for one in of_part["tokens"] if one.get("map") == largest]
    _dots(target / "gpu_2_hosts.png", of_part["hosts"], {
        "forward": goals.forward, "training": goals.training, "memory": goals.memory,
    }, "over the plain host")  # fmt: skip
    _dots(target / "gpu_3_tokens.png", tokens, {
        "attention": goals.attention, "over_roofline": None,
    }, f"time of a training step on {largest} over attention's, and over the roofline")  # fmt: skip
    _dots(target / "gpu_6_mixers.png", of_part["mixers"], dict(goals.errors),
          "relative error of the output")  # fmt: skip


def _dots(file: Path, records: list[Record], limits: dict[str, float | None], title: str) -> None:
    """Draw a row of dots per record, one per key, and a line at the limit of each key."""
    import matplotlib as mpl

    from tools.plotting.colours import COLOURS

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    keys = [key for key in limits if any(record.get(key) for record in records)]
    rows = [record for record in records if any(record.get(key) for key in keys)]
    if not rows:
        file.unlink(missing_ok=True)
        return
    rows.sort(key=lambda record: max(record.get(key) or 0 for key in keys))
    figure, axis = plt.subplots(figsize=(8, 1.4 + 0.18 * len(rows)), layout="constrained")
    for key, colour in zip(keys, COLOURS, strict=False):
        axis.plot([record.get(key) or float("nan") for record in rows], range(len(rows)), "o",
                  ms=4, color=colour, label=key.replace("_", " "))  # fmt: skip
        if limits[key]:
            axis.axvline(limits[key], color=colour, lw=1, ls=(0, (4, 3)))
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(rows)), [_label(one) for one in rows], fontsize=7)
    axis.set_title(f"{title}; dashed: goals", loc="left", fontsize=9)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=len(keys), fontsize=8, frameon=False)
    figure.savefig(file, dpi=90)
    plt.close(figure)
