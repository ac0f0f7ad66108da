"""Which errors of a run are the user's or the machine's, and their one message."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from tools.cli.paths import ROOT
from tools.cli.printable import printable

OURS = tuple(
    f"{ROOT / package}/" for package in ("backbones", "heads", "tasks", "datamodules", "tools")
)
FREE = "free space there, or choose another folder"
IN_THE_WAY = "remove or rename it"
PERMISSION = "check its permissions, or choose another folder"
# What the machine does not give, and what to do.
REFUSED_BY_SYSTEM = {
    errno.ENOSPC: FREE,
    errno.EDQUOT: FREE,
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION,
    errno.EROFS: PERMISSION,
    errno.EISDIR: f"a file belongs in the place of this folder; {IN_THE_WAY}",
    errno.ENOTDIR: f"a folder belongs in the place of this file; {IN_THE_WAY}",
    errno.EEXIST: IN_THE_WAY,
    errno.ENOTEMPTY: IN_THE_WAY,
    errno.ELOOP: "remove the link",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or lower data.num_workers",
    errno.ENFILE: "close other programs",
    errno.EIO: "check the disk",
    errno.ESTALE: "mount the folder again",
    errno.EBUSY: "close the program that uses it",
}
# What torch's and safetensors' writers say of a full disk or of a limit of file sizes.
UNWRITTEN = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs|\(os error (\d+)\)")
# Where torch takes over the memory of a tensor from another process.
HANDED_OVER = str(Path("torch", "multiprocessing", "reductions.py"))


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one message for what a user or the machine caused.

    Anything else is a fault and keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        logging.shutdown()
        print(f"error: {printable(text)}", file=sys.stderr)
        sys.exit(2)


def sentence(error: BaseException | None) -> str | None:
    """The text for the user, or None if the error is a fault.

    An error is the user's if our packages raise it as such, also where libraries raise another one
    on top of it.
    """
    # A worker's end may break off anything, such as the writing of a checkpoint, which says so.
    lost = next(filter(None, map(_lost_worker, _causes(error))), None)
    if lost is not None:
        return lost
    while error is not None:
        text = str(error)
        if isinstance(error, OmegaConfBaseException):
            # Lines of its own stand around what a resolver of ours says.
            _, resolved, said = text.partition(" raised while resolving interpolation: ")
            said = (said or text).partition("\n")[0]
            return said if resolved or not error.full_key else f"{error.full_key}: {said}"
        if isinstance(error, HydraException):
            return " ".join(text.split())
        of_machine = _of_machine(error, text)
        if of_machine is not None:
            return of_machine
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].filename.startswith(OURS):
            return text if isinstance(error, ValueError | OSError | ImportError) else None
        error = error.__cause__ or error.__context__
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lost_worker(error: BaseException) -> str | None:
    """What to say of a loader's process that is gone."""
    text = str(error)
    if text.startswith("DataLoader worker") and ("killed by signal" in text or "exited" in text):
        gone = text.partition(". ")[0]
    elif isinstance(error, ConnectionError | EOFError | FileNotFoundError) and any(
        frame.filename.endswith(HANDED_OVER) for frame in traceback.extract_tb(error.__traceback__)
    ):
        gone = "DataLoader worker ended while a batch was taken from it"
    else:
        return None
    return (
        f"{gone}; a worker that is killed is often a lack of memory (or of /dev/shm): lower "
        "data.num_workers or data.batch_size"
    )


def _of_machine(error: BaseException, text: str) -> str | None:
    """What to say of an error that the machine or another process has caused."""
    if "in DataLoader worker process" in text:
        # torch puts the worker's traceback into the text; its last line is the message.
        last = text.strip().splitlines()[-1]
        return last.partition(": ")[2] or last
    if "address already in use" in text.lower() or "EADDRINUSE" in text:
        named = re.search(r"port: (\d+)", text)
        port = named[1] if named else os.environ.get("MASTER_PORT", "none is set")
        return (
            "the port by which the processes of a run find each other is in use (MASTER_PORT: "
            f"{port}); set the variable to a free one, or unset it"
        )
    if type(error).__name__ == "OutOfMemoryError":
        return f"{text.partition('. ')[0]}; lower data.batch_size or the size of the images"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return "the memory of this machine does not suffice; lower data.batch_size or a size"
    if isinstance(error, RuntimeError) and text == "Could not determine home directory.":
        return "a path begins with ~ and names no user of this machine; type the whole path"
    return _of_system(error, text)


def _of_system(error: BaseException, text: str) -> str | None:
    """Return what to say of a file that the system refuses to open or to write."""
    if isinstance(error, OSError) and error.errno in REFUSED_BY_SYSTEM:
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror}; {REFUSED_BY_SYSTEM[error.errno]}"
    reason = unwritten(error)
    return reason and f"a file could not be written ({reason}); free space, or raise ulimit -f"


def unwritten(error: BaseException) -> str | None:
    """Return why a file could not be written, on a full disk or beyond a limit; else None."""
    if isinstance(error, OSError):
        known = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return os.strerror(error.errno) if error.errno is not None and known else None
    found = UNWRITTEN.search(str(error))
    if found is None:
        return None
    number = int(found[1] or 0)
    return os.strerror(number) if number else "the disk is full or the file is too large"
