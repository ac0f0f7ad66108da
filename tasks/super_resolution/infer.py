"""Enlarge images: python infer.py IMAGE ..., or in Python: from infer import predict."""

import json, pathlib, sys, numpy as np, onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(pathlib.Path(__file__).with_name("whole.onnx"))
facts = {k: json.loads(v) for k, v in session.get_modelmeta().custom_metadata_map.items()}

def pixels(image):  # of a path or Pillow image: values (H, W, 3), and channels and type of the file
    image = image if isinstance(image, Image.Image) else Image.open(image)
    if "16" in str(image.tile) and image.mode == "RGB" or image.has_transparency_data:
        raise ValueError("alpha and 16 bits per colour need tools/run.py mode=predict")
    image = ImageOps.exif_transpose(image)
    image = image if image.mode[0] in "IL" else image.convert("L" if image.mode == "1" else "RGB")
    x = np.asarray(image)
    x = x.astype(np.uint16) if image.mode[0] == "I" else x
    x, kind, is_grey = x / np.iinfo(x.dtype).max, x.dtype, x.ndim == 2
    return (np.stack([x] * 3, -1) if is_grey else x).astype(np.float32), kind, is_grey

def predict(images):  # per image an array (r H, r W) or (r H, r W, 3) of the file's type
    answers = []
    for x, kind, is_grey in map(pixels, images):
        (y,) = session.run(["enlarged"], {"images": x[None]})
        y = y[0].mean(-1) if is_grey else y[0]
        answers.append((y.clip(0, 1) * np.iinfo(kind).max).round().astype(kind))
    return answers

if __name__ == "__main__":
    for name, x in zip(sys.argv[1:], predict(sys.argv[1:])):
        Image.fromarray(x).save(f"{pathlib.Path(name).stem}_x{facts['scale']}.png")
