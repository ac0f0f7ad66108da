"""Cut the boxes of a detection set into class folders, for data=folder.

usage: python tools/crop.py root=FOLDER out=FOLDER [key=value ...]

  root=FOLDER      an export with boxes: Pascal VOC, YOLO, COCO and others, as data=coco reads them
  out=FOLDER       gets <split>/<class>/<image>_<number>.png; an export without splits <class>/...
  layout=auto      the tool that wrote the export, as data.layout
  margin=0         share of the longer side of a box that is added on each side

A crop is the square around the centre of a box, with the longer side of the box; what lies outside
of the image is black. Boxes below 2 pixels are left out. Train with the crops, here with those of
the split "test" as validation images:
python tools/run.py task=classification data=folder data.root=FOLDER data.val_split=test
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse_options
from tools.cli.command import exit_with, run_command

DEFAULTS = {"root": "", "out": "", "layout": "auto", "margin": "0"}
LEAST = 2  # pixels of a side


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("crop.py", __doc__, crop, arguments)


def crop(arguments: Sequence[str]) -> None:
    """Write the crops.

    Raises:
        ValueError: An option is missing or wrong, or the folder has no boxes.
    """
    from typing import get_args

    from datamodules.annotation_formats.box_exports import Layout, open_export
    from datamodules.annotation_formats.coco_files import WHOLE
    from datamodules.files import require_folder
    from datamodules.files.text_files import finite_number
    from datamodules.files.values import file_errors

    layouts = tuple(name for name in get_args(Layout) if name != "coco")
    options = parse_options(arguments, DEFAULTS, {"layout": layouts})
    for key in ("root", "out"):
        if not options[key]:
            raise ValueError(f"{key}=FOLDER is missing; see --help")
    with file_errors("margin"):
        margin = finite_number(options["margin"])
    if margin < 0:
        raise ValueError(f"margin={options['margin']} must be at least 0")
    root, out = (Path(options[key]).expanduser() for key in ("root", "out"))
    require_folder(root, "pass an export with boxes as root=")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"out={out} is not empty; pass a new folder")
    export = open_export(root, options["layout"])
    if export is None:
        raise ValueError(f"{root} is not an export of a known tool; pass layout=, see --help")
    for split, read in export.parts.items():
        folder = out if split == WHOLE else out / split
        counts = write_crops(read(), folder, margin)
        listing = ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
        print(f"{folder}: {listing or 'no boxes'}")


def write_crops(part: Any, folder: Path, margin: float) -> Counter[str]:
    """Write the crops of a split, and return their number per class.

    Args:
        part: A ``Part`` of an export.
        folder: Folder that gets <class>/<image>_<number>.png.
        margin: Share of the longer side of a box that is added on each side.
    """
    from datamodules.files import load_rgb

    names = {entry["id"]: str(entry["name"]) for entry in part.content["categories"]}
    for name in names.values():
        if PurePosixPath(name).name != name:
            raise ValueError(f"{part.source}: the class {name!r} cannot name a folder; rename it")
    boxes: dict[Any, list[Any]] = {}
    for entry in part.content["annotations"]:
        if min(entry["bbox"][2:]) >= LEAST:
            boxes.setdefault(entry["image_id"], []).append(entry)
    counts: Counter[str] = Counter()
    for photo in part.content["images"]:
        entries = boxes.get(photo["id"])
        if entries is None:
            continue
        image = load_rgb(part.images / photo["file_name"], upright=True)
        stem = PurePosixPath(photo["file_name"]).with_suffix("").as_posix().replace("/", "_")
        for number, entry in enumerate(entries):
            name = names[entry["category_id"]]
            target = folder / name / f"{stem}_{number:03d}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            image.crop(square(entry["bbox"], margin)).save(target)
            counts[name] += 1
    return counts


def square(box: Sequence[float], margin: float) -> tuple[int, int, int, int]:
    """Return the corners of the square around a box (x, y, width, height), in whole pixels."""
    x, y, width, height = box
    side = round(max(width, height) * (1 + 2 * margin))
    x_min, y_min = (
        round(start + (extent - side) / 2) for start, extent in ((x, width), (y, height))
    )
    return x_min, y_min, x_min + side, y_min + side


if __name__ == "__main__":
    exit_with(main, writes_files=True)
