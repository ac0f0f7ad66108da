"""Opens checkpoints for analyses: network, classes and images of each, as its run had them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backbones import Backbone, create_backbone
from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import open_checkpoint
from datamodules.images.classification import ClassificationDataModule
from heads.linear import LinearClassifier
from tasks.engine.base import BaseTask
from tasks.engine.classes import warn_of_order
from tasks.engine.family import Family, find_family
from tasks.engine.instantiate import build
from tasks.engine.loading import build_task, targets_in
from tasks.engine.saved_config import checkpoint_file, saved_run
from tools.analyses import check_applies
from tools.cli.literal import literal, quoted
from tools.cli.network_names import name_of
from tools.cli.typed_network import label as label_of
from tools.cli.typed_network import read_networks, split_outside
from tools.cli.usual_family import usual_family, usual_task
from tools.config.automatic import fixed
from tools.config.config_checks import resolved
from tools.config.lazy_groups import register
from tools.config.name_checks import composed
from tools.config.run_config import CONFIGS, job_config

BATCH = 16
Size = tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """Images as the network sees them.

    Attributes:
        images: (B, 3, H, W), normalised.
        labels: (B,) classes; -1 where nobody knows.
        names: Their files.
        samples: What the data module collated, for tasks whose batches are more than this.
        inside: (H, W) of each image without its padding, which is below and to the right.
    """

    images: Tensor
    labels: Tensor
    names: tuple[str, ...]
    samples: Any
    inside: tuple[Size, ...]


@dataclass
class Subject:
    """A checkpoint, or a network with random weights, that is analysed.

    Attributes:
        label: What it is called in pictures.
        backbone: In evaluation mode, without gradients of parameters.
        model: Images to logits, or None where there is no classifier.
        family: Whose networks it is one of; that of configs/run.yaml without a run.
        task: Of a run, else None.
        data: Its images; None where none are known.
        folder: Of the run, else None.
        config: Of the run, else None.
        size: (H, W) that images are resized to; None leaves them as the data prepares them.
        count: Images that are looked at, at most.
        why_no_images: Said where images are asked for and none are known.
    """

    label: str
    backbone: Backbone
    model: Callable[[Tensor], Tensor] | None
    task: BaseTask | None = None
    family: Family = field(default_factory=usual_family)
    data: Any = None
    folder: Path | None = None
    config: Mapping[str, Any] | None = None
    size: Size | None = None
    count: int = BATCH
    why_no_images: str = ""
    _ready: bool = field(default=False, repr=False)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes; empty without a classifier that has names."""
        if self.task is None:
            return ()
        task: Any = self.task
        names: Sequence[str] = getattr(task, "shown_names", ()) or getattr(task, "class_names", ())
        return tuple(names)

    def class_name(self, label: int) -> str:
        """A class in words, or its number."""
        return self.class_names[label] if label < len(self.class_names) else f"class {label}"

    @cached_property
    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and deviation of the channels that images were normalised by."""
        if hasattr(self.data, "normalisation"):
            return self.data.normalisation
        processor = self.preprocessor()
        if processor is None:
            return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        return tuple(
            [float(v) / 255 for v in getattr(processor, key).flatten()] for key in ("mean", "std")
        )  # type: ignore[return-value]

    def preprocessor(self) -> Any:
        """What a toolkit's model normalises and pads by; None for classifiers."""
        return None if self.task is None else _preprocessor_of(self.task.model)

    def batches(self, count: int | None = None) -> Iterator[Batch]:
        """Images, evenly spaced over those there are.

        Args:
            count: How many at most; by default as many as were asked for.

        Raises:
            ValueError: No images are known.
        """
        if self.data is None:
            raise ValueError(self.why_no_images)
        dataset = self._dataset()
        count = min(count or self.count, len(dataset))
        indices = [number * len(dataset) // count for number in range(count)]
        collate = self.data.collate() or torch.utils.data.default_collate
        # Images of dense tasks have sizes of their own, unless all are brought to one.
        at_once = BATCH if self.preprocessor() is None or self.size else 1
        for start in range(0, count, at_once):
            part = indices[start : start + at_once]
            samples = collate([dataset[0, index] for index in part])
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
            images, labels = samples["image"], samples["label"]
        else:
            one = [_of_dense(processor, samples, index, self.size) for index in range(len(names))]
            images = torch.cat([image for image, _ in one])
            inside = tuple(size for _, size in one)
            return Batch(images, torch.full((len(names),), -1), names, samples, inside)
        if self.size is not None and tuple(images.shape[2:]) != self.size:
            images = _resized(images, self.size)
        whole = (images.shape[2], images.shape[3])
        return Batch(images, labels, names, samples, (whole,) * len(images))

    def logits(self, images: Tensor) -> Tensor:
        """Scores of classes, (B, K).

        Raises:
            ValueError: There is no classifier.
        """
        return self.classifier()(images)

    def classifier(self) -> Callable[[Tensor], Tensor]:
        """Images to logits.

        Raises:
            ValueError: There is none.
        """
        if self.model is None:
            raise ValueError(
                f"{self.label} has no classifier of images: pass ckpt=<run folder> of "
                "task=classification or transfer, or a file that holds one"
            )
        return self.model


def open_subjects(options: Mapping[str, str], words: Sequence[str]) -> list[Subject]:
    """Every checkpoint or network that is typed, in order.

    Args:
        options: ``analysis``, its name; ``ckpt``, ``backbone``, ``input``, ``images``,
            ``image_size``.
        words: Typed ``backbone.KEY=VALUE`` and ``data.KEY=VALUE``.

    Raises:
        ValueError: Nothing is typed, or a file of no run without the name of its network.
    """
    register()
    whole = options["ckpt"]  # a path may have commas, too
    paths = [whole] if Path(whole).exists() else whole.split(",")
    paths = [path for path in paths if path]
    names = [name for name in split_outside(options["backbone"], ",") if name.strip()]
    if not paths and not names:
        raise ValueError("say what to analyse: ckpt=<run folder>, or backbone=NAME; see --help")
    if paths and len(names) > 1 and len(names) != len(paths):
        raise ValueError(
            f"backbone= names {len(names)} networks and ckpt= {len(paths)} checkpoints; give one "
            "name for all, or one each"
        )
    if not paths:
        networks = read_networks(options["backbone"], _of("backbone.", words))
        subjects = [_untrained(network, options, words) for network in networks]
    else:
        subjects = [
            _opened(path, names[min(index, len(names) - 1)] if names else "", options, words)
            for index, path in enumerate(paths)
        ]
    return _told_apart(subjects)


def _opened(path: str, name: str, options: Mapping[str, str], words: Sequence[str]) -> Subject:
    run = saved_run(path)
    if run is None:
        if not name:
            raise ValueError(
                f"{path} lies in no run folder, whose config.yaml says what network it is of: pass "
                "backbone=NAME beside it"
            )
        return _of_file(path, name, options, words)
    if name and name != run.config["backbone"]["name"]:
        raise ValueError(
            f"ckpt={path} holds {run.config['backbone']['name']}, not {name}; leave backbone= out"
        )
    family = find_family(run.config["task_name"])
    check_applies(family, options["analysis"])
    typed = ["mode=predict", f"ckpt={quoted(str(run.checkpoint))}", *_input(options), *words]
    config = _config(typed)
    config["data"]["num_workers"] = 0
    square = _square(options)
    # Of the data alone: position tables are as large as at training, and are resized as they run.
    if square and "image_size" in config["data"]:
        config["data"]["image_size"] = square
    data = build(config, "data", seed=config["seed"], predict_path=config["input"])
    checkpoint = open_checkpoint(run.checkpoint)
    targets = targets_in(config, checkpoint)
    if targets is None:
        data.prepare_data()
        data.setup()
    else:
        data.predict_only(**targets)
    task = build_task(config, data)
    task.load_weights(checkpoint)
    task.data = data
    task.eval().requires_grad_(False)
    backbone: Backbone = task.model.backbone
    model = task.model if getattr(task.model, "keeps_classifier", None) is not None else None
    return _sized(
        Subject(
            name_of(config["backbone"]), backbone, model, task, family, data, run.folder, config,
            count=int(options["images"]),
        ),
        options,
    )  # fmt: skip


def _of_file(path: str, name: str, options: Mapping[str, str], words: Sequence[str]) -> Subject:
    """A checkpoint that lies in no run folder."""
    ((name, given),) = read_networks(name, _of("backbone.", words))
    file = checkpoint_file(path)
    try:
        model: Any = LinearClassifier.from_pretrained(name, file, **given)
        backbone = model.backbone
    except ValueError as error:
        if "classifier" not in str(error):
            raise
        model, backbone = None, create_backbone(name, **given)
        adopt(backbone, open_checkpoint(file), trained=True)
    return _plain(Path(path).stem, backbone, model, options, words)


def _untrained(network: tuple[str, dict[str, Any]], options: Mapping[str, str],
               words: Sequence[str]) -> Subject:  # fmt: skip
    name, given = network
    torch.manual_seed(0)
    backbone = create_backbone(name, **given)
    return _plain(f"{label_of(network)} (random)", backbone, None, options, words)


def _plain(label: str, backbone: Backbone, model: Any, options: Mapping[str, str],
           words: Sequence[str]) -> Subject:  # fmt: skip
    (model or backbone).eval().requires_grad_(False)
    subject = Subject(label, backbone, model, count=int(options["images"]))
    subject.why_no_images = (
        f"{label} comes from no run, so say which images to look at: input=<image, folder or data "
        "set such as sample_classification>"
    )
    if options["input"]:
        subject.data = _images_of(options, words)
    return _sized(subject, options)


def _images_of(options: Mapping[str, str], words: Sequence[str]) -> Any:
    """The data module of ``input=`` where no run has one."""
    given, square = options["input"], _square(options)
    if _is_data_set(given):
        size = [f"data.image_size={square}"] if square else []
        config = _config([f"task={usual_task()}", f"data={given}", *_of("data.", words), *size])
        config["data"]["num_workers"] = 0
        return build(config, "data", seed=0)
    data: Any = ClassificationDataModule(image_size=square or 224, num_workers=0,
                                         predict_path=given)  # fmt: skip
    data.predict_only(())
    return data


def _config(typed: list[str]) -> dict[str, Any]:
    """The config of a run that is typed, whose mistakes are one sentence each."""
    typed = literal(typed)
    return fixed(resolved(job_config(typed, composed(typed))))


def _input(options: Mapping[str, str]) -> list[str]:
    given = options["input"]
    if not given:
        return []
    return [f"data={given}"] if _is_data_set(given) else [f"input={quoted(given)}"]


def _is_data_set(given: str) -> bool:
    return not Path(given).exists() and (CONFIGS / "data" / f"{given}.yaml").is_file()


def _of(prefix: str, words: Sequence[str]) -> list[str]:
    return [word for word in words if word.lstrip("+").startswith(prefix)]


def _square(options: Mapping[str, str]) -> int | None:
    text = options["image_size"]
    return int(text) if text.isdecimal() else None


def _sized(subject: Subject, options: Mapping[str, str]) -> Subject:
    from tools.cli.arguments import image_size

    if options["image_size"]:
        subject.size = image_size(options["image_size"])
    return subject


def _told_apart(subjects: list[Subject]) -> list[Subject]:
    """Give those with one name the names of their folders beside it, and if need be numbers."""
    folders = [one.folder.name if one.folder else "" for one in subjects]
    for own in (folders, [str(place) for place in range(1, len(subjects) + 1)]):
        labels = [subject.label for subject in subjects]
        for subject, more in zip(subjects, own, strict=True):
            if labels.count(subject.label) > 1:
                subject.label = f"{subject.label} {more}".strip()
    return subjects


def _preprocessor_of(model: Any) -> Any:
    for part in model.modules():
        with suppress(AttributeError):
            return part.data_preprocessor
    return None


def _of_dense(processor: Any, samples: Any, index: int, size: Size | None) -> tuple[Tensor, Size]:
    """The normalised image of a sample of the toolkits, (1, 3, H, W), and its size unpadded."""
    image = samples["inputs"][index]
    sample = samples["data_samples"][index]
    images = processor({"inputs": [image], "data_samples": [sample]}, False)["inputs"]
    images = images if isinstance(images, Tensor) else torch.stack(list(images))
    height, width = image.shape[1:]
    if size is None:
        return images, (height, width)
    padded = images.shape[2:]
    inside = round(height * size[0] / padded[0]), round(width * size[1] / padded[1])
    return _resized(images, size), inside


def _resized(images: Tensor, size: Size) -> Tensor:
    return F.interpolate(images, size, mode="bicubic", antialias=True, align_corners=False)
