"""Open an exported folder as its README says, and return its outputs for fixed images."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SIDE = 64
STANDALONE = """
import sys
from pathlib import Path
folder, narrow = sys.argv[1:]
# Without an installed MixerLab, whose backbones would come before a folder without __init__.py.
rest = [path for path in sys.path if not Path(path, "backbones").is_dir()]
sys.path[:] = [folder, narrow, *rest]
import narrow, opening
narrow.narrow_timm()
import backbones
assert backbones.__path__[0].startswith(folder), backbones.__path__
print("outputs", opening.as_json(opening.open_backbone(folder)))
"""


def images() -> np.ndarray:
    """Two images (2, 3, 64, 64) whose values need no random generator."""
    steps = np.arange(2 * 3 * SIDE * SIDE, dtype=np.float32)
    return np.sin(steps * 0.37).reshape(2, 3, SIDE, SIDE)


def as_json(outputs) -> str:
    """Return the shape and the first 16 values of each output."""
    arrays = [np.asarray(output, dtype=np.float32) for output in outputs]
    return json.dumps([[array.shape, array.ravel()[:16].tolist()] for array in arrays])


def maps(network) -> list:
    """Return the outputs of a network for the fixed images."""
    import torch

    with torch.no_grad():
        return [output.numpy() for output in network.eval()(torch.from_numpy(images()))]


def read_mm(folder) -> tuple:
    """Return the config of a toolkit's model and its tensors."""
    import torch
    from mmengine import Config

    (weights,) = Path(folder).glob("*.pth")
    tensors = torch.load(weights, weights_only=True)["state_dict"]
    return Config.fromfile(Path(folder, "config.py")), tensors


def open_mm(folder) -> list:
    """Build the backbone of the folder's config and load the checkpoint."""
    from mmengine.registry import MODELS, DefaultScope

    import heads  # noqa: F401 - finds operators for mmcv

    config, tensors = read_mm(folder)
    with DefaultScope.overwrite_default_scope(config.default_scope):
        model = MODELS.build(config.model).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert not [name for name in missing if name.startswith("backbone.")]
    return maps(model.backbone)


def open_mm_whole(folder) -> list:
    """Open the detector or segmentor by the toolkit's own function, and return its maps."""
    import heads  # noqa: F401 - finds operators for mmcv

    if read_mm(folder)[0].default_scope == "mmdet":
        from mmdet.apis import init_detector as init_model
    else:
        from mmseg.apis import init_model
    weights = next(Path(folder).glob("*.pth"))
    return maps(init_model(str(Path(folder, "config.py")), str(weights), device="cpu").backbone)


def open_backbone(folder) -> list:
    """Build the backbone alone by mmengine, without the toolkit, and load its part."""
    from mmengine.registry import MODELS

    config, tensors = read_mm(folder)
    backbone = MODELS.build(config.model.backbone)
    own = {k.removeprefix("backbone."): v for k, v in tensors.items() if k.startswith("backbone.")}
    backbone.load_state_dict(own)
    return maps(backbone)


def open_standalone(folder) -> list:
    """Open the folder in a fresh interpreter that finds the folder's own ``backbones``."""
    command = [sys.executable, "-I", "-B", "-W", "ignore", "-c", STANDALONE, folder, HERE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("outputs "))
    return json.loads(line.removeprefix("outputs "))


def open_timm(folder) -> list:
    """Create the model from the local directory."""
    import timm
    import torch

    import backbones.timm_models  # noqa: F401 - registers the names

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    pyramid = timm.create_model(f"local-dir:{folder}", pretrained=True, features_only=True)
    with torch.no_grad():
        return [model(torch.from_numpy(images())).numpy(), *maps(pyramid)]


def open_onnx(folder) -> list:
    """Run each graph in onnxruntime."""
    import onnxruntime

    sessions = [onnxruntime.InferenceSession(path) for path in sorted(Path(folder).glob("*.onnx"))]
    assert sessions
    return [one for session in sessions for one in session.run(None, {"images": images()})]


def open_torch_export(folder) -> list:
    """Load each program and run it."""
    import torch

    programs = [torch.export.load(path).module() for path in sorted(Path(folder).glob("*.pt2"))]
    assert programs
    found = [program(torch.from_numpy(images())) for program in programs]
    return [one.detach().numpy() for one in found]  # of a classifier, one output per program


OPENERS = {
    "mmdet": open_mm_whole,
    "mmseg": open_mm_whole,
    "mmpretrain": open_mm,
    "mmdet_standalone": open_standalone,
    "mmseg_standalone": open_standalone,
    "mmpretrain_standalone": open_standalone,
    "timm": open_timm,
    "onnx": open_onnx,
    "torch_export": open_torch_export,
}
