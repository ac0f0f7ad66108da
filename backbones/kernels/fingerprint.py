"""Which compiled file belongs to these sources, this torch and this processor.

Nothing of torch is imported: `make doctor` and the build ask here as well.
"""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMPILED = Path(__file__).parent / "compiled"


def compiled_file(portable: bool) -> Path:
    """Where the operators lie, or would lie, once they are compiled.

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


def _processor() -> bytes:
    """What this processor can do: code for another one ends the process."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "").encode()
