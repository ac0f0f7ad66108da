"""Write the class names of an exported classifier as JSON and in the target tool's format."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path

from tools.exports.requests import ExportRequest

NAMES = "class_names.json"
# timm reads a text file with one stripped name per line, or a pickled dictionary.
CLASS_MAP, PICKLED_MAP = "class_map.txt", "class_map.pkl"
ANNOTATIONS = "annotations.py"
WRITER = '''"""Write train.txt and val.txt: each image with its class number.

python annotations.py <data_root>
"""

import json
import sys
from pathlib import Path

ENDINGS = {endings}
names = json.loads((Path(__file__).parent / "{names}").read_text(encoding="utf-8"))
for split in ("train", "val"):
    folder = Path(sys.argv[1]) / split
    lines = [  # skip hidden files, as in training
        f"{{path.relative_to(folder).as_posix()}} {{label}}\\n"
        for label, name in enumerate(names)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in ENDINGS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not lines:
        sys.exit(f"{{folder}} must have class folders with images, named as in {names}")
    folder.with_suffix(".txt").write_text("".join(lines), encoding="utf-8")
'''


def class_names(request: ExportRequest, count: int) -> tuple[str, ...]:
    """Return a checkpoint's class names in label order; empty if their number is not ``count``."""
    names = (request.checkpoint and request.checkpoint.class_names) or ()
    return names if count and len(names) == count else ()


def write_names(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write the classes in label order as a JSON list; without names, write no file."""
    if not names:
        return []
    file = folder / NAMES
    file.write_text(json.dumps(list(names), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    return [file]


def write_class_map(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write the class map for ``--class-map`` of timm's scripts; without names, write no file."""
    if not names:
        return []
    if all(name == name.strip() and len(name.splitlines()) == 1 for name in names):
        file = folder / CLASS_MAP
        file.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    else:
        file = folder / PICKLED_MAP
        file.write_bytes(pickle.dumps({name: label for label, name in enumerate(names)}))
    return [file]


def write_annotations(folder: Path, endings: Sequence[str]) -> Path:
    """Write a script that lists images in our class order; MMPretrain sorts folders as text."""
    file = folder / ANNOTATIONS
    file.write_text(WRITER.format(endings=repr(tuple(endings)), names=NAMES), encoding="utf-8")
    return file
