"""Compile the operators of ``cpu/csrc`` against the installed torch.

usage: python -m backbones.fast.build [--portable]

  --portable   for any processor of this kind, and not for the instructions of this very one; for
               an image or a disk that several machines share

Prints one line about the result. The status is 1 if the compilation failed; mixers
then compute by torch's own operations.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from backbones.fast.fingerprint import COMPILED, MISSING, SOURCES, compiled_file, find_fault

COMPILERS = ("g++", "c++")
ROOT = Path(__file__).resolve().parents[2]


class Torch(NamedTuple):
    """Facts of the installed torch that the compiler needs."""

    folder: Path
    abi: str  # of std::string and the like: "1", or "0" for GCC's before 5


def find_compiler() -> list[str]:
    """Return the words of $CXX, else the first C++ compiler on the path, else an empty list."""
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        return command if shutil.which(command[0]) else []
    return next(([name] for name in COMPILERS if shutil.which(name)), [])


def compilation(compiler: Sequence[str], source: Path, target: Path, portable: bool) -> list[str]:
    """Return the command that compiles one file."""
    torch = find_torch()
    include = torch.folder / "include"
    return [
        *compiler,
        *("-std=c++20", "-O3", "-fno-math-errno", "-fPIC", "-fopenmp", "-Wno-psabi"),
        *(() if portable else ("-march=native",)),
        f"-D_GLIBCXX_USE_CXX11_ABI={torch.abi}",
        *(f"-I{path}" for path in (include, include / "torch" / "csrc" / "api" / "include")),
        *("-c", str(source), "-o", str(target)),
    ]


def link(compiler: Sequence[str], objects: Sequence[Path], target: Path) -> list[str]:
    """Return the command that links one library."""
    libraries = (f"-L{find_torch().folder / 'lib'}", "-lc10", "-ltorch_cpu")
    return [*compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(target), *libraries]


def build(portable: bool = False) -> str:
    """Compile the operators; return why that failed, or an empty string.

    A failure leaves no files.
    """
    compiler = find_compiler()
    if not compiler:
        return f"there is no C++ compiler{_library_name()}; type: apt-get install g++"
    try:
        return _build_with(compiler, compiled_file(portable), portable)
    except OSError as error:
        return f"{error.filename or COMPILED}: {error.strerror or error}"


def _build_with(compiler: Sequence[str], target: Path, portable: bool) -> str:
    COMPILED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=COMPILED) as folder:
        library = Path(folder) / target.name
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            compilation(compiler, source, object_file, portable)
            for source, object_file in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures = list(pool.map(_run, commands))
        failure = next(filter(None, failures), "") or _run(link(compiler, objects, library))
        if failure:
            return f"{shlex.join(compiler)} says: {failure}"
        failure = _try(library, compiler[0])
        if failure:
            return failure
        library.replace(target)
    # Of older sources; those for another torch or processor may be in use on a disk that is shared.
    for earlier in COMPILED.glob(f"{target.stem.rpartition('-')[0]}-*.so"):
        if earlier != target:
            earlier.unlink(missing_ok=True)
    return ""


def _try(library: Path, compiler: str) -> str:
    """Try a library in a process of its own; return why it fails, or an empty string."""
    process = subprocess.run(
        [sys.executable, "-m", "backbones.fast.compiled_trial", str(library)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        lines = process.stderr.splitlines() or [f"status {process.returncode}"]
        return f"what {compiler} made cannot be used: {lines[-1]}"
    difference = process.stdout.strip()
    return difference and (
        f"{compiler} made wrong code for this processor, {difference}; type: CXX=clang++ make "
        "install, or that with another compiler"
    )


@functools.cache
def find_torch() -> Torch:
    """Return where torch is and how it was compiled, asked in a process of its own."""
    probe = "import torch; print(int(torch.compiled_with_cxx11_abi()), torch.__path__[0])"
    process = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    abi, _, folder = process.stdout.strip().partition(" ")
    return Torch(Path(folder), abi)


def _library_name() -> str:
    name = os.environ.get("CXX", "")
    return f" (CXX is {name!r})" if name else ""


def _run(command: Sequence[str]) -> str:
    """Run a compiler; return its first error, or an empty string."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if not process.returncode:
        return ""
    errors = [line for line in process.stderr.splitlines() if "error" in line]
    return (errors or [f"status {process.returncode}"])[0]


def main() -> int:
    """Run the command and return its exit status."""
    words = sys.argv[1:]
    if words not in ([], ["--portable"]):
        print((__doc__ or "").strip())
        return 0 if words in (["-h"], ["--help"]) else 2
    portable = bool(words)
    # Operators for any processor serve this one as well.
    serving = [compiled_file(portable), compiled_file(portable=True)]
    for file in serving:
        if not find_fault(file):
            print(f"operators are compiled: {file.name}")
            return 0
    fault = find_fault(serving[0])
    if fault != MISSING:
        print(f"{serving[0]} {fault} and is replaced", file=sys.stderr)
    if find_compiler():
        count = len([*SOURCES.glob("*.cpp")])
        print(f"compiling {count} files, which takes a minute or two", file=sys.stderr, flush=True)
    failure = build(portable)
    if failure:
        print(f"operators are not compiled, torch's own serve: {failure}")
        return 1
    print(f"operators are compiled: {compiled_file(portable).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
