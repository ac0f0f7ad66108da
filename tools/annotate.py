"""Make label maps of a folder of classes, for training networks that classify their tokens.

usage: python tools/annotate.py root=FOLDER out=FOLDER teacher=NAME [key=value ...]

  root=FOLDER      has <class>/*, or train/<class>/*
  out=FOLDER       gets <class>/<image>.pt; existing files stay
  teacher=NAME     a timm network, such as dm_nfnet_f6.dm_in1k, or a backbone of this project
  checkpoint=FILE  its weights with the classifier, or a run folder, which also gives the name
  size=N           side that whole images are resized to (default: the teacher's own, or 224)
  class_order=text order of the class folders; natural is timm's; as data.class_order
  top=5            classes kept per location
  batch=32         images per step
  device=cpu       or cuda

A file has a tensor (2, top, h, w): scores and indices of the best classes, for each location of
the teacher's last map. classes.json lists the class folders in index order. ImageNet's
published maps have the same format. Train with the maps:
python tools/run.py recipe=lvt backbone=lvt_r2 data=imagenet data.root=FOLDER
data.token_labels=FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse_integer, parse_options
from tools.cli.command import exit_with, run_command

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
DEFAULT_SIZE = 224
HALF_EXACT = 2048  # float16 represents all integers up to this one


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("annotate.py", __doc__, annotate, arguments)


def annotate(arguments: Sequence[str]) -> None:
    """Write the label maps.

    Raises:
        ValueError: An option is missing or wrong.
    """
    options = parse_options(
        arguments, DEFAULTS, {"device": ("cpu", "cuda"), "class_order": ("text", "natural")}
    )
    for key in ("root", "out"):
        if not options[key]:
            raise ValueError(f"{key}=FOLDER is missing; see --help")
    if not options["teacher"] and not options["checkpoint"]:
        raise ValueError("teacher=NAME or checkpoint=<run folder> is missing; see --help")
    size = parse_integer("size", options["size"], 32) if options["size"] else None
    top, batch = (parse_integer(key, options[key]) for key in ("top", "batch"))

    import torch
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    from datamodules.files import require_folder
    from datamodules.files.class_order import KEYS, other_orders, sort_classes
    from datamodules.files.values import check_option
    from datamodules.images.image_folder import class_folders
    from datamodules.images.token_labels import write_classes
    from tasks.classification.teacher import TeacherOptions, load_teacher

    if options["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a GPU, but torch finds none; leave device= out")
    root, out = (Path(options[key]).expanduser() for key in ("root", "out"))
    require_folder(root, "pass a folder of class folders as root=")
    folder = root / "train" if (root / "train").is_dir() else root
    order: Any = options["class_order"]
    check_option("class_order", order, order in KEYS, f"one of {', '.join(KEYS)}")
    names = sort_classes(class_folders(folder), order)
    images = list(list_image_names(folder, names))
    moments = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD  # for weights without recorded ones
    request = TeacherOptions("hard", options["teacher"] or None, options["checkpoint"] or None)
    teacher = load_teacher(request, names, moments, other_orders(names, order), "class_order")
    if top > len(names):
        raise ValueError(f"top={top} is more than the number of classes, {len(names)}")
    write_classes(out, names)
    side = size or test_size(teacher.network)
    queue = [name for name in images if not label_map_path(out, name).exists()]
    for start in range(0, len(queue), batch):
        some = queue[start : start + batch]
        write_maps(teacher, folder, out, some, side, top, options["device"])
        if sys.stderr.isatty():
            print(f"\r{start + len(some)} of {len(queue)} images", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{out}: {len(queue)} label maps of {teacher.name} at {side} pixels written, "
          f"{len(images) - len(queue)} existed already")  # fmt: skip


def list_image_names(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield all images as <class>/<file>.

    Raises:
        ValueError: Two images of a class would share a label map.
    """
    from datamodules.files.class_listing import list_class_images

    for files in list_class_images(folder, names).values():
        stems: dict[str, str] = {}
        for file in files:
            stem = str(Path(file).with_suffix(""))
            if stem in stems:
                raise ValueError(
                    f"{folder}: {stems[stem]} and {file} would share one label map; rename one of "
                    "them"
                )
            stems[stem] = file
            yield file


def label_map_path(out: Path, name: str) -> Path:
    """Return the label map's path for an image."""
    return (out / name).with_suffix(".pt")


def test_size(network: Any) -> int:
    """Return the size that a timm network is tested at; for others the default."""
    source = getattr(network, "pretrained_cfg", None)
    if not source:
        return DEFAULT_SIZE
    tested = source.get("test_input_size") or source["input_size"]
    return int(tested[-1])


def write_maps(
    teacher: Any, folder: Path, out: Path, names: Sequence[str], side: int, top: int, device: str
) -> None:
    """Write the label maps of some images, each file atomically."""
    import torch
    from torchvision.transforms.v2 import functional

    from datamodules.files import load_rgb
    from heads.dense_logits import dense_logits
    from tasks.engine.run_folder.atomic_writes import whole_file

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
        file = label_map_path(out, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as opened:
            torch.save(label_map.clone(), opened)


if __name__ == "__main__":
    exit_with(main, writes_files=True)
