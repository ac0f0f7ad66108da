"""Export to timm: a folder for ``timm.create_model("local-dir:<folder>", pretrained=True)``.

The folder has the files that timm writes for the Hugging Face hub, ``config.json`` and
``model.safetensors``; ``import backbones.timm_models`` provides the model's class. The config has
the preprocessing of a run's validation, and the class names of our checkpoints (``label_names``).
timm's scripts number class folders in another order; ``class_map.txt`` gives them ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import timm
import torch
from timm.models import save_for_hf

from backbones.timm_models import around
from heads.linear import LinearClassifier
from tools.exports.class_lists import class_names, write_class_map
from tools.exports.networks import Maps, build_export_network
from tools.exports.preprocessing import read_preprocessing
from tools.exports.requests import ExportRequest, check_equal

WEIGHTS, CONFIG, README = "model.safetensors", "config.json", "README.md"
TEXT = """# {name} for timm

```python
import timm
import backbones.timm_models  # of mixerlab: pip install -e <its checkout>

model = timm.create_model("local-dir:<this folder>", pretrained=True)  # {what}
maps = timm.create_model("local-dir:<this folder>", pretrained=True, features_only=True)
# Images are preprocessed as in config.json: size, crop, interpolation, mean and std.
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
outputs = model.eval()(transform(image)[None])  # image: an RGB image of Pillow's
```

After an upload to the Hugging Face hub it opens as `hf-hub:<owner>/<name>`.
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
python -c "
import runpy, sys, backbones.timm_models
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name='__main__')
" validate.py --data-dir <folder of the class folders> \\
    --model local-dir:<this folder> --class-map <this folder>/{file}
```

In Python: `timm.data.create_dataset("", <folder>, class_map="<this folder>/{file}")`.
"""
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
        arguments["dense"] = True
    model = around(network.backbone, arguments)
    if classes:
        model.classifier = cast("LinearClassifier", network).classifier
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
    text = TEXT.format(name=request.label, what=content)
    if prepared and prepared.bands:
        text += BANDS.format(bands=list(prepared.bands))
    maps = write_class_map(request.folder, names)
    if classes:
        text += SCRIPTS.format(file=maps[0].name) if maps else NAMELESS
    (request.folder / README).write_text(text, encoding="utf-8")
    _check(request, network, classes)
    return [*(request.folder / name for name in (CONFIG, WEIGHTS, README)), *maps]


def _check(request: ExportRequest, network: LinearClassifier | Maps, classes: int) -> None:
    """Open the folder with timm and compare logits and maps."""
    source, images = f"local-dir:{request.folder}", request.images()
    opened = timm.create_model(source, pretrained=True).eval()
    maps = timm.create_model(source, pretrained=True, features_only=True).eval()
    with torch.inference_mode():
        check_equal("the maps in timm", list(network.backbone(images)), maps(images))
        if classes:
            check_equal("the classifier in timm", [network(images)], [opened(images)])
