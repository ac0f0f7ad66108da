"""Label images: python infer.py IMAGE ..., or in Python: from infer import predict."""

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

def predict(images):  # labels (H, W), numbers in facts["classes"], and probabilities (H, W)
    answers, arrays = {}, [pixels(image) for image in images]
    for shape in {x.shape for x in arrays}:
        places = [place for place, x in enumerate(arrays) if x.shape == shape]
        batch = np.stack([resized(arrays[place], **facts["resize"]) for place in places])
        feed = {"images": batch, "size": np.array(shape[:2])}
        answers |= zip(places, zip(*session.run(["labels", "probabilities"], feed)))
    return [answers[place] for place in range(len(arrays))]

if __name__ == "__main__":
    for name, (labels, _) in zip(sys.argv[1:], predict(sys.argv[1:])):
        Image.fromarray(labels).save(pathlib.Path(name).stem + "_labels.png")
