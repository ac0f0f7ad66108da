"""Messages for errors that the machine or another process causes."""

import pytest

from tasks.engine.checkpoints.files import AtomicCheckpointIO
from tools.cli.errors import one_line_errors
from tools.runs.outcome import read_failure, recording_failure

SHARED_MEMORY = "enlarge it (docker run --shm-size=1g), lower data.batch_size, or pass data.num_"
SAID = {
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory. ": SHARED_MEMORY,
    "unable to allocate shared memory(shm) for file </torch_7_0>: No space": SHARED_MEMORY,
    "DataLoader worker (pid 7) is killed by signal: Killed. ": "lower data.num_workers",
    "DataLoader worker (pid(s) 7, 8) exited unexpectedly": "lower data.num_workers",
    "The server socket has failed to bind. EADDRINUSE": "the port through which",
    "[enforce fail] DefaultCPUAllocator: can't allocate memory": "this machine has too little",
}


@pytest.mark.parametrize("text", SAID)
def test_errors_of_libraries_become_one_sentence(text, capsys):
    with pytest.raises(SystemExit), one_line_errors():
        raise RuntimeError(text)
    assert SAID[text] in capsys.readouterr().err


def test_workers_and_disks_that_fail_are_reported(tmp_path, capsys):
    class Killed:
        def __reduce__(self):
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    with pytest.raises(SystemExit), one_line_errors():
        AtomicCheckpointIO().save_checkpoint({"a": Killed()}, tmp_path / "last.ckpt")
    assert capsys.readouterr().err.startswith("error: DataLoader worker (pid 7) is killed")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=r"could not be written .*; there is none before it"):
        AtomicCheckpointIO().save_checkpoint({"a": FullDisk()}, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="is broken"), recording_failure(tmp_path):
        raise ValueError("/data/\udcff.jpg is broken")
    assert read_failure(tmp_path) == "/data/\\udcff.jpg is broken"


class FullDisk:
    def __reduce__(self):
        raise OSError(28, "No space left on device")
