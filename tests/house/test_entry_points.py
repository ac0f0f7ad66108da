"""A mixer, host, family and data module of an installed package, each by its entry point."""

import json
import os
import subprocess
import sys

import pytest

from tests.runs import ROOT

FILES = {
    "mixer": """
from backbones import register_mixer
from backbones.mixers.ffn import FFN

@register_mixer("lab_mixer", kind="channel", source="a test")
class LabMixer(FFN):
    pass
""",
    "host": """
from backbones import register_host
from backbones.hosts.deit import deit_t

register_host("lab_host", source="a test")(deit_t)
""",
    "family": """
from dataclasses import replace
from tasks.classification import family

FAMILY = replace(family.FAMILY, name="lab", task="lab.task.LabTask")
""",
    "task": """
from tasks.classification.task import ClassificationTask

class LabTask(ClassificationTask):
    pass
""",
    "data": """
from datamodules import ImageFolderDataModule

class LabSet(ImageFolderDataModule):
    pass
""",
}
POINTS = {
    "mixers": "lab_mixer = lab.mixer", "hosts": "lab_host = lab.host",
    "families": "lab = lab.family", "data": "lab_set = lab.data:LabSet",
}  # fmt: skip
SCRIPT = """
import json, sys
from backbones import create_backbone
from backbones.registry import find_mixer
from tasks.engine.family import family_of_task, find_family
from tasks.engine.instantiate import build

loaded = lambda: sorted(name for name in sys.modules if name.startswith("lab."))
found = {"before": loaded(), "mixers": [find_mixer("lab_mixer").build.__name__, loaded()]}
backbone = create_backbone("lab_host", mixer="lab_mixer", img_size=64)
found["hosts"] = [backbone.name, sorted({type(m).__name__ for m in backbone.mixers().values()})]
found["families"] = [find_family("lab").name, family_of_task(["lab.task.LabTask"]).task]
found["data"] = [type(build({"_target_": "lab.data.LabSet"}, "data")).__name__]
print(json.dumps(found))
"""
EXPECTED = {
    "before": [],  # a package is imported when a name of it is looked up
    "mixers": ["LabMixer", ["lab.mixer"]],
    "hosts": ["lab_host_lab_mixer", ["LabMixer"]],
    "families": ["lab", "lab.task.LabTask"],
    "data": ["LabSet"],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a fresh interpreter finds beside an installed package."""
    site = tmp_path_factory.mktemp("site")
    (site / "lab").mkdir()
    for name, text in FILES.items():
        (site / "lab" / f"{name}.py").write_text(text)
    info = site / "lab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    points = "".join(f"[mixerlab.{group}]\n{point}\n" for group, point in POINTS.items())
    (info / "entry_points.txt").write_text(points)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("group", EXPECTED)
def test_a_package_adds_one_of_each_kind(group, found):
    assert found[group] == EXPECTED[group]
