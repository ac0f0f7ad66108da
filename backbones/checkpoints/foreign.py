"""Reading of other tools' files without running their code.

Many tools store objects with the weights: mmengine the history of its losses, timm's script its
``argparse.Namespace``, Lightning the hyperparameters of a module. torch's weights-only reader
refuses them all. Here each class is replaced by an inert one. Functions are refused, and so are
classes of Python's own library that may act.
"""

from __future__ import annotations

import contextlib
import pickletools
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

# Functions that build harmless values, and harmless classes of Python's own library.
HARMLESS = re.compile(
    r"numpy\.(core|_core)\.(multiarray|numeric)\.(_reconstruct|scalar|_frombuffer)|"
    r"numpy\.(ndarray|dtype|bool_?|u?int\d+|float\d+)|(builtins|__builtin__)\.(getattr|slice|"
    r"list|dict|tuple|int|float|str|bool|object|frozenset|range|type)|copyreg\._reconstructor|"
    r"argparse\.Namespace|types\.SimpleNamespace|pathlib\.\w+|pathlib\._local\.\w+|"
    r"collections\.(defaultdict|deque)|functools\.partial|datetime\.\w+|decimal\.Decimal|"
    r"fractions\.Fraction|uuid\.UUID|enum\.\w+|typing\.\w+"
)
# Names that torch's reader accepts; it lists them for files of its present form only.
KNOWN = re.compile(
    r"torch\._utils\.\w+|torch\.\w+|torch\.nn\.parameter\.Parameter|_codecs\.encode|"
    r"collections\.(OrderedDict|Counter)|builtins\.(set|bytearray|complex|long)"
)
A_LIST = re.compile(r"collections\.deque")
A_DICTIONARY = re.compile(r".*(Dict|defaultdict|CfgNode|Munch|Box)")  # filled item by item
PARTS = 4  # of a file before torch 1.6: number, protocol, machine and content

# First bytes of files that are often mistaken for checkpoints, and their kind.
OTHER_KINDS = (
    (b"version https://git-lfs", "a pointer of Git LFS; fetch the file by `git lfs pull`"),
    (b"<", "a web page; download the file itself"),
    (b"\x89HDF", "an HDF5 file, as Keras writes; convert it to safetensors"),
    (b"GGUF", "a GGUF file; use the safetensors it was made from"),
)
ARCHIVES = (
    ("/constants.pkl", "a TorchScript archive; save the state_dict of the model instead"),
    ("serialized_exported_program.json", "an exported program; use the checkpoint of its model"),
    ("models/model.json", "an exported program; use the checkpoint of its model"),
    (".npy", "an archive of NumPy arrays, as JAX code writes; convert it to safetensors"),
)


class Inert:
    """Object that accepts and ignores any arguments, attributes and state."""

    origin = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: D102
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{self.origin}>"


class Items:
    """Substitute for a subclass of ``dict``: a plain one, which the reader fills."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return OrderedDict()


class Sequence:
    """Substitute for a subclass of ``list``: a plain one, which the reader fills."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return []


def read_foreign(path: Path, map_location: Any, *, mmap: bool = False) -> object:
    """Read a file of ``torch.save`` as ``torch.load`` does, objects in it replaced by ``Inert``.

    Raises:
        pickle.UnpicklingError: The file names functions, or classes that may act.
    """
    names = [name for name in _names(path) if _is_harmless(name)]
    return _load(path, names, map_location, mmap)


def refused_names(path: Path) -> list[str]:
    """List the functions and classes for which a file is refused, with their entries."""
    names, content = _names(path), None
    with contextlib.suppress(Exception):
        content = _load(path, names, "cpu", mmap=False)
    names = [name for name in names if not _is_harmless(name)]
    entries = content.items() if isinstance(content, dict) else ()
    places = {origin: key for key, value in entries for origin in _origins(value)}
    return [f"{name} in its entry {places[name]!r}" if name in places else name for name in names]


def other_kind(path: Path) -> str | None:
    """Describe a file of a kind that is often mistaken for a checkpoint; None for others."""
    if zipfile.is_zipfile(path):
        names = []
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        return next(
            (kind for end, kind in ARCHIVES if any(name.endswith(end) for name in names)), None
        )
    with path.open("rb") as file:
        start = file.read(32).lstrip()
    if path.suffix == ".onnx":
        return "an ONNX model; use the checkpoint that it was made from"
    return next((kind for magic, kind in OTHER_KINDS if start.startswith(magic)), None)


def objects_in(value: object) -> list[str]:
    """Return the classes of the objects in a value that ``read_foreign`` replaced."""
    return list(dict.fromkeys(_origins(value)))


def _load(path: Path, names: list[str], map_location: Any, mmap: bool) -> object:
    stand_ins: list[Any] = [(_stand_in(name), name) for name in names]
    with safe_globals(stand_ins):
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)


def _stand_in(name: str) -> type:
    """Create a class for each name, since the reader also looks names up by class."""
    if A_DICTIONARY.fullmatch(name):
        return type("StandInItems", (Items,), {})
    if A_LIST.fullmatch(name):
        return type("StandInSequence", (Sequence,), {})
    return type("StandIn", (Inert,), {"origin": name})


def _names(path: Path) -> list[str]:
    """List the classes and functions that a file names, in a damaged file before the damage.

    torch's reader refuses all others afterwards.
    """
    names: set[str] = set()
    with contextlib.suppress(Exception):  # foreign bytes raise errors of all kinds
        if zipfile.is_zipfile(path):
            return sorted(get_unsafe_globals_in_checkpoint(path))
        with path.open("rb") as file:
            for _ in range(PARTS):
                for code, argument, _position in pickletools.genops(file):
                    if code.name == "GLOBAL":
                        name = str(argument).replace(" ", ".")
                        names.add(name.replace("__builtin__", "builtins"))
    return sorted(name for name in names if not KNOWN.fullmatch(name))


def _is_harmless(name: str) -> bool:
    """Return True for the classes of packages and for what ``HARMLESS`` lists."""
    package, last = name.partition(".")[0], name.rpartition(".")[2]
    of_package = package not in sys.stdlib_module_names and last[:1].isupper()
    return of_package or HARMLESS.fullmatch(name) is not None


def _origins(value: object) -> Iterator[str]:
    """Yield the classes of replaced objects within nested dictionaries and lists."""
    ids: set[int] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if id(node) in ids:
            continue
        ids.add(id(node))
        if isinstance(node, Inert):
            yield node.origin
        elif isinstance(node, dict):
            waiting += [*node, *node.values()]
        elif isinstance(node, list | tuple | set):
            waiting += node
