"""Published data sets with a few tiny pictures in the places of theirs."""

import functools
import io

from PIL import Image

from datamodules.corruptions import KINDS, SEVERITIES
from datamodules.robustness_sets import GROUPS, SYNSETS, subset_of


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
    write_classes(folder, [SYNSETS[label] for label in subset_of(name)], copies)


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
        kind = Value("string" if isinstance(given[0], str) else "int64")
        kind = ClassLabel(names=list(names)) if names else kind
        for shard in range(2):
            part = slice(shard * len(files) // 2, (shard + 1) * len(files) // 2)
            images = [{"bytes": path.read_bytes(), "path": path.name} for path in files[part]]
            content = dict(zip(columns, (images, given[part]), strict=True))
            features = Features(dict(zip(columns, (Image(), kind), strict=True)))
            table = Dataset.from_dict(content, features=features)
            table.to_parquet(str(target / f"{called}-{shard:05d}-of-00002.parquet"))
