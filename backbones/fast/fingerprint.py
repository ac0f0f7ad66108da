"""Name the compiled file of these sources, this torch and this processor, and check it.

It runs without torch, for `make doctor` and the build.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import struct
from importlib import metadata
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu" / "csrc"
MISSING = "is missing"
COMPILED = Path(__file__).parent / "cpu" / "compiled"


def compiled_file(portable: bool) -> Path:
    """Return the path of the compiled operators, whether they exist or not.

    Args:
        portable: For any processor of this kind, instead of this very one.
    """
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    processor = "portable" if portable else hashlib.sha256(_processor()).hexdigest()[:8]
    torch = metadata.version("torch")
    name = f"torch-{torch}-{platform.machine()}-{processor}-{digest.hexdigest()[:8]}"
    return COMPILED / f"{name}.so"


def operator_names() -> list[str]:
    """List the operators that the sources define."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(SOURCES.glob("*.cpp")))
    return [name for text in texts for name in re.findall(r'm\.def\(\s*"(\w+)', text)]


def find_fault(path: Path) -> str:
    """Return why a file cannot be the compiled operators, or an empty text; only read the file.

    Loading another library would run its code, and a FIFO would be waited for.
    """
    if not os.path.lexists(path):
        return MISSING
    if not path.is_file():
        return "is not a file"
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not content.startswith(b"\x7fELF"):
        return "is not a library"
    if len(content) < _whole_size(content):
        return "is incomplete"
    if not all(name.encode() in content for name in operator_names()):
        return "is another library"
    return ""


def _whole_size(content: bytes) -> int:
    """Return the size of an ELF file of 64 bits by its header: its last part lists its sections."""
    if len(content) < 64:
        return 64
    start = struct.unpack_from("<Q", content, 0x28)[0]
    size, count = struct.unpack_from("<HH", content, 0x3A)
    return int(start + size * count)


def _processor() -> bytes:
    """Return the instruction sets of this processor: code for another one ends the process."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()
