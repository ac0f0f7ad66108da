"""Analyse trained networks: draw the papers' figures and write the numbers behind them.

usage: python tools/analyse.py WHAT ckpt=RUN[,RUN ...] [key=value ...]

{kinds}

  ckpt=RUN,RUN         run folders or checkpoints, side by side in one figure with shared scales
  backbone=NAME        of a checkpoint outside of run folders; without ckpt=, random weights
  backbone.KEY=VALUE   an option that it was built with, as in run.py
  input=PATH           image, folder of images, or dataset such as imagenet with data.root=PATH
                       (default: the run's validation data)
  images=16            maximum number of images, evenly spaced
  image_size=          side or HEIGHTxWIDTH of the images (default: the run's validation size)
  out=FOLDER           (default: analyses/WHAT in the first run folder, else in this folder)
  format=table         of the printed table: table, markdown, latex, csv or json

Every analysis writes its figures as PNG and SVG and its numbers as CSV. Its own options:
python tools/analyse.py WHAT --help
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.analyses import Analysis, analyses, find_analysis
from tools.cli.arguments import parse_image_size, parse_integer, parse_options
from tools.cli.command import HELP, exit_with, run_command
from tools.cli.tables import FORMATS, TEXT_FORMATS, write

SHARED = {
    "ckpt": "", "backbone": "", "input": "", "images": "16", "image_size": "", "out": "",
    "format": "table",
}  # fmt: skip
RUN_PREFIXES = ("backbone.", "data.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("analyse.py", _help, run_named, arguments, needs_arguments=True)


def run_named(arguments: Sequence[str]) -> list[Path]:
    """Run the analysis named by the first argument."""
    return run(find_analysis(arguments[0]), arguments[1:])


def run(analysis: Analysis, arguments: Sequence[str]) -> list[Path]:
    """Analyse, print the short table and the folder, and return the written files."""
    words = [word for word in arguments if word.lstrip("+").startswith(RUN_PREFIXES)]
    options = parse_options(
        [word for word in arguments if word not in words],
        {**SHARED, **analysis.options},
        {"format": (*FORMATS, *TEXT_FORMATS), **analysis.choices},
        takes_backbone=True,
    )
    parse_integer("images", options["images"])
    if options["image_size"]:
        parse_image_size(options["image_size"])
    from tools.analyses.subjects import open_subjects
    from tools.analyses.writing import write_findings

    subjects = open_subjects({"analysis": analysis.name, **options}, words)
    findings = analysis.analyse(subjects, options)
    first = subjects[0].folder
    parent = Path("analyses") if first is None else first / "analyses"
    folder = Path(options["out"]) if options["out"] else parent / analysis.name
    files = write_findings(analysis.name, findings, folder)
    if findings.summary:
        write(findings.summary, options["format"], findings.columns)
    for note in findings.notes:
        print(note, file=sys.stderr)
    names = ", ".join(path.name for path in files)
    print(f"{folder}: {names}", file=sys.stderr if options["format"] == "json" else sys.stdout)
    return files


def _help(arguments: Sequence[str]) -> str:
    """Return the help of the named analysis, or of the command."""
    if not arguments or arguments[0] in HELP:
        kinds = "\n".join(f"  {kind.name:14} {kind.summary}" for kind in analyses().values())
        return (__doc__ or "").format(kinds=kinds)
    analysis = find_analysis(arguments[0])
    module = sys.modules[analysis.analyse.__module__]
    defaults = [f"  {key}={default}" for key, default in analysis.options.items()]
    for place, key in enumerate(analysis.options):
        if key in analysis.choices:
            defaults[place] += f"   ({', '.join(analysis.choices[key])})"
    lines = [f"usage: python tools/analyse.py {analysis.name} ckpt=RUN [key=value ...]", ""]
    lines += [(module.__doc__ or "").strip(), "", "Its own options:" if defaults else "", *defaults]
    return "\n".join(lines).strip()


if __name__ == "__main__":
    exit_with(main, writes_files=True)
