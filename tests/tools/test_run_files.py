"""Broken files of a run folder are reported in one sentence, without hanging."""

import json
import os

import pytest
import yaml

from tasks.engine.plain_files import DamagedFile, read_csv, read_json, read_text, read_yaml
from tasks.engine.run_files import read_classes, read_rows, read_run_config, read_summary
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
    path = folder / name
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path),
     "link to a device": lambda: path.symlink_to("/dev/zero")}[kind]()  # fmt: skip
    found = read_run(folder)
    expected = {
        "link to a device": "is a link, which is not followed",
    }.get(kind, "cannot be read (it is a folder, pipe or device)")
    assert (found.status, found.reason) == ("unreadable", f"{name} {expected}")


BOMB = "a: &a [x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [BOMB, "a: &a [*a]", "[" * 10**5, "{a: " * 10**4, "a: 2020-01-01", "a: !!set {b}",
     "a: &a {b: 1}\nc: {<<: *a}", f"a: {10**30}", "a: [1", "a: !!python/object:os.system {}",
     "a" * (2**24 + 1)],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_yaml_without_end_is_named(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(DamagedFile, match=r"a\.yaml cannot be read \(") as refused:
        read_yaml(tmp_path / "a.yaml")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("text", ["[" * 10**5, "{", "9" * 5000, "1" * 30, "\x00"])
def test_json_without_end_is_named(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DamagedFile, match=r"a\.json cannot be read \("):
        read_json(tmp_path / "a.json")


def change_value(content, path, value):
    content = json.loads(json.dumps(content))
    *parents, last = path.split(".")
    place = content
    for parent in parents:
        place = place[parent]
    place[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value"),
    [("task_name", 3), ("task_name", "a/b"), ("backbone", None), ("backbone.name", "../x"),
     ("head", []), ("data._target_", 1), ("seed", "x"), ("seed", -1), ("mode", "train"),
     ("overrides", 3), ("overrides", [1]), ("paper", "afbo"), ("paper", {"table": []}),
     ("protocol", ["x"]), ("trainer", 3), ("data.a b", 1), ("head.x", "${oc.env:HOME}")],
)  # fmt: skip
def test_a_config_of_other_types_is_named(path, value, folder):
    (folder / "config.yaml").write_text(yaml.safe_dump(change_value(CONFIG, path, value)))
    with pytest.raises(DamagedFile, match=r"config\.yaml is damaged: "):
        read_run_config(folder / "config.yaml")
    assert read_run(folder).reason.startswith("config.yaml is damaged: ")


@pytest.mark.parametrize(
    ("path", "value"),
    [("metrics", None), ("metrics", []), ("metrics.top1", "x"), ("metrics.top1", [1]),
     ("parameters", "x"), ("seconds", None), ("backbone_macs", {}), ("macs_at", [64]),
     ("macs_at", 64), ("network", []), ("data", 3), ("data", {"images": {"val": "x"}}),
     ("data", {"fingerprints": {"val": 3}}), ("paper", {"row": 1}), ("overrides", "x"),
     ("images_per_second", 3.0), ("num_workers", "x")],
)  # fmt: skip
def test_a_summary_of_other_types_is_named(path, value, folder):
    (folder / "summary.json").write_text(json.dumps(change_value(SUMMARY, path, value)))
    with pytest.raises(DamagedFile, match=r"summary\.json is damaged: "):
        read_summary(folder / "summary.json")
    assert read_run(folder).reason.startswith("summary.json is damaged: ")


@pytest.mark.parametrize(
    "text", ["class,IoU\na\n", "class,IoU\na,b\n", "class,IoU\na," + "1" * 140_000 + "x\n"]
)
def test_classes_of_other_cells_are_named_or_left_out(text, tmp_path):
    (tmp_path / "classes.csv").write_text(text)
    if "1" in text:
        assert read_classes(tmp_path / "classes.csv") == []
        return
    with pytest.raises(DamagedFile, match=r"classes\.csv is damaged"):
        read_classes(tmp_path / "classes.csv")


def test_an_endless_cell_only_loses_its_line(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2\n2," + "9" * 140_000 + "\n3,4\n")
    assert read_rows(tmp_path / "metrics.csv") == [{"step": 1, "loss": 2}, {"step": 3, "loss": 4}]
    assert list(read_csv(tmp_path / "metrics.csv"))[2] == []


def test_a_summary_is_valid_json():
    content = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -float("inf")}}
    assert json.dumps(_valid_json(content), allow_nan=False) == (
        '{"a": null, "b": [null, 1.5], "c": {"d": null}}'
    )


def test_null_in_a_summary_is_nan(folder):
    (folder / "summary.json").write_text(json.dumps(change_value(SUMMARY, "metrics.top1", None)))
    assert read_run(folder).reason == "top1 must be a finite number"


def test_read_text_names_unreadable_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")
    (tmp_path / "a").write_bytes(b"ab\xff")
    with pytest.raises(DamagedFile, match="byte 2 is not UTF-8"):
        read_text(tmp_path / "a")
