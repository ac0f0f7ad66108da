"""Write README, preprocessing, class names and infer.py into a folder of exported graphs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbones.base import Backbone
from tools.exports.class_lists import NAMES, write_names
from tools.exports.preprocessing import UNCHANGED, Values, describe_preprocessing
from tools.exports.requests import ExportRequest
from tools.exports.tracing import INPUT, Graph

README, INFER, PREPROCESSING = "README.md", "infer.py", "preprocessing.json"
LOGITS = "logits"
SCRIPT = '''"""Run {file} on an image: python infer.py IMAGE (needs {package} and Pillow)."""

import {json}pathlib, sys, numpy as np, {package}
from PIL import {pillow}

{load}
image = {image}.convert("RGB")
{resize}
x = np.asarray(image.resize(shape, Image.Resampling.{interpolation}){crop}){channels} / 255
x = ((x - {mean}) / {std}).astype("float32").transpose(2, 0, 1)[None]
{run}
{show}
'''
BANDS = '''"""Run {file}: python infer.py ARRAY.npy (H, W, bands); needs {package} and Pillow."""

import {json}pathlib, sys, numpy as np, {package}
from PIL import Image

{load}
values = np.load(sys.argv[1])[..., {channels}].astype("float32").transpose(2, 0, 1)
bands = [Image.fromarray(values[band]) for band in range(len(values))]
image = bands[0]
{resize}
resized = [one.resize(shape, Image.Resampling.{interpolation}){crop} for one in bands]
x = np.stack([np.asarray(one) for one in resized], axis=-1)
x = ((x - {mean}) / {std}).astype("float32").transpose(2, 0, 1)[None]
{run}
{show}
'''
OPENED = {
    False: "Image.open(sys.argv[1])",
    True: "ImageOps.exif_transpose(Image.open(sys.argv[1]))",
}
RESIZES = {  # by the first key of the rule in preprocessing.json
    "unchanged": "shape = image.size",
    "shorter_side": "shape = [{shorter_side} * side // min(image.size) for side in image.size]",
    "height": "shape = {width}, {height}",
    "longest_side_at_most": """limits = {longest_side_at_most}, {shortest_side_at_most}
scale = min(limits[0] / max(image.size), limits[1] / min(image.size))
shape = [max(1, int(side * scale + 0.5)) for side in image.size]""",
}
# Rounds as torchvision's CenterCrop.
PLACE = """
left, top = round((shape[0] - {width}) / 2), round((shape[1] - {height}) / 2)"""
CROP = ".crop((left, top, left + {width}, top + {height}))"
SHOW_CLASSES = """shares = np.exp(outputs[0][0] - outputs[0].max())
for label in shares.argsort()[::-1][:5]:
    print(f"{{shares[label] / shares.sum():.4f}}  {name}")"""
SHOW_MAPS = """for name, values in zip({names}, outputs):
    print(name, values.shape)"""

SHOW_IMAGE = """pixels = (outputs[0][0].clip(0, 1) * 255).round().astype("uint8").transpose(1, 2, 0)
Image.fromarray(pixels).save("{name}.png")
print("{name}.png", pixels.shape)"""


@dataclass(frozen=True)
class Format:
    """Python code that uses a file format.

    Attributes:
        title: In the heading of the README.
        package: The package that opens it.
        load: Lines that open ``{file}``.
        run: Line that turns ``x`` (H, W, 3) into ``outputs``.
        classes: Expression for the JSON list of class names.
        example: Lines for the README.
    """

    title: str
    package: str
    load: str
    run: str
    classes: str
    example: str


FORMATS = {
    "onnx": Format(
        title="ONNX",
        package="onnxruntime",
        load='session = onnxruntime.InferenceSession(pathlib.Path(__file__).with_name("{file}"))',
        run='outputs = session.run({names}, {{"images": x}})',
        classes='session.get_modelmeta().custom_metadata_map["class_names"]',
        example="""import onnxruntime

session = onnxruntime.InferenceSession("{file}")
{outputs} = session.run({names}, {{"images": images}})
metadata = session.get_modelmeta().custom_metadata_map  # JSON: {metadata}""",
    ),
    "torch_export": Format(
        title="torch.export",
        package="torch",
        load=f"""metadata = {{{{"{NAMES}": ""}}}}
program = torch.export.load(pathlib.Path(__file__).with_name("{{file}}"), extra_files=metadata)""",
        run="outputs = [y.numpy() for y in {begin}program.module()(torch.from_numpy(x)){end}]",
        classes=f'metadata["{NAMES}"]',
        example=f"""import torch

metadata = {{{{"{PREPROCESSING}": "", "{NAMES}": ""}}}}  # filled with JSON texts
program = torch.export.load("{{file}}", extra_files=metadata).module()
{{outputs}} = program(images)""",
    ),
}


@dataclass(frozen=True)
class Described:
    """A written graph.

    Attributes:
        file: Its name.
        graph: As recorded.
        outputs: Names of its outputs.
        prepared: Preprocessing of its images.
    """

    file: str
    graph: Graph
    outputs: Sequence[str]
    prepared: Values


def output_names(network: Any) -> list[str]:
    """Name the outputs: ``logits``, ``map_<stride>`` for each map, or those of a whole model."""
    if hasattr(network, "outputs"):
        return list(network.outputs)
    if network.num_classes:
        return [LOGITS]
    names = [f"map_{info.stride}" for info in network.backbone.feature_info]
    if len(set(names)) == len(names):
        return names
    return [f"{name}_{place}" for place, name in enumerate(names)]


def preprocessing(request: ExportRequest, backbone: Backbone, graph: Graph) -> Values:
    """Describe the preprocessing of images for a graph."""
    is_fixed = "height" not in graph.free_axes
    if request.exported_part == "model":
        return {**UNCHANGED, "size": list(request.image_size) if is_fixed else None}
    return describe_preprocessing(
        request.run,
        backbone,
        request.image_size,
        has_fixed_size=is_fixed,
        weights=request.checkpoint,
    )


def write_usage(
    request: ExportRequest, graphs: Sequence[Described], classes: Sequence[str]
) -> list[Path]:
    """Write README, preprocessing, class names and infer.py into a folder.

    Args:
        request: The export.
        graphs: At least one; infer.py runs the first.
        classes: Names of the classes; empty if unknown.
    """
    first, folder = graphs[0], request.folder
    prepared = json.dumps(first.prepared, indent=2, ensure_ascii=False) + "\n"
    names = classes if list(first.outputs) == [LOGITS] else ()
    texts = {
        PREPROCESSING: prepared,
        INFER: _script(FORMATS[request.to], first, names),
        README: _readme(request, graphs, names),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [*write_names(folder, classes), *(folder / name for name in texts)]


def _script(form: Format, graph: Described, classes: Sequence[str]) -> str:
    names, prepared = json.dumps(list(graph.outputs)), graph.prepared
    crop = dict(zip(("height", "width"), prepared["crop"] or (), strict=False))
    place = PLACE.format(**crop) if crop else ""
    is_classifier = list(graph.outputs) == [LOGITS]
    is_alone = is_classifier or "unchanged" in prepared["resize"]  # an output outside a tuple
    if is_classifier:
        show = SHOW_CLASSES.format(name="{names[label]!r}" if classes else "class {label}")
        show = f"names = json.loads({form.classes})\n{show}" if classes else show
    elif is_alone:
        show = SHOW_IMAGE.format(name=graph.outputs[0])
    else:
        show = SHOW_MAPS.format(names=names)
    channels, has_bands = prepared["channels"], isinstance(prepared["channels"], list)
    return (BANDS if has_bands else SCRIPT).format(
        file=graph.file,
        package=form.package,
        json="json, " if classes else "",
        pillow="Image, ImageOps" if prepared["upright"] else "Image",
        image=OPENED[prepared["upright"]],
        load=form.load.format(file=graph.file),
        resize=RESIZES[next(iter(prepared["resize"]))].format(**prepared["resize"]) + place,
        interpolation=prepared["interpolation"].upper(),
        crop=CROP.format(**crop) if crop else "",
        channels=channels if has_bands else "[..., ::-1]" * (channels == "BGR"),
        mean=prepared["mean"],
        std=prepared["std"],
        run=form.run.format(names=names, begin="[" * is_alone, end="]" * is_alone),
        show=show,
    )


def _readme(request: ExportRequest, graphs: Sequence[Described], classes: Sequence[str]) -> str:
    form, first = FORMATS[request.to], graphs[0]
    names, (height, width) = json.dumps(list(first.outputs)), request.image_size
    example = form.example.format(
        file=first.file,
        outputs=f"({', '.join(first.outputs)},)" if request.to == "onnx" else first.outputs[0]
        if len(first.outputs) == 1 else f"({', '.join(first.outputs)},)",
        names=names,
        metadata="preprocessing, class_names" if classes else "preprocessing",
    )  # fmt: skip
    argument = "ARRAY.npy" if isinstance(first.prepared["channels"], list) else "IMAGE"
    lines = [
        f"# {request.label} as {form.title}",
        "",
        f"`python {INFER} {argument}` runs `{first.file}` on an image; it needs {form.package} and "
        "Pillow. In Python:",
        "",
        f"```python\n{example}\n```",
        "",
        f"`{INPUT}` are (B, {request.channels}, H, W) in float32, preprocessed as in "
        f"`{PREPROCESSING}`, which is also inside each file. Its values come from "
        f"{first.prepared['source']}.",
        "",
    ]
    for graph in graphs:
        outputs = ", ".join(f"`{name}`" for name in graph.outputs)
        if "height" in graph.graph.free_axes:
            sizes = f"any batch, any height and width from {graph.graph.least}."
        else:
            sizes = (
                f"any batch of {height}x{width} images, because {graph.graph.why_fixed} (for "
                "another size export with image_size=HEIGHTxWIDTH)"
            )
        lines.append(f"* `{graph.file}` returns {outputs}: {sizes}")
    if classes:
        lines += ["", f"`{NAMES}` lists the classes in the order of `{LOGITS}`."]
    return "\n".join(lines) + "\n"
