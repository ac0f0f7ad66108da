"""Classify images: python infer.py IMAGE ..., or in Python: from infer import predict."""

import json, pathlib, sys, numpy as np, onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(pathlib.Path(__file__).with_name("whole.onnx"))
facts = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}

def pixels(image):  # of a path or Pillow image
    image = image if isinstance(image, Image.Image) else Image.open(image)
    if image.mode[0] == "I":  # of 16 bits the high byte
        image = Image.fromarray((np.clip(image, 0, 65535).astype(int) >> 8).astype(np.uint8))
    return prepared((image.convert("RGBA") if image.mode == "P" else image).convert("RGB"))

def prepared(image):  # resized and cropped by the run's rule
    rule = facts["preprocessing"]
    (height, width), least = rule["size"], rule["resize"].get("shorter_side")
    sides = [least * side // min(image.size) for side in image.size] if least else [width, height]
    image = image.resize(sides, Image.Resampling[rule["interpolation"].upper()])
    x, y = round((sides[0] - width) / 2), round((sides[1] - height) / 2)
    return np.asarray(image.crop((x, y, x + width, y + height)))

def predict(images):  # per image the probability of each class, the surest first
    batch = np.stack([pixels(image) for image in images])
    rows, names = session.run(["probabilities"], {"images": batch})[0], facts["classes"]
    return [{names[label]: float(row[label]) for label in (-row).argsort()} for row in rows]

if __name__ == "__main__":
    least = facts.get("threshold", 0)  # of several labels per image
    for name, row in zip(sys.argv[1:], predict(sys.argv[1:])):
        print(name, *[f"{share:.4f} {label!r}" for label, share in row.items() if share >= least][:5], sep="\n  ")
