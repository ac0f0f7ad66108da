"""Copy the package ``backbones`` into an exported folder, which then opens without MixerLab.

The folder's config imports ``backbones.mm`` from the copy, which needs torch, timm and mmengine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import backbones
from backbones.options import mixer_names
from backbones.registry import find_mixer, look_up
from tools.exports.requests import check_equal

PACKAGE = Path(backbones.__file__).parent
# Operators are compiled for one machine; without them torch's operations are used.
LEFT_OUT = shutil.ignore_patterns("__pycache__", "compiled")
# Runs in a separate process (python -I) with the folder first on the path.
CHECK = """
import sys
from pathlib import Path
folder, checkpoint, images, outputs = (Path(word).resolve() for word in sys.argv[1:])
sys.path.insert(0, str(folder))
import torch
from mmengine import Config
from mmengine.registry import MODELS
config = Config.fromfile(folder / "config.py").model.backbone
for name, module in list(sys.modules.items()):
    top = name.partition(".")[0]
    assert top not in ("heads", "tasks", "datamodules", "tools"), name
    if top == "backbones":
        assert Path(module.__file__).resolve().is_relative_to(folder / "backbones"), name
config.pop("init_cfg", None)
backbone = MODELS.build(config).eval()
backbone.load_weights(str(checkpoint))
with torch.no_grad():
    torch.save(list(backbone(torch.load(images, weights_only=True))), outputs)
"""


def write_standalone(name: str, options: Mapping[str, Any], folder: Path) -> Path:
    """Copy the package into the folder of an export, and return the copy.

    Args:
        name: Registered name of the backbone.
        options: Options of ``create_backbone``, which may name a token mixer.
        folder: Folder of the export.

    Raises:
        ValueError: The host or a mixer is defined outside the package.
    """
    host, mixer = look_up(name)
    used = [*mixer_names(options.get("mixer")), *mixer_names(options.get("token_mixer"))]
    used += [mixer] if mixer else []
    for build in [host.build, *(find_mixer(mixer_name).build for mixer_name in used)]:
        if build.__module__.partition(".")[0] != "backbones":
            raise ValueError(
                f"standalone=true copies the package backbones, but {name} needs the module "
                f"{build.__module__}; move that into backbones/hosts or backbones/mixers, or leave "
                "standalone=true out"
            )
    return Path(shutil.copytree(PACKAGE, folder / "backbones", ignore=LEFT_OUT))


def check_standalone(
    folder: Path, checkpoint: Path, images: Tensor, before: Sequence[Tensor]
) -> None:
    """Compare the exported folder's outputs, computed by a process that cannot import MixerLab.

    Raises:
        ValueError: The outputs differ, or the copied package fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        inputs, outputs = Path(scratch, "images.pt"), Path(scratch, "outputs.pt")
        torch.save(images, inputs)
        paths = map(str, (folder, checkpoint, inputs, outputs))
        ended = subprocess.run(
            [sys.executable, "-I", "-B", "-c", CHECK, *paths],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ended.returncode:
            raise ValueError(f"the copied package fails: {ended.stderr[-2000:]}")
        after = torch.load(outputs, weights_only=True)
    check_equal("the copied package", before, after)
