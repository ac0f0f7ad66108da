"""to=hub: the model folder of a run, its upload, and what opens it: others' files as data alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from backbones import create_backbone
from backbones.checkpoints.hub import CONFIG, WEIGHTS, open_model_folder
from tasks import load
from tests.families import rest_slow
from tests.hub_server import served_hub
from tests.runs import SMALLEST
from tools import export
from tools.cli.paths import ROOT

IMAGE = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)


@pytest.fixture(scope="module")
def model_folder(smallest_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "model"
    assert export.main([f"ckpt={smallest_run('classification')}", "to=hub", f"out={folder}"]) == 0
    return folder


@pytest.fixture
def changed(model_folder, tmp_path):
    """A function that copies the folder with a change of its config's entries."""

    def copy(change):
        content = json.loads((model_folder / CONFIG).read_text())
        change(content)
        content.pop("mixerlab", None)
        (tmp_path / WEIGHTS).write_bytes((model_folder / WEIGHTS).read_bytes())
        (tmp_path / CONFIG).write_text(json.dumps(content))
        return f"local-dir:{tmp_path}"

    return copy


@pytest.mark.parametrize("family", rest_slow(SMALLEST, ["classification"]))
def test_a_run_of_any_family_opens_from_its_folder(family, smallest_run, tmp_path, capsys):
    """With the run's own values, a whole card, and without paths of this machine."""
    run, out = smallest_run(family), tmp_path / "model"
    assert export.main([f"ckpt={run}", "to=hub", f"out={out}", "licence=mit"]) == 0
    assert capsys.readouterr().out.split() == [str(out / n) for n in (CONFIG, WEIGHTS, "README.md")]
    ours, opened = load(run), load(f"local-dir:{out}")
    assert ours.target_state() == opened.target_state()
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, opened.model.state_dict()[name])
    backbone = create_backbone(f"local-dir:{out}")
    assert backbone.record["weights_from"] == f"local-dir:{out}"
    card = (out / "README.md").read_text()
    assert "license: mit" in card
    for title in ("Use", "Data", "Metrics", "Size", "Citation", "Licence"):
        assert f"## {title}\n" in card
    summary = json.loads((run / "summary.json").read_text())
    assert f"{summary['parameters']:,.0f} parameters" in card
    for text in (card, (out / CONFIG).read_text()):
        assert str(Path.home()) not in text
        assert str(run.parents[2]) not in text


def test_a_folder_is_exported_as_a_run_is(changed, tmp_path, capsys):
    """Also one of a stranger whose config names neither seed nor schedule."""

    def shorten(content):
        for name in ("seed", "optimizer", "schedule", "choices"):
            content["config"].pop(name)

    words = [f"ckpt={changed(shorten)}", "to=timm", f"out={tmp_path / 'timm'}"]
    assert export.main(words) == 0, capsys.readouterr().err


def test_the_card_has_the_interval_of_the_tested_metric(smallest_run, model_folder):
    lines = (model_folder / "README.md").read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| top1 |")]
    low, high = (float(end) for end in row.split("|")[3].split(" to "))
    summary = json.loads((smallest_run("classification") / "summary.json").read_text())
    assert low <= summary["metrics"]["top1"] <= high


def hidden_pickle(content):
    content["config"]["backbone"]["pretrained"] = "/tmp/weights.pth"


CHANGES = {
    "another class": (
        lambda c: c["config"]["task"].update(_target_="os.system"), "task._target_=os.system is"
    ),
    "a nested class": (
        lambda c: c["config"]["data"].update(augmentation={"_target_": "builtins.eval"}),
        "data.augmentation._target_=builtins.eval is refused",
    ),
    "a file": (hidden_pickle, "names a file in backbone.pretrained"),
    "a folder": (lambda c: c["config"]["data"].update(root="~/photos"), "a file in data.root"),
    "another backbone": (
        lambda c: c["config"]["backbone"].update(name="nothing_of_ours"), "nothing_of_ours"
    ),
    "an unknown option": (lambda c: c["config"]["backbone"].update(shell="ls"), "shell"),
    "no config": (lambda c: c.pop("config"), "config.json"),
    "names as numbers": (lambda c: c.update(class_names=[1, 2]), "keys|class"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_a_strangers_config_names_parts_of_a_closed_list(kind, changed):
    change, said = CHANGES[kind]
    with pytest.raises(ValueError, match=said):
        load(changed(change))


def test_a_pickle_in_place_of_the_weights_stays_closed(model_folder, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_bytes((model_folder / CONFIG).read_bytes())
    with pytest.raises(ValueError, match=WEIGHTS):
        load(f"local-dir:{tmp_path}")
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        load(f"local-dir:{tmp_path / 'absent'}")


def test_weights_of_another_config_are_damaged(model_folder, tmp_path):
    tensors = safetensors.torch.load_file(model_folder / WEIGHTS)
    name = next(iter(tensors))
    tensors[name] = tensors[name] + 1
    safetensors.torch.save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_bytes((model_folder / CONFIG).read_bytes())
    with pytest.raises(ValueError, match="checksum"):
        load(f"local-dir:{tmp_path}")


def test_a_run_without_its_folder_is_refused(tmp_path, capsys):
    assert export.main(["backbone=deit_t", "to=hub", f"out={tmp_path / 'out'}"]) == 2
    assert "to=hub takes a trained run; pass ckpt=<run folder>" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["hf-hub:", "hf-hub:a/b/c", "hf-hub:../x", "hf-hub:a b"])
def test_a_source_has_a_form(source):
    with pytest.raises(ValueError, match=r"must be hf-hub:owner/name|could not be fetched"):
        open_model_folder(source)


SCRIPT = """
import json, sys, numpy as np, torch
from backbones import create_backbone
from tasks import load
task = load(sys.argv[1])
backbone = create_backbone(sys.argv[1])
image = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
print(json.dumps([str(task.source), backbone.record["weights_from"], task.predict(image)]))
"""


class Client:
    """Processes with a hub at an address, and a cache of their own."""

    def __init__(self, address, folder):
        self.environment = os.environ | {
            "HF_ENDPOINT": address, "HF_HOME": str(folder), "PYTHONPATH": str(ROOT),
            "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

    def run(self, *words):
        return subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=self.environment
        )

    def loads(self, source):
        ended = self.run("-c", SCRIPT, source)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout), ended.stderr


@pytest.mark.slow
def test_a_hub_serves_a_revision_that_is_printed_and_kept(model_folder, tmp_path):
    """Also without network once it is in the cache; an earlier commit stays reachable."""
    files = {name: (model_folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    with served_hub() as (hub, address):
        client = Client(address, tmp_path)
        first = hub.add("owner/name", files)
        hub.add("owner/name", {**files, "evil.py": b"raise SystemExit"})
        (source, weights, rows), printed = client.loads(f"hf-hub:owner/name@{first}")
        assert source == weights == f"hf-hub:owner/name@{first}"
        assert printed == ""
        (newest, _, others), printed = client.loads("hf-hub:owner/name")
        assert newest == f"hf-hub:owner/name@{hub.main['owner/name']}"
        assert f"hf-hub:owner/name is {newest}" in printed
        assert rows == others == load(f"local-dir:{model_folder}").predict(IMAGE)
        assert {path.rpartition("/")[2] for method, path in hub.seen if method == "GET"} == {
            CONFIG, WEIGHTS
        }  # fmt: skip
        absent = client.run("-c", SCRIPT, "hf-hub:owner/other").stderr
        assert "config.json of hf-hub:owner/other could not be fetched" in absent
    (offline, _, rows), _ = client.loads("hf-hub:owner/name")
    assert (offline, rows) == (newest, others)


@pytest.mark.slow
def test_a_folder_is_pushed_and_opens_from_the_hub(smallest_run, tmp_path):
    words = [f"ckpt={smallest_run('classification')}", "to=hub", "repo=owner/name"]
    tool = str(ROOT / "tools" / "export.py")
    with served_hub() as (hub, address):
        client = Client(address, tmp_path / "cache")
        ended = client.run(tool, *words, f"out={tmp_path / 'model'}")
        assert ended.returncode == 0, ended.stderr
        assert f"pushed to {address}/owner/name/commit/" in ended.stderr
        (pushed,) = hub.repos["owner/name"].values()
        assert set(pushed) == {CONFIG, WEIGHTS, "README.md"}
        client.loads("hf-hub:owner/name")
    ended = client.run(tool, *words, f"out={tmp_path / 'offline'}")
    assert ended.returncode == 0
    assert "hf upload owner/name" in ended.stderr
    assert (tmp_path / "offline" / WEIGHTS).is_file()


@pytest.mark.slow
def test_published_weights_without_network_end_in_one_line(tmp_path):
    client = Client("http://127.0.0.1:9", tmp_path)
    words = ["backbone=resnet18", "backbone.pretrained=true", f"output_dir={tmp_path}"]
    ended = client.run(str(ROOT / "tools" / "run.py"), *words)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert line.startswith("error: timm could not fetch its weights")
