"""Published data sets with a few tiny pictures in the places of theirs."""

import functools
import gzip
import io
import json
import pickle
import tarfile

import numpy as np
from PIL import Image

from datamodules.corruptions import KINDS, SEVERITIES
from datamodules.images.robustness_sets import GROUPS, SYNSETS, subset_classes

# Of iNaturalist; ids of folders sort differently as text, 10 before 2.
CATEGORIES = {2: "Aves bubo", 10: "Insecta apis", 7: "Plantae abies"}


@functools.cache
def jpeg(number, side=16):
    file = io.BytesIO()
    shade = (number * 37 % 256, number * 91 % 256, number * 53 % 256)
    Image.new("RGB", (side, side), shade).save(file, "JPEG")
    return file.getvalue()


def write_classes(folder, names, copies=1):
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for copy in range(copies):
            (folder / name / f"{copy}.JPEG").write_bytes(jpeg((number + copy) % 50))


def write_subset(folder, name, copies=1):
    write_classes(folder, [SYNSETS[label] for label in subset_classes(name)], copies)


def write_v2(folder):
    write_classes(folder, map(str, range(1000)))


def write_c(folder, names, grouped=False):
    for place, kind in enumerate(KINDS):
        inner = folder / GROUPS[place % 4] if grouped else folder
        for severity in SEVERITIES:
            write_classes(inner / kind / str(severity), names)


def write_parquet(folders, target, names=None, columns=("image", "label"), labels=None):
    """Class folders ``train`` and ``val`` as two shards each, as Hugging Face's sets are.

    ``names`` are those of the classes that the shards state; ``labels`` replace the right ones.
    """
    from datasets import ClassLabel, Dataset, Features, Image, Value, disable_progress_bars

    disable_progress_bars()
    target.mkdir(parents=True)
    for split, called in (("train", "train"), ("val", "validation")):
        classes = sorted(path.name for path in (folders / split).iterdir())
        files = [p for name in classes for p in sorted((folders / split / name).iterdir())]
        right = [classes.index(path.parent.name) for path in files]
        given = [labels[index % len(labels)] for index in range(len(files))] if labels else right
        kind = Value({str: "string", float: "float64"}.get(type(given[0]), "int64"))
        kind = ClassLabel(names=list(names)) if names else kind
        for shard in range(2):
            part = slice(shard * len(files) // 2, (shard + 1) * len(files) // 2)
            images = [{"bytes": path.read_bytes(), "path": path.name} for path in files[part]]
            content = dict(zip(columns, (images, given[part]), strict=True))
            features = Features(dict(zip(columns, (Image(), kind), strict=True)))
            table = Dataset.from_dict(content, features=features)
            table.to_parquet(str(target / f"{called}-{shard:05d}-of-00002.parquet"))


def write_tars(folders, target):
    """Class folders ``train`` and ``val`` as two tar files each."""
    for split in ("train", "val"):
        (target / split).mkdir(parents=True)
        paths = sorted(path for path in (folders / split).rglob("*") if path.is_file())
        for shard in range(2):
            with tarfile.open(target / split / f"{shard:03d}.tar", "w") as tar:
                for path in paths[shard::2]:
                    tar.add(path, path.relative_to(folders / split))


def write_inaturalist(root, per_class=2):
    for number, split in enumerate(("train", "val")):
        content = {"categories": [{"id": i, "name": n} for i, n in CATEGORIES.items()],
                   "images": [], "annotations": []}  # fmt: skip
        for category in CATEGORIES:
            for copy in range(per_class):
                image = 1000 * number + 10 * category + copy
                name = f"train_val2019/Some/{category}/{image}.jpg"
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(jpeg(image % 50))
                content["images"].append({"id": image, "file_name": name})
                content["annotations"].append(
                    {"id": image, "image_id": image, "category_id": category}
                )
        (root / f"{split}2019.json").write_text(json.dumps(content))


def write_fashion_mnist(root, train=40, test=20, pack=gzip.compress):
    """Fashion-MNIST's four idx files; the classes by turns."""
    generator = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        pixels = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays = {"images-idx3": pixels, "labels-idx1": np.arange(count, dtype=np.uint8) % 10}
        for kind, array in arrays.items():
            head = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            ending = ".gz" if pack is gzip.compress else ""
            file = root / f"{name}-{kind}-ubyte{ending}"
            file.write_bytes(pack(head + array.tobytes()))


def write_elpv(root, copies=5):
    """ELPV's table and images: each probability and type in turn."""
    (root / "images").mkdir()
    kinds = [(level, kind) for level in ("0.0", "0.3333333333333333", "0.6666666666666666", "1.0")
             for kind in ("mono", "poly")]  # fmt: skip
    lines = []
    for number, (level, kind) in enumerate(copies * kinds):
        name = f"images/cell{number:04d}.png"
        Image.new("L", (30, 30), number * 5).save(root / name)
        lines.append(f"{name}  {level:20}{kind}\n")
    (root / "labels.csv").write_text("".join(lines))


def write_cloud(folder, count=400, label="segment"):
    """A room of Pointcept's S3DIS or ScanNet: an array per property."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    normal = generator.normal(size=(count, 3))
    arrays = {
        "coord": generator.uniform(0, 2, (count, 3)).astype(np.float32),
        "color": generator.integers(0, 256, (count, 3)).astype(np.float32),
        "normal": (normal / np.linalg.norm(normal, axis=1, keepdims=True)).astype(np.float32),
        label: generator.integers(0, 13, count),
    }
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)


def write_cifar10(root, rows=4):
    """The seven pickles of CIFAR-10, of which each of images has a few rows."""
    generator = np.random.default_rng(0)
    for file in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        content = {
            b"data": generator.integers(0, 256, (rows, 3072), dtype=np.uint8),
            b"labels": [row % 10 for row in range(rows)],
        }
        (root / file).write_bytes(pickle.dumps(content, protocol=2))
    names = {b"label_names": [f"class{number}".encode() for number in range(10)]}
    (root / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
