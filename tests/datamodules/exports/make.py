"""Write the exports of this folder, by the tools' own packages where pip has them; without images.

usage: python -m tests.datamodules.exports.make [cvat|roboflow|label_studio|...]

FiftyOne's and Roboflow's Darknet exports are written by hand in their documented format. The others
need packages that the tests do without:
pip install datumaro==1.13.12 supervision==0.31.2 label-studio-sdk==2.0.28 labelme==6.3.1
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path

import datumaro as dm
import numpy as np
import supervision as sv
from label_studio_sdk.converter import Converter
from PIL import Image

from tests.datamodules.exported import SIZES

HERE = Path(__file__).parent
NAMES = ("dog", "cat", "bird")  # neither sorted nor in the order in which they occur
COLOURS = {
    name: [colour, [], []]
    for name, colour in {
        "background": (0, 0, 0), "dog": (250, 50, 83), "cat": (51, 221, 255), "bird": (36, 179, 83)
    }.items()
}  # fmt: skip
SPLITS = {"train": ("photo 1", "b", "c", "d"), "val": ("e", "f")}
# Image, class, box and, for the sets with outlines, a polygon inside the box.
OBJECTS = (
    ("photo 1", "cat", (4, 6, 20, 30), (4, 6, 24, 6, 24, 36, 10, 36)),
    ("photo 1", "bird", (30, 10, 16, 20), (30, 10, 46, 10, 38, 30)),
    ("b", "dog", (2, 2, 40, 50), (2, 2, 42, 2, 42, 52, 2, 52)),
    ("d", "cat", (8, 8, 32, 16), (8, 8, 40, 8, 40, 24, 24, 24, 8, 16)),
    ("d", "dog", (40, 40, 20, 20), (40, 40, 60, 40, 60, 60)),
    ("e", "cat", (10, 10, 50, 30), (10, 10, 60, 10, 60, 40, 10, 40)),
    ("e", "bird", (60, 5, 30, 40), (60, 5, 90, 5, 75, 45)),
    ("f", "dog", (5, 5, 30, 30), (5, 5, 35, 5, 35, 35, 5, 20)),
)


def objects_of(name):
    """Return class, box and polygon of each object in an image."""
    return [one[1:] for one in OBJECTS if one[0] == name]


def points(corners):
    return list(zip(corners[::2], corners[1::2], strict=True))


def shoelace(corners):
    x, y = np.array(corners[::2]), np.array(corners[1::2])
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def write_blank(file, size):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", tuple(size)).save(file)


def truth(outlines, split=None):
    """Return the same annotations in COCO's form."""
    names = [n for n in SIZES if split is None or n in SPLITS[split]]
    images = [
        {"id": i, "file_name": f"{n}.jpg", "width": SIZES[n][0], "height": SIZES[n][1]}
        for i, n in enumerate(names, 1)
    ]
    annotations = [
        {
            "id": i,
            "image_id": names.index(image) + 1,
            "category_id": NAMES.index(name),
            "bbox": list(box),
            "area": shoelace(corners) if outlines else box[2] * box[3],
            "iscrowd": 0,
            "segmentation": [list(corners)] if outlines else [],
        }
        for i, (image, name, box, corners) in enumerate(OBJECTS, 1)
        if image in names
    ]
    categories = [{"id": i, "name": n} for i, n in enumerate(NAMES)]
    return {"images": images, "annotations": annotations, "categories": categories}


def datumaro_set(outlines, splits):
    """Return a datumaro dataset, which writes CVAT's exports."""
    items = []
    for name, (width, height) in SIZES.items():
        annotations = [
            dm.Polygon(list(corners), label=NAMES.index(c), id=i)
            if outlines
            else dm.Bbox(*box, label=NAMES.index(c), id=i)
            for i, (image, c, box, corners) in enumerate(OBJECTS, 1)
            if image == name
        ]
        subset = next(s for s, names in SPLITS.items() if name in names) if splits else "default"
        pixels = np.zeros((height, width, 3), np.uint8)
        media = dm.Image.from_numpy(pixels, ext=".jpg")
        items.append(dm.DatasetItem(name, subset=subset, media=media, annotations=annotations))
    return dm.Dataset.from_iterable(items, categories=list(NAMES))


def write_cvat(folder):
    boxes, outlines = datumaro_set(False, False), datumaro_set(True, False)
    boxes.export(str(folder / "cvat_images"), "cvat", save_media=True)
    outlines.export(str(folder / "cvat_images_outlines"), "cvat", save_media=True)
    for name in ("cvat_images", "cvat_images_outlines"):  # datumaro calls the file by the subset
        (folder / name / "default.xml").rename(folder / name / "annotations.xml")
    outlines.export(str(folder / "cvat_coco"), "coco_instances", save_media=True)
    datumaro_set(True, True).export(
        str(folder / "cvat_coco_splits"), "coco_instances", save_media=True
    )
    boxes.export(str(folder / "cvat_voc"), "voc_detection", save_media=True)
    # CVAT calls the subset of a task train.
    boxes.transform("map_subsets", mapping=[("default", "train")])
    boxes.export(str(folder / "cvat_yolo"), "yolo", save_media=True)
    datumaro_set(False, True).export(
        str(folder / "cvat_ultralytics"), "yolo_ultralytics", save_media=True
    )
    masks = datumaro_set(True, False)
    masks.transform("polygons_to_masks")
    masks.export(str(folder / "cvat_masks"), "voc_segmentation", save_media=True, label_map=COLOURS)


def supervision_set(split):
    pixels, annotations = {}, {}
    for name in SPLITS[split]:
        width, height = SIZES[name]
        file, own = f"{name}.jpg", objects_of(name)
        pixels[file] = np.zeros((height, width, 3), np.uint8)
        annotations[file] = sv.Detections.empty()
        if own:
            xyxy = np.array([[x, y, x + w, y + h] for _, (x, y, w, h), _ in own], np.float32)
            labels = np.array([NAMES.index(label) for label, *_ in own])
            annotations[file] = sv.Detections(xyxy, class_id=labels)
    return sv.DetectionDataset(classes=list(NAMES), images=pixels, annotations=annotations)


def write_roboflow(folder):
    for split, place in (("train", "train"), ("val", "valid")):
        boxes = supervision_set(split)
        coco, yolo, voc = (folder / f"roboflow_{kind}" for kind in ("coco", "yolo", "voc"))
        boxes.as_coco(str(coco / place), str(coco / place / "_annotations.coco.json"))
        add_supercategory(coco / place / "_annotations.coco.json")
        boxes.as_yolo(
            str(yolo / place / "images"), str(yolo / place / "labels"), str(yolo / "data.yaml")
        )
        boxes.as_pascal_voc(str(voc / place), str(voc / place))
    names = ", ".join(f"'{name}'" for name in NAMES)
    (yolo / "data.yaml").write_text(  # as the web site writes it
        f"train: ../train/images\nval: ../valid/images\ntest: ../test/images\n\nnc: {len(NAMES)}\n"
        f"names: [{names}]\n\nroboflow:\n  workspace: w\n  project: pets\n  version: 1\n"
    )
    (yolo / "test/images").mkdir(parents=True)
    for kind in (coco, yolo, voc):
        (kind / "README.roboflow.txt").write_text("pets - v1\n")


def add_supercategory(file):
    """Number the categories from 1 and add their parent, as the web site does."""
    content = json.loads(file.read_text())
    above = {"id": 0, "name": "pets", "supercategory": "none"}
    own = [{"id": i, "name": name, "supercategory": "pets"} for i, name in enumerate(NAMES, 1)]
    names = {one["id"]: one["name"] for one in content["categories"]}
    for one in content["annotations"]:
        one["category_id"] = NAMES.index(names[one["category_id"]]) + 1
    content["categories"] = [above, *own]
    file.write_text(json.dumps(content))


def write_label_studio(folder):
    labels = "".join(f'<Label value="{name}"/>' for name in NAMES)
    config = f"""<View><Image name="image" value="$image"/>
      <RectangleLabels name="box" toName="image">{labels}</RectangleLabels>
      <PolygonLabels name="outline" toName="image">{labels}</PolygonLabels></View>"""
    for outlines in (False, True):
        end = "_outlines" if outlines else ""
        tasks = [task(number, name, outlines) for number, name in enumerate(SIZES, 1)]
        place = folder / f"label_studio_json{end}"
        place.mkdir()
        source = place / "project-1-at-2026-11-25-10-00-0a1b2c3d.json"
        source.write_text(json.dumps(tasks))
        converter = Converter(config=config, project_dir=None, download_resources=False)
        for _ in SIZES:  # the converter opens the images
            for kind in ("coco", "yolo", "voc"):
                images = folder / f"label_studio_{kind}{end}" / "images"
                images.mkdir(parents=True, exist_ok=True)
        for kind, convert in {
            "coco": converter.convert_to_coco,
            "yolo": converter.convert_to_yolo,
            "voc": converter.convert_to_voc,
            "min": converter.convert_to_json_min,
        }.items():
            if kind != "voc" or not outlines:
                convert(str(source), str(folder / f"label_studio_{kind}{end}"), is_dir=False)
    shutil.rmtree(folder / "label_studio_voc_outlines")


def task(number, name, outlines):
    width, height = SIZES[name]
    kind = "polygonlabels" if outlines else "rectanglelabels"
    results = []
    for label, (x, y, w, h), corners in objects_of(name):
        value = {
            "x": 100 * x / width, "y": 100 * y / height,
            "width": 100 * w / width, "height": 100 * h / height, "rotation": 0,
        }  # fmt: skip
        if outlines:
            shares = [[100 * a / width, 100 * b / height] for a, b in points(corners)]
            value = {"points": shares, "closed": True}
        results.append({
            "id": f"r{len(results)}", "type": kind, "to_name": "image", "origin": "manual",
            "from_name": "outline" if outlines else "box", "value": {**value, kind: [label]},
            "original_width": width, "original_height": height, "image_rotation": 0,
        })  # fmt: skip
    annotation = {
        "id": number, "result": results, "was_cancelled": False, "ground_truth": False,
        "created_at": "2026-11-25T10:00:00.000000Z", "completed_by": 1,
    }  # fmt: skip
    file = f"0a1b2c3d-{name}.jpg"
    return {"id": number, "annotations": [annotation], "predictions": [], "file_upload": file,
            "data": {"image": f"/data/upload/1/{file}"}}  # fmt: skip


def write_labelme(folder):
    from labelme._label_file import write_label_file

    for outlines in (False, True):
        place = folder / f"labelme{'_outlines' * outlines}"
        place.mkdir()
        for name, (width, height) in SIZES.items():
            shapes = [
                {
                    "label": label, "group_id": None, "description": "", "flags": {}, "mask": None,
                    "points": [[float(a), float(b)] for a, b in points(corners)]
                    if outlines else [[x, y], [x + w, y + h]],
                    "shape_type": "polygon" if outlines else "rectangle",
                }
                for label, (x, y, w, h), corners in objects_of(name)
            ]  # fmt: skip
            write_label_file(
                str(place / f"{name}.json"), shapes=shapes, image_path=f"{name}.jpg",
                image_height=height, image_width=width,
            )  # fmt: skip


def write_darknet(folder):
    """Write Roboflow's YOLO Darknet export: images, texts and a list of classes per split."""
    for split, place in (("train", "train"), ("val", "valid")):
        target = folder / "darknet_roboflow" / place
        for name in SPLITS[split]:
            width, height = SIZES[name]
            write_blank(target / f"{name}.jpg", SIZES[name])
            rows = [
                (
                    NAMES.index(label),
                    (x + w / 2) / width,
                    (y + h / 2) / height,
                    w / width,
                    h / height,
                )
                for label, (x, y, w, h), _ in objects_of(name)
            ]
            text = "".join(f"{' '.join(f'{value:.10g}' for value in row)}\n" for row in rows)
            (target / f"{name}.txt").write_text(text)
        (target / "_darknet.labels").write_text("".join(f"{name}\n" for name in NAMES))


def write_fiftyone(folder):
    """Write FiftyOne's COCODetectionDataset: ``data`` and labels.json per export.

    Source: https://docs.voxel51.com/user_guide/export_datasets.html#cocodetectiondataset
    """
    exports = {
        "fiftyone_coco/train": (False, "train"),
        "fiftyone_coco/validation": (False, "val"),
        "fiftyone_coco_outlines": (True, None),
    }
    for place, (outlines, split) in exports.items():
        content = truth(outlines, split)
        names = sorted(NAMES)  # FiftyOne numbers the sorted classes
        for image in content["images"]:
            size = image["width"], image["height"]
            write_blank(folder / place / "data" / image["file_name"], size)
            image.update(license=None, date_captured=None)
        for one in content["annotations"]:
            one["category_id"] = names.index(NAMES[one["category_id"]]) + 1
            if not outlines:
                del one["segmentation"]
        categories = [
            {"id": i, "name": name, "supercategory": None} for i, name in enumerate(names, 1)
        ]
        own = {"info": {"year": "", "version": "1.5.0"}, "licenses": [], "categories": categories}
        (folder / place / "labels.json").write_text(
            json.dumps({**own, "images": content["images"], "annotations": content["annotations"]})
        )


def main(what):
    for name in what or ("cvat", "roboflow", "label_studio", "labelme", "darknet", "fiftyone"):
        for old in HERE.glob(f"{name}*"):
            shutil.rmtree(old)
        with contextlib.redirect_stdout(sys.stderr):
            globals()[f"write_{name}"](HERE)
    for outlines in (False, True):
        text = json.dumps(
            {s: truth(outlines, s) for s in (*SPLITS, None) if s} | {"all": truth(outlines)}
        )
        (HERE / f"truth{'_outlines' * outlines}.json").write_text(text)
    images = {}
    for file in sorted(HERE.rglob("*.jpg")):
        with Image.open(file) as image:
            images[file.relative_to(HERE).as_posix()] = image.size
        file.unlink()
    kept = json.loads((HERE / "images.json").read_text()) if (HERE / "images.json").exists() else {}
    (HERE / "images.json").write_text(json.dumps({**kept, **images}, indent=0))


if __name__ == "__main__":
    main(sys.argv[1:])
