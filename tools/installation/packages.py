"""The project's packages: what is installed of them, and which versions are tested.

Uses the standard library only, since everything else may be missing or broken.
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
OWN = "mixerlab"  # which one of its extras asks for, with others
IN_VENV = Path(sys.prefix).resolve() == VENV
IS_CHECKOUT = (ROOT / "Makefile").exists()  # a wheel's user lacks make
REPAIR = "make install" if IS_CHECKOUT else 'pip install "mixerlab[dense]"'
PIP = f"pip install -c {'constraints.txt' if IS_CHECKOUT else ROOT / 'constraints.txt'}"

# Features that need a package; packages without an entry serve the features of their group.
GROUP_FEATURES = {"": "everything", "dev": "tests and checks", "docs": "make docs"}
FEATURES = {
    "timm": "backbones",
    "torchmetrics": "metrics",
    "hydra-core": "command line",
    "scikit-learn": "sample data",
    "filelock": "sample data",
    "matplotlib": "curves",
    "rich": "progress and tables",
    "tensorboard": "TensorBoard events",
    "safetensors": "safetensors checkpoints",
    "fvcore": "complexity with rule=fvcore",
    "pytest-xdist": "tests and checks",
    "cvxpy": "semidefinite programs",
    "clarabel": "semidefinite programs",
    "scs": "semidefinite programs",
    "onedl-mmpretrain": "exports to MMPretrain",
    "onnx": "exports to ONNX",
    "onnxruntime": "exports to ONNX",
    "onnxscript": "exports to ONNX",
    "openvino": "exports to OpenVINO",
    "hydra-joblib-launcher": "hydra/launcher=joblib",
    "hydra-submitit-launcher": "hydra/launcher=submitit_slurm",
    "optuna": "tools/search.py",
    "schedulefree": "optimizer.name=schedulefree_*",
    "fla-core": "backbone.token_mixer=gated_delta on a GPU",
    "peft": "backbone.lora",
    "torch-uncertainty": "prediction sets",
    "datasets": "data=imagenet_parquet",
    "elpv-dataset": "data=elpv",
    "captum": "tools/analyse.py attributions",
    "wandb": "logger=wandb",
    "mlflow-skinny": "logger=mlflow",
    "jupytext": "notebooks, make docs",
}

Status = Literal["ok", "untested version", "missing"]
VersionOf = Callable[
    [str], "str | None"
]  # quoted, because a too old Python must still be able to report itself


@dataclass(frozen=True)
class Package:
    """One direct requirement and its installed version."""

    name: str
    group: str
    installed: str | None
    tested: str
    status: Status
    feature: str
    remedy: str


def normalise(name: str) -> str:
    """Normalise a distribution name as package indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def read_pins(path: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """Read a constraints file as {name: version}."""
    pins = re.findall(r"^([\w.-]+)==([^\s#;]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {normalise(name): version for name, version in pins}


def read_requirements(path: Path = ROOT / "pyproject.toml") -> dict[str, list[str]]:
    """Read the names of the direct requirements per group: "" (core), "dense", "dev", ..."""
    import tomllib  # missing before Python 3.11, which main reports

    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    earlier_names: set[str] = set()
    requirements: dict[str, list[str]] = {}
    for group, lines in groups.items():
        names = [normalise(re.split(r"[\s<>=!~;\[]", line)[0]) for line in lines]
        requirements[group] = [name for name in names if name not in earlier_names | {OWN}]
        earlier_names.update(names)
    return requirements


def tasks_with(name: str, group: str) -> list[str]:
    """Return the tasks that need a package, or else those that need any other of its group."""
    from tasks.engine.family import families  # of the Python that main has checked

    optional = [
        f"task={family.name} {family.uses[name]}"
        for family in families().values()
        if name in family.uses
    ]
    if optional:
        return optional
    needs = {family.name: set(family.needs) for family in families().values()}
    group_names = set(read_requirements()[group]) if group else set()
    tasks = [task for task, packages in needs.items() if name in packages]
    return tasks or [task for task, packages in needs.items() if packages & group_names]


def describe(name: str, group: str, tested: str, installed: str | None) -> Package:
    """Compare one package with the tested set, ignoring local parts such as +cu130."""
    status: Status = "missing"
    if installed is not None:
        status = "ok" if installed.split("+")[0] == tested else "untested version"
    remedy = "" if status == "ok" else f"{PIP} {name}"
    if remedy and IN_VENV:
        remedy = "make install"
    feature = FEATURES.get(name) or ", ".join(tasks_with(name, group))
    feature = feature or GROUP_FEATURES.get(group, group)
    return Package(name, group, installed, tested, status, feature, remedy)


def list_packages(version_of: VersionOf = installed_version) -> list[Package]:
    """Return every direct requirement, in the order of pyproject.toml."""
    tested = read_pins()
    return [
        describe(name, group, tested.get(name, "?"), version_of(name))
        for group, names in read_requirements().items()
        for name in names
    ]
