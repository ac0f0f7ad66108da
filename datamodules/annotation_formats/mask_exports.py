"""Exports with masks, by tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from datamodules.annotation_formats.coco_files import WHOLE
from datamodules.annotation_formats.image_lookup import Images
from datamodules.files.console import log
from datamodules.files.folders import first_few, list_folders, require_names
from datamodules.files.mask_colours import IGNORED, Colour
from datamodules.files.text_files import nfc, read_csv, read_lines
from datamodules.files.values import file_errors, refuse

AUTO: Final = "auto"
OWN: Final = "folder"
CLASSES, VALUE, NAME = "_classes.csv", "Pixel Value", "Class"
MASK = "_mask"  # suffix of Roboflow's masks
LABEL_MAP, MASKS, LISTS = "labelmap.txt", "SegmentationClass", "ImageSets/Segmentation"
REMEDY = "export again with 'Save images', or copy them into JPEGImages"


@dataclass(frozen=True)
class Masks:
    """A recognised export with masks.

    Attributes:
        root: Folder of the export.
        tool: Value of ``data.layout``.
        kind: Name of the format.
        names: Class names in label order.
        values: Mask value per class; empty if masks are in colours.
        colours: Colour per class; empty if values are the labels.
        splits: Image and mask by split.
    """

    root: Path
    tool: str
    kind: str
    names: tuple[str, ...]
    values: tuple[int, ...]
    colours: tuple[Colour, ...]
    splits: Mapping[str, Sequence[tuple[Path, Path]]]

    @property
    def title(self) -> str:
        """Folder and format, for messages."""
        return f"{self.root} ({self.kind}, data.layout={self.tool})"


def open_masks(root: Path, layout: str) -> Masks | None:
    """Recognise an export; None with ``auto`` for another folder.

    Raises:
        ValueError: The folder has another tool's format.
    """
    for tool, (find, convert) in TOOLS.items():
        if layout in (AUTO, tool) and find(root):
            return convert(root)
    if layout == AUTO:
        return None
    contents = {"roboflow": f"<split>/{CLASSES}", "cvat": f"{LABEL_MAP} and {MASKS}/"}[layout]
    raise ValueError(f"{root} is not an export of data.layout={layout}: it must hold {contents}")
    return None


def find_roboflow(root: Path) -> list[str]:
    """Return the splits of Roboflow's export, each with its list of classes."""
    return [name for name in list_folders(root) if (root / name / CLASSES).is_file()]


def is_cvat(root: Path) -> bool:
    """Return True for CVAT's Segmentation mask 1.1."""
    return (root / LABEL_MAP).is_file() and (root / MASKS).is_dir()


def _roboflow(root: Path) -> Masks:
    splits, classes = {}, {}
    for split in find_roboflow(root):
        classes[split] = _classes(root / split / CLASSES)
        splits[split] = _pair_masks(root / split)
    first = next(iter(classes))
    differing = [split for split in classes if classes[split] != classes[first]]
    refuse(root / first / CLASSES, {"must be equal to those of other splits": differing})
    values = tuple(classes[first])
    names = tuple(classes[first].values())
    return Masks(root, "roboflow", "Roboflow's masks", names, values, (), splits)


def _classes(file: Path) -> dict[int, str]:
    """Return the name per value, in the file's order."""
    rows = read_csv(file)
    several = bool(rows) and "filename" in rows[0]
    refuse(file, {"lists several labels per image, which is unsupported": several})
    classes: dict[int, str] = {}
    with file_errors(file):
        for row in rows:
            value, name = int(row[VALUE]), row[NAME]
            if not 0 <= value < IGNORED or value in classes or name in ("", *classes.values()):
                raise ValueError(
                    f"must hold values from 0 to {IGNORED - 1} with names, each once, got "
                    f"{value!r} and {name!r}"
                )
            classes[value] = name
    refuse(file, {"must list classes, but is empty; export it again": not classes})
    return classes


def _pair_masks(folder: Path) -> list[tuple[Path, Path]]:
    """Return the images of a folder with the masks beside them."""
    images = Images(folder)
    masks: set[str | None] = {n for n in images.names if Path(n).stem.endswith(MASK)}
    photos = [name for name in images.names if name not in masks]
    masks_of = {name: images.find_stem(f"{name.rpartition('.')[0]}{MASK}") for name in photos}
    _report(folder, [name for name in photos if masks_of[name] is None], len(photos))
    masks -= set(masks_of.values())
    lost = {str(folder / str(mask)) for mask in masks}
    remedy = "add the images or remove the masks"
    require_names(lost, f"masks in {folder} lack their images", remedy)
    return [(folder / name, folder / mask) for name, mask in masks_of.items() if mask is not None]


def _report(folder: Path, bare: Sequence[str], total: int) -> None:
    if bare:
        log(
            f"{folder}: images without a mask are skipped: {len(bare)} of {total}, such as "
            f"{first_few(bare, 3)}"
        )


def _cvat(root: Path) -> Masks:
    names, colours = _label_map(root / LABEL_MAP)
    images, masks = Images(root), Images(root / MASKS)
    lists = sorted((root / LISTS).glob("*.txt"))
    stems = {file.stem: [line.strip('"') for line in read_lines(file) if line] for file in lists}
    if not stems:
        stems = {WHOLE: [name.rpartition(".")[0] for name in masks.names]}
    splits = {split: _pair_listed(part, root, images, masks) for split, part in stems.items()}
    return Masks(root, "cvat", "CVAT's Segmentation mask 1.1", names, (), colours, splits)


def _pair_listed(
    stems: Sequence[str], root: Path, images: Images, masks: Images
) -> list[tuple[Path, Path]]:
    pairs, bare, missing = [], [], []
    for stem in map(nfc, stems):
        mask = masks.find_stem(stem)
        image = images.find_stem(stem, ("JPEGImages", "images", ""))
        if mask is None:  # CVAT writes masks only for images with annotations
            bare.append(stem)
        elif image is None:
            missing.append(stem)
        else:
            pairs.append((root / image, masks.folder / mask))
    images.require_found(missing, root / LISTS, REMEDY)
    _report(root, bare, len(stems))
    return pairs


def _label_map(file: Path) -> tuple[tuple[str, ...], tuple[Colour, ...]]:
    """Return names and colours of labelmap.txt: "name:red,green,blue:parts:actions"."""
    names, colours = [], []
    for number, line in enumerate(read_lines(file), 1):
        if not line or line.startswith("#"):
            continue
        with file_errors(f"{file}, line {number}"):
            name, rest = line.split(":")[:2]
            colour = tuple(map(int, rest.split(",")))
            valid = len(colour) == 3 and 0 <= min(colour) and max(colour) <= 255
            if not valid or name in names or colour in colours:
                raise ValueError(
                    "must be name:red,green,blue:parts:actions of another name and colour than "
                    f"others, got {line!r:.60}"
                )
        names.append(name)
        colours.append(colour)
    refuse(file, {"must list labels, but is empty; export it again": not names})
    return tuple(names), tuple(colours)


TOOLS: dict[str, tuple[Callable[[Path], object], Callable[[Path], Masks]]] = {
    "roboflow": (find_roboflow, _roboflow),
    "cvat": (is_cvat, _cvat),
}
Layout = Literal["auto", "folder", "roboflow", "cvat"]
