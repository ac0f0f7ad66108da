"""Measure what INT8 costs mixers of different kinds: points lost and time, on the same real data.

usage: python docs/_ext/int8_costs.py FOLDER data=fashion_mnist data.root=ROOT [key=value ...]

Each mixer is trained in the leaderboard's small ViT, exported as a whole graph in float and in INT8
(tools/export.py int8=true int8.keep=auto), and both files are timed in turn on one thread. Runs and
graphs go below FOLDER; mixers that have a row in docs/measurements/int8/mixers.json are skipped.
Further words are options of the runs, such as trainer.limit_train_batches=300.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from measurement_pages import FOLDER  # noqa: E402

from tools import export, run  # noqa: E402
from tools.bench.timing import interleave, summarise_ratios  # noqa: E402
from tools.cli.grammar import key_of  # noqa: E402
from tools.installation.packages import installed_version  # noqa: E402
from tools.runs.run_facts import device_name  # noqa: E402

FILE = FOLDER / "int8" / "mixers.json"
# Kind -> option of the host. The host's attention and FFN stay where a mixer leaves them.
MIXERS = {
    "ffn": ("attention and FFN", "mixer.name"),
    "afbo": ("product of two mappings", "mixer.name"),
    "iffn": ("FFN of the paper", "mixer.name"),
    "swiglu": ("gated", "mixer.name"),
    "star": ("product of two linear layers", "mixer.name"),
    "pooling": ("pooling", "token_mixer"),
    "sep_conv": ("depthwise convolution", "token_mixer"),
    "spatial_mlp": ("MLP over tokens", "token_mixer"),
    "sgu": ("gated MLP over tokens", "token_mixer"),
    "fnet": ("Fourier", "token_mixer"),
    "relu_linear": ("linear attention", "token_mixer"),
    "sbm": ("sums of basis matrices", "token_mixer"),
}
SAMPLES, BATCH, ROUNDS = 2000, 16, 15
COLUMNS = [
    "mixer", "kind", "float %", "INT8 %", "points lost", "95 %", "verdict", "time over float",
    "layers in float", "lost with all layers in INT8",
]  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Measure the mixers without a row and write the file."""
    if len(words) < 2 or "=" in words[0]:
        print((__doc__ or "").partition("\n\n")[2], file=sys.stderr)
        return 2
    folder, *options = words
    content = json.loads(FILE.read_text("utf-8")) if FILE.exists() else None
    rows = content["rows"] if content else []
    for name in MIXERS:
        if name in {row[0] for row in rows}:
            continue
        rows.append(measure(name, Path(folder).resolve() / name, options))
        rows.sort(key=lambda row: list(MIXERS).index(row[0]))
        write(rows, options)
        print(" | ".join(rows[[row[0] for row in rows].index(name)]))
    return 0


def measure(name: str, folder: Path, options: Sequence[str]) -> list[str]:
    """Train, export and time a mixer; return its row."""
    plan = yaml.safe_load((DOCS / "leaderboard/plan.yaml").read_text("utf-8"))
    words = [
        f"task={plan['task']}", *_words(plan["host"][0]), *plan["options"], *options,
        f"backbone.{MIXERS[name][1]}={name}", "trainer=cpu", "logger=csv", "seed=0",
        f"output_dir={folder}",
    ]  # fmt: skip
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = _status(run.main, list({key_of(word): word for word in words}.values()))
    assert status == 0, printed.getvalue()
    ckpt = printed.getvalue().strip().splitlines()[-1].removeprefix("Run folder: ")
    shared = ["to=onnx", f"ckpt={ckpt}", "overwrite=true"]
    exports = {
        "float": ["samples=25"],
        "int8": [f"samples={SAMPLES}", "int8=true", "int8.keep=auto"],
    }
    for form, more in exports.items():
        with contextlib.redirect_stdout(io.StringIO()):
            assert export.main([*shared, *more, f"out={folder / form}"]) == 0
    sessions = [_session(folder / form / "whole.onnx") for form in exports]
    facts = json.loads(sessions[1].get_modelmeta().custom_metadata_map["int8"])
    side = sessions[0].get_inputs()[0].shape[1:3]
    side = [value if isinstance(value, int) else 32 for value in side]
    images = np.random.default_rng(0).integers(0, 256, (BATCH, *side, 3), dtype=np.uint8)
    steps = [lambda session=s: session.run(None, {"images": images}) for s in sessions]
    before, after = interleave(steps, ROUNDS, "cpu", "process")
    ratios = summarise_ratios(after, before)
    return row(name, facts, ratios)


def row(name: str, facts: dict[str, Any], ratios: dict[str, float]) -> list[str]:
    """Return the cells of a mixer."""
    first = facts["trials"][0]
    return [
        name,
        MIXERS[name][0],
        f"{facts['before']:.2f}",
        f"{facts['after']:.2f}",
        f"{facts['loss']:.2f}",
        f"{facts['low']:.2f} to {facts['high']:.2f}",
        facts["verdict"],
        f"{ratios['ratio']:.2f}",
        layers_cell(facts["float_layers"]),
        f"{first['loss']:.2f} ({first['low']:.2f} to {first['high']:.2f})",
    ]


def layers_cell(layers: Sequence[str]) -> str:
    """Return the number of layers and the worst one."""
    return f"{len(layers)}, first `{layers[0]}`" if layers else "none"


def write(rows: list[list[str]], options: Sequence[str]) -> None:
    """Write the file of the page."""
    machine = device_name(torch.device("cpu"))
    typed = [word for word in options if not word.startswith("data.root=")]
    content = {
        "title": f"{len(rows)} mixers in a small ViT",
        "machine": f"INT8 on {machine}",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": f"python docs/_ext/int8_costs.py FOLDER {' '.join(typed)} data.root=ROOT",
        "versions": {name: installed_version(name) for name in ("torch", "onnxruntime")},
        "notes": NOTES,
        "columns": COLUMNS,
        "rows": rows,
    }
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


NOTES = [
    "The host is the leaderboard's ViT of width 32 and depth 4. Both metrics are of the same "
    f"{SAMPLES:,} validation images; the interval is of the paired difference. Time is processor "
    f"time on one thread for {BATCH} images, median of {ROUNDS} rounds in turn.",
]


def _words(text: str) -> list[str]:
    """Return a name with options as words of a command."""
    name, *more = text.split(" ")
    return [f"backbone={name}", *more]


def _status(command: Any, words: Sequence[str]) -> int:
    """Return the exit status of a command."""
    try:
        return int(command(list(words)) or 0)
    except SystemExit as ended:
        return int(ended.code or 0)


def _session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
