"""One module that holds a backbone: of ours it needs nothing, of others torch, timm and mmengine.

It is our own source, cut to what the backbone reaches, and stands as ``backbones/mm.py`` in the
exported folder: the same config imports it there, and its checkpoints are those of the whole.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backbones.registry import OWN_FFN, find_mixer, look_up
from tools.exporters import check_equal
from tools.exporters.merge_modules import Merger

ENTRY = "backbones.mm"
ALLOWED = frozenset({"torch", "timm", "mmengine"})
# Run in a process of its own (python -I), where the folder comes first on the path.
CHECK = """
import sys
from pathlib import Path
folder, checkpoint, images, outputs = (Path(word).resolve() for word in sys.argv[1:])
sys.path.insert(0, str(folder))
import torch
from mmengine import Config
from mmengine.registry import MODELS
config = Config.fromfile(folder / "config.py").model.backbone
module = sys.modules["backbones.mm"]
assert Path(module.__file__).resolve() == folder / "backbones" / "mm.py", module.__file__
ours = [name for name in sys.modules if name.partition(".")[0] == "backbones"]
assert sorted(ours) == ["backbones", "backbones.mm"], ours
config.pop("init_cfg", None)
backbone = MODELS.build(config).eval()
backbone.load_weights(str(checkpoint))
with torch.no_grad():
    torch.save(list(backbone(torch.load(images, weights_only=True))), outputs)
"""


def standalone_source(name: str, options: Mapping[str, Any]) -> str:
    """The source of a module that registers a backbone, and of all that it is made of.

    Args:
        name: Registered name.
        options: Of ``create_backbone``; a token mixer of theirs is in the module too.

    Raises:
        ValueError: The backbone needs another package.
    """
    host, mixer = look_up(name)
    token = options.get("token_mixer")
    token = token.get("name") if isinstance(token, Mapping) else token
    merger = Merger("backbones", ALLOWED)
    merger.add(ENTRY, lambda statement: isinstance(statement, ast.Expr))
    for build in [host.build, *(find_mixer(m).build for m in (mixer, token, OWN_FFN) if m)]:
        if "<locals>" in build.__qualname__:  # made by a function that a loop calls
            merger.add(build.__module__, lambda statement: isinstance(statement, ast.For))
        else:
            merger.add_name(build.__module__, build.__qualname__)
    return merger.source(
        f"{name} for MMDetection, MMSegmentation and MMPretrain, in one module.\n\n"
        "Made by the export of MixerLab out of the modules that are named below; it needs torch, "
        "timm\nand mmengine. Importing it registers the backbone with mmengine.\n"
    )


def write_standalone(name: str, options: Mapping[str, Any], folder: Path) -> Path:
    """Write the module into the folder of an export."""
    file = folder / "backbones" / "mm.py"
    file.parent.mkdir()
    file.write_text(standalone_source(name, options))
    return file


def check_standalone(
    folder: Path, checkpoint: Path, images: Tensor, before: Sequence[Tensor]
) -> None:
    """Compare the outputs of the exported folder, opened by a process that cannot see us.

    Raises:
        ValueError: They differ, or the module does not run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given, taken = Path(scratch, "images.pt"), Path(scratch, "outputs.pt")
        torch.save(images, given)
        paths = map(str, (folder, checkpoint, given, taken))
        ended = subprocess.run(
            [sys.executable, "-I", "-B", "-c", CHECK, *paths],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ended.returncode:
            raise ValueError(f"the module that stands alone does not run: {ended.stderr[-2000:]}")
        after = torch.load(taken, weights_only=True)
    check_equal("the module that stands alone", before, after)
