"""Makes a corrupted copy of a folder of classes, as ImageNet-C is one of ImageNet's validation set.

usage: python tools/corrupt.py root=FOLDER out=FOLDER [key=value ...]

  root=FOLDER           holds <class>/*, or val/<class>/*
  out=FOLDER            gets <kind>/<severity>/<class>/*.jpg; a copy that was broken off goes on
  kinds=NAME,NAME       some of the 15 kinds (default: all)
  severities=1,2,3,4,5  some of the five
  size=224              side of the copies, cut out of the middle
  resize=256            shorter side before that (default: 8/7 of size)
  seed=0                other random numbers
  frost=FOLDER          photographs of frost; without them textures are made
  workers=N             processes (default: one a core)

All depends on the seed and the images' names alone. Parameters are ImageNet-C's, random numbers and
frost are not: figures on such a copy compare with each other, not with papers'. Measure a network
on it by  python tools/run.py mode=test data=imagenet_c data.root=FOLDER ckpt=<run folder>
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import number, parse
from tools.cli.command import answer, exit_with

DEFAULTS = {
    "root": "",
    "out": "",
    "kinds": "",
    "severities": "1,2,3,4,5",
    "size": "224",
    "resize": "",
    "seed": "0",
    "frost": "",
    "workers": "",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for arguments that cannot be served."""
    return answer("corrupt.py", __doc__, corrupt, arguments)


def corrupt(arguments: Sequence[str]) -> None:
    """Write the copy that the arguments ask for.

    Raises:
        ValueError: An option that is missing or cannot be used.
    """
    options = parse(arguments, DEFAULTS, {})
    for key in ("root", "out"):
        if not options[key]:
            raise ValueError(f"{key}=FOLDER is missing; see --help")
    severities = sorted({number("severities", part) for part in options["severities"].split(",")})
    if severities[-1] > 5:
        raise ValueError(f"severities are 1 to 5; got {options['severities']!r}")
    size = number("size", options["size"])
    resize = number("resize", options["resize"]) if options["resize"] else round(size * 256 / 224)
    workers = number("workers", options["workers"]) if options["workers"] else os.cpu_count() or 1
    seed = number("seed", options["seed"], 0)

    from datamodules.images.corrupted_copies import CopyOptions, choose_kinds, write_copy

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


def show_progress(done: int, total: int) -> None:
    """One line that is written over."""
    print(f"\r{done} of {total} images", end="\n" if done == total else "", file=sys.stderr)


if __name__ == "__main__":
    exit_with(main, writes_files=True)
