"""Broken files of a run folder are reported in one sentence, without hanging."""

import json
import os

import pytest
import yaml

from tasks.engine.run_folder.bounded_reading import (
    DamagedFile,
    read_json,
    read_yaml,
)
from tasks.engine.run_folder.schemas import read_run_config, read_summary
from tools.comparing.run_records import read_run
from tools.runs.report import _valid_json

CONFIG = {"task_name": "x", "seed": 0, "mode": "fit", "backbone": {"name": "x"},
          **{part: {"_target_": "x"} for part in ("head", "data", "task")}}  # fmt: skip
SUMMARY = {"metrics": {"top1": 1.0}, "parameters": 1, "backbone_macs": 2, "seconds": 3}
FILES = ("config.yaml", "summary.json", "metrics.csv", "error.txt")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    return tmp_path


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a device"])
@pytest.mark.parametrize("name", FILES)
def test_wrong_kinds_of_files_are_named(name, kind, folder):
    if name in ("metrics.csv", "error.txt"):
        (folder / "summary.json").unlink()
    (folder / name).unlink(missing_ok=True)
    path, reason = folder / name, "cannot be read (it is a folder, pipe or device)"
    if kind == "link to a device":
        path.symlink_to("/dev/zero")
        reason = "is a link, which is not followed"
    else:
        (os.mkdir if kind == "folder" else os.mkfifo)(path)
    found = read_run(folder)
    assert (found.status, found.reason) == ("unreadable", f"{name} {reason}")


BOMB = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


YAMLS = (
    BOMB, "a: &a [*a]", "[" * 10**5, "{a: " * 10**4, "a: 2020-01-01", "a: !!set {b}",
    "a: &a {b: 1}\nc: {<<: *a}", f"a: {10**30}", "a: [1", "a: !!python/object:os.system {}",
    "a" * (2**24 + 1),
)  # fmt: skip
JSONS = ("[" * 10**5, "{", "9" * 5000, "1" * 30, "\x00")


@pytest.mark.parametrize(
    ("read", "text"),
    [*((read_yaml, text) for text in YAMLS), *((read_json, text) for text in JSONS)],
    ids=lambda value: value[:12] if isinstance(value, str) else value.__name__,
)
def test_files_without_end_are_named(read, text, tmp_path):
    (tmp_path / "a.x").write_text(text)
    with pytest.raises(DamagedFile, match=r"a\.x cannot be read \(") as refused:
        read(tmp_path / "a.x")
    assert len(str(refused.value)) < 400


def change_value(content, path, value):
    content = json.loads(json.dumps(content))
    *parents, last = path.split(".")
    place = content
    for parent in parents:
        place = place[parent]
    place[last] = value
    return content


CHANGES = {
    "config": [
        ("task_name", 3), ("task_name", "a/b"), ("backbone", None), ("backbone.name", "../x"),
        ("head", []), ("data._target_", 1), ("seed", "x"), ("seed", -1), ("mode", "train"),
        ("overrides", 3), ("overrides", [1]), ("paper", "afbo"), ("paper", {"table": []}),
        ("protocol", ["x"]), ("trainer", 3), ("data.a b", 1), ("head.x", "${oc.env:HOME}"),
    ],
    "summary": [
        ("metrics", None), ("metrics", []), ("metrics.top1", "x"), ("metrics.top1", [1]),
        ("parameters", "x"), ("seconds", None), ("backbone_macs", {}), ("macs_at", []),
        ("macs_at", 64), ("network", []), ("data", 3), ("data", {"samples": {"val": "x"}}),
        ("data", {"fingerprints": {"val": 3}}), ("paper", {"row": 1}), ("overrides", "x"),
        ("samples_per_second", 3.0), ("num_workers", "x"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_a_config_or_summary_of_other_types_is_named(kind, folder):
    content, name, read = {
        "config": (CONFIG, "config.yaml", read_run_config),
        "summary": (SUMMARY, "summary.json", read_summary),
    }[kind]
    for path, value in CHANGES[kind]:
        (folder / name).write_text(json.dumps(change_value(content, path, value)))
        reason = read_run(folder).reason or ""
        assert reason.startswith(f"{name} is damaged: "), (path, value)
        with pytest.raises(DamagedFile, match=rf"{name} is damaged: "):
            read(folder / name)


def test_a_summary_is_valid_json_and_null_is_nan(folder):
    content = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}}
    assert json.dumps(_valid_json(content), allow_nan=False) == (
        '{"a": null, "b": [null, 1.5], "c": {"d": null}}'
    )
    (folder / "summary.json").write_text(json.dumps(change_value(SUMMARY, "metrics.top1", None)))
    assert read_run(folder).reason == "top1 must be a finite number"


def test_a_summary_of_an_older_release_counts_samples(tmp_path):
    content = {"metrics": {}, "parameters": 1.0, "backbone_macs": 1.0, "seconds": 1.0}
    older = {"data": {"images": {"val": 3}}, "images_per_second": 2.0, "num_workers": 0}
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(content | older | {"waiting_for_data": 0.0}))
    found = read_summary(file)
    assert (found["data"], found["samples_per_second"]) == ({"samples": {"val": 3}}, 2.0)
