"""Lists of images that exports write for MMPretrain."""

import subprocess
import sys

from tools.exports.class_lists import write_annotations, write_names


def test_hidden_files_are_skipped_and_empty_splits_rejected(tmp_path):
    (tmp_path / "export").mkdir()
    write_names(tmp_path / "export", ["2", "10"])
    script = write_annotations(tmp_path / "export", [".jpg"])
    for name in ("2/a.JPG", "2/b/c.jpg", "2/._a.jpg", "2/.x/a.jpg", "10/a b.jpg", "10/a.txt"):
        file = tmp_path / "data/train" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    command = [sys.executable, script, tmp_path / "data"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert (
        "data/val must have class folders with images, named as in class_names.json" in ended.stderr
    )
    assert (tmp_path / "data/train.txt").read_text() == "2/a.JPG 0\n2/b/c.jpg 0\n10/a b.jpg 1\n"
