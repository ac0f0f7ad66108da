"""The packages that the project names, what is installed of them, and what was tested.

Nothing but the standard library, for an environment in which nothing may work.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from tools.cli.paths import ROOT

VENV = ROOT / ".venv"
IN_VENV = Path(sys.prefix).resolve() == VENV

# What stops working without a package; a package that is not named here serves its whole group.
GROUP_FEATURES = {"": "everything", "dense": "detection, segmentation", "dev": "tests and checks"}
FEATURES = {
    "timm": "backbones",
    "torchmetrics": "classification, transfer",
    "hydra-core": "command line",
    "scikit-learn": "sample data",
    "filelock": "sample data",
    "matplotlib": "curves",
    "rich": "progress and tables",
    "tensorboard": "TensorBoard events",
    "safetensors": "safetensors checkpoints",
    "onedl-mmdetection": "detection",
    "onedl-mmsegmentation": "segmentation",
    "pycocotools": "detection",
    "faster-coco-eval": "detection metrics",
    "fvcore": "complexity with rule=fvcore",
    "pytest-xdist": "tests and checks",
    "cvxpy": "semidefinite programs",
    "clarabel": "semidefinite programs",
    "scs": "semidefinite programs",
    "onedl-mmpretrain": "exports to MMPretrain",
    "onnx": "exports to ONNX",
    "onnxruntime": "exports to ONNX",
    "onnxscript": "exports to ONNX",
    "hydra-joblib-launcher": "hydra/launcher=joblib",
    "hydra-submitit-launcher": "hydra/launcher=submitit_slurm",
    "optuna": "tools/search.py",
    "schedulefree": "optimizer.name=schedulefree_*",
    "datasets": "data=imagenet_parquet",
    "captum": "tools/analyse.py attributions",
    "wandb": "logger=wandb",
    "mlflow-skinny": "logger=mlflow",
}

Status = Literal["ok", "untested version", "missing"]
VersionOf = Callable[[str], "str | None"]  # quoted for the Python that is too old and says so


@dataclass(frozen=True)
class Package:
    """One direct requirement and what is installed of it."""

    name: str
    group: str
    installed: str | None
    tested: str
    status: Status
    feature: str
    remedy: str


def normalise(name: str) -> str:
    """Spell a distribution name the way package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_pins(path: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """Read the pins of a constraints file as {name: version}."""
    pins = re.findall(r"^([\w.-]+)==([^\s#;]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {normalise(name): version for name, version in pins}


def requirements(path: Path = ROOT / "pyproject.toml") -> dict[str, list[str]]:
    """Names of the direct requirements per group: "" (core), "dense", "dev"."""
    import tomllib  # absent before Python 3.11, which main reports

    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    seen: set[str] = set()
    named: dict[str, list[str]] = {}
    for group, lines in groups.items():
        names = [normalise(re.split(r"[\s<>=!~;\[]", line)[0]) for line in lines]
        named[group] = [name for name in names if name not in seen]
        seen.update(names)
    return named


def describe(name: str, group: str, tested: str, installed: str | None) -> Package:
    """Compare one package with the tested set; a local part such as +cu130 does not count."""
    status: Status = "missing"
    if installed is not None:
        status = "ok" if installed.split("+")[0] == tested else "untested version"
    remedy = "" if status == "ok" else f"pip install -c constraints.txt {name}"
    if remedy and IN_VENV:
        remedy = "make install"
    feature = FEATURES.get(name, GROUP_FEATURES.get(group, group))
    return Package(name, group, installed, tested, status, feature, remedy)


def packages(version_of: VersionOf = installed_version) -> list[Package]:
    """Every direct requirement, in the order of pyproject.toml."""
    tested = read_pins()
    return [
        describe(name, group, tested.get(name, "?"), version_of(name))
        for group, names in requirements().items()
        for name in names
    ]
