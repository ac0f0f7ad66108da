"""Open checkpoints for analyses: network, classes and images of each, as in its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from backbones import Backbone, create_backbone
from backbones.checkpoints.adoption import adopt
from backbones.lora import weights_follow
from datamodules.loading.memory import check_images_fit
from heads.linear import LinearClassifier
from tasks.engine.base import BaseTask
from tasks.engine.classes import warn_of_order
from tasks.engine.family import Family, find_family
from tasks.engine.instantiate import build
from tasks.engine.loading import build_task, read_targets, usual_data
from tasks.engine.optimisation.automatic import apply_fixed_schedule
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import Saved, open_saved
from tools.analyses import check_applies
from tools.cli.network_names import config_network_name
from tools.cli.paths import CONFIGS
from tools.cli.quoting import quote, quote_arguments
from tools.cli.typed_network import network_label as label_of
from tools.cli.typed_network import read_networks, split_outside_brackets
from tools.cli.usual_family import family_of_backbone
from tools.config.config_checks import resolve_config
from tools.config.lazy_groups import register_groups
from tools.config.name_checks import compose_checked
from tools.config.run_config import job_config

BATCH = 16
Size = tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """Images as the network sees them.

    Attributes:
        images: (B, 3, H, W), normalised.
        labels: (B,) classes; -1 if unknown.
        names: Their files.
        samples: The data module's collated samples, for tasks whose batches have more.
        inside: (H, W) of each image without its padding, which is below and to the right.
    """

    images: Tensor
    labels: Tensor
    names: tuple[str, ...]
    samples: Any
    inside: tuple[Size, ...]


@dataclass
class Subject:
    """A checkpoint, or a network with random weights, to analyse.

    Attributes:
        label: Its name in figures.
        backbone: In evaluation mode, with frozen parameters.
        model: Images to logits, or None without a classifier.
        family: Task family of the run, or without a run, of the backbone.
        task: The run's task, or None.
        data: The data module of its images, or None.
        folder: The run's folder, or None.
        config: The run's config, or None.
        size: (H, W) that images are resized to; None keeps the data's size.
        count: Maximum number of images.
        why_no_images: Error message if images are needed but missing.
    """

    label: str
    backbone: Backbone
    model: Callable[[Tensor], Tensor] | None
    family: Family
    task: BaseTask | None = None
    data: Any = None
    folder: Path | None = None
    config: RunConfig | None = None
    size: Size | None = None
    count: int = BATCH
    why_no_images: str = ""
    _ready: bool = field(default=False, repr=False)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes; empty if unknown."""
        if self.task is None:
            return ()
        task: Any = self.task
        names: Sequence[str] = getattr(task, "shown_names", ()) or getattr(task, "class_names", ())
        return tuple(names)

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number."""
        return self.class_names[label] if label < len(self.class_names) else f"class {label}"

    @cached_property
    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the mean and standard deviation per channel of the images' normalisation."""
        if hasattr(self.data, "normalisation"):
            return self.data.normalisation
        processor = self.preprocessor()
        if processor is None:
            return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return tuple(
            [float(v) / 255 for v in getattr(processor, key).flatten()] for key in ("mean", "std")
        )  # type: ignore[return-value]

    def preprocessor(self) -> Any:
        """Return the module that normalises and pads in a toolkit's model, or None."""
        return None if self.task is None else _find_preprocessor(self.task.model)

    def batches(self, count: int | None = None) -> Iterator[Batch]:
        """Yield batches of images, evenly spaced over the dataset.

        Args:
            count: Maximum number of images; default: ``self.count``.

        Raises:
            ValueError: The subject lacks images.
        """
        if self.data is None:
            raise ValueError(self.why_no_images)
        dataset = self._dataset()
        count = min(count or self.count, len(dataset))
        indices = [number * len(dataset) // count for number in range(count)]
        collate = self.data.collate() or torch.utils.data.default_collate
        # Images of dense tasks differ in size, unless all are resized to one.
        at_once = BATCH if self.preprocessor() is None or self.size else 1
        for start in range(0, count, at_once):
            part = indices[start : start + at_once]
            samples = self.data.normalise(collate([dataset[0, index] for index in part]))
            if self.preprocessor() is None:
                device = next(self.backbone.parameters()).device
                samples = move_data_to_device(samples, device)
            names = tuple(self.data.predict_name(index) for index in part)
            yield self._batch(samples, names)

    def _dataset(self) -> Any:
        if not self._ready:
            if self.data.predict_path is None:
                self.data.prepare_data()
                self.data.setup()
                if self.task is None and self.model is not None:
                    warn_of_order(self.label, self.data.class_names, self.data.other_orders)
            self._ready = True
        return self.data._to_predict()

    def _batch(self, samples: Any, names: tuple[str, ...]) -> Batch:
        processor = self.preprocessor()
        if processor is None:
            images = samples[next(iter(self.family.batch))]
            labels = samples.get("label", torch.full((len(images),), -1))
        else:
            parts = [
                _prepare_sample(processor, samples, index, self.size) for index in range(len(names))
            ]
            images = torch.cat([image for image, _ in parts])
            inside = tuple(size for _, size in parts)
            return Batch(images, torch.full((len(names),), -1), names, samples, inside)
        if self.size is not None and tuple(images.shape[2:]) != self.size:
            images = _resize(images, self.size)
        full_size = (images.shape[-2], images.shape[-1])
        return Batch(images, labels, names, samples, (full_size,) * len(images))

    def logits(self, images: Tensor) -> Tensor:
        """Return the class scores, (B, K).

        Raises:
            ValueError: The network lacks a classifier.
        """
        return self.classifier()(images)

    def classifier(self) -> Callable[[Tensor], Tensor]:
        """Return the function from images to logits.

        Raises:
            ValueError: The network lacks a classifier.
        """
        if self.model is None:
            raise ValueError(
                f"{self.label} lacks an image classifier: pass ckpt=<run folder> of "
                "task=classification or transfer, or a checkpoint with a classifier"
            )
        return self.model


def open_subjects(options: Mapping[str, str], words: Sequence[str]) -> list[Subject]:
    """Open every checkpoint or network that is typed, in order.

    Args:
        options: ``analysis``, its name; ``ckpt``, ``backbone``, ``input``, ``images``,
            ``image_size``.
        words: Typed ``backbone.KEY=VALUE`` and ``data.KEY=VALUE``.

    Raises:
        ValueError: Both are missing, or a file outside of run folders comes without backbone=.
    """
    register_groups()
    text = options["ckpt"]  # a path may have commas too
    paths = [text] if Path(text).exists() else text.split(",")
    paths = [path for path in paths if path]
    names = [name for name in split_outside_brackets(options["backbone"], ",") if name.strip()]
    if not paths and not names:
        raise ValueError("ckpt=<run folder> or backbone=NAME is missing; see --help")
    if paths and len(names) > 1 and len(names) != len(paths):
        raise ValueError(
            f"backbone= has {len(names)} networks, but ckpt= has {len(paths)} checkpoints; pass "
            "one name for all, or one for each"
        )
    if not paths:
        networks = read_networks(options["backbone"], _select_words("backbone.", words))
        subjects = [_untrained(network, options, words) for network in networks]
    else:
        subjects = [
            _open_subject(path, names[min(index, len(names) - 1)] if names else "", options, words)
            for index, path in enumerate(paths)
        ]
    return _make_labels_unique(subjects)


def _open_subject(
    path: str, name: str, options: Mapping[str, str], words: Sequence[str]
) -> Subject:
    saved = open_saved(path)
    run = saved.run
    if run is None:
        if not name:
            raise ValueError(
                f"{path} is not in a run folder, so its network is unknown: pass backbone=NAME too"
            )
        return _open_file(saved, Path(path).stem, name, options, words)
    if name and name != run.config["backbone"]["name"]:
        raise ValueError(
            f"ckpt={path} has {run.config['backbone']['name']}, not {name}; leave backbone= out"
        )
    family = find_family(run.config["task_name"])
    check_applies(family, options["analysis"])
    command = ["mode=predict", f"ckpt={quote(str(run.checkpoint))}", *_input(options), *words]
    config = _config(command)
    config.data["num_workers"] = 0
    square = _image_side(options)
    # Only the data: position tables keep their trained size and are resized in each pass.
    if square and "image_size" in config.data:
        config.data["image_size"] = square
    data = build(config.data, "data", seed=config.seed, predict_path=config.input)
    targets = read_targets(config.task, saved.checkpoint)
    if targets is None:
        data.prepare_data()
        data.setup()
    else:
        data.predict_only(**targets)
    task = build_task(config, data)
    task.load_weights(saved.checkpoint)
    task.data = data
    task.eval().requires_grad_(False)
    backbone: Backbone = task.model.backbone
    model = task.model if getattr(task.model, "keeps_classifier", None) is not None else None
    return _set_size(
        Subject(
            config_network_name(config.backbone),
            backbone, model, family, task, data, run.folder, config,
            count=int(options["images"]),
        ),
        options,
    )  # fmt: skip


def _open_file(
    saved: Saved, label: str, name: str, options: Mapping[str, str], words: Sequence[str]
) -> Subject:
    """Open a checkpoint outside of run folders."""
    ((name, network_options),) = read_networks(name, _select_words("backbone.", words))
    family = _applicable_family(name, options)
    try:
        model: Any = LinearClassifier.from_pretrained(name, saved.file, **network_options)
        backbone = model.backbone
    except ValueError as error:
        if "classifier" not in str(error):
            raise
        with weights_follow():
            model, backbone = None, create_backbone(name, **network_options)
        adopt(backbone, saved.checkpoint, trained=True)
    return _make_subject(label, backbone, model, family, options, words)


def _untrained(network: tuple[str, dict[str, Any]], options: Mapping[str, str],
               words: Sequence[str]) -> Subject:  # fmt: skip
    name, network_options = network
    family = _applicable_family(name, options)
    torch.manual_seed(0)
    backbone = create_backbone(name, **network_options)
    return _make_subject(f"{label_of(network)} (random)", backbone, None, family, options, words)


def _applicable_family(name: str, options: Mapping[str, str]) -> Family:
    """Return the family of a network without a run, which must define the analysis."""
    family = family_of_backbone(name)
    check_applies(family, options["analysis"])
    return family


def _make_subject(label: str, backbone: Backbone, model: Any, family: Family,
                  options: Mapping[str, str], words: Sequence[str]) -> Subject:  # fmt: skip
    (model or backbone).eval().requires_grad_(False)
    subject = Subject(label, backbone, model, family, count=int(options["images"]))
    subject.why_no_images = (
        f"{label} is not from a run folder, so pass its images as input=<image, folder or dataset "
        "such as sample_classification>"
    )
    if options["input"]:
        subject.data = _build_inputs(family, options, words, backbone.img_size)
        is_oblong = family.modality == "image" and len({*backbone.img_size}) > 1
        if is_oblong and not options["image_size"]:
            subject.size = backbone.img_size
    return _set_size(subject, options)


def _build_inputs(
    family: Family, options: Mapping[str, str], words: Sequence[str], img_size: Size
) -> Any:
    """Return the data module of ``input=`` for a network without a run, at its size by default."""
    source, square = options["input"], _image_side(options)
    if _is_data_set(source):
        size = [f"data.image_size={square}"] if square else []
        config = _config(
            [f"task={family.name}", f"data={source}", *_select_words("data.", words), *size]
        )
        config.data["num_workers"] = 0
        return build(config.data, "data", seed=0)
    usual = usual_data([family.task], square or img_size)
    data = build({**usual, "num_workers": 0}, "data", seed=0, predict_path=source)
    data.predict_only(())
    return data


def _config(words: list[str]) -> RunConfig:
    """Compose the config of a run; mistakes raise one sentence."""
    words = quote_arguments(words)
    return apply_fixed_schedule(resolve_config(job_config(words, compose_checked(words))))


def _input(options: Mapping[str, str]) -> list[str]:
    source = options["input"]
    if not source:
        return []
    return [f"data={source}"] if _is_data_set(source) else [f"input={quote(source)}"]


def _is_data_set(source: str) -> bool:
    return not Path(source).exists() and (CONFIGS / "data" / f"{source}.yaml").is_file()


def _select_words(prefix: str, words: Sequence[str]) -> list[str]:
    return [word for word in words if word.lstrip("+").startswith(prefix)]


def _image_side(options: Mapping[str, str]) -> int | None:
    text = options["image_size"]
    return int(text) if text.isdecimal() else None


def _set_size(subject: Subject, options: Mapping[str, str]) -> Subject:
    from tools.cli.arguments import parse_image_size

    if options["image_size"]:
        subject.size = parse_image_size(options["image_size"])
        check_images_fit(min(BATCH, subject.count), subject.size, "lower image_size=")
    return subject


def _make_labels_unique(subjects: list[Subject]) -> list[Subject]:
    """Make equal labels unique by the names of their folders, and if necessary by numbers."""
    folders = [subject.folder.name if subject.folder else "" for subject in subjects]
    for endings in (folders, [str(place) for place in range(1, len(subjects) + 1)]):
        labels = [subject.label for subject in subjects]
        for subject, more in zip(subjects, endings, strict=True):
            if labels.count(subject.label) > 1:
                subject.label = f"{subject.label} {more}".strip()
    return subjects


def _find_preprocessor(model: Any) -> Any:
    for part in model.modules():
        with suppress(AttributeError):
            return part.data_preprocessor
    return None


def _prepare_sample(
    processor: Any, samples: Any, index: int, size: Size | None
) -> tuple[Tensor, Size]:
    """Return a toolkit sample's normalised image (1, 3, H, W), and its size without padding."""
    image = samples["inputs"][index]
    sample = samples["data_samples"][index]
    images = processor({"inputs": [image], "data_samples": [sample]}, False)["inputs"]
    images = images if isinstance(images, Tensor) else torch.stack(list(images))
    height, width = image.shape[1:]
    if size is None:
        return images, (height, width)
    padded = images.shape[2:]
    inside = round(height * size[0] / padded[0]), round(width * size[1] / padded[1])
    return _resize(images, size), inside


def _resize(images: Tensor, size: Size) -> Tensor:
    return F.interpolate(images, size, mode="bicubic", antialias=True, align_corners=False)
