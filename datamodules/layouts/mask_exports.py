"""Exports with masks, by the tool that wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datamodules.files import first_few, list_folders
from datamodules.files.console import say
from datamodules.files.mask_colours import IGNORED, Colour
from datamodules.files.text_files import nfc, read_csv, read_lines
from datamodules.layouts.coco_files import WHOLE
from datamodules.layouts.image_lookup import Images

AUTO, OWN = "auto", "folder"
CLASSES, VALUE, NAME = "_classes.csv", "Pixel Value", "Class"
MASK = "_mask"  # what a mask of Roboflow's has more than its image
LABEL_MAP, MASKS, LISTS = "labelmap.txt", "SegmentationClass", "ImageSets/Segmentation"
REMEDY = "export again with 'Save images', or copy them into JPEGImages"


@dataclass(frozen=True)
class Masks:
    """A recognised export with masks.

    Attributes:
        root: Its folder.
        tool: Value of ``data.layout``.
        kind: Name of the format.
        names: The classes in label order.
        values: What masks hold where each class is; empty if they are in colours.
        colours: The colour of each class; empty if the values are the labels.
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
        """The folder and its format, for messages."""
        return f"{self.root} ({self.kind}, data.layout={self.tool})"


def open_masks(root: Path, layout: str) -> Masks | None:
    """Recognise an export; None with ``auto`` for another folder.

    Raises:
        ValueError: The folder is not one of the tool's.
    """
    for tool, (find, opened) in TOOLS.items():
        if layout in (AUTO, tool) and find(root):
            return opened(root)
    if layout == AUTO:
        return None
    wanted = {"roboflow": f"<split>/{CLASSES}", "cvat": f"{LABEL_MAP} and {MASKS}/"}[layout]
    raise ValueError(f"{root} is not an export of data.layout={layout}: it must hold {wanted}")


def is_roboflow(root: Path) -> list[str]:
    """Return the splits of Roboflow's export, each with its list of classes."""
    return [name for name in list_folders(root) if (root / name / CLASSES).is_file()]


def is_cvat(root: Path) -> bool:
    """Return True for CVAT's Segmentation mask 1.1."""
    return (root / LABEL_MAP).is_file() and (root / MASKS).is_dir()


def _roboflow(root: Path) -> Masks:
    splits, classes = {}, {}
    for split in is_roboflow(root):
        classes[split] = _classes(root / split / CLASSES)
        splits[split] = _beside(root / split)
    first = next(iter(classes))
    for split, found in classes.items():
        if found != classes[first]:
            raise ValueError(
                f"{root / split / CLASSES} and {root / first / CLASSES} differ: "
                f"{first_few(found.values(), 10)} against {first_few(classes[first].values(), 10)}"
            )
    values = tuple(classes[first])
    names = tuple(classes[first].values())
    return Masks(root, "roboflow", "Roboflow's masks", names, values, (), splits)


def _classes(file: Path) -> dict[int, str]:
    """Return the name of each value, in the file's order."""
    rows = read_csv(file)
    if rows and not {VALUE, NAME} <= set(rows[0]):
        what = (
            "it lists several labels per image, which are not read"
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
        raise ValueError(f"{file} lists no classes")
    return classes


def _beside(folder: Path) -> list[tuple[Path, Path]]:
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
        say(
            f"{folder}: images without a mask are left out: {len(bare)} of {total}, such as "
            f"{first_few(bare, 3)}"
        )


def _cvat(root: Path) -> Masks:
    names, colours = _label_map(root / LABEL_MAP)
    images, masks = Images(root), Images(root / MASKS)
    lists = sorted((root / LISTS).glob("*.txt"))
    stems = {file.stem: [line.strip('"') for line in read_lines(file) if line] for file in lists}
    if not stems:
        stems = {WHOLE: [name.rpartition(".")[0] for name in masks.names]}
    splits = {split: _listed(found, root, images, masks) for split, found in stems.items()}
    return Masks(root, "cvat", "CVAT's Segmentation mask 1.1", names, (), colours, splits)


def _listed(
    stems: Sequence[str], root: Path, images: Images, masks: Images
) -> list[tuple[Path, Path]]:
    pairs, bare, missing = [], [], []
    for stem in map(nfc, stems):
        mask = masks.find_stem(stem)
        image = images.find_stem(stem, ("JPEGImages", "images", ""))
        if mask is None:  # CVAT writes none for images without annotations
            bare.append(stem)
        elif image is None:
            missing.append(stem)
        else:
            pairs.append((root / image, masks.folder / mask))
    images.refuse_missing(missing, root / LISTS, REMEDY)
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
                f"{file}, line {number}: {line!r:.60} has the name or colour of another"
            )
        names.append(name)
        colours.append(colour)
    if not names:
        raise ValueError(f"{file} lists no labels")
    return tuple(names), tuple(colours)


TOOLS: dict[str, tuple[Callable[[Path], object], Callable[[Path], Masks]]] = {
    "roboflow": (is_roboflow, _roboflow),
    "cvat": (is_cvat, _cvat),
}
LAYOUTS = (AUTO, OWN, *TOOLS)
