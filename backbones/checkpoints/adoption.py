"""Loading of checkpoints into networks: one conversion and one report of all differences."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from backbones.base import Backbone
from backbones.checkpoints.adapters import HIGH, LOW, merge, split_adapters, to_adapted
from backbones.checkpoints.behaviour import describe_change
from backbones.checkpoints.earlier_forms import take_recorded_forms
from backbones.checkpoints.equations import KINDS, differences
from backbones.checkpoints.keys import NETWORK, strip_wrappers
from backbones.checkpoints.opening import TASK, Checkpoint
from backbones.mixer import Mixer

V = TypeVar("V")
logger = logging.getLogger(__name__)

CLASSIFIER = "classifier."
# BatchNorm's counter, which files of early torch (torchvision's first weights) lack.
BATCH_COUNTER = ".num_batches_tracked"
FEW = 0.1  # share of a network's values below which loading them warns


@dataclass(frozen=True)
class LoadReport:
    """Report on the loading of a checkpoint.

    Attributes:
        source: The file.
        loaded: Number of loaded tensors.
        resized: Loaded tensors that were recomputed for this network, such as a table of positions
            for other windows or images.
        initialised: Keys of the model missing from the file (a new mixer, a new output norm).
        skipped: Keys of the file that the model lacks (a replaced FFN, the classifier).
        dead: Keys of the file without effect, such as a zero bias of a model without biases.
    """

    source: str
    loaded: int
    resized: tuple[str, ...]
    initialised: tuple[str, ...]
    skipped: tuple[str, ...]
    dead: tuple[str, ...] = ()

    def with_classifier(self) -> LoadReport:
        """Return the report for loading the file's classifier as well."""
        used = [key for key in self.skipped if key.startswith(CLASSIFIER)]
        rest = tuple(key for key in self.skipped if key not in used)
        return replace(self, loaded=self.loaded + len(used), skipped=rest)

    def __str__(self) -> str:
        """Return one line for a log."""
        return (
            f"{self.source}: {self.loaded} tensors loaded, of these {len(self.resized)} resized"
            f"{_some(self.resized)}, {len(self.initialised)} left at their initialisation"
            f"{_some(self.initialised)}, {len(self.skipped)} in the file not used"
            f"{_some(self.skipped)}"
        ) + (f", {len(self.dead)} dropped that change nothing{_some(self.dead)}" * bool(self.dead))


@dataclass(frozen=True, eq=False)
class Conversion:
    """Checkpoint's tensors converted to the names and sizes of a backbone.

    Attributes:
        backbone: The backbone.
        source: The file.
        tensors: All tensors without dead ones, the classifier under ``classifier.*``.
        dead: Keys of tensors without effect.
        places: Memory addresses of the file's values; tensors elsewhere were computed.
        interpolated: Tables of mixers that were interpolated to this map size, with both shapes.
        record: Options that the file's network was built with, if the file has them.
        prefixes: Prefixes of the names in the file.
    """

    backbone: Backbone
    source: str
    tensors: dict[str, Tensor]
    dead: tuple[str, ...]
    places: frozenset[int]
    interpolated: tuple[str, ...]
    record: Mapping[str, Any]
    prefixes: tuple[str, ...] = ()

    @property
    def has_classifier(self) -> bool:
        """True if the file has a classifier."""
        return {f"{CLASSIFIER}weight", f"{CLASSIFIER}bias"} <= self.tensors.keys()

    @property
    def classifier(self) -> dict[str, Tensor]:
        """Tensors of the classifier by their names in it.

        Raises:
            ValueError: The file lacks a classifier.
        """
        if not self.has_classifier:
            raise ValueError(
                f"{self.source} holds a backbone without classifier: pass it as "
                "backbone.pretrained instead"
            )
        return _below(CLASSIFIER, self.tensors)

    @property
    def num_classes(self) -> int:
        """Number of classes of the classifier.

        Raises:
            ValueError: The file lacks a classifier.
        """
        return len(self.classifier["weight"])

    def check(self, *, trained: bool = False) -> LoadReport:
        """Return the report that loading would give.

        Args:
            trained: Require the weights of all mixers, for use without training.

        Raises:
            ValueError: Keys differ that must agree; see ``adopt``. The message lists them.
        """
        report = self.match.report
        if trained:
            _refuse_untrained(self.backbone, report)
        return report

    @functools.cached_property
    def match(self) -> Match:
        """Tensors that fit the backbone.

        Raises:
            ValueError: As ``check``.
        """
        return _matched(self)


@dataclass(frozen=True, eq=False)
class Match:
    """Tensors of a conversion that fit its backbone, and the mixers that they leave out."""

    usable: dict[str, Tensor]
    report: LoadReport
    absent_mixers: tuple[str, ...]
    related_mixers: tuple[str, ...]


def convert(checkpoint: Checkpoint, backbone: Backbone) -> Conversion:
    """Convert a checkpoint of ours, timm's or the authors' to a backbone's names, without loading.

    Raises:
        ValueError: It lacks weights, or a table cannot be interpolated to the backbone's size.
    """
    if backbone.has_source_names(checkpoint.tensors):
        file: Mapping[str, Tensor] = checkpoint.tensors
    else:
        file = checkpoint.state_dict
        if NETWORK not in dict(backbone.named_children()):
            file, _ = strip_wrappers(file, checkpoint.path)
    file, adapters = split_adapters(file)
    if not backbone.adapted:
        file = merge(file, adapters, checkpoint.record)
    tensors = backbone.adapt_input(backbone.convert_state_dict(dict(file)))
    dead, interpolated = [], []
    for prefix, mixer in backbone.named_modules():
        if isinstance(mixer, Mixer):
            below = f"{prefix}."
            inside = _below(below, tensors)
            dead += [f"{below}{key}" for key, value in inside.items() if mixer.is_dead(key, value)]
            converted = mixer.convert_state_dict(inside)
            for key in inside.keys() - converted.keys():  # renamed
                del tensors[f"{below}{key}"]
            if not _is_own_module(mixer, converted):
                resized = mixer.to_own_size(converted, checkpoint.grids.get(prefix))
                interpolated += [
                    f"{below}{key} {tuple(converted[key].shape)} -> {tuple(value.shape)}"
                    for key, value in resized.items()
                ]
                converted |= resized
            tensors |= {f"{below}{key}": value for key, value in converted.items()}
    tensors = {key: value for key, value in tensors.items() if key not in dead}
    if backbone.adapted:
        tensors = to_adapted(tensors, adapters, backbone.adapted)
    places = frozenset(_place(value) for value in file.values())
    return Conversion(
        backbone,
        checkpoint.path,
        tensors,
        tuple(dead),
        places,
        tuple(interpolated),
        checkpoint.record,
        tuple(dict.fromkeys(key.rpartition(".")[0] or key for key in checkpoint.tensors)),
    )


def adopt(
    network: nn.Module, weights: Checkpoint | Conversion, *, trained: bool = False
) -> LoadReport:
    """Load a checkpoint into a network, completely or not at all.

    A backbone, alone or with its classifier, takes files of ours, timm's and the authors'. Only
    these parts may differ: a replaced mixer that is missing as a whole (the file has the host's own
    FFN or attention, or another mixer), the parts for dense prediction or classification alone, and
    BatchNorm's counters of batches. If the host's own module is the same mixer with other options,
    its fitting tensors are loaded. A warning lists all missing tensors outside missing mixers.

    A task's model takes a checkpoint of that task, and all keys must agree. A training form is
    folded for fused parts (modules with ``fold_state_dict``).

    Args:
        network: A backbone, a network with ``backbone`` and ``classifier``, or a task's model.
        weights: The checkpoint, or its conversion for this backbone.
        trained: Require the weights of all mixers, for use without training; always so with a
            classifier.

    Raises:
        ValueError: Any other tensor is missing, left over, of another shape or of whole numbers
            (quantised weights); or the classifier is missing or has other classes.
    """
    is_backbone = isinstance(network, Backbone)
    backbone = network if is_backbone else getattr(network, "backbone", None)
    if isinstance(weights, Checkpoint) and not is_backbone:
        if weights.is_of_task or not hasattr(network, "classifier"):
            return _adopt_exactly(network, weights)
    assert isinstance(backbone, Backbone), "the network needs one of our backbones"
    conversion = convert(weights, backbone) if isinstance(weights, Checkpoint) else weights
    assert conversion.backbone is backbone, "converted for another network"
    report = conversion.check(trained=trained or not is_backbone)
    if not is_backbone:
        _load_classifier(network.classifier, conversion)
        report = report.with_classifier()
    state, match = backbone.state_dict(), conversion.match
    _warn_of_interpolation(conversion.source, conversion.interpolated)
    record = take_recorded_forms(backbone, conversion.record)
    _warn_of_equations(conversion.source, backbone, record, match.absent_mixers)
    backbone.load_state_dict(match.usable, strict=False)
    logger.info("%s", report)
    _warn_of_more_than_mixers(report, state, match.absent_mixers, match.related_mixers)
    return report


def _adopt_exactly(model: nn.Module, checkpoint: Checkpoint) -> LoadReport:
    tensors = _folded(model, _without_task(checkpoint.tensors))
    backbone = getattr(model, "backbone", None)
    weights, adapters = split_adapters(tensors)
    if adapters and not getattr(backbone, "adapted", ()):
        tensors = merge(weights, adapters, checkpoint.record)
    if isinstance(backbone, Backbone):
        tensors = _at_own_size(backbone, tensors, checkpoint)
    _refuse_others(model, tensors, checkpoint.path)
    if isinstance(backbone, Backbone):
        record = take_recorded_forms(backbone, checkpoint.record)
        _warn_of_equations(checkpoint.path, backbone, record, ())
    model.load_state_dict(tensors)
    return LoadReport(checkpoint.path, len(tensors), (), (), ())


def _at_own_size(
    backbone: Backbone, tensors: dict[str, Tensor], checkpoint: Checkpoint
) -> dict[str, Tensor]:
    """Return a task's tensors with tables interpolated to the backbone's build resolution."""
    state, inside = backbone.state_dict(), _below("backbone.", tensors)
    weights = {name for name, _ in (*backbone.named_parameters(), *backbone.named_buffers())}
    is_another = not state.keys() & weights <= inside.keys()
    if is_another or _are_of_one_size(backbone, inside, weights, checkpoint.grids):
        return tensors
    converted = convert(dataclasses.replace(checkpoint, weights=inside), backbone)
    _warn_of_interpolation(converted.source, converted.interpolated)
    beside = {key: value for key, value in tensors.items() if not key.startswith("backbone.")}
    return beside | {f"backbone.{key}": value for key, value in converted.tensors.items()}


def _are_of_one_size(
    backbone: Backbone,
    file_state: Mapping[str, Tensor],
    weights: Collection[str],
    grids: Mapping[str, tuple[int, int]],
) -> bool:
    """Return True if tensors belong to the map sizes that a backbone was built for.

    Equal shapes are insufficient: maps of 4 x 9 and of 6 x 6 have equal numbers of tokens.

    Args:
        backbone: With its own tensors.
        file_state: Tensors of a file, by the backbone's names.
        weights: Names of the backbone's parameters and buffers; other entries are map sizes.
        grids: Map sizes of the mixers by the file's record.
    """
    state = backbone.state_dict()
    if any(state[key].shape != file_state[key].shape for key in state.keys() & weights):
        return False
    stated = [
        {key: value.tolist() for key, value in tensors.items() if key not in weights}
        for tensors in (state, file_state)
    ]
    mixers = {name: part for name, part in backbone.named_modules() if isinstance(part, Mixer)}
    return stated[0] == stated[1] and all(
        grids.get(name, mixer.built_for) == mixer.built_for for name, mixer in mixers.items()
    )


def _folded(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a task's tensors, with the training form folded for fused parts."""
    folded = dict(tensors)
    for name, part in model.named_modules():
        fold: Any = getattr(part, "fold_state_dict", None)
        inside = _below(f"{name}.", folded) if fold is not None else {}
        if inside:
            folded = {key: value for key, value in folded.items() if not key.startswith(f"{name}.")}
            folded |= {f"{name}.{key}": value for key, value in fold(inside).items()}
    return folded


def refuse_other_model(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Check that a task's tensors fit its model exactly, without loading them.

    Raises:
        ValueError: Weights of another model; the message lists the keys.
    """
    _refuse_others(model, _without_task(tensors), source)


def _refuse_others(model: nn.Module, file_state: Mapping[str, Tensor], source: str) -> None:
    state = model.state_dict()
    used = {key: value for key, value in file_state.items() if key in state}
    missing, surplus = (
        (key for key in state if key not in used),
        (k for k in file_state if k not in used),
    )
    wrong = _differences(state, used, missing, surplus)
    if wrong:
        raise ValueError(
            f"{source} holds another model: {_counted(wrong)}; pass the task, backbone, head and "
            "data that it was trained with"
        )


def _matched(conversion: Conversion) -> Match:
    backbone, tensors = conversion.backbone, conversion.tensors
    state = backbone.state_dict()
    absent, related = _absent_and_related(backbone, tensors, conversion.dead)
    unfit = {
        key
        for key, value in tensors.items()
        if key.startswith(related) and key in state and state[key].shape != value.shape
    }
    usable = {
        key: value
        for key, value in tensors.items()
        if key in state and key not in unfit and not key.startswith(absent)
    }
    missing = [key for key in state if key not in usable]
    surplus = [key for key in tensors if key not in usable]
    may_miss = (*absent, *related, *backbone.map_keys)
    new_adapters = not any(key.endswith((LOW, HIGH)) for key in tensors)
    may_remain = (*absent, *related, *backbone.classification_keys, CLASSIFIER)
    wrong = _differences(
        state,
        usable,
        (
            key
            for key in missing
            if not (key.startswith(may_miss) or key.endswith(BATCH_COUNTER))
            and not (new_adapters and key.endswith((LOW, HIGH)))
        ),
        (key for key in surplus if not key.startswith(may_remain)),
    )
    if wrong:
        names = (
            "" if usable else f"; names in the file begin with {_some(conversion.prefixes)[2:-1]}"
        )
        raise ValueError(
            f"{conversion.source} does not fit {backbone.name or type(backbone).__name__}: "
            f"{_counted(wrong)}{names}; name the backbone and options it was trained with"
        )
    resized = tuple(key for key, value in usable.items() if _place(value) not in conversion.places)
    report = LoadReport(
        conversion.source, len(usable), resized, tuple(missing), tuple(surplus), conversion.dead
    )
    return Match(usable, report, absent, related)


def _differences(
    state: Mapping[str, Tensor],
    used: Mapping[str, Tensor],
    missing: Iterable[str],
    surplus: Iterable[str],
) -> list[str]:
    """Describe the keys in which a network and a file must not differ.

    Args:
        state: Tensors of the network.
        used: Tensors of the file that the network has as well.
        missing: Keys missing from the file.
        surplus: Keys missing from the network.
    """
    wrong = [f"missing {key}" for key in missing]
    wrong += [f"unexpected {key}" for key in surplus]
    wrong += [
        f"{key}: {tuple(value.shape)} instead of {tuple(state[key].shape)}"
        for key, value in used.items()
        if state[key].shape != value.shape
    ]
    wrong += [
        f"{key}: {value.dtype} instead of {state[key].dtype}"
        for key, value in used.items()
        if state[key].is_floating_point() and not value.is_floating_point()
    ]
    return wrong


def _counted(wrong: Collection[str]) -> str:
    return f"{len(wrong)} keys differ{_some(wrong, 8)}"


def _refuse_untrained(backbone: Backbone, report: LoadReport) -> None:
    mixers = [
        prefix.removesuffix(".")
        for prefix in backbone.mixers()
        if any(key.startswith(prefix) for key in report.initialised)
    ]
    if mixers:
        raise ValueError(
            f"{report.source} lacks the weights of the mixers of {backbone.name}{_some(mixers)}, "
            "which would be random; name the backbone and options it was trained with"
        )


def _load_classifier(classifier: Any, conversion: Conversion) -> None:
    file_tensors, state = conversion.classifier, classifier.state_dict()
    if conversion.num_classes != classifier.out_features:
        raise ValueError(
            f"{conversion.source} was trained on {conversion.num_classes} classes, this data has "
            f"{classifier.out_features}"
        )
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in file_tensors.items()}:
        raise ValueError(
            f"{conversion.source} holds the classifier tensors {_shapes(file_tensors)} where "
            f"{conversion.backbone.name} has {_shapes(state)}; name the backbone and options it "
            "was trained with"
        )
    classifier.load_state_dict(file_tensors)


def _absent_and_related(
    backbone: Backbone, state_dict: Mapping[str, Tensor], dead: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return prefixes of mixers that a file lacks, and of those that it has with other options."""
    absent, related = [], []
    for prefix, mixer in backbone.mixers().items():
        inside = _below(prefix, state_dict)
        if mixer.is_related and (_is_replaced(mixer, inside, _below(prefix, dict.fromkeys(dead)))):
            related.append(prefix)
        elif _is_absent(mixer, inside):
            absent.append(prefix)
    return tuple(absent), tuple(related)


def _is_replaced(mixer: Mixer, file_state: Mapping[str, Tensor], dead: Collection[str]) -> bool:
    """Return True if a file has the host's own module at a mixer, without dead tensors."""
    mixer_shapes = {key: value.shape for key, value in mixer.state_dict().items()}
    shapes = {key: value.shape for key, value in file_state.items()}
    replaced = {key: shape for key, shape in (mixer.replaced or {}).items() if key not in dead}
    return shapes == replaced and shapes != mixer_shapes


def _is_own_module(mixer: Mixer, file_state: Mapping[str, Tensor]) -> bool:
    """Return True if a file has the module that a mixer replaced."""
    return {key: value.shape for key, value in file_state.items()} == mixer.replaced


def _is_absent(mixer: Mixer, file_state: Mapping[str, Tensor]) -> bool:
    """Return True if a file has another module at a mixer, such as the host's FFN.

    Half of a mixer is an error. Names alone are insufficient, since a mixer may use the FFN's names
    (fc1, fc2) at other widths.
    """
    mixer_shapes = {key: value.shape for key, value in mixer.state_dict().items()}
    shapes = {key: value.shape for key, value in file_state.items()}
    return shapes.keys().isdisjoint(mixer_shapes) or (
        shapes == mixer.replaced and shapes != mixer_shapes
    )


def _warn_of_interpolation(source: str, tables: Collection[str]) -> None:
    if tables:
        noun = "tables of mixers were" if len(tables) > 1 else "table of a mixer was"
        warnings.warn(
            f"{source}: {len(tables)} {noun} interpolated to this map size{_some(tables, 2)}",
            stacklevel=3,
        )


def _warn_of_equations(
    source: str, backbone: Backbone, record: Mapping[str, Any], absent: Collection[str]
) -> None:
    """Warn if the weights come from a network with equal shapes but another equation or code."""
    change = describe_change(source, record, backbone.create)
    if change:
        warnings.warn(f"{change}; restore that code, or train further", stacklevel=3)
    channel = {f"{name}." for name in backbone.channel_places()}
    moved = set()
    for kind in KINDS:
        prefixes = [p for p in backbone.mixers() if (p in channel) == (kind == "mixer")]
        if not prefixes or any(prefix not in absent for prefix in prefixes):
            moved.add(kind)
    changes = differences(record, backbone.record, moved)
    if changes:
        warnings.warn(
            f"{source} was trained with other options and equal shapes; this network has "
            f"{', '.join(changes)}; train it further, or pass the options of the checkpoint",
            stacklevel=3,
        )


def _warn_of_more_than_mixers(
    report: LoadReport,
    state: Mapping[str, Tensor],
    absent: tuple[str, ...],
    related: tuple[str, ...],
) -> None:
    """Warn of tensors outside whole mixers that keep their initialisation or are left out.

    If whole mixers hold most of the values, as in PosMLP, the warning names them as well.
    """
    missing = [
        key
        for key in report.initialised
        if not (key.startswith(absent) or key.endswith(BATCH_COUNTER))
    ]
    unused = [key for key in report.skipped if key.startswith(related)]
    total = sum(value.numel() for value in state.values())
    share = 1 - sum(state[key].numel() for key in report.initialised) / total
    if not missing and not unused and share > FEW:
        return
    parts = [
        f"{len(keys)} tensors {noun}{_some(keys)}"
        for keys, noun in (
            (missing, "of the network are missing from it and keep their initialisation"),
            (unused, "of it do not fit a mixer with these options"),
        )
        if keys
    ]
    if absent:
        names = [prefix.removesuffix(".") for prefix in absent]
        parts.append(f"{len(names)} mixers keep their initialisation{_some(names)}")
    warnings.warn(
        f"{report.source} gave {math.floor(1000 * share) / 10}% of the network's values: "
        f"{'; '.join(parts)}",
        stacklevel=3,
    )


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, which views share."""
    return tensor.untyped_storage().data_ptr()


def _without_task(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(TASK): value for key, value in tensors.items()}


def _below(prefix: str, state_dict: Mapping[str, V]) -> dict[str, V]:
    return {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{key} {tuple(value.shape)}" for key, value in tensors.items())


def _some(keys: Collection[str], limit: int = 4) -> str:
    if not keys:
        return ""
    sample = ", ".join(list(keys)[:limit])
    return f" ({sample}, ...)" if len(keys) > limit else f" ({sample})"
