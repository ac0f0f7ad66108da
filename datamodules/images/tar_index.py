"""Index of the files in a tar archive, for random access.

timm's reader of tar files unpickles an index that lies beside them, and knows no WebDataset labels.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

LOOKED_AT = 2**20  # bytes after the end of an archive that must be zero


class Member(NamedTuple):
    """A file in an archive.

    Attributes:
        name: Path in the archive without ``./``; in an inner tar file ``n01.tar/1.JPEG``.
        offset: Position of its first byte in the archive.
        size: Number of bytes.
    """

    name: str
    offset: int
    size: int


def list_members(archive: Path) -> Iterator[Member]:
    """Yield the files of an archive and of the tar files in it, in order.

    A hard link yields the file that it points to.

    Raises:
        ValueError: The archive is compressed, damaged or truncated.
    """
    with archive.open("rb") as file:
        try:
            yield from _members(file, 0, "")
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(
                f"{archive} or a tar file in it is compressed or damaged ({error}); unpack it to a "
                "plain .tar file, or copy it again"
            ) from error


def _members(file: IO[bytes], base: int, prefix: str) -> Iterator[Member]:
    places: dict[str, Member] = {}
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (info := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # a kilobyte per file
            name = posixpath.normpath(info.name).lstrip("/")
            if info.islnk() and info.linkname in places:
                yield places[info.linkname]._replace(name=f"{prefix}{name}")
            if not info.isreg():
                continue
            if info.issparse():
                raise tarfile.TarError(f"{info.name} is a sparse file")
            if name.lower().endswith(".tar"):
                inner = tar.extractfile(info)
                assert inner is not None
                yield from _members(inner, base + info.offset_data, f"{prefix}{name}/")
                continue
            places[info.name] = Member(f"{prefix}{name}", base + info.offset_data, info.size)
            yield places[info.name]
        file.seek(tar.offset)
        rest = file.read(LOOKED_AT)
    # tarfile takes a damaged header for the end and would lose the files after it.
    if len(rest) < tarfile.BLOCKSIZE or rest.strip(b"\0"):
        raise tarfile.TarError("its end mark is missing, or data follow it")


def read_member(archive: str, offset: int, size: int) -> bytes:
    """Return the bytes of a file in an archive.

    The archive is opened per file: processes that share a descriptor share its position.
    """
    with open(archive, "rb") as file:  # noqa: PTH123 - called per image
        file.seek(offset)
        return file.read(size)
