"""An export replaces the files of an earlier export, and keeps all others."""

import pytest

from tools.exports.requests import MADE, MARK, new_folder


def exported(out, files, **options):
    with new_folder(out, **options) as folder:
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)


def content(folder):
    return {str(path.relative_to(folder)): path.read_text()
            for path in folder.rglob("*") if path.is_file() and path.name != MARK}  # fmt: skip


def test_overwriting_keeps_files_of_the_user(tmp_path):
    out = tmp_path / "out"
    exported(out, {"a": "1", "old/b": "1", "older/c": "1"}, overwrite=False)
    (out / "notes.txt").write_text("mine")
    (out / "old" / "notes.txt").write_text("mine")
    exported(out, {"a": "2", "new/d": "2"}, overwrite=True)
    mine = {"notes.txt": "mine", "old/notes.txt": "mine"}
    assert content(out) == {"a": "2", "new/d": "2", **mine}
    assert not (out / "older").exists()
    assert (out / MARK).read_text().splitlines() == [MADE, "a", "new/d"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_users_file_in_the_way_is_named(tmp_path):
    out = tmp_path / "out"
    exported(out, {"a": "1"}, overwrite=False)
    (out / "b").write_text("mine")
    with pytest.raises(ValueError, match="has b, not made by an export; rename it"):
        exported(out, {"a": "2", "b": "2"}, overwrite=True)
    assert content(out) == {"a": "1", "b": "mine"}


@pytest.mark.parametrize("name", ["../precious", "{root}/precious", "link/precious"])
def test_a_record_with_files_outside_removes_none(name, tmp_path):
    (tmp_path / "precious").write_text("mine")
    out = tmp_path / "out"
    exported(out, {"a": "1"}, overwrite=False)
    (out / "link").symlink_to(tmp_path)
    with (out / MARK).open("a") as file:
        file.write(f"{name.format(root=tmp_path)}\n")
    with pytest.raises(ValueError, match=r"is outside of .*out, where exports stay"):
        exported(out, {"a": "2"}, overwrite=True)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    "text", ["Made by an export, which may replace this folder.\n", "", f"{MADE}\n\0\n"]
)
def test_a_folder_without_a_record_is_rejected(text, tmp_path):
    (tmp_path / MARK).write_text(text)
    with pytest.raises(ValueError, match="does not list the export's files"):
        exported(tmp_path, {"a": "2"}, overwrite=True)
