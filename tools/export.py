"""Exports a backbone with its weights to where other people's tools can use it.

usage: python tools/export.py backbone=NAME to=TARGET [key=value ...]
       python tools/export.py list [backbone=NAME,PATTERN] [to=TARGET,TARGET] [format=table]

  backbone=NAME        registered name; of a run folder's checkpoint it is known, with its options
  backbone.KEY=VALUE   an option of the backbone, in run.py's words: backbone.mixer.g2=6
  to=TARGET            {targets}
  ckpt=PATH            checkpoint file or run folder (default: random weights)
  out=FOLDER           (default: exports/<backbone>-<target>)
  overwrite=false      true: replace the files that an export made in the folder; others stay
  image_size=          side, or HEIGHTxWIDTH, of the images that outputs are compared on (default:
                       as a classification run saw them, else 224)
  what=both            onnx, torch_export: classifier, maps or dense (maps for dense prediction)
                       instead of all that the checkpoint holds; each graph takes its own minutes
  standalone=false     mmdet, mmseg, mmpretrain; true: with a copy of the package backbones

What was written is loaded again as its user will load it, and its outputs have to equal those of
the original. The folder appears when all is done; what takes long is said on stderr. list tries
every pair and prints what goes where.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.engine.family import ANY
from tools.cli.arguments import image_size, parse, select
from tools.cli.command import REFUSALS, answer, exit_with
from tools.cli.network_names import network_name
from tools.cli.tables import FORMATS, Record, write
from tools.cli.typed_network import merged, options_of_run, read_network, separate
from tools.cli.usual_family import usual_family
from tools.exports import (
    TARGETS,
    ExportRequest,
    Target,
    check_exported,
    checkpoint_of,
    exporter,
    family_of_run,
    new_folder,
)

SHARED = {
    "backbone": "", "to": "", "ckpt": "", "out": "", "overwrite": "false", "image_size": "",
}  # fmt: skip
LIST = {"backbone": "*", "to": ",".join(TARGETS), "image_size": "64", "format": "table"}
# Options of a backbone that an export decides itself.
ELSEWHERE = {
    "pretrained": "pass the file as ckpt=",
    "dense": "targets take the form they need; what=dense chooses it where there is a choice",
}
COLUMNS = {name: (name, "{}") for name in ("backbone", *TARGETS, "note")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for arguments that cannot be served."""
    targets = [f"{name:12} {target.summary}" for name, target in TARGETS.items()]
    text = (__doc__ or "").format(targets=f"\n{' ' * 23}".join(targets))
    return answer("export.py", text, export_or_list, arguments, needs_arguments=True)


def export_or_list(arguments: Sequence[str]) -> None:
    """Export, or print which backbones go to which targets."""
    if arguments[0] == "list":
        options = parse(arguments[1:], LIST, {"format": FORMATS})
        write(table(options), options["format"], COLUMNS)
    else:
        export(arguments)


def export(arguments: Sequence[str]) -> list[Path]:
    """Export one backbone to one target and say what was written."""
    words, own = separate(arguments)
    to = next((item.removeprefix("to=") for item in arguments if item.startswith("to=")), "")
    if not to:
        raise ValueError(f"say where to: to={'|'.join(TARGETS)}; see --help")
    function = exporter(to)
    target = TARGETS[to]
    options = parse(
        own,
        {**SHARED, **target.settings},
        {"overwrite": ("false", "true"), **target.choices},
        takes_backbone=True,
    )
    ckpt, run = checkpoint_of(options["ckpt"])
    if not options["backbone"] and not run:
        raise ValueError("say what to export: backbone=NAME, or ckpt=<run folder>; see --help")
    check_exported(run, to)
    name, typed = read_network(
        options["backbone"] or (run or {}).get("backbone", {}).get("name", ""), words
    )
    for option, instead in ELSEWHERE.items():
        if option in typed:
            raise ValueError(f"backbone.{option} is refused: {instead}")
    chosen = merged(options_of_run(run, name), typed)
    label = network_name(name, chosen.get("token_mixer"))
    out = Path(options["out"] or f"exports/{label}-{to}")
    with new_folder(out, overwrite=options["overwrite"] == "true") as folder:
        request = ExportRequest(
            to=to,
            backbone=name,
            options=chosen,
            ckpt=ckpt,
            run=run,
            folder=folder,
            image_size=image_size(options["image_size"] or _seen_by(run, target)),
            settings={key: options[key] for key in target.settings},
            say=progress(),
        )
        with contextlib.redirect_stdout(io.StringIO()):  # other packages talk while they work
            files = function(request)
    written = [out / path.relative_to(folder) for path in files]
    print("\n".join(map(str, written)))
    return written


def progress() -> Callable[[str], None]:
    """Prints lines with the seconds since now, beside what the command gives: to stderr."""
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    return say


def _seen_by(run: Mapping[str, Any] | None, target: Target) -> str:
    """Return the side of a classifier's images, at which its graphs are recorded."""
    records = "what" in target.settings
    classifies = run is not None and family_of_run(run).export_of(ANY) == "classifier"
    side = run["data"].get("image_size") if run is not None and records and classifies else None
    return "" if side is None else str(side)


def table(options: dict[str, str]) -> list[Record]:
    """One record per backbone: whether it goes to each target, and why not."""
    targets = options["to"].split(",")
    for to in targets:
        if to not in TARGETS:
            exporter(to)  # refuses it with the nearest name
    size = image_size(options["image_size"])
    records, say = [], progress()
    for name in select(options["backbone"], usual_family()):
        reasons = {}
        for to in targets:  # of which onnx and torch_export take a minute each
            say(f"{name} to {to}")
            reasons[to] = refusal(name, to, size)
        notes = [f"{to}: {why}" for to, why in reasons.items() if why]
        answers = {to: "no" if why else "yes" for to, why in reasons.items()}
        records.append({"backbone": name, **answers, "note": "; ".join(notes)})
    return records


def refusal(name: str, to: str, size: tuple[int, int]) -> str:
    """Why a backbone cannot be exported to a target, found by exporting it; empty if it can."""
    with tempfile.TemporaryDirectory() as folder:
        request = ExportRequest(
            to=to,
            backbone=name,
            options={},
            ckpt=None,
            run=None,
            folder=Path(folder),
            image_size=size,
            settings=TARGETS[to].settings,
        )
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exporter(to)(request)
        except REFUSALS as error:
            return str(error)
        except Exception as error:  # a fault of ours takes no other answers of the table with it
            return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


if __name__ == "__main__":
    exit_with(main, writes_files=True)
