"""Make a corrupted copy of a folder of classes, as ImageNet-C is of ImageNet's validation set.

usage: python tools/corrupt.py root=FOLDER out=FOLDER [key=value ...]

  root=FOLDER           has <class>/*, or val/<class>/*
  ckpt=RUN              a run folder gives root= and size= of its data
  out=FOLDER            gets <kind>/<severity>/<class>/*.jpg; an interrupted copy is continued
  kinds=NAME,NAME       some of the 15 kinds (default: all)
  severities=1,2,3,4,5  some of the five
  size=                 side of the copies, cropped from the centre (default: 224)
  resize=256            shorter side before the crop (default: 8/7 of size)
  seed=0                seed of the random numbers
  frost=FOLDER          photographs of frost (default: generated textures)
  workers=N             processes (default: one per core)

The copy depends on the seed and the file names only. Parameters are ImageNet-C's, but random
numbers and frost differ: compare results with each other, not with papers. Evaluate a network with
python tools/run.py mode=test data=imagenet_c data.root=FOLDER ckpt=<run folder>
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse_integer, parse_options
from tools.cli.command import exit_with, run_command

DEFAULTS = {
    "root": "",
    "ckpt": "",
    "out": "",
    "kinds": "",
    "severities": "1,2,3,4,5",
    "size": "",
    "resize": "",
    "seed": "0",
    "frost": "",
    "workers": "",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("corrupt.py", __doc__, corrupt, arguments)


def corrupt(arguments: Sequence[str]) -> None:
    """Write the copy.

    Raises:
        ValueError: An option is missing or wrong.
    """
    options = parse_options(arguments, DEFAULTS, {})
    if options["ckpt"]:
        for key, value in data_of_run(options["ckpt"]).items():
            options[key] = options[key] or value
    for key in ("root", "out"):
        if not options[key]:
            raise ValueError(f"{key}=FOLDER is missing; see --help")
    levels = options["severities"].split(",")
    severities = sorted({parse_integer("severities", level) for level in levels})
    if severities[-1] > 5:
        raise ValueError(f"severities are 1 to 5; got {options['severities']!r}")
    size = parse_integer("size", options["size"] or "224")
    resize = (
        parse_integer("resize", options["resize"]) if options["resize"] else round(size * 256 / 224)
    )
    workers = (
        parse_integer("workers", options["workers"]) if options["workers"] else os.cpu_count() or 1
    )
    seed = parse_integer("seed", options["seed"], 0)

    from datamodules.corruptions.copies import CopyOptions, choose_kinds, write_copy
    from datamodules.loading.memory import check_images_fit

    check_images_fit(1, (resize, resize), "lower size= or resize=")
    how = CopyOptions(
        kinds=choose_kinds(options["kinds"]),
        severities=tuple(severities),
        size=size,
        resize=resize,
        seed=seed,
        frost=options["frost"] or None,
    )
    out = Path(options["out"]).expanduser()
    root = Path(options["root"]).expanduser()
    count = write_copy(root, out, how, workers, show_progress if sys.stderr.isatty() else None)
    print(f"{out}: {count} images, {len(how.kinds)} kinds in {len(severities)} severities each")


def data_of_run(ckpt: str) -> dict[str, str]:
    """Return the options ``root`` and ``size`` of a run's data.

    Raises:
        ValueError: The path is outside a run folder, or the run's family does not take images.
    """
    from tasks.engine.family import find_family
    from tasks.engine.run_folder.saved_runs import open_saved
    from tasks.engine.run_folder.schemas import read_summary

    run = open_saved(ckpt).run
    if run is None:
        raise ValueError(f"ckpt={ckpt} is outside a run folder; pass root=FOLDER instead")
    family = find_family(run.config["task_name"])
    if family.modality != "image":
        raise ValueError(
            f"corruptions apply to images, but {ckpt} is a run of task={family.name}, which takes "
            f"{family.modality}s"
        )
    data, summary = run.config["data"], run.folder / "summary.json"
    facts = (summary.is_file() and read_summary(summary).get("data")) or {}
    data_options = {"root": data.get("root") or facts.get("root"), "size": data.get("image_size")}
    return {key: str(value or "") for key, value in data_options.items()}


def show_progress(count: int, total: int) -> None:
    """Print progress in one line that overwrites itself."""
    print(f"\r{count} of {total} images", end="\n" if count == total else "", file=sys.stderr)


if __name__ == "__main__":
    exit_with(main, writes_files=True)
