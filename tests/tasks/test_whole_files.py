"""Files are written atomically and never through a link."""

import contextlib

import pytest

from tasks.engine.callbacks.loggers import CsvLog, read_rows
from tasks.engine.run_folder.atomic_writes import make_folder, whole_file, write_whole
from tasks.engine.run_folder.bounded_reading import DamagedFile


def test_a_file_is_replaced_when_complete(tmp_path):
    path = tmp_path / "a.txt"
    write_whole(path, "before \udcff")
    with contextlib.suppress(RuntimeError), whole_file(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"before \xff"
    write_whole(path, b"after")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.txt", "after")]
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(OSError, match=r"a\.txt could not be written \(No space left on .*; what"):
        with whole_file(path):
            raise OSError(28, "No space left on device")
    assert path.read_text() == "before"


@pytest.mark.parametrize("target", ["link", "partial", "dangling"])
def test_links_are_replaced_and_not_followed(target, tmp_path):
    foreign, path = tmp_path / "foreign", tmp_path / "a.txt"
    foreign.write_text("mine")
    where = path.with_name(".a.txt.partial") if target == "partial" else path
    where.symlink_to(tmp_path / "absent" if target == "dangling" else foreign)
    write_whole(path, "ours")
    assert foreign.read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_text() == "ours"
    assert not (tmp_path / "absent").exists()


def test_a_folder_is_made_unless_the_path_is_taken(tmp_path):
    assert make_folder(tmp_path / "a") == make_folder(tmp_path / "a")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match=r"the folder .*file cannot be made \(File exists\)"):
        make_folder(tmp_path / "file")
    with pytest.raises(OSError, match="link is a link and is not followed; remove it"):
        make_folder(tmp_path / "link")


def test_metrics_are_not_written_through_a_link(tmp_path, caplog):
    foreign, path = tmp_path / "foreign.csv", tmp_path / "metrics.csv"
    log = CsvLog(path)
    log.log_metrics({"loss": 1.0}, step=0)
    log.save()
    path.rename(foreign)
    before = foreign.read_text()
    path.symlink_to(foreign)
    log.log_metrics({"loss": 2.0}, step=1)
    log.save()
    assert "metrics.csv cannot be written" in caplog.text
    with pytest.raises(DamagedFile, match="is a link, which is not followed"):
        read_rows(path)
    resumed = CsvLog(path)
    resumed.resume_at(2)
    resumed.log_metrics({"loss": 3.0}, step=2)
    resumed.save()
    assert read_rows(path) == [{"step": 2, "loss": 3.0}]
    assert foreign.read_text() == before
