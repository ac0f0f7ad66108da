"""Turn errors that the user or the machine caused into one message."""

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
from tools.cli.printable import as_typed, printable

OUR_FOLDERS = tuple(
    f"{ROOT / package}/" for package in ("backbones", "heads", "tasks", "datamodules", "tools")
)
# Remedies to print with errors of the operating system.
REMEDIES = {
    "free space there, or choose another folder": "ENOSPC EDQUOT",
    "raise the limit of file sizes (ulimit -f)": "EFBIG",
    "check its permissions, or choose another folder": "EACCES EPERM EROFS",
    "remove or rename it": "EISDIR ENOTDIR EEXIST ENOTEMPTY ELOOP",
    "choose a shorter name": "ENAMETOOLONG",
    "raise the limit of open files (ulimit -n), or pass data.num_workers=0": "EMFILE ENFILE",
    "check the disk": "EIO ESTALE EBUSY",
}
REMEDY = {getattr(errno, name): text for text, names in REMEDIES.items() for name in names.split()}
# Messages of torch's and safetensors' writers about a full disk or a file size limit.
WRITE_FAILURE = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs|\(os error (\d+)\)")
FULL_GPU = re.compile(r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")
# The file in which torch receives a tensor from another process.
TENSOR_TRANSFER = str(Path("torch", "multiprocessing", "reductions.py"))


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit with one message for errors that the user or the machine caused.

    Other errors are bugs and keep their traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        text = user_message(error)
        if text is None:
            raise
        logging.shutdown()
        print(f"error: {printable(as_typed(text))}", file=sys.stderr)
        sys.exit(2)


def user_message(error: BaseException | None) -> str | None:
    """Return the message for the user, or None if the error is a bug.

    Errors raised by our packages are for the user, also when a library wraps them in another one.
    """
    # A worker that ends can interrupt anything, such as a checkpoint, which then raises first.
    causes = list(_causes(error))
    lost = next(filter(None, map(_worker_message, causes)), None)
    if lost is not None:
        return lost
    for error in causes:
        text = str(error)
        if isinstance(error, OmegaConfBaseException):
            # OmegaConf adds lines of its own around the message of our resolver.
            _, resolved, reason = text.partition(" raised while resolving interpolation: ")
            reason = (reason or text).partition("\n")[0]
            return reason if resolved or not error.full_key else f"{error.full_key}: {reason}"
        if isinstance(error, HydraException):
            return " ".join(text.split())
        of_machine = _machine_message(error, text)
        if of_machine is not None:
            return of_machine
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].filename.startswith(OUR_FOLDERS):
            return text if isinstance(error, ValueError | OSError | ImportError) else None
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that one, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _worker_message(error: BaseException) -> str | None:
    """Return the message for a data loader's worker that ended, else None."""
    text = str(error)
    if "shared memory(shm)" in text or "out of shared memory" in text:
        return (
            "/dev/shm is too small for the batches of worker processes; enlarge it (docker run "
            "--shm-size=1g), lower data.batch_size, or pass data.num_workers=0"
        )
    if text.startswith("DataLoader worker") and ("killed by signal" in text or "exited" in text):
        gone = text.partition(". ")[0]
    elif isinstance(error, ConnectionError | EOFError | FileNotFoundError) and any(
        frame.filename.endswith(TENSOR_TRANSFER)
        for frame in traceback.extract_tb(error.__traceback__)
    ):
        gone = "DataLoader worker ended while a batch was taken from it"
    else:
        return None
    return (
        f"{gone}; the memory (or /dev/shm) was probably too small: lower data.num_workers or "
        "data.batch_size"
    )


def _machine_message(error: BaseException, text: str) -> str | None:
    """Return the message for an error that the machine or another process caused, else None."""
    if "in DataLoader worker process" in text:
        # torch puts the worker's traceback into the text; the last line is the message.
        last = text.strip().splitlines()[-1]
        return last.partition(": ")[2] or last
    if "address already in use" in text.lower() or "EADDRINUSE" in text:
        match = re.search(r"port: (\d+)", text)
        port = match[1] if match else os.environ.get("MASTER_PORT", "none is set")
        return (
            f"the port through which the run's processes connect is in use (MASTER_PORT: {port}); "
            "set MASTER_PORT to a free port, or unset it"
        )
    if is_gpu_memory(error):
        return "the GPU's memory is full; lower data.batch_size or the size of the images"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return "this machine has too little memory; lower data.batch_size or the image size"
    if isinstance(error, RuntimeError) and text == "Could not determine home directory.":
        return "a path begins with ~ and an unknown user name; type the full path"
    return _file_message(error, text)


def is_gpu_memory(error: BaseException) -> bool:
    """Return True if a GPU's memory is full: torch's own error, or one of CUDA or cuBLAS."""
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and FULL_GPU.search(str(error)) is not None
    )


def _file_message(error: BaseException, text: str) -> str | None:
    """Return the message for a file that the system cannot open or write, else None."""
    if isinstance(error, OSError) and error.errno in REMEDY:
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror}; {REMEDY[error.errno]}"
    reason = write_failure(error)
    return reason and f"a file could not be written ({reason}); free space, or raise ulimit -f"


def write_failure(error: BaseException) -> str | None:
    """Return why writing a file failed (full disk or size limit), else None."""
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return os.strerror(error.errno) if error.errno is not None and is_full else None
    match = WRITE_FAILURE.search(str(error))
    if match is None:
        return None
    number = int(match[1] or 0)
    return os.strerror(number) if number else "the disk is full or the file is too large"
