"""Makes label maps of a folder of classes, by which networks that classify their tokens train.

usage: python tools/annotate.py root=FOLDER out=FOLDER teacher=NAME [key=value ...]

  root=FOLDER      holds <class>/*, or train/<class>/*
  out=FOLDER       gets <class>/<image>.pt; files that are there stay
  teacher=NAME     a network of timm's, such as dm_nfnet_f6.dm_in1k, or a backbone here
  checkpoint=FILE  its weights with the classifier, or a run folder, which says the name, too
  size=N           side that the whole image is resized to (default: the teacher's own, or 224)
  class_order=text order of the class folders, natural as timm sorts them; as data.class_order
  top=5            classes kept of each place
  batch=32         images at a time
  device=cpu       or cuda

A file holds a tensor (2, top, h, w): of each place of the teacher's last map the scores of its best
classes, and their numbers among the sorted names of the class folders, which classes.json lists.
The published maps of
ImageNet have this format. Train with them by  python tools/run.py recipe=lvt backbone=lvt_r2
data=imagenet data.root=FOLDER data.token_labels=FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import number, parse
from tools.cli.command import answer, exit_with

DEFAULTS = {
    "root": "",
    "out": "",
    "teacher": "",
    "checkpoint": "",
    "size": "",
    "class_order": "text",
    "top": "5",
    "batch": "32",
    "device": "cpu",
}
USUAL_SIZE = 224
HALF_EXACT = 2048  # whole numbers that float16 holds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for arguments that cannot be served."""
    return answer("annotate.py", __doc__, annotate, arguments)


def annotate(arguments: Sequence[str]) -> None:
    """Write the label maps that the arguments ask for.

    Raises:
        ValueError: An option that is missing or cannot be used.
    """
    options = parse(
        arguments, DEFAULTS, {"device": ("cpu", "cuda"), "class_order": ("text", "natural")}
    )
    for key in ("root", "out"):
        if not options[key]:
            raise ValueError(f"{key}=FOLDER is missing; see --help")
    if not options["teacher"] and not options["checkpoint"]:
        raise ValueError("teacher=NAME is missing, or checkpoint=<run folder>; see --help")
    size = number("size", options["size"], 32) if options["size"] else None
    top, batch = (number(key, options[key]) for key in ("top", "batch"))

    import torch
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    from datamodules.files import require_folder
    from datamodules.files.class_order import check_class_order, other_orders, sort_classes
    from datamodules.images.image_folder import class_folders
    from datamodules.images.token_labels import write_classes
    from tasks.classification.teacher import TeacherOptions, load_teacher

    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch sees no GPU here; leave device= out")
    root, out = (Path(options[key]).expanduser() for key in ("root", "out"))
    require_folder(root, "pass root= one that holds class folders")
    folder = root / "train" if (root / "train").is_dir() else root
    order = check_class_order(options["class_order"])
    names = sort_classes(class_folders(folder), order)
    images = list(images_of(folder, names))
    own = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD  # for weights that record no statistics
    asked = TeacherOptions("hard", options["teacher"] or None, options["checkpoint"] or None)
    teacher = load_teacher(asked, names, own, other_orders(names, order), "class_order")
    if top > len(names):
        raise ValueError(f"top={top} is more than the {len(names)} classes there are")
    write_classes(out, names)
    side = size or usual_size(teacher.network)
    wanted = [name for name in images if not target(out, name).exists()]
    for start in range(0, len(wanted), batch):
        some = wanted[start : start + batch]
        write_maps(teacher, folder, out, some, side, top, options["device"])
        if sys.stderr.isatty():
            print(f"\r{start + len(some)} of {len(wanted)} images", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{out}: {len(wanted)} label maps of {teacher.name} at {side} pixels made, "
          f"{len(images) - len(wanted)} were there")  # fmt: skip


def images_of(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """All images as <class>/<file>.

    Raises:
        ValueError: Two of a class would have one label map.
    """
    from datamodules.files.class_listing import list_class_images

    for files in list_class_images(folder, names).values():
        taken: dict[str, str] = {}
        for file in files:
            stem = str(Path(file).with_suffix(""))
            if stem in taken:
                raise ValueError(
                    f"{folder} has {taken[stem]} and {file}, whose label maps would have one name; "
                    "rename one of them"
                )
            taken[stem] = file
            yield file


def target(out: Path, name: str) -> Path:
    """The label map of an image."""
    return (out / name).with_suffix(".pt")


def usual_size(network: Any) -> int:
    """The size that a network of timm's is tested at; another's is not known."""
    source = getattr(network, "pretrained_cfg", None)
    if not source:
        return USUAL_SIZE
    tested = source.get("test_input_size") or source["input_size"]
    return int(tested[-1])


def write_maps(
    teacher: Any, folder: Path, out: Path, names: Sequence[str], side: int, top: int, device: str
) -> None:
    """Write the label maps of some images, each file whole or not at all."""
    import torch
    from torchvision.transforms.v2 import functional

    from datamodules.files import load_rgb
    from heads.dense_logits import dense_logits
    from tasks.engine.whole_files import whole_file

    pixels = [
        functional.pil_to_tensor(
            load_rgb(folder / name, upright=False).resize((side, side), resample=3)  # bicubic
        )
        for name in names
    ]
    mean, std = (torch.tensor(part)[:, None, None] for part in teacher.normalisation)
    images = ((torch.stack(pixels) / 255 - mean) / std).to(device)
    scores = dense_logits(teacher.network.to(device), images)
    best = scores.topk(top, dim=1)
    dtype = torch.float16 if scores.shape[1] <= HALF_EXACT else torch.float32
    maps = torch.stack([best.values, best.indices.to(best.values.dtype)], dim=1).to(dtype).cpu()
    for name, label_map in zip(names, maps, strict=True):
        file = target(out, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as opened:
            torch.save(label_map.clone(), opened)


if __name__ == "__main__":
    exit_with(main, writes_files=True)
