"""What all exports share: the request, the weights it means, and a folder that is whole or absent.

A target is a module here with a function ``export(request) -> list[Path]``: it writes its files
into ``request.folder``, loads them back as their user will, compares the outputs with
``check_equal`` and returns what it wrote. What it cannot export it refuses with a ValueError that
names module and operator.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.engine.plain_files import DamagedFile, read_text
from tools.cli.network_names import network_name

if TYPE_CHECKING:
    from torch import Tensor

    from backbones import Backbone
    from backbones.checkpoints.opening import Checkpoint

NUM_CLASSES = 1000  # of a classifier without checkpoint
MARK = ".mixerlab-export"  # an export's folder has this file, and no other folder is ever replaced
MADE = "Made by an export, which may replace these files:"  # the first line of it
SEED = 0  # of weights and images where there is no checkpoint

Exporter = Callable[["ExportRequest"], "list[Path]"]


def silent(text: str) -> None:
    """Say nothing of what is being done."""


@contextmanager
def seeded() -> Iterator[None]:
    """Within it random weights are the same ones at every time."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


@dataclass(frozen=True)
class Target:
    """Somewhere a backbone can go.

    Attributes:
        module: Module of this package that exports it.
        summary: What is written, for the help.
        needs: Packages that have to be installed, by import name, with what to type.
        settings: Its own ``key=value`` arguments with their defaults, all texts.
        choices: What a setting may be, where that is a closed list.
    """

    module: str
    summary: str
    needs: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)


DENSE, EXPORT = "make install", "pip install -e '.[export]'"
SWITCH = ("false", "true")
PARTS = ("classifier", "maps", "dense")
GRAPHS: Mapping[str, Sequence[str]] = {"what": ("both", *PARTS), "network": ("all", *PARTS)}
TARGETS = {
    "mmdet": Target(
        "mm",
        "config, checkpoint and README for MMDetection",
        {"mmdet": DENSE},
        {"standalone": "false"},
        {"standalone": SWITCH},
    ),
    "mmseg": Target(
        "mm",
        "config, checkpoint and README for MMSegmentation",
        {"mmseg": DENSE},
        {"standalone": "false"},
        {"standalone": SWITCH},
    ),
    "mmpretrain": Target(
        "mm",
        "config, checkpoint and README for MMPretrain",
        {"mmpretrain": EXPORT},
        {"standalone": "false"},
        {"standalone": SWITCH},
    ),
    "timm": Target("timm_model", "a checkpoint for timm.create_model"),
    "onnx": Target(
        "onnx_model",
        "ONNX models of classifier and maps, checked in onnxruntime",
        {"onnx": EXPORT, "onnxruntime": EXPORT, "onnxscript": EXPORT},
        dict.fromkeys(GRAPHS, ""),
        GRAPHS,
    ),
    "torch_export": Target(
        "torch_export",
        "torch.export programs of classifier and maps",
        {},
        dict.fromkeys(GRAPHS, ""),
        GRAPHS,
    ),
}


@dataclass(frozen=True)
class ExportRequest:
    """One backbone on its way to one target.

    Attributes:
        to: Name of the target.
        backbone: Registered name.
        options: For ``create_backbone``; those of a run folder, then those typed.
        ckpt: Checkpoint file; None exports random weights.
        run: The config of the run that made the checkpoint, if it lies in a run folder.
        folder: Empty folder to write into; it gets its final name when all is done.
        image_size: (H, W) of the images that outputs are compared on.
        settings: The target's own settings.
        say: Told, a line each, what is being done where that takes long.
    """

    to: str
    backbone: str
    options: Mapping[str, Any]
    ckpt: Path | None
    run: Mapping[str, Any] | None
    folder: Path
    image_size: tuple[int, int]
    settings: Mapping[str, str]
    say: Callable[[str], None] = silent

    @property
    def label(self) -> str:
        """The name of the network, with a token mixer that replaces the host's."""
        return network_name(self.backbone, self.options.get("token_mixer"))

    @functools.cached_property
    def checkpoint(self) -> Checkpoint | None:
        """What the checkpoint file holds, read once; None for random weights."""
        from backbones.checkpoints.opening import open_checkpoint

        return None if self.ckpt is None else open_checkpoint(self.ckpt)

    def build_backbone(self, *, dense: bool) -> Backbone:
        """The backbone in evaluation mode, with random weights."""
        from backbones import create_backbone

        return create_backbone(self.backbone, **{**self.options, "dense": dense}).eval()

    def create_backbone(self, *, dense: bool) -> Backbone:
        """The backbone in evaluation mode with the checkpoint's weights, or random ones.

        Raises:
            ValueError: Weights of another model; the keys that differ are listed.
        """
        from backbones.checkpoints.adoption import adopt

        with seeded():
            backbone = self.build_backbone(dense=dense)
        if self.checkpoint is not None:
            adopt(backbone, self.checkpoint, trained=True)
        return backbone

    def images(self, batch: int = 2, size: tuple[int, int] | None = None) -> Tensor:
        """Images (B, 3, H, W) to compare outputs on, the same for every call."""
        import torch

        generator = torch.Generator().manual_seed(SEED)
        return torch.randn(batch, 3, *(size or self.image_size), generator=generator)


def exporter(to: str) -> Exporter:
    """The function of a target.

    Raises:
        ValueError: There is no such target, or a package that it needs is absent.
    """
    from backbones.options import unknown

    if to not in TARGETS:
        raise ValueError(unknown("target", to, TARGETS))
    target = TARGETS[to]
    for package, remedy in target.needs.items():
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"to={to} needs {package}, which is not installed; type: {remedy}")
    function: Exporter = importlib.import_module(f"tools.exports.{target.module}").export
    return function


def checkpoint_of(ckpt: str) -> tuple[Path | None, Mapping[str, Any] | None]:
    """The checkpoint file that a run folder or a path means, and the config of its run.

    Raises:
        ValueError: There is none.
    """
    from tasks.engine.saved_config import open_saved

    if not ckpt:
        return None, None
    saved = open_saved(ckpt)
    return saved.file, None if saved.run is None else saved.run.config


@contextmanager
def new_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place if the block succeeds and else is removed.

    An existing ``out`` keeps all files that no export has made.

    Raises:
        ValueError: ``out`` exists and may not be overwritten, as none may that no export has made,
            or no folder can be made there.
    """
    from tools.cli.errors import unwritten

    taken = out.is_symlink() or out.exists()
    made_here = not out.is_symlink() and (out / MARK).is_file()
    if Path.cwd().is_relative_to(out.resolve()):
        raise ValueError(f"{out} is the folder that this runs in; pass another out=")
    if taken and not made_here:
        raise ValueError(f"{out} exists already, and no export has made it; pass another out=")
    if taken and not overwrite:
        raise ValueError(f"{out} exists already; pass overwrite=true or another out=")
    made = _made_files(out) if taken else set()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ValueError(f"no folder can be made at {out} ({error}); pass another out=") from error
    try:
        temporary.chmod(0o755)  # mkdtemp's is for its owner alone
        yield temporary
        files = [path for path in temporary.rglob("*") if path.is_file()]
        for path in files:  # safetensors' files are for their owner alone
            path.chmod(0o644)
        names = sorted(str(path.relative_to(temporary)) for path in files)
        (temporary / MARK).write_text("\n".join([MADE, *names]) + "\n")
        if taken:
            _replace(out, temporary, made, {*names, MARK})
        else:
            temporary.rename(out)
    except Exception as error:
        reason = unwritten(error)
        if reason is None:
            raise
        raise ValueError(
            f"the export could not be written to {out.parent} ({reason}); free space there, raise "
            "ulimit -f, or pass another out="
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _made_files(out: Path) -> set[str]:
    """Return the names of the files that an export has made in a folder, by its record.

    Raises:
        ValueError: The record is of an earlier version, or names files outside the folder.
    """
    try:
        title, *names = read_text(out / MARK, errors="replace").splitlines() or [""]
    except DamagedFile as error:
        raise ValueError(f"{error}; remove {out} or pass another out=") from error
    if title != MADE or "\0" in "".join(names):
        raise ValueError(
            f"{out / MARK} does not list the files that the export made, so they cannot be told "
            f"from yours; remove {out} or pass another out="
        )
    _check_inside(out, names)
    return {*names, MARK}


def _check_inside(out: Path, names: Iterable[str]) -> None:
    """Refuse files that ``..`` or a link of a folder leads outside an export's folder.

    Raises:
        ValueError: Names the file.
    """
    inside = out.resolve()
    for name in names:
        # A file that is a link itself is removed or replaced, not followed.
        if not (inside / name).parent.resolve().is_relative_to(inside):
            raise ValueError(f"{out / name} is outside {out}, which no export replaces; remove it")


def _replace(out: Path, new: Path, made: set[str], names: set[str]) -> None:
    """Move the files of an export into a folder, in the place of those that one made before.

    Raises:
        ValueError: A new file would replace one that no export has made.
    """
    _check_inside(out, names)
    foreign = sorted(name for name in names - made if os.path.lexists(out / name))
    if foreign:
        raise ValueError(
            f"{out} has {', '.join(foreign[:5])}, which no export has made; rename it or pass "
            "another out="
        )
    # The record first: it names what an interrupted replacement leaves.
    for name in sorted(names, key=lambda name: (name != MARK, name)):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).replace(out / name)
    for name in made - names:
        with contextlib.suppress(IsADirectoryError):  # a folder of the user's that took its place
            (out / name).unlink(missing_ok=True)
    for folder in {(out / name).parent for name in made - names} - {out}:
        with contextlib.suppress(OSError):  # it holds files that no export has made
            folder.rmdir()


def check_equal(
    what: str, before: Sequence[Tensor], after: Sequence[Tensor], tolerance: float = 1e-5
) -> float:
    """The largest difference of two lists of outputs, relative to the largest value where above 1.

    Raises:
        ValueError: Other numbers, shapes, or values beyond the tolerance.
    """
    shapes = [[tuple(x.shape) for x in outputs] for outputs in (before, after)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{what} gives shapes {shapes[1]} instead of {shapes[0]}; not exported")
    worst = 0.0
    for one, other in zip(before, after, strict=True):
        scale = max(1.0, float(one.abs().max()))
        worst = max(worst, float((one - other).abs().max()) / scale)
    if not worst <= tolerance:  # NaN is refused as well
        raise ValueError(f"{what} differs by {worst:.1e}, allowed is {tolerance:.0e}; not exported")
    return worst
