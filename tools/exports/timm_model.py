"""Export to timm: a folder for ``timm.create_model("local-dir:<folder>", pretrained=True)``.

The folder has the files that timm writes for the Hugging Face hub, ``config.json`` and
``model.safetensors``. A model of timm without mixers of ours is timm's own again; for all others
``import backbones.timm_models`` provides the model's class. The config has
the preprocessing of a run's validation, and the class names of our checkpoints (``label_names``).
timm's scripts number class folders in another order; ``class_map.txt`` gives them ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import timm
import torch
from timm.models import save_for_hf
from torch import nn

from backbones.hosts.timm_model import TimmBackbone
from backbones.timm_models import around
from heads.linear import LinearClassifier
from tools.exports.class_lists import class_names, write_class_map
from tools.exports.networks import ExportNetwork, Maps, build_export_network
from tools.exports.preprocessing import read_preprocessing
from tools.exports.requests import ExportRequest, check_equal

WEIGHTS, CONFIG, README = "model.safetensors", "config.json", "README.md"
IMPORT = """
import backbones.timm_models  # of MixerLab, which is installed first"""
TEXT = """# {name} for timm

```python
import timm{imported}

model = timm.create_model("local-dir:<this folder>", pretrained=True)  # {what}
{maps}# Images are preprocessed as in config.json: size, crop, interpolation, mean and std.
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
outputs = model.eval()(transform(image)[None])  # image: an RGB image of Pillow's
```

After an upload to the Hugging Face hub it opens as `hf-hub:<owner>/<name>`.
"""
MAPS = """\
maps = timm.create_model("local-dir:<this folder>", pretrained=True, features_only=True)
"""
BANDS = """
## Bands

Images are tensors of the bands {bands}, counted from 0, in the units of their files. `mean` and
`std` of config.json are in these units: `model((bands - mean) / std)`. timm's transforms are for
RGB images of Pillow's.
"""
SCRIPTS = """
## Classes

`{file}` lists the classes in the order of the classifier's outputs. timm sorts class folders by the
numbers in their names, which gives another order, so pass the file to timm's scripts:

```
{python} validate.py --data-dir <folder of the class folders> \\
    --model local-dir:<this folder> --class-map <this folder>/{file}
```

In Python: `timm.data.create_dataset("", <folder>, class_map="<this folder>/{file}")`.
"""
# Runs a script after the import that provides our models.
IMPORTING = """python -c "
import runpy, sys, backbones.timm_models
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name='__main__')
\""""
NAMELESS = """
## Classes

The checkpoint does not name its classes. timm sorts class folders by the numbers in their names;
for another order pass `--class-map <file with one class per line>` to timm's scripts.
"""


def export(request: ExportRequest) -> list[Path]:
    """Write config, weights and README, and open them with timm.

    Raises:
        ValueError: The weights are another model's, JSON cannot hold an option, or outputs differ.
    """
    exported = build_export_network(request)
    network = exported.network
    classes = network.num_classes
    arguments = {**request.options, "num_classes": classes}
    if exported.content == "dense":
        arguments |= {"dense": True, "global_pool": ""}  # a network of maps pools nothing
    timm_arguments = find_timm_arguments(exported)
    model: Any
    if timm_arguments is None:
        model = around(network.backbone, arguments)
        if classes:
            model.classifier = cast("LinearClassifier", network).classifier
    else:
        arguments = timm_arguments
        model = build_timm_model(cast("TimmBackbone", network.backbone), network, arguments)
    prepared = read_preprocessing(
        request.run, network.backbone, request.checkpoint, request.image_size[0]
    )
    names = class_names(request, classes)
    labels = {"label_names": list(names)} if names else {}
    save_for_hf(
        model,
        str(request.folder),
        model_config=labels,
        model_args=arguments,
        safe_serialization=True,
        data_config=prepared.to_timm_config()
        if prepared
        else {"input_size": (request.channels, *request.image_size)},
    )
    content = f"{classes} classes" if classes else "no classifier"
    is_ours = timm_arguments is None
    text = TEXT.format(
        name=request.label, what=content, imported=IMPORT * is_ours, maps=MAPS * is_ours
    )
    if prepared and prepared.bands:
        text += BANDS.format(bands=list(prepared.bands))
    maps = write_class_map(request.folder, names)
    if classes:
        python = IMPORTING if is_ours else "python"
        text += SCRIPTS.format(file=maps[0].name, python=python) if maps else NAMELESS
    (request.folder / README).write_text(text, encoding="utf-8")
    _check(request, network, classes, is_ours)
    return [*(request.folder / name for name in (CONFIG, WEIGHTS, README)), *maps]


def find_timm_arguments(exported: ExportNetwork) -> dict[str, Any] | None:
    """Return timm's arguments for its own model, or None where ours is another network.

    Ours has mixers, maps for dense prediction, or one layer in place of timm's classifier of
    several parts.
    """
    backbone = exported.backbone
    if (
        not isinstance(backbone, TimmBackbone)
        or exported.content != "classifier"
        or backbone.mixers()
        or not backbone.has_one_linear_classifier()
    ):
        return None
    return {**backbone.facts.options, "num_classes": exported.network.num_classes}


def build_timm_model(
    backbone: TimmBackbone, network: LinearClassifier | Maps, arguments: dict[str, Any]
) -> nn.Module:
    """Return timm's own model with the weights of a classifier of ours."""
    model: nn.Module = timm.create_model(backbone.model, **arguments).eval()
    layer = cast("LinearClassifier", network).classifier
    (name,) = backbone.facts.classifier
    state = {**backbone.network.state_dict()}
    for key in ("weight", "bias"):
        place = f"{name}.{key}"
        state[place] = getattr(layer, key).view_as(model.get_parameter(place))
    model.load_state_dict(state)
    return model


def _check(
    request: ExportRequest, network: LinearClassifier | Maps, classes: int, is_ours: bool
) -> None:
    """Open the folder with timm and compare logits, and maps of a network of ours."""
    source, images = f"local-dir:{request.folder}", request.images()
    opened = timm.create_model(source, pretrained=True).eval()
    with torch.inference_mode():
        if is_ours:
            maps = timm.create_model(source, pretrained=True, features_only=True).eval()
            check_equal("the maps in timm", list(network.backbone(images)), maps(images))
        if classes:
            check_equal("the classifier in timm", [network(images)], [opened(images)])
