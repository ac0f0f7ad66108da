"""The code of a run: its commit, and what the commit lacks, kept in the run folder."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from backbones.base import Mixer
from tasks.engine.run_folder.source_copies import FOLDER, ROOT

log_info = logging.getLogger(__name__).info

DIFF = "changes.diff"
PACKAGES = ("backbones", "heads", "tasks", "datamodules", "tools", "configs")
SUFFIXES = {".py", ".yaml", ".cpp", ".h", ".cu", ".cuh"}
DIRTY = "-dirty"
LARGEST = 2**20  # bytes of a file that is kept
SECONDS = 30  # for one command of git


@dataclass(frozen=True)
class Source:
    """The code of this checkout.

    Attributes:
        commit: Name of the commit, with "-dirty" if files differ from it or source files are
            untracked; None outside of a git checkout.
        untracked: Source files that git does not know, relative to the checkout.
        diff: Changes of source files since the commit.
    """

    commit: str | None
    untracked: tuple[str, ...] = ()
    diff: bytes = b""


def read_source(root: Path = ROOT) -> Source:
    """Return the code's state in git; the commit is None outside of a repository."""
    if _git(root, "ls-files", "--error-unmatch", "backbones/__init__.py") is None:
        return Source(None)
    description = _git(root, "describe", "--always", "--dirty", "--abbrev=12")
    # With -z names are neither quoted nor escaped.
    listing = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *PACKAGES)
    if description is None or listing is None:
        return Source(None)
    names = [os.fsdecode(name) for name in listing.split(b"\0") if name]
    untracked = tuple(sorted(name for name in names if Path(name).suffix in SUFFIXES))
    commit = description.decode().strip().removesuffix(DIRTY)
    differs = description.decode().strip().endswith(DIRTY)
    flags = ("--no-ext-diff", "--no-textconv", "--binary")
    diff = _git(root, "diff", *flags, "HEAD", "--", *PACKAGES) if differs else b""
    return Source(f"{commit}{DIRTY}" if differs or untracked else commit, untracked, diff or b"")


def keep_source(
    folder: Path, source: Source, root: Path = ROOT, network: nn.Module | None = None
) -> None:
    """Keep a network's code, and what the commit lacks, in ``source/`` of a run folder.

    A run resumed with other changes keeps them beside those that it began with.

    Args:
        folder: Run folder.
        source: Result of ``read_source``.
        root: The checkout.
        network: The files of its classes in this project and in plugins are kept.
    """
    target = folder / FOLDER
    classes = {type(part) for part in network.modules()} if network is not None else set()
    for kind in classes:
        path = getattr(sys.modules.get(kind.__module__), "__file__", None)
        ours = issubclass(kind, Mixer) or kind.__module__.partition(".")[0] in PACKAGES
        if ours and path is not None:
            place, file = target.joinpath(*kind.__module__.split(".")), Path(path)
            target_file = place / file.name if file.stem == "__init__" else place.with_suffix(".py")
            _write_new(target_file, file.read_bytes())
    if source.diff:
        _write_new(target / DIFF, source.diff)
    for name in source.untracked:
        file = root / name
        if file.is_symlink() or not file.is_file() or file.stat().st_size > LARGEST:
            log_info(
                f"{name} is untracked, and no file below 1 MiB; the run folder does not keep it"
            )
            continue
        _write_new(target / name, file.read_bytes())


def _write_new(file: Path, content: bytes) -> None:
    """Write a file, beside an earlier one of other content."""
    file.parent.mkdir(parents=True, exist_ok=True)
    number, path = 1, file
    while path.exists():
        if path.read_bytes() == content:
            return
        number += 1
        path = file.with_name(f"{file.stem}-{number}{file.suffix}")
    path.write_bytes(content)


def _git(root: Path, *arguments: str) -> bytes | None:
    """Return the output of a command of git; None where it fails."""
    program = shutil.which("git")
    if program is None:
        return None
    # Within a hook of another repository these name that one.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = [program, "--no-optional-locks", "-C", str(root), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, check=True, env=environment, timeout=SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
