"""Images of one tar archive and their classes, from folders or WebDataset's labels.

WebDataset stores the files of a sample under one key: ``000017.jpg`` and ``000017.cls``. The key
ends at the first dot of the file's own name; folders belong to the key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from datamodules.files.cache import cache_root
from datamodules.files.console import log
from datamodules.files.folders import HIDDEN, IMAGE_SUFFIXES, NO_ENDING, file_suffix, first_few
from datamodules.files.text_files import parse_json, read_file
from datamodules.files.values import refuse
from datamodules.images.tar_index import Member, list_members, read_member

# Source: webdataset/tariterators.py, base_plus_ext and tar_file_iterator.
KEY = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)")
META = re.compile(r"__[^/]*__($|/)")
LABEL, SIDECAR = "cls", "json"
KEPT_FROM = 2**30  # bytes of an archive from which its index is cached
VERSION = 2  # of the cached index
LONGEST = 4096  # bytes of a .cls member


@dataclass
class Shard:
    """Images of an archive, in its order.

    Attributes:
        archive: The tar file.
        names: Image names in the archive.
        offsets: Position of each image's first byte.
        sizes: Size of each image in bytes.
        labels: WebDataset's label per image, a number or class name; else empty.
        fields: Fields of the first .json member beside an image, if labels come from elsewhere.
        skipped: Counter of other files by ending.
    """

    archive: str
    names: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    labels: list[int | str] = field(default_factory=list)
    fields: str = ""
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def is_webdataset(self) -> bool:
        """True if the archive has a label per image."""
        return bool(self.labels)

    def add(self, image: Member) -> None:
        """Append an image."""
        self.names.append(image.name)
        self.offsets.append(image.offset)
        self.sizes.append(image.size)


def read_shard(archive: Path, label_key: str | None = None) -> Shard:
    """Return the images of an archive, with labels if it is WebDataset's.

    The index of an archive above 1 GB is stored in the user's cache.

    Args:
        archive: The tar file.
        label_key: Field of the .json members with the label; None for the .cls members.

    Raises:
        ValueError: The archive is damaged, or a sample lacks its image or label.
    """
    status = archive.stat()
    if status.st_size < KEPT_FROM:
        return _read_shard(archive, label_key)
    state = (str(archive.resolve()), status.st_size, status.st_mtime_ns, label_key)
    digest = hashlib.sha256(json.dumps([VERSION, *state]).encode()).hexdigest()[:32]
    file = cache_root() / "tar-indices" / f"{digest}.json"
    with contextlib.suppress(OSError, ValueError):  # the cached index is missing or damaged
        index = TypeAdapter(Shard).validate_json(read_file(file), strict=True)
        if len(index.names) == len(index.offsets) == len(index.sizes):
            return index
    shard = _read_shard(archive, label_key)
    try:
        _cache(shard, file)
    except OSError as error:
        log(f"The index of {archive} cannot be cached for the next run ({error})")
    return shard


def _read_shard(archive: Path, label_key: str | None) -> Shard:
    shard = Shard(str(archive))
    files = list(_visible(list_members(archive), shard.skipped))
    samples = _by_key(files)
    kinds = {kind for parts in samples.values() for kind in parts}
    if label_key is not None or any(map(_holds_a_label, kinds)):
        _add_samples(shard, samples, label_key)
        return shard
    for file in files:
        if file_suffix(file.name) in IMAGE_SUFFIXES:
            shard.add(file)
        else:
            shard.skipped[file_suffix(file.name) or NO_ENDING] += 1
    for parts in samples.values():
        if SIDECAR in parts and _image_kinds(parts):
            content = _sidecar(shard, parts)
            shard.fields = ", ".join(map(str, content)) if isinstance(content, dict) else ""
            break
    return shard


def _visible(members: Iterable[Member], skipped: Counter[str]) -> Iterable[Member]:
    """Yield the files that are neither hidden nor WebDataset's own notes."""
    for member in members:
        if META.match(member.name):
            continue
        if any(part.startswith(".") for part in member.name.split("/")):
            skipped[HIDDEN] += file_suffix(member.name) in IMAGE_SUFFIXES
        else:
            yield member


def _by_key(files: Iterable[Member]) -> dict[str, dict[str, list[Member]]]:
    """Return the files of each sample by kind, the part of the name after the key."""
    samples: dict[str, dict[str, list[Member]]] = {}
    for member in files:
        match = KEY.fullmatch(member.name)
        if match:
            parts = samples.setdefault(match[1], {})
            parts.setdefault(match[2].lower(), []).append(member)
    return samples


def _holds_a_label(kind: str) -> bool:
    """Return True for ``cls`` and for kinds with further dots, such as ``5.cls``."""
    return LABEL in kind.split(".") and file_suffix(f".{kind}") not in IMAGE_SUFFIXES


def _image_kinds(parts: Mapping[str, Any]) -> list[str]:
    return [kind for kind in parts if f".{kind}" in IMAGE_SUFFIXES]


def _add_samples(
    shard: Shard, samples: Mapping[str, Mapping[str, list[Member]]], label_key: str | None
) -> None:
    label_kind = SIDECAR if label_key is not None else LABEL
    for key, parts in samples.items():
        place = f"{shard.archive}, sample {key!r}"
        images = _image_kinds(parts)
        if not images and not _means_an_image(parts, label_kind):
            shard.skipped.update({f".{kind}": len(members) for kind, members in parts.items()})
            continue
        repeated = [
            kind for kind in parts if len(parts[kind]) > 1 and kind in (*images, label_kind)
        ]
        if len(images) != 1 or label_kind not in parts or repeated:
            raise ValueError(f"{place}: {_sample_fault(parts, images, label_kind)}")
        (image,) = images
        shard.add(parts[image][0])
        shard.labels.append(
            _label(shard, parts[LABEL][0], place)
            if label_key is None
            else _field(_sidecar(shard, parts), label_key, place)
        )


def _means_an_image(parts: Mapping[str, Any], ending: str) -> bool:
    """Return True if files without an image have a label, and are more than a single .json."""
    ends = {kind.rpartition(".")[2] for kind in parts}
    return bool(ends & {ending, LABEL}) and ends != {SIDECAR}


def _sample_fault(parts: Mapping[str, Any], images: list[str], ending: str) -> str:
    """Return what is wrong with a sample, and what to do."""
    members = first_few(f".{kind}" for kind in parts)
    dotted = [kind for kind in parts if "." in kind and kind.rpartition(".")[2] == ending]
    if dotted:
        return (
            f"it has the members {members}; WebDataset's keys end at the first dot of a file name, "
            "so replace the other dots"
        )
    if len(images) > 1:
        return f"it has several images ({members}); keep one per sample"
    if not images:
        return f"it lacks an image ({members}); WebDataset needs one per sample, such as .jpg"
    if ending in parts:
        return f"it has several members of one kind ({members}); keep one"
    if ending == SIDECAR:
        return f"it lacks a .json member for data.label_key ({members})"
    return f"it lacks a .cls member ({members}); write one, or pass data.label_key=<field of .json>"


def _label(shard: Shard, member: Member, place: str) -> int | str:
    content = read_member(shard.archive, member.offset, min(member.size, LONGEST))
    text = content.decode("utf-8-sig", "replace").strip()
    number = f"its .cls must hold the number of a class; got {content[:20]!r}"
    refuse(f"{place}:", {number: not text or "\ufffd" in text})
    return int(text) if re.fullmatch(r"[+-]?\d+", text, re.ASCII) else text


def _sidecar(shard: Shard, parts: Mapping[str, list[Member]]) -> Any:
    member = parts[SIDECAR][0]
    content = read_member(shard.archive, member.offset, member.size)
    return parse_json(content, f"{shard.archive}/{member.name}")


def _field(content: Any, key: str, place: str) -> int | str:
    value = content
    for part in [key] if isinstance(content, dict) and key in content else key.split("."):
        fields = value if isinstance(value, dict) else {}
        lack = f"its .json lacks the field {key!r}; it has: {', '.join(fields) or 'none'}"
        refuse(f"{place}:", {lack: part not in fields})
        value = fields[part]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        value = value.strip()
    inner = [*value] if isinstance(value, dict) else []
    is_label = isinstance(value, int | str) and not isinstance(value, bool)
    faults = {
        f"{key!r} in its .json has inner fields; pass data.label_key={key}.<field> with one of": (
            inner
        ),
        f"{key!r} in its .json must be the number or name of a class; got {value!r}": not is_label,
    }
    refuse(f"{place}:", faults)
    return value


def _cache(shard: Shard, file: Path) -> None:
    """Write a shard's index atomically, as other processes may read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as begun:
        json.dump(asdict(shard), begun)
    Path(begun.name).replace(file)
