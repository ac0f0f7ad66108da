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
