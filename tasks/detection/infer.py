"""Detect objects: python infer.py IMAGE ..., or in Python: from infer import predict."""

import json, pathlib, sys, numpy as np, onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(pathlib.Path(__file__).with_name("whole.onnx"))
facts = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}

def pixels(image):  # of a path or Pillow image
    image = ImageOps.exif_transpose(image if isinstance(image, Image.Image) else Image.open(image))
    if image.mode[0] == "I":  # of 16 bits the high byte
        image = Image.fromarray((np.clip(image, 0, 65535).astype(int) >> 8).astype(np.uint8))
    return np.asarray((image.convert("RGBA") if image.mode == "P" else image).convert("RGB"))

def resized(x, longest, shortest):  # as by OpenCV, to one grey value
    scale = min(longest / max(x.shape[:2]), shortest / min(x.shape[:2]))
    sides = [max(1, int(side * scale + 0.5)) for side in x.shape[:2]]
    if x.shape[:2] == (2 * sides[0], 2 * sides[1]):
        return (x.reshape(sides[0], 2, sides[1], 2, 3).sum((1, 3)) + 2 >> 2).astype(np.uint8)
    for axis in (1, 0) if [*x.shape[:2]] != sides else ():
        place = (np.arange(sides[axis]) + 0.5) * (x.shape[axis] / sides[axis]) - 0.5
        place = place.clip(0, x.shape[axis] - 1)
        far = np.rint(place % 1 * 2048).astype(int).reshape(-1, *[1] * (2 - axis))
        parts = zip((2048 - far, far), (x.take(p.astype(int), axis) for p in (place, np.ceil(place))))
        x = sum(part * v if axis else part * (v >> 4) >> 16 for part, v in parts)
    return (x if x.dtype == np.uint8 else x + 2 >> 2).astype(np.uint8)

def predict(images):  # per image (class, score, [left, top, right, bottom], mask if any), the surest first
    answers, arrays = {}, [pixels(image) for image in images]
    for shape in {x.shape for x in arrays}:
        places = [place for place, x in enumerate(arrays) if x.shape == shape]
        batch = np.stack([resized(arrays[place], **facts["resize"]) for place in places])
        feed = {"images": batch, "size": np.array(shape[:2])}
        for place, *rows in zip(places, *session.run(None, feed)):
            answers[place] = [(facts["classes"][row[0]], *row[1:]) for row in zip(*rows) if row[0] >= 0]
    return [answers[place] for place in range(len(arrays))]

if __name__ == "__main__":
    for name, rows in zip(sys.argv[1:], predict(sys.argv[1:])):
        print(name, *(row[:3] for row in rows if row[1] > facts["threshold"]), sep="\n")
