"""Export a backbone with its weights for use in other toolkits and runtimes.

usage: python tools/export.py backbone=NAME to=TARGET [key=value ...]
       python tools/export.py list [backbone=NAME,PATTERN] [to=TARGET,TARGET] [format=table]

  backbone=NAME        registered name (default: that of the run folder, with its options)
  backbone.KEY=VALUE   an option of the backbone, as in run.py: backbone.mixer.g2=6
  to=TARGET            {targets}
  ckpt=PATH            checkpoint file or run folder (default: random weights)
  out=FOLDER           (default: exports/<backbone>-<target>)
  overwrite=false      true: replace the files of an earlier export in the folder; others stay
  image_size=          side or HEIGHTxWIDTH of the images for the comparison of outputs (default:
                       a classification run's image size, else 224)
  what=whole           onnx: one graph of a run from inputs to answers, checked on its validation
                       samples, with infer.py; the default where it works
  what=both            onnx, torch_export: classifier, maps, or dense (maps for dense prediction);
                       both means all that the checkpoint has; each graph takes minutes
  samples=1000         what=whole: validation samples to compare on, evenly spaced
  licence=             what=whole: licence of the weights, for the file's metadata
  int8=false           what=whole; true: quantise after training, calibrated on training samples;
                       refused if the metric loses more than a point on the validation samples
  int8.keep=           auto: leave the layers that break in float until the loss holds
  standalone=false     mmdet, mmseg, mmpretrain; true: include a copy of the package backbones
  repo= private=false licence=apache-2.0 test=
                       hub: where to push it, the licence of the weights, and the folder of a
                       mode=test run whose metrics the card shows (default: those of the run)

Each export is loaded as its user will load it, and its outputs must equal the original's. The
folder appears when all is done; progress is printed to stderr. list tries every pair.
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

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backbones.options import unknown
from tasks.engine.family import ANY, find_family
from tools.cli.arguments import parse_image_size, parse_options, select_backbones
from tools.cli.command import REFUSALS, exit_with, run_command
from tools.cli.network_names import name_with_model, network_name
from tools.cli.tables import FORMATS, Record, write
from tools.cli.typed_network import merge_options, read_network, run_options, split_backbone_options
from tools.exports.requests import (
    COMPARED,
    TARGETS,
    Exporter,
    ExportRequest,
    check_exported,
    checkpoint_of,
    exported_family,
    exporter,
    new_folder,
)

SHARED = {
    "backbone": "", "to": "", "ckpt": "", "out": "", "overwrite": "false", "image_size": "",
}  # fmt: skip
LEAST_SIDE = 64  # of the images that graphs of any size are recorded with
OF_BACKBONES = [name for name, target in TARGETS.items() if not target.takes_runs]
LIST = {"backbone": "*", "to": ",".join(OF_BACKBONES), "image_size": "64", "format": "table"}
# Options of a backbone that the export sets itself.
DECIDED_BY_EXPORT = {
    "pretrained": "pass the file as ckpt=",
    "dense": "each target takes the form it needs; use what=dense to choose it",
}
COLUMNS = {name: (name, "{}") for name in ("backbone", *OF_BACKBONES, "note")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    targets = [f"{name:12} {target.summary}" for name, target in TARGETS.items()]
    text = (__doc__ or "").format(targets=f"\n{' ' * 23}".join(targets))
    return run_command("export.py", text, export_or_list, arguments, needs_arguments=True)


def export_or_list(arguments: Sequence[str]) -> None:
    """Export, or print which backbones fit which targets."""
    if arguments[0] == "list":
        options = parse_options(arguments[1:], LIST, {"format": FORMATS})
        write(list_exports(options), options["format"], COLUMNS)
    else:
        print("\n".join(map(str, export(arguments))))


def export(arguments: Sequence[str]) -> list[Path]:
    """Export one backbone to one target; return the written files."""
    words, option_words = split_backbone_options(arguments)
    to = next((item.removeprefix("to=") for item in arguments if item.startswith("to=")), "")
    if not to:
        raise ValueError(f"to= is missing: pass to={'|'.join(TARGETS)}; see --help")
    function = exporter(to)
    target = TARGETS[to]
    options = parse_options(
        option_words,
        {**SHARED, **target.settings},
        {"overwrite": ("false", "true"), **target.choices},
        takes_backbone=True,
    )
    ckpt, run = checkpoint_of(options["ckpt"])
    if not options["backbone"] and not run:
        raise ValueError("backbone=NAME is missing, or ckpt=<run folder>; see --help")
    name, typed_options = read_network(
        options["backbone"] or (run or {}).get("backbone", {}).get("name", ""),
        words,
        find_family(run["task_name"]) if run else None,
    )
    check_exported(run, name, to)
    part = options.get("what", "")
    if "true" == options.get("int8") or options.get("int8.keep"):
        if part not in ("", "whole"):
            raise ValueError(f"int8 and int8.keep are options of what=whole; leave what={part} out")
        part = "whole"
    if exported_family(run, name).graph and part != "whole" and not target.takes_runs:
        from tools.exports import whole_network

        function = whole_network.export
    by_default = not part and not options.get("network") and exported_family(run, name).whole_graph
    if part == "whole" or (to == "onnx" and by_default):
        function = whole_or(function, run, part)
    for option, instead in DECIDED_BY_EXPORT.items():
        if option in typed_options:
            raise ValueError(f"backbone.{option} is not an export option: {instead}")
    if target.takes_runs and typed_options:
        raise ValueError(f"to={to} takes a run as it is; leave backbone.{min(typed_options)} out")
    network_options = merge_options(run_options(run, name), typed_options)
    size = _checked_size(options["image_size"] or _run_image_size(run, to))
    network = name_with_model(name, network_options.get("model"))
    label = network_name(network, network_options.get("token_mixer"), network_options.get("mixer"))
    out = Path(options["out"] or f"exports/{label}-{to}")
    with new_folder(out, overwrite=options["overwrite"] == "true") as folder:
        request = ExportRequest(
            to=to,
            backbone=name,
            # Adapters are merged as the weights are loaded into plain layers.
            options={key: value for key, value in network_options.items() if key != "lora"},
            ckpt=ckpt,
            run=run,
            folder=folder,
            image_size=size,
            settings={key: options[key] for key in target.settings},
            report=progress_printer(),
        )
        with contextlib.redirect_stdout(io.StringIO()):  # other packages print while they work
            files = function(request)
    return [out / path.relative_to(folder) for path in files]


def whole_or(function: Exporter, run: Mapping[str, Any] | None, part: str) -> Exporter:
    """Return the export of a run's whole graph, or without ``part`` of its parts where that fails.

    Args:
        function: The export of the parts.
        run: Config of the run; None without one.
        part: "whole", or empty for the default.

    Raises:
        ValueError: what=whole without a run.
    """
    if run is None:
        if part:
            raise ValueError("what=whole takes a run, which has samples; pass ckpt=<run folder>")
        return function
    from tasks.engine.graphs import NotWholeError
    from tools.exports import whole_graph

    def export_whole(request: ExportRequest) -> list[Path]:
        try:
            return whole_graph.export(request)
        except NotWholeError as error:
            if part:
                raise ValueError(f"what=whole: {error}") from error
            request.report(f"what=whole is left out: {error}")
            (request.folder / whole_graph.NAME).unlink(missing_ok=True)
            return function(request)

    return export_whole


def progress_printer() -> Callable[[str], None]:
    """Return a function that prints a line to stderr with the seconds since now."""
    started = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    return report


def _checked_size(text: str) -> tuple[int, int]:
    """Return the image size, at which the compared images must fit into memory."""
    from datamodules.loading.memory import check_images_fit

    size = parse_image_size(text)
    check_images_fit(COMPARED, size, "lower image_size=")
    return size


def _run_image_size(run: Mapping[str, Any] | None, to: str) -> str:
    """Return the image size of a run at which its graphs are recorded; empty for the usual one."""
    records = "what" in TARGETS[to].settings
    if run is None or not records:
        return ""
    family = find_family(run["task_name"])
    if family.exports.get(to) == "model":
        return str(LEAST_SIDE)  # the graph serves any size
    if family.export_of(ANY) != "classifier":
        return ""
    return str(run["data"].get("image_size") or "")


def list_exports(options: dict[str, str]) -> list[Record]:
    """Try every pair; return one record per backbone with yes or no per target, and the reasons."""
    targets = options["to"].split(",")
    for to in targets:
        if to not in OF_BACKBONES:
            raise ValueError(unknown("target of list", to, OF_BACKBONES))
    size = _checked_size(options["image_size"])
    records, report = [], progress_printer()
    for name in select_backbones(options["backbone"]):
        reasons = {}
        for to in targets:  # onnx and torch_export take a minute each
            report(f"{name} to {to}")
            reasons[to] = export_error(name, to, size)
        notes = [f"{to}: {why}" for to, why in reasons.items() if why]
        answers = {to: "no" if why else "yes" for to, why in reasons.items()}
        records.append({"backbone": name, **answers, "note": "; ".join(notes)})
    return records


def export_error(name: str, to: str, size: tuple[int, int]) -> str:
    """Return the error of exporting a backbone to a target, or an empty text."""
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
            check_exported(None, name, to)
            with contextlib.redirect_stdout(io.StringIO()):
                exporter(to)(request)
        except REFUSALS as error:
            return str(error)
        except Exception as error:  # a bug in one pair must not stop the table
            return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


if __name__ == "__main__":
    exit_with(main, writes_files=True)
