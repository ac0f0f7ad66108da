"""Compiles the operators of ``csrc`` against the torch that is installed.

usage: python -m backbones.kernels.build [--portable]

  --portable   for any processor of this kind, and not for the instructions of this very one; for
               an image or a disk that several machines share

Prints one line that says what there is now. The status is 1 if nothing could be compiled; mixers
then compute by torch's own operations.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backbones.kernels.fingerprint import COMPILED, SOURCES, compiled_file

COMPILERS = ("g++", "c++")


def find_compiler() -> str | None:
    """The C++ compiler of $CXX, or the first that there is."""
    named = os.environ.get("CXX", "").split()
    return next(filter(None, map(shutil.which, named[:1] or COMPILERS)), None)


def compilation(compiler: str, source: Path, target: Path, portable: bool) -> list[str]:
    """What is typed to compile one file."""
    include = _torch() / "include"
    return [
        compiler,
        *("-std=c++20", "-O3", "-fno-math-errno", "-fPIC", "-fopenmp", "-Wno-psabi"),
        *(() if portable else ("-march=native",)),
        *(f"-I{path}" for path in (include, include / "torch" / "csrc" / "api" / "include")),
        *("-c", str(source), "-o", str(target)),
    ]


def link(compiler: str, objects: Sequence[Path], target: Path) -> list[str]:
    """What is typed to make one library of all."""
    libraries = (f"-L{_torch() / 'lib'}", "-lc10", "-ltorch_cpu")
    return [compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(target), *libraries]


def build(portable: bool = False) -> str:
    """Compile; why that failed, or nothing. Half a library is never left behind."""
    target = compiled_file(portable)
    compiler = find_compiler()
    if compiler is None:
        return "there is no C++ compiler; type: apt-get install g++"
    COMPILED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=COMPILED) as folder:
        whole = Path(folder) / target.name
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            compilation(compiler, source, target, portable)
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures = list(pool.map(_run, commands))
        failure = next(filter(None, failures), "") or _run(link(compiler, objects, whole))
        if failure:
            return f"{compiler} says: {failure}"
        probe = f"import torch; torch.ops.load_library({str(whole)!r})"
        loaded = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, check=False
        )
        if loaded.returncode:
            return f"what {compiler} made cannot be loaded: {loaded.stderr.splitlines()[-1]}"
        whole.replace(target)
    for old in COMPILED.glob("*.so"):
        if old not in (compiled_file(True), compiled_file(False)):
            old.unlink(missing_ok=True)
    return ""


def _torch() -> Path:
    return Path(sysconfig.get_path("purelib")) / "torch"


def _run(command: Sequence[str]) -> str:
    """Run a compiler; its first complaint, or nothing."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    return (errors or [f"status {done.returncode}"])[0]


def main() -> int:
    """Run the command and return its exit status."""
    words = sys.argv[1:]
    if words not in ([], ["--portable"]):
        print((__doc__ or "").strip())
        return 0 if words in (["-h"], ["--help"]) else 2
    portable = bool(words)
    if compiled_file(portable).exists():
        print(f"operators are compiled: {compiled_file(portable).name}")
        return 0
    failure = build(portable)
    if failure:
        print(f"operators are not compiled, torch's own serve: {failure}")
        return 1
    print(f"operators are compiled: {compiled_file(portable).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
