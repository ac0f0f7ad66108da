"""Shared by all exports: the request, the checkpoint, and a folder that is complete or absent.

A target is a module here with a function ``export(request) -> list[Path]``. It writes files to
``request.folder``, loads them as their user will, compares the outputs with ``check_equal`` and
returns the files. For what it cannot export it raises a ValueError that names module and operator.
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

from backbones.options.suggestions import plural
from tasks.engine.family import Family, find_family
from tasks.engine.run_folder.bounded_reading import DamagedFile, read_text
from tools.cli.network_names import name_with_model, network_name
from tools.cli.usual_family import family_of_backbone

if TYPE_CHECKING:
    from torch import Tensor

    from backbones import Backbone
    from backbones.checkpoints.opening import Checkpoint

NUM_CLASSES = 1000  # classifier outputs without a checkpoint
MARK = ".mixerlab-export"  # marks an export's folder; other folders are never replaced
MADE = "Made by an export, which may replace these files:"  # its first line
COMPARED = 2  # images for the comparison of outputs
SEED = 0  # of weights and images without a checkpoint

Exporter = Callable[["ExportRequest"], "list[Path]"]


def ignore(text: str) -> None:
    """Discard a line of progress."""


@contextmanager
def seeded() -> Iterator[None]:
    """Make random weights reproducible, as a context manager."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


@dataclass(frozen=True)
class Target:
    """A format or toolkit to export to.

    Attributes:
        module: Module of this package that exports it.
        summary: Its line of the help.
        needs: Required packages by import name, with the command that installs them.
        settings: Its own ``key=value`` arguments with their defaults, all texts.
        choices: The valid values of settings that have a closed list.
        takes_runs: True if it takes the run of any family as it is, and nothing else.
    """

    module: str
    summary: str
    needs: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    takes_runs: bool = False


DENSE, EXPORT = 'pip install "mixerlab[dense]"', 'pip install "mixerlab[dense,export]"'
SWITCH = ("false", "true")
PARTS = ("classifier", "maps", "dense")
WHOLE = {"samples": "1000", "licence": "", "int8": "false", "int8.keep": ""}
INT8 = {"int8": SWITCH, "int8.keep": ("auto",)}
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
        {**dict.fromkeys(GRAPHS, ""), **WHOLE},
        {**GRAPHS, "what": ("whole", *GRAPHS["what"]), **INT8},
    ),
    "openvino": Target(
        "whole_graph",
        "OpenVINO's form of a run's whole graph, checked in its runtime",
        {name: EXPORT for name in ("onnx", "onnxruntime", "onnxscript")}
        | {"openvino": 'pip install "mixerlab[dense,export,openvino]"'},
        WHOLE,
        INT8,
        takes_runs=True,
    ),
    "torch_export": Target(
        "torch_export",
        "torch.export programs of classifier and maps",
        {},
        dict.fromkeys(GRAPHS, ""),
        GRAPHS,
    ),
    "hub": Target(
        "hub",
        "a model folder with its card for the Hugging Face hub; repo=OWNER/NAME pushes it",
        {},
        {"repo": "", "private": "false", "licence": "apache-2.0", "test": ""},
        {"private": SWITCH},
        takes_runs=True,
    ),
}


@dataclass(frozen=True)
class ExportRequest:
    """Export of one backbone to one target.

    Attributes:
        to: Name of the target.
        backbone: Registered name.
        options: For ``create_backbone``: the run's, overridden by typed ones.
        ckpt: Checkpoint file; None exports random weights.
        run: Config of the checkpoint's run; None outside of run folders.
        folder: Empty folder to write to; it gets its final name when the export is complete.
        image_size: (H, W) of the images for the comparison of outputs.
        settings: The target's own settings.
        report: Prints a line of progress before long steps.
    """

    to: str
    backbone: str
    options: Mapping[str, Any]
    ckpt: Path | None
    run: Mapping[str, Any] | None
    folder: Path
    image_size: tuple[int, int]
    settings: Mapping[str, str]
    report: Callable[[str], None] = ignore

    @property
    def exported_part(self) -> str:
        """Return the part of the run's family that the target takes; without a run, a backbone."""
        if self.run is None:
            return "backbone"
        return find_family(self.run["task_name"]).export_of(self.to)

    @property
    def label(self) -> str:
        """Return the network's name, including a token mixer that replaces the host's."""
        options = self.options
        name = name_with_model(self.backbone, options.get("model"))
        return network_name(name, options.get("token_mixer"), options.get("mixer"))

    @property
    def channels(self) -> int:
        """Return the channels of the network's images."""
        return int(self.options.get("in_chans", 3))

    @functools.cached_property
    def checkpoint(self) -> Checkpoint | None:
        """Read the checkpoint file once; None for random weights."""
        from backbones.checkpoints.opening import open_checkpoint

        return None if self.ckpt is None else open_checkpoint(self.ckpt)

    def build_backbone(self, *, dense: bool) -> Backbone:
        """Build the backbone in evaluation mode with random weights."""
        from backbones import create_backbone
        from backbones.lora import weights_follow

        with weights_follow():
            return create_backbone(self.backbone, **{**self.options, "dense": dense}).eval()

    def create_backbone(self, *, dense: bool) -> Backbone:
        """Build the backbone in evaluation mode with the checkpoint's weights, or random ones.

        Raises:
            ValueError: The weights are another model's; the message lists the differing keys.
        """
        from backbones.checkpoints.adoption import adopt

        with seeded():
            backbone = self.build_backbone(dense=dense)
        if self.checkpoint is not None:
            adopt(backbone, self.checkpoint, trained=True)
        return backbone

    def images(self, batch: int = COMPARED, size: tuple[int, int] | None = None) -> Tensor:
        """Return images (B, C, H, W) for the comparison of outputs, equal in every call."""
        import torch

        generator = torch.Generator().manual_seed(SEED)
        shape = (batch, self.channels, *(size or self.image_size))
        return torch.randn(shape, generator=generator)


def exported_family(run: Mapping[str, Any] | None, backbone: str) -> Family:
    """Return the family of a run, or without a run the usual one of a backbone."""
    return find_family(run["task_name"]) if run else family_of_backbone(backbone)


def check_exported(run: Mapping[str, Any] | None, backbone: str, to: str) -> None:
    """Check that the family of a run, or without a run of a backbone, defines a target.

    Raises:
        ValueError: Names the targets that it does, or asks for the run that it needs.
    """
    if TARGETS[to].takes_runs and run is None:
        raise ValueError(f"to={to} takes a trained run; pass ckpt=<run folder>")
    family = exported_family(run, backbone)
    if not TARGETS[to].takes_runs and not family.export_of(to):
        targets = ", ".join(name for name in TARGETS if family.export_of(name)) or "none"
        subject = family.peculiarity or f"which are for {plural(family.modality)}"
        raise ValueError(
            f"to={to} does not take networks of task={family.name}, {subject}; its targets: "
            f"{targets}"
        )
    if run is None and family.export_of(to) == "model":
        raise ValueError(
            f"to={to} takes networks of task={family.name} from their runs; pass ckpt=<run folder>"
        )


def exporter(to: str) -> Exporter:
    """Return the export function of a target.

    Raises:
        ValueError: The target is unknown, or a required package is missing.
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
    """Return the checkpoint file for a run folder or path, and the config of its run.

    Raises:
        ValueError: The checkpoint is missing.
    """
    from tasks.engine.run_folder.saved_runs import open_saved

    if not ckpt:
        return None, None
    saved = open_saved(ckpt)
    return saved.file, None if saved.run is None else saved.run.config


@contextmanager
def new_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Provide a temporary folder that replaces ``out`` if the block succeeds, else is removed.

    An existing ``out`` keeps all files that were not made by an export.

    Raises:
        ValueError: ``out`` exists and must stay, was not made by an export, or cannot be created.
    """
    from tools.cli.errors import write_failure

    exists = out.is_symlink() or out.exists()
    made_here = not out.is_symlink() and (out / MARK).is_file()
    if Path.cwd().is_relative_to(out.resolve()):
        raise ValueError(f"{out} contains the current folder; pass another out=")
    if exists and not made_here:
        raise ValueError(f"{out} exists but was not made by an export; pass another out=")
    if exists and not overwrite:
        raise ValueError(f"{out} exists; pass overwrite=true or another out=")
    export_files = _made_files(out) if exists else set()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ValueError(f"cannot create {out} ({error}); pass another out=") from error
    try:
        temporary.chmod(0o755)  # mkdtemp gives access to the owner only
        yield temporary
        files = [path for path in temporary.rglob("*") if path.is_file()]
        for path in files:  # safetensors gives access to the owner only
            path.chmod(0o644)
        names = sorted(str(path.relative_to(temporary)) for path in files)
        (temporary / MARK).write_text("\n".join([MADE, *names]) + "\n")
        if exists:
            _replace(out, temporary, export_files, {*names, MARK})
        else:
            temporary.rename(out)
    except Exception as error:
        reason = write_failure(error)
        if reason is None:
            raise
        raise ValueError(
            f"the export could not be written to {out.parent} ({reason}); free space there, raise "
            "ulimit -f, or pass another out="
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _made_files(out: Path) -> set[str]:
    """Return the names of the files that an export wrote to a folder, from its record.

    Raises:
        ValueError: The record is from an earlier version, or names files outside the folder.
    """
    try:
        title, *names = read_text(out / MARK, errors="replace").splitlines() or [""]
    except DamagedFile as error:
        raise ValueError(f"{error}; remove {out} or pass another out=") from error
    if title != MADE or "\0" in "".join(names):
        raise ValueError(
            f"{out / MARK} does not list the export's files, so yours cannot be identified; remove "
            f"{out} or pass another out="
        )
    _check_inside(out, names)
    return {*names, MARK}


def _check_inside(out: Path, names: Iterable[str]) -> None:
    """Check that ``..`` or a link leads no file outside an export's folder.

    Raises:
        ValueError: A file is outside.
    """
    inside = out.resolve()
    for name in names:
        # A file that is itself a link is removed or replaced, never followed.
        if not (inside / name).parent.resolve().is_relative_to(inside):
            raise ValueError(f"{out / name} is outside of {out}, where exports stay; remove it")


def _replace(out: Path, source: Path, earlier_names: set[str], names: set[str]) -> None:
    """Move an export's files into a folder, replacing the files of an earlier export.

    Raises:
        ValueError: A new file would replace one that no export wrote.
    """
    _check_inside(out, names)
    foreign = sorted(name for name in names - earlier_names if os.path.lexists(out / name))
    if foreign:
        raise ValueError(
            f"{out} has {', '.join(foreign[:5])}, not made by an export; rename it or pass another "
            "out="
        )
    # The record comes first: it lists what an interrupted replacement leaves behind.
    for name in sorted(names, key=lambda name: (name != MARK, name)):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).replace(out / name)
    for name in earlier_names - names:
        with contextlib.suppress(IsADirectoryError):  # a user's folder has its name now
            (out / name).unlink(missing_ok=True)
    for folder in {(out / name).parent for name in earlier_names - names} - {out}:
        with contextlib.suppress(OSError):  # it has files of the user's
            folder.rmdir()


def check_equal(
    subject: str, before: Sequence[Tensor], after: Sequence[Tensor], tolerance: float = 1e-5
) -> float:
    """Return the largest difference of two lists of outputs, relative to values above 1.

    Raises:
        ValueError: Numbers of outputs or shapes differ, or values differ beyond the tolerance.
    """
    shapes = [[tuple(x.shape) for x in outputs] for outputs in (before, after)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{subject} gives shapes {shapes[1]} instead of {shapes[0]}; not exported")
    worst = 0.0
    for x, y in zip(before, after, strict=True):
        scale = max(1.0, float(x.abs().max()))
        worst = max(worst, float((x - y).abs().max()) / scale)
    if not worst <= tolerance:  # also true for NaN
        raise ValueError(
            f"{subject} differs by {worst:.1e}, more than {tolerance:.0e}; not exported"
        )
    return worst
