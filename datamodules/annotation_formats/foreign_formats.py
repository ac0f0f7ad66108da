"""Recognises unsupported formats by their files, to name them in messages."""

from __future__ import annotations

from pathlib import Path

from datamodules.files.folders import list_folders
from datamodules.files.text_files import text_start

# Pattern of files below data.root or one of its folders, and the name of the format.
FORMATS = (
    ("*.tfrecord*", "TFRecord"),
    ("_annotations.createml.json", "Roboflow's CreateML"),
    ("_annotations.csv", "Roboflow's CSV (TensorFlow, RetinaNet)"),
    ("_annotations.txt", "Roboflow's YOLO Keras"),
    ("*.jsonl", "JSON lines (PaliGemma, Florence-2, OpenAI)"),
    ("*.ndjson", "NDJSON (Labelbox, Ultralytics)"),
    ("*.manifest", "SageMaker Ground Truth's manifest"),
    ("via_*.json", "VGG Image Annotator"),
    ("samples.json", "FiftyOneDataset"),
    ("captions_*.json", "COCO captions"),
    ("person_keypoints_*.json", "COCO key points"),
    ("annotations/person_keypoints_*.json", "COCO key points"),
    ("annotations/captions_*.json", "COCO captions"),
    ("annotations/panoptic_*.json", "COCO panoptic"),
    ("ann/*.json", "Supervisely"),
    ("gt/gt.txt", "MOT"),
    ("label_2/*.txt", "KITTI"),
    ("labels.json", "FiftyOne's own labels.json"),
    ("*-annotations-bbox.csv", "Open Images"),
    ("*.parquet", "parquet"),
    ("*.mat", "MATLAB"),
    ("*.zip", "a zip archive, which must be unpacked"),
    ("*.tar*", "a tar archive, which must be unpacked"),
)

# Text near the start of JSON files, and the name of the format.
CONTENTS = (("dm_format_version", "Datumaro"), ("_via_settings", "VGG Image Annotator"))
BEGINNING = 4096


def detect_foreign_format(root: Path) -> str | None:
    """Return the name of an unsupported format and the file that shows it; None if unknown."""
    folders = [root, *(root / name for name in list_folders(root)[:100])]
    for pattern, name in FORMATS:
        for folder in folders:
            file = next(iter(sorted(folder.glob(pattern))), None)
            if file is not None:
                return f"{name} ({file})"
    for folder in (*folders, root / "annotations"):
        for file in sorted(folder.glob("*.json"))[:10]:
            with file.open("rb") as opened:
                beginning = text_start(opened.read(BEGINNING))
            for text, name in CONTENTS:
                if f'"{text}"' in beginning:
                    return f"{name} ({file})"
    return None
