"""Teacher of a distillation: its options, its weights and its logits of a batch."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from backbones import list_backbones
from backbones.checkpoints.hub import quick_offline
from backbones.checkpoints.opening import open_checkpoint
from backbones.options import check_value
from heads.distillation import Distillation, TeacherLogits
from heads.linear import LinearClassifier
from tasks.classification.family import FAMILY
from tasks.engine.classes import ORDER, Orders, check_classes, warn_of_order
from tasks.engine.normalisation import IMAGENET, expected_preprocessing
from tasks.engine.run_folder.saved_runs import checkpoint_file, open_saved

log_info = rank_zero_only(logging.getLogger(__name__).info)

OPTION = "task.distillation"
data_config_of: Any = resolve_model_data_config  # timm's function is untyped
Normalisation = tuple[Sequence[float], Sequence[float]]  # mean and deviation of the channels


class TeacherOptions:
    """Options of ``task.distillation``, checked before any weights are loaded.

    Args:
        type: "hard" or "soft"; None disables distillation and excludes the other options.
        teacher: Name of one of our backbones, which needs ``checkpoint``, or of a network of timm,
            with its tag (``regnety_160.deit_in1k``) if timm has several weights of it. Optional if
            ``checkpoint`` lies in a run folder.
        checkpoint: Weights of the teacher with its classifier: a file, or one of our run folders.
        alpha: Share of the teacher in the loss.
        temperature: Temperature of soft labels.
        image_size: Side that images are resized to for the teacher. By default the teacher sees the
            student's images; networks of timm with a fixed size get that size.

    Raises:
        ValueError: An option is invalid, or a name is unknown.
    """

    def __init__(
        self,
        type: str | None = None,
        teacher: str | None = None,
        checkpoint: str | Path | None = None,
        alpha: float = 0.5,
        temperature: float = 1.0,
        image_size: int | None = None,
    ) -> None:
        self.teacher, self.checkpoint, self.image_size = teacher, checkpoint, image_size
        if type is None:
            if teacher is not None or checkpoint is not None:
                raise ValueError(
                    f"{OPTION} has a teacher but lacks a type; pass {OPTION}.type=hard or soft"
                )
            self.how = None
            return
        self.how = Distillation(type, alpha, temperature)  # type: ignore[arg-type] # it checks
        for name, value, hint in (
            ("teacher", teacher, str | None),
            ("checkpoint", checkpoint, Path | None),
            ("image_size", image_size, int | None),
        ):
            check_value(f"{OPTION}.{name}", value, hint)
        if image_size is not None and image_size < 1:
            raise ValueError(f"{OPTION}.image_size must be at least 1, got {image_size}")
        if teacher is None and checkpoint is None:
            raise ValueError(
                f"{OPTION}.type={type} needs a teacher: pass {OPTION}.teacher=<a network of timm's,"
                f" such as regnety_160.deit_in1k> or {OPTION}.checkpoint=<run folder>"
            )
        if teacher is not None and not _is_ours(teacher):
            _check_timm(teacher)
        elif teacher is not None and checkpoint is None:
            raise ValueError(
                f"{OPTION}.teacher={teacher} needs weights; pass {OPTION}.checkpoint=<its file or "
                "run folder>, or name a network of timm's with its tag"
            )


class Teacher:
    """Trained classifier in evaluation mode, detached from the gradient.

    It is kept outside ``nn.Module``, so that the task neither saves, averages, optimises,
    synchronises nor exports it. It moves to the device and precision of the images.

    Args:
        network: Maps images to logits (B, K).
        name: Name for messages.
        normalisation: Normalisation of its training images.
        image_size: Side that images are resized to, or None.
        how: Loss that the student computes from the logits.
    """

    def __init__(
        self,
        network: nn.Module,
        name: str,
        normalisation: Normalisation,
        image_size: int | None,
        how: Distillation,
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.name, self.how, self.image_size = name, how, image_size
        self.normalisation = normalisation
        self._place: tuple[torch.device, torch.dtype] | None = None

    @torch.no_grad()
    def teacher_logits(self, images: Tensor, normalisation: Normalisation) -> TeacherLogits:
        """Return the teacher's logits of the student's images.

        The teacher computes in the precision of the training step.

        Args:
            images: (B, 3, H, W).
            normalisation: The student's, by which the images are normalised.
        """
        place = images.device, images.dtype
        if self._place != place:
            self.network.to(*place)
            self._place = place
        return TeacherLogits(self.network(self.convert_images(images, normalisation)), self.how)

    def convert_images(self, images: Tensor, normalisation: Normalisation) -> Tensor:
        """Convert images to the teacher's normalisation and size."""
        if not _equal(normalisation, self.normalisation):
            (mean, std), (own_mean, own_std) = (
                (images.new_tensor(list(part))[:, None, None] for part in pair)
                for pair in (normalisation, self.normalisation)
            )
            images = (images * std + (mean - own_mean)) / own_std
        size = self.image_size
        if size is not None and images.shape[-2:] != (size, size):
            images = F.interpolate(
                images, (size, size), mode="bicubic", align_corners=False, antialias=True
            )
        return images


def load_teacher(
    options: TeacherOptions,
    class_names: Sequence[str],
    normalisation: Normalisation,
    other_orders: Orders | None = None,
    order_option: str = ORDER,
) -> Teacher:
    """Build the teacher of a student; the run's random state stays unchanged.

    Args:
        options: Network and type of distillation.
        class_names: Class names of the data.
        normalisation: Normalisation of the student's images.
        other_orders: The data's classes in each other order that they can be read in. A teacher
            without class names may use one of these.
        order_option: Name of the option that chooses the order, for the warning.

    Raises:
        ValueError: The weights are missing, or of another network or of other classes.
    """
    assert options.how is not None
    with torch.random.fork_rng(devices=[]):
        network, name, statistics, size = _load(options, class_names, normalisation)
    _check_order(options, name, class_names, other_orders or {}, order_option)
    teacher = Teacher(network, name, statistics, options.image_size or size, options.how)
    count = sum(parameter.numel() for parameter in network.parameters())
    notes = [] if _equal(statistics, normalisation) else ["normalised as its own training's"]
    if teacher.image_size is not None:
        notes.append(f"resized to {teacher.image_size} pixels")
    log_info(
        f"Teacher: {name}, {count / 1e6:.1f} M parameters, {options.how.type} labels, alpha "
        f"{options.how.alpha:g}; it sees the student's images"
        + (f", {' and '.join(notes)}" if notes else "")
    )
    return teacher


Loaded = tuple[nn.Module, str, Normalisation, int | None]


def _load(
    options: TeacherOptions, class_names: Sequence[str], normalisation: Normalisation
) -> Loaded:
    name, file = options.teacher, options.checkpoint
    if file is not None and (name is None or _is_ours(name)):
        run = open_saved(file).run
        if run is not None:
            return _load_run_teacher(run.config, name, file, class_names)
        if name is None:
            raise ValueError(
                f"{file} lies outside a run folder, which would name its network; pass "
                f"{OPTION}.teacher=<its name>"
            )
        network = LinearClassifier.from_pretrained(name, file)
        _check_count(network.classifier.out_features, class_names, str(file))
        expected = dict(zip(IMAGENET, normalisation, strict=True))
        expected |= expected_preprocessing(network.backbone, file)[0]
        return network, name, (expected["mean"], expected["std"]), None
    assert name is not None
    network = _build_timm(name, file, class_names)
    data = data_config_of(network)
    size = data["input_size"][-1] if network.pretrained_cfg.get("fixed_input_size") else None
    return network, name, (data["mean"], data["std"]), size


def _check_order(
    options: TeacherOptions,
    name: str,
    class_names: Sequence[str],
    other_orders: Orders,
    option: str,
) -> None:
    """Compare a teacher's classes by name and order; warn if it lacks class names.

    Raises:
        ValueError: They differ.
    """
    file = options.checkpoint
    source = f"the teacher {file or name}"
    opened = file and open_checkpoint(checkpoint_file(file), values_only=True)
    if opened and opened.class_names is not None:
        check_classes(opened.values, class_names, source, other_orders, option)
    else:
        warn_of_order(source, class_names, other_orders, option)


def _load_run_teacher(
    config: Mapping[str, Any], name: str | None, file: str | Path, class_names: Sequence[str]
) -> Loaded:
    from tasks.engine.loading import load_run

    trained = config["backbone"]["name"]
    if name not in (None, trained):
        raise ValueError(
            f"{file} belongs to a run of {trained}, not of {name}; leave {OPTION}.teacher out"
        )
    if config["task"]["_target_"] != FAMILY.task:
        raise ValueError(
            f"{file} belongs to a run of task={config['task_name']}, but a teacher must classify "
            "images; pass a run of task=classification or transfer"
        )
    task: Any = load_run(file)
    _check_count(len(task.class_names), class_names, str(file))
    return task.model, trained, task.data.normalisation, None


def _build_timm(name: str, file: str | Path | None, class_names: Sequence[str]) -> Any:
    source = timm.get_pretrained_cfg(name)
    if file is not None:
        return _build_timm_from_file(name, file, class_names)
    if source is None or not source.has_weights:
        raise ValueError(
            f"timm lacks weights of {name}; pass {OPTION}.checkpoint=<file of its weights>"
        )
    _check_count(source.num_classes, class_names, name)
    try:
        with quick_offline():
            return timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"model.safetensors from huggingface.co/{source.hf_hub_id}"
        raise ValueError(
            f"timm could not fetch its weights of {name} ({type(error).__name__}); download "
            f"{where if source.hf_hub_id else source.url} on a machine with network and pass "
            f"{OPTION}.checkpoint=<its path>"
        ) from error


def _build_timm_from_file(name: str, file: str | Path, class_names: Sequence[str]) -> Any:
    """Build a network of timm with the weights and number of classes of a file."""
    tensors = open_checkpoint(file).state_dict
    classifier = (timm.get_pretrained_cfg(name, allow_unregistered=True) or _EmptyConfig).classifier
    classifiers = [classifier] if isinstance(classifier, str) else list(classifier or ())
    counts = {len(tensors[f"{key}.weight"]) for key in classifiers if f"{key}.weight" in tensors}
    count = counts.pop() if counts else len(class_names)
    _check_count(count, class_names, str(file))
    overlay = {"state_dict": dict(tensors), "num_classes": count}
    try:
        return timm.create_model(
            name, pretrained=True, num_classes=count, pretrained_cfg_overlay=overlay
        )
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"{file} contains another network than {name}: {reason}") from error


class _EmptyConfig:
    classifier = None


def _is_ours(name: str) -> bool:
    return name in list_backbones()


def _check_timm(name: str) -> None:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        names = [*list_backbones(), *timm.list_models()]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see timm.list_models()"
        raise ValueError(f"{name!r} is neither a backbone here nor a network of timm; {hint}")
    tags = [entry.partition(".")[2] for entry in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise ValueError(
            f"timm lacks the weights {name}; of {architecture} it has: {', '.join(tags) or 'none'}"
        )


def _check_count(count: int, class_names: Sequence[str], source: str) -> None:
    if count != len(class_names):
        raise ValueError(
            f"the teacher {source} has {count} classes, the data have {len(class_names)}; "
            "pass a teacher that was trained on the data's classes"
        )


def _equal(first: Normalisation, second: Normalisation) -> bool:
    return all(tuple(a) == tuple(b) for a, b in zip(first, second, strict=True))
