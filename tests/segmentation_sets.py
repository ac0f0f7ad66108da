"""Small datasets of images and masks in several layouts, and their readings."""

import numpy as np
from PIL import Image

from datamodules.dense.cityscapes import IDS
from tests.datamodules import loading

SIZE = (40, 60)
CITY = "leftImg8bit/{split}/{city}/{city}_00000{i}_000019_leftImg8bit.png"
MASK = "gtFine/{split}/{city}/{city}_00000{i}_000019_gtFine_{kind}.png"


def save(path, pixels, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    if mode == "P":
        image.putpalette([value for colour in range(256) for value in (colour, 0, 0)])
    image.save(path)


def photo(generator):
    return generator.integers(0, 255, (*SIZE, 3))


def cityscapes(root, kinds=("labelIds",)):
    generator = np.random.default_rng(0)
    for split, city in (("train", "ulm"), ("train", "aachen"), ("val", "bonn")):
        for i in range(2):
            place = {"split": split, "city": city, "i": i}
            save(root / CITY.format(**place), photo(generator))
            labels = generator.integers(0, 34, SIZE)
            train_ids = np.full(SIZE, 255)
            for index, label in enumerate(IDS):
                train_ids[labels == label] = index
            for kind in kinds:
                values = labels if kind == "labelIds" else train_ids
                save(root / MASK.format(**place, kind=kind), values)
    return root


def voc(root):
    generator = np.random.default_rng(0)
    for i in range(4):
        save(root / f"JPEGImages/2007_{i}.jpg", photo(generator))
        labels = generator.choice([*range(21), 255], SIZE)
        save(root / f"SegmentationClass/2007_{i}.png", labels, "P")
    lists = root / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("2007_2\n2007_0\n2007_1\n")
    (lists / "val.txt").write_text("2007_3\n")
    return root


def folder(root, values=(0, 1, 2, 255)):
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(2):
            save(root / f"images/{split}/{i}.tif", photo(generator))
            save(root / f"masks/{split}/{i}.png", generator.choice(values, SIZE))
    (root / "class_names.txt").write_text("soil\nwater\nwood\n")
    return root


def ade20k(root):
    generator = np.random.default_rng(0)
    for split in ("training", "validation"):
        for i in range(3):
            save(root / f"images/{split}/{i}.jpg", photo(generator))
            save(root / f"annotations/{split}/{i}.png", generator.integers(0, 151, SIZE))
    return root


def module(kind, root, **options):
    defaults = {"scale": (120, 80), "crop_size": 64, "batch_size": 2, "num_workers": 0}
    return kind(root, **{**defaults, **options})


_, ready, rejected, not_found = loading.bound(module)


def truths(data):
    samples = loading.dense_samples(data.val_dataloader())
    return {s.img_path: s.gt_sem_seg.data[0].numpy() for s in samples}


def logged_lines(data, caplog):
    caplog.clear()
    data.setup()
    with caplog.at_level("INFO"):
        data.check_files()
    return [record.message for record in caplog.records][1:]
