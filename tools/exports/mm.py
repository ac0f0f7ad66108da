"""Export to MMDetection, MMSegmentation and MMPretrain: config, checkpoint and README.

A run folder of task=detection (or segmentation) exports the whole detector (segmentor). Otherwise
the backbone is exported inside the toolkit's own Mask R-CNN or UperNet, which is then to be
trained. MMPretrain gets the classification network, with its classifier if the checkpoint has one.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from mmengine import Config
from mmengine.registry import DefaultScope
from torch import Tensor, nn

from backbones import Backbone, create_backbone
from backbones.checkpoints.adoption import adopt
from backbones.layers.classifier import Classifier
from datamodules.dense.toolkit_data import require_package
from heads.linear import LinearClassifier
from heads.toolkits.toolkit import silence_toolkits
from tools.bench.timed_networks import non_default_options
from tools.exports.class_lists import (
    ANNOTATIONS,
    class_names,
    write_annotations,
    write_names,
)
from tools.exports.mm_configs import (
    FOLDER_SUFFIXES,
    base_files,
    dataset_config,
    model_base,
    model_config,
    required_modules,
    training_config,
)
from tools.exports.mm_inherit import write_config
from tools.exports.networks import build_export_network
from tools.exports.preprocessing import read_preprocessing
from tools.exports.requests import NUM_CLASSES, ExportRequest, check_equal
from tools.exports.standalone import check_standalone, write_standalone

CONFIG, README = "config.py", "README.md"
HERE = "{{ fileDirname }}"  # mmengine replaces this by the config's folder


@dataclass(frozen=True)
class Package:
    """Content of the export, and the original that it must reproduce.

    Attributes:
        model: The toolkit's config of the model, including the backbone.
        tensors: The checkpoint, by the toolkit's names.
        metainfo: Names and possibly colours of the classes; empty if unknown.
        backbone: The original in evaluation mode.
        network: The original model around it, if the whole model is exported.
        data: Config of datasets and evaluators.
        base: The toolkit's config that the detector or segmentor is based on.
    """

    model: dict[str, Any]
    tensors: dict[str, Tensor]
    metainfo: dict[str, Any]
    backbone: Backbone
    network: nn.Module | None
    data: dict[str, Any]
    base: str | None = None


def export(request: ExportRequest) -> list[Path]:
    """Write the folder, open it with the toolkit and compare the outputs.

    Raises:
        ValueError: The outputs differ, or the checkpoint is another model's.
    """
    require_package(f"{request.to}.datasets")  # first, because it explains what is missing
    if request.run is not None and request.run["data"].get("bands") is not None:
        raise ValueError(
            f"this run has data.bands, but the pipelines of {request.to} read 8-bit BGR; pass "
            "to=onnx, torch_export or timm"
        )
    if request.to == "mmpretrain":
        package = classifier_package(request)
    elif request.exported_part == "model":
        package = whole_package(request)
    else:
        package = backbone_package(request)
    modules = required_modules(package.model)
    if "heads.mm" in modules and request.settings["standalone"] == "true":
        raise ValueError(
            "standalone=true copies the package backbones, but this segmentor needs MixerLab's "
            "heads too; leave standalone=true out"
        )
    name, folder = request.label, request.folder
    files = [folder / CONFIG, folder / f"{name}.pth", folder / f"{name}.safetensors"]
    tensors = {key: value.detach().contiguous().clone() for key, value in package.tensors.items()}
    meta = {"dataset_meta": package.metainfo} if package.metainfo else {}
    torch.save({"state_dict": tensors, "meta": meta}, files[1])
    safetensors.torch.save_file(tensors, files[2])
    start = f"{HERE}/{files[1].name}"
    if package.network is None:
        package.model["backbone"]["init_cfg"] = {"type": "Pretrained", "checkpoint": start}
    config = {
        "custom_imports": {"imports": modules, "allow_failed_imports": False},
        "default_scope": request.to,
        **package.data,
        **training_config(
            request.to, package.backbone, getattr(package.network, "multipliers", {})
        ),
        "model": package.model,
        "load_from": start if package.network is not None else None,
    }
    bases = base_files(request.to, package.base, with_mask="roi_head" in package.model)
    files += write_config(folder, CONFIG, request.to, bases, config, f"{name} in {request.to}.")[1:]
    if request.settings["standalone"] == "true":
        files.append(write_standalone(request.backbone, request.options, folder))
        before = _outputs(package, request.images())
        check_standalone(folder, files[1], request.images(), before)
    files += write_names(folder, package.metainfo.get("classes", ()))
    if _lists_images(package):
        files.append(write_annotations(folder, FOLDER_SUFFIXES))
    files.append(write_readme(request, package))
    compare(request, package)
    return files


def backbone_package(request: ExportRequest) -> Package:
    """Put the backbone in a detector or segmentor of the toolkit that is still to be trained."""
    backbone = request.create_backbone(dense=True)
    return Package(
        model=model_config(request.to, backbone) | {"backbone": _backbone_config(request)},
        tensors=_prefixed(backbone),
        metainfo={},
        backbone=backbone,
        network=None,
        data=dataset_config(request.to),
        base=model_base(
            request.to, {"name": {"mmdet": "mask_rcnn", "mmseg": "upernet"}[request.to]}
        ),
    )


def whole_package(request: ExportRequest) -> Package:
    """Take the detector or segmentor of a run, with its classes and image sizes."""
    from tasks.engine.instantiate import build

    assert request.run is not None
    assert request.checkpoint is not None
    datamodule = build(request.run["data"], "data", seed=request.run["seed"], predict_path=None)
    names = request.checkpoint.class_names
    if names:
        datamodule.class_names = names
    else:  # checkpoints of an earlier version lack them
        datamodule.prepare_data()
        datamodule.setup()
    options = {**request.options, "dense": True}
    backbone = create_backbone(request.backbone, **options)
    network = build(
        request.run["head"], "head", backbone=backbone, num_classes=datamodule.num_classes
    )
    adopt(network, request.checkpoint)  # prefers the averaged weights, which were validated
    model = dict(network.config) | {"backbone": _backbone_config(request)}
    neck = model.get("neck") or {}
    first = neck.get("start_level", 0) if isinstance(neck, dict) else 0
    if first:  # RetinaNet: unused maps are not returned, so every output gets a gradient
        neck_options = {"start_level": 0, "in_channels": list(neck["in_channels"])[first:]}
        model["neck"] = {**neck, **neck_options}
    model["backbone"]["out_indices"] = network.maps[first:]
    return Package(
        model=model,
        tensors=network.model.state_dict(),
        metainfo=datamodule.metainfo,
        backbone=backbone.eval(),
        network=network.eval(),
        data=dataset_config(request.to, datamodule, with_mask=bool(model.get("roi_head"))),
        base=model_base(request.to, request.run["head"]),
    )


def classifier_package(request: ExportRequest) -> Package:
    """Take the classification network, as MMPretrain's ImageClassifier."""
    network: LinearClassifier | None = None
    metainfo, num_classes = {}, NUM_CLASSES
    # Without a checkpoint the classifier is random and not worth exporting.
    exported = build_export_network(request) if request.checkpoint is not None else None
    if exported is None or exported.content == "dense":
        backbone = request.create_backbone(dense=False)
    else:
        backbone = exported.network.backbone
    if request.checkpoint is not None and exported is not None and exported.content == "classifier":
        network = cast("LinearClassifier", exported.network)
        if type(network.classifier) is not Classifier:
            raise ValueError(
                f"the classifier of {request.backbone} is more than a linear layer, but MMPretrain "
                "only has that; export it to=timm or to=onnx, or its backbone to=mmdet"
            )
        num_classes = network.classifier.out_features
        names = class_names(request, num_classes)
        metainfo = {"classes": names} if names else {}
    tensors = _prefixed(backbone)
    if network is not None:
        head = network.classifier.state_dict()
        tensors |= {f"head.fc.{key}": value for key, value in head.items()}
    model = model_config("mmpretrain", backbone, num_classes)
    model["backbone"] = _backbone_config(request) | {"out_type": "embedding"}
    return Package(
        model=model,
        tensors=tensors,
        metainfo=metainfo,
        backbone=backbone,
        network=network,
        data=dataset_config(
            "mmpretrain",
            num_classes=num_classes,
            class_names=metainfo.get("classes", ()),
            prepared=read_preprocessing(
                request.run, backbone, request.checkpoint, request.image_size[0]
            ),
        ),
    )


def _backbone_config(request: ExportRequest) -> dict[str, Any]:
    options = {key: value for key, value in request.options.items() if value is not None}
    config = {"type": request.backbone, **non_default_options(request.backbone, options)}
    maps = {} if request.to == "mmpretrain" else {"out_indices": (0, 1, 2, 3)}
    return {**config, **maps, "frozen_stages": -1}


def _prefixed(backbone: Backbone) -> dict[str, Tensor]:
    return {f"backbone.{key}": value for key, value in backbone.state_dict().items()}


def compare(request: ExportRequest, package: Package) -> None:
    """Open the written config and checkpoint as a user does, and compare the outputs.

    Raises:
        ValueError: The outputs or the weights differ.
    """
    folder = request.folder
    config = Config.fromfile(folder / CONFIG)
    images = request.images()
    with silence_toolkits(), DefaultScope.overwrite_default_scope(request.to), torch.no_grad():
        if package.network is None:
            backbone = _models(request.to).build(config.model.backbone)
            backbone.init_weights()
            check_equal(request.backbone, _outputs(package, images), backbone.eval()(images))
            return
        opened = open_whole(request.to, config, folder / f"{request.label}.pth")
        tensors = opened.state_dict()
        differ = [key for key in package.tensors if not tensors[key].equal(package.tensors[key])]
        if differ or tensors.keys() != package.tensors.keys():
            raise ValueError(
                f"{request.to} reads weights that differ from the written ones: "
                f"{differ or sorted(tensors.keys() ^ package.tensors.keys())}"
            )
        if request.to == "mmpretrain":
            after = [opened(images, mode="tensor")]
            check_equal(request.backbone, [package.network(images)], after)
        else:
            check_equal(request.backbone, _outputs(package, images), opened.backbone(images))


def _lists_images(package: Package) -> bool:
    """Return True if the config reads lists of images, which number the classes."""
    return bool(package.data["train_dataloader"]["dataset"].get("ann_file") == "train.txt")


def _outputs(package: Package, images: Tensor) -> list[Tensor]:
    """Return expected outputs of the toolkit's backbone: the config's maps or the embedding."""
    config = package.model["backbone"]
    with torch.no_grad():
        if config.get("out_type") == "embedding":
            return [package.backbone.embed(images)]
        maps = package.backbone(images)
    return [maps[index] for index in config["out_indices"]]


def open_whole(toolkit: str, config: Config, checkpoint: Path) -> Any:
    """Open a trained model on the CPU with the toolkit's own function."""
    if toolkit == "mmdet":
        from mmdet.apis import init_detector

        return init_detector(config, str(checkpoint), device="cpu")
    if toolkit == "mmseg":
        from mmseg.apis import init_model

        return init_model(config, str(checkpoint), device="cpu")
    from mmpretrain.apis import get_model

    return get_model(config, pretrained=str(checkpoint), device="cpu").eval()


def _models(toolkit: str) -> Any:
    importlib.import_module(f"{toolkit}.models")  # registers the toolkit's modules
    return importlib.import_module(f"{toolkit}.registry").MODELS


# A standalone folder works without MixerLab: the config imports the copy beside it.
FIRST_LINES = {
    False: "import heads  # MixerLab's: provides torchvision's operators where mmcv lacks them",
    True: 'import sys; sys.path.insert(0, "<this folder>")  # has the network',
}
OPENED = {
    "mmdet": """from mmdet.apis import inference_detector, init_detector

model = init_detector("{config}", "{weights}", device="cpu")
result = inference_detector(model, "image.jpg")""",
    "mmseg": """from mmseg.apis import inference_model, init_model

model = init_model("{config}", "{weights}", device="cpu")
result = inference_model(model, "image.jpg")""",
    "mmpretrain": """from mmpretrain.apis import get_model, inference_model

model = get_model("{config}", pretrained="{weights}", device="cpu")
result = inference_model(model, "image.jpg")""",
}
BUILT = """from mmengine import Config
from {to}.registry import MODELS
from {to}.utils import register_all_modules

register_all_modules()
model = MODELS.build(Config.fromfile("{config}").model)
model.init_weights()  # loads the backbone's; the rest is to be trained"""


def script_lines(to: str, weights: str, *, has_head: bool, standalone: bool) -> str:
    """Return a Python script that uses the export; its first line makes MixerLab's part available.

    Args:
        to: The toolkit.
        weights: File of the checkpoint.
        has_head: The checkpoint has the whole model.
        standalone: The folder has a copy of the package backbones.
    """
    first, rest = FIRST_LINES[standalone], OPENED[to] if has_head else BUILT
    return f"{first}\n{rest.format(to=to, config=CONFIG, weights=weights)}"


def write_readme(request: ExportRequest, package: Package) -> Path:
    """Write the README with the commands for training, testing and a plain script."""
    to, name = request.to, request.label
    standalone = request.settings["standalone"] == "true"
    path = "PYTHONPATH=." if standalone else "PYTHONPATH=<folder of MixerLab>"
    needs = (
        "The folder `backbones` here has the network; it only needs torch, timm and mmengine."
        if standalone
        else "`backbones.mm`, which the config imports, is part of MixerLab. If MixerLab is "
        "installed with pip, PYTHONPATH is not needed."
    )
    tools = f"$(python -c 'import {to}; print({to}.__path__[0])')/.mim/tools"
    trained = (
        "the whole trained model" if package.network is not None else "the weights of the backbone"
    )
    slash = " (with a slash at its end)" if to == "mmdet" else ""
    masks = ""
    if to == "mmseg":
        zero = package.data["train_dataloader"]["dataset"].get("reduce_zero_label", True)
        first = "0 is ignored and the first class is 1" if zero else "the first class is 0"
        masks = (
            f"\nThe config reads 8-bit masks in which {first}; 255 is ignored. Convert others "
            "first, because MMSegmentation scales grey values of 1, 2 and 4 bits.\n"
        )
    listing = (
        "MMPretrain would number these class folders in another order. First run\n"
        f"`python {ANNOTATIONS} <data_root>`, which writes the lists of images that the config "
        "reads.\n\n"
        if _lists_images(package)
        else ""
    )
    has_head = package.network is not None
    script = script_lines(to, f"{name}.pth", has_head=has_head, standalone=standalone)
    file = request.folder / README
    file.write_text(
        f"""# {name} in {to}

`{name}.pth` and `{name}.safetensors` have {trained}, tensors only. {needs}

{listing}`{CONFIG}` only has what differs from {to}'s base configs, which are copied to `_base_`.
To train and test, set `data_root` in it{slash}, then type in this folder:

```
{path} python "{tools}/train.py" {CONFIG}
{path} python "{tools}/test.py" {CONFIG} {name}.pth
```
{masks}
A plain script needs one line before it imports {to}, the first one here:

```python
{script}
```

If mmcv lacks compiled operators, replace `python` by this, which uses torchvision's:
`PYTHONPATH=<folder of MixerLab> python -m heads.mmcv_finder`.
"""
    )
    return file
