"""Exports with masks, by tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datamodules.files.console import log
from datamodules.files.folders import first_few, list_folders
from datamodules.files.mask_colours import IGNORED, Colour
from datamodules.files.text_files import nfc, read_csv, read_lines
from datamodules.layouts import AUTO, WHOLE
from datamodules.layouts.image_lookup import Images

OWN = "folder"
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
    wanted = {"roboflow": f"<split>/{CLASSES}", "cvat": f"{LABEL_MAP} and {MASKS}/"}[layout]
    raise ValueError(f"{root} is not an export of data.layout={layout}: it must hold {wanted}")


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
    for split, found in classes.items():
        if found != classes[first]:
            raise ValueError(
                f"{root / split / CLASSES} and {root / first / CLASSES} must be equal, got "
                f"{first_few(found.values(), 10)} and {first_few(classes[first].values(), 10)}"
            )
    values = tuple(classes[first])
    names = tuple(classes[first].values())
    return Masks(root, "roboflow", "Roboflow's masks", names, values, (), splits)


def _classes(file: Path) -> dict[int, str]:
    """Return the name per value, in the file's order."""
    rows = read_csv(file)
    if rows and not {VALUE, NAME} <= set(rows[0]):
        what = (
            "it lists several labels per image, which is unsupported"
            if "filename" in rows[0]
            else f"found {list(rows[0])}"
        )
        raise ValueError(f"{file} must have the columns {VALUE!r} and {NAME!r}; {what}")
    classes: dict[int, str] = {}
    for number, row in enumerate(rows, 2):
        value = int(row[VALUE]) if row[VALUE].isdecimal() else IGNORED
        if value >= IGNORED or value in classes or row[NAME] in ("", *classes.values()):
            raise ValueError(
                f"{file}, line {number}: must hold a value from 0 to {IGNORED - 1} and a name, "
                f"each once, got {row[VALUE]!r} and {row[NAME]!r}"
            )
        classes[value] = row[NAME]
    if not classes:
        raise ValueError(f"{file} must list classes, but is empty; export it again")
    return classes


def _pair_masks(folder: Path) -> list[tuple[Path, Path]]:
    """Return the images of a folder with the masks beside them."""
    images = Images(folder)
    masks: set[str | None] = {n for n in images.names if Path(n).stem.endswith(MASK)}
    photos = [name for name in images.names if name not in masks]
    found = {name: images.find_stem(f"{name.rpartition('.')[0]}{MASK}") for name in photos}
    _report(folder, [name for name in photos if found[name] is None], len(photos))
    masks -= set(found.values())
    if masks:
        raise FileNotFoundError(
            f"{len(masks)} masks in {folder} lack their images: "
            f"{first_few(sorted(map(str, masks)))}; add the images or remove the masks"
        )
    return [(folder / name, folder / mask) for name, mask in found.items() if mask is not None]


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
    splits = {split: _pair_listed(found, root, images, masks) for split, found in stems.items()}
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
        name, _, rest = line.partition(":")
        parts = rest.partition(":")[0].split(",")
        colour = tuple(int(part) for part in parts if part.strip().isdecimal())
        if len(parts) != 3 or len(colour) != 3 or max(colour) > 255:
            raise ValueError(
                f"{file}, line {number}: must be name:red,green,blue:parts:actions, got "
                f"{line!r:.60}"
            )
        if name in names or colour in colours:
            raise ValueError(
                f"{file}, line {number}: {line!r:.60} repeats a name or colour; make them unique"
            )
        names.append(name)
        colours.append(colour)
    if not names:
        raise ValueError(f"{file} must list labels, but is empty; export it again")
    return tuple(names), tuple(colours)


TOOLS: dict[str, tuple[Callable[[Path], object], Callable[[Path], Masks]]] = {
    "roboflow": (find_roboflow, _roboflow),
    "cvat": (is_cvat, _cvat),
}
LAYOUTS = (AUTO, OWN, *TOOLS)
