"""Exports of annotation tools for tests: committed files, and generated images."""

import json
import shutil
from pathlib import Path

from PIL import Image

EXPORTS = Path(__file__).parent / "exports"
SIZES = {
    "photo 1": (64, 48), "b": (48, 64), "c": (80, 40), "d": (64, 64), "e": (100, 50), "f": (40, 40)
}  # fmt: skip
UPLOADED = "images/0a1b2c3d-"  # Label Studio's prefix of uploaded files


def unpack(name, folder):
    root = folder / name
    shutil.copytree(EXPORTS / name, root)
    listed = json.loads((EXPORTS / "images.json").read_text())
    sizes = {
        file.removeprefix(f"{name}/"): size
        for file, size in listed.items()
        if file.startswith(f"{name}/")
    }
    prefix = UPLOADED if name.startswith("label_studio") else ""
    draw(root, sizes or {f"{prefix}{stem}.jpg": size for stem, size in SIZES.items()})
    return root


def draw(root, sizes):
    for file, size in sizes.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", tuple(size)).save(root / file)


def truth(outlines, split="all"):
    """Return the annotations of all exports in COCO's form."""
    return json.loads((EXPORTS / f"truth{'_outlines' * outlines}.json").read_text())[split]


def stem(file_name):
    return Path(file_name).stem.removeprefix("0a1b2c3d-")
