"""Checks beyond version numbers: packages that do not fit each other or the machine.

Uses the standard library only, since everything else may be missing or broken.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from tools.cli.paths import ROOT
from tools.installation.packages import (
    IN_VENV,
    IS_CHECKOUT,
    PIP,
    REPAIR,
    VENV,
    VersionOf,
    installed_version,
)

# Distributions that overwrite the files of the ones we use.
ORIGINALS = {
    "onedl-mmcv": ("mmcv", "mmcv-full", "mmcv-lite"),
    "onedl-mmengine": ("mmengine", "mmengine-lite"),
    "onedl-mmdetection": ("mmdet",),
    "onedl-mmsegmentation": ("mmsegmentation",),
}
OPENCV = (
    "opencv-python",
    "opencv-python-headless",
    "opencv-contrib-python",
    "opencv-contrib-python-headless",
)
MIN_FREE_GB = 5.0
PROBE = f"""
import json, sys, torch
sys.path.insert(0, {str(ROOT)!r})
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
found = {{"gpus": gpus, "operators": None, "error": None, "kernels": ""}}
found |= {{"registered": "", "broken": ""}}
try:
    import heads, mmcv.ops
    found["operators"] = mmcv.ops.get_compiler_version()
except Exception as error:  # reported, whatever it is
    found["error"] = f"{{type(error).__name__}}: {{error}}"
try:
    from backbones import fast
    for index in range(len(gpus)):
        fast.try_all(torch.device("cuda", index))
    found["kernels"] = fast.status()
except Exception as error:
    found["kernels"] = f"{{type(error).__name__}}: {{error}}"
try:
    from backbones import registry
    found["registered"] = f"{{len(registry.mixers())}} mixers, {{len(registry.hosts())}} hosts"
except Exception as error:
    found["broken"] = str(error)
print("\\n" + json.dumps(found))
"""

FILES = "mixers and hosts"
Level = Literal["ok", "note", "problem"]
EMPTY_PROBE: dict[str, Any] = {
    "gpus": [],
    "operators": None,
    "error": "torch is missing",
    "kernels": "torch is missing",
    "registered": "",
    "broken": "",
}


@dataclass(frozen=True)
class Check:
    """Result of one check; a problem in the core makes the exit status 1."""

    name: str
    level: Level
    text: str
    remedy: str = ""
    core: bool = False


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """Check that the Python version fits, and that `make install`'s Python is used if it exists."""
    text = f"{platform.python_version()} at {sys.executable}"
    remedy = ".venv/bin/python tools/doctor.py" if VENV.exists() else REPAIR
    if not (3, 11) <= version <= (3, 13):
        return Check("python", "problem", f"{text}; 3.11 to 3.13 is needed", remedy, core=True)
    if VENV.exists() and not IN_VENV:
        return Check("python", "note", f"{text}; {VENV} is not in use", remedy)
    return Check("python", "ok", text)


def required_torch() -> str | None:
    """Return the torch version that the installed torchvision was built for."""
    if installed_version("torchvision") is None:
        return None
    for line in metadata.requires("torchvision") or ():
        if match := re.match(r"torch\s*\(?==\s*([\w.]+)", line):
            return match[1]
    return None


def check_torch_pair(
    version_of: VersionOf = installed_version, versions: str | None = required_torch()
) -> Check:
    """Check that the installed torchvision was built for the installed torch."""
    torch, torchvision = version_of("torch"), version_of("torchvision")
    if torch is None or torchvision is None:
        return Check("torch and torchvision", "problem", "missing", REPAIR, core=True)
    text = f"torch {torch}, torchvision {torchvision}"
    if versions is None or versions == torch.split("+")[0]:
        return Check("torch and torchvision", "ok", text)
    remedy = f"{PIP} torch torchvision, then {REPAIR}"
    text += f", which was built for torch {versions}"
    return Check("torch and torchvision", "problem", text, remedy, core=True)


def check_overwritten(version_of: VersionOf = installed_version) -> list[Check]:
    """Check that the original MM packages have not overwritten the maintained ones."""
    checks = []
    for fork, originals in ORIGINALS.items():
        names = [name for name in originals if version_of(name) is not None]
        if names:
            text = f"{' and '.join(names)} overwrites its files in the same folder"
            remedy = f"pip uninstall -y {' '.join([*names, fork])}, then {REPAIR}"
            checks.append(Check(fork, "problem", text, remedy))
    return checks


def opencv_is_headless() -> bool:
    """Return True if the cv2 folder has the files of a headless distribution."""
    for folder in sys.path:
        facts = Path(folder) / "cv2" / "version.py"
        if facts.is_file():
            return "headless = True" in facts.read_text(encoding="utf-8")
    return False


def check_opencv(
    version_of: VersionOf = installed_version, is_headless: Callable[[], bool] = opencv_is_headless
) -> Check:
    """Check that the OpenCV packages in the shared folder agree, the headless one on top."""
    versions = {name: version for name in OPENCV if (version := version_of(name)) is not None}
    text = ", ".join(f"{name} {version}" for name, version in versions.items()) or "missing"
    if not versions:
        return Check("opencv", "note", text, REPAIR)
    repair = f"{PIP} --force-reinstall --no-deps opencv-python-headless"
    if len(set(versions.values())) > 1:
        remedy = f"{PIP} {' '.join(versions)}, then {repair}"
        return Check("opencv", "problem", f"{text}: they share one folder and must agree", remedy)
    if not is_headless():
        return Check("opencv", "note", f"{text}; the one installed last needs libGL", repair)
    return Check("opencv", "ok", text)


def probe() -> dict[str, Any]:
    """Import torch and mmcv.ops in a separate process, since a wrong binary may crash it."""
    command = [sys.executable, "-c", PROBE]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return {**EMPTY_PROBE, "error": "importing torch and mmcv took more than 5 minutes"}
    try:
        return dict(json.loads(run.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last = (run.stderr.strip().splitlines() or [f"status {run.returncode}"])[-1]
        return {**EMPTY_PROBE, "error": last}


def check_operators(facts: dict[str, Any], version_of: VersionOf = installed_version) -> Check:
    """Check that mmcv's operators load: torchvision's, or compiled ones for this torch."""
    mmcv, torch = version_of("onedl-mmcv"), version_of("torch")
    if mmcv is None:
        return Check("mmcv operators", "note", "mmcv is not installed", REPAIR)
    pair = f"mmcv {mmcv}, torch {torch}, Python {platform.python_version()}"
    if facts["error"]:
        text = f"do not work for {pair}: {facts['error']}"
        again = "pip install --force-reinstall --no-deps --no-cache-dir onedl-mmcv"
        return Check("mmcv operators", "problem", text, again)
    return Check("mmcv operators", "ok", f"{pair}: {facts['operators']}")


def check_kernels(facts: dict[str, Any]) -> Check:
    """Check that our operators are compiled; without them mixers are slower, with equal results."""
    text = facts["kernels"]
    if "switched off" in text:
        return Check("mixer operators", "note", text, "unset MIXERLAB_KERNELS")
    if not text.startswith("compiled"):
        compilers = filter(None, (os.environ.get("CXX", "").partition(" ")[0], "g++", "c++"))
        found_one = any(map(shutil.which, compilers))
        compiles = REPAIR if found_one else f"apt-get install g++, then {REPAIR}"
        remedy = compiles if IS_CHECKOUT else ""  # a wheel's mixers run torch's operators
        return Check("mixer operators", "note", text, remedy)
    return Check("mixer operators", "ok", text)


def check_files(facts: dict[str, Any], version_of: VersionOf = installed_version) -> Check:
    """Check that every file of backbones/mixers and hosts can be imported."""
    if version_of("timm") is None:
        return Check(FILES, "note", "not checked, because timm is missing", REPAIR)
    if facts["broken"]:
        remedy = "fix the file, or move it out of the folder"
        return Check(FILES, "problem", facts["broken"], remedy, core=True)
    if not facts["registered"]:
        return Check(FILES, "note", f"not checked: {facts['error']}", REPAIR)
    return Check(FILES, "ok", facts["registered"])


def check_devices(facts: dict[str, Any]) -> Check:
    """List processors and GPUs; a machine without a GPU is fine."""
    gpus = ", ".join(facts["gpus"]) or "no GPU (training runs on the CPU)"
    return Check("devices", "ok", f"{len(os.sched_getaffinity(0))} CPU cores, {gpus}")


def check_disk(free_bytes: int | None = None) -> Check:
    """Check that there is room for sample data and runs."""
    space = (shutil.disk_usage(ROOT).free if free_bytes is None else free_bytes) / 2**30
    if space < MIN_FREE_GB:
        text = f"{space:.1f} GB free; runs and sample data may need {MIN_FREE_GB:.0f}"
        return Check("disk", "note", text, "free some space")
    return Check("disk", "ok", f"{space:.0f} GB free")


def run_checks() -> list[Check]:
    """Run all checks."""
    facts = EMPTY_PROBE if installed_version("torch") is None else probe()
    return [
        check_python(),
        check_torch_pair(),
        *check_overwritten(),
        check_opencv(),
        check_operators(facts),
        check_kernels(facts),
        check_files(facts),
        check_devices(facts),
        check_disk(),
    ]
