"""Schema of checkpoints; every part is checked when a file is opened."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from backbones.checkpoints.seal import FORMAT, KEY, DamagedCheckpoint
from backbones.options.schemas import ClosedPart, OpenPart, describe_misfit, validate

NEWER = "newer_format"
DEEPEST, MOST_ENTRIES = 32, 1_000_000
CUDA_STATE = (torch.uint8, (16,))  # 8 bytes of the seed and 8 of the offset
LARGEST = 2**64  # of whole numbers; seeds have 64 bits
# Views may share memory, up to this factor over the file's size plus a free amount.
SHARED, FREE = 8, 2**28  # times, bytes
DTYPES = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip

VERSION = r"^2\.\d{1,4}\.\d{1,4}(\.?(a|b|rc|post|dev)\d{1,9})*(\+[a-z0-9.]{1,40})?$"

# Default of optional parts, which must not be null in a file.
ABSENT: Any = None

Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Tensors = dict[str, Tensor]


def _random_state(value: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        random.Random().setstate(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError("is not a state of random generators") from error
    return value


def _single_number(value: Tensor) -> Tensor:
    if value.ndim:
        raise ValueError("is not a single number")
    return value


Score = Annotated[Tensor, AfterValidator(_single_number)]
PythonState = Annotated[
    tuple[Literal[3], tuple[int, ...], float | None], AfterValidator(_random_state)
]


class SealPart(OpenPart):
    """See ``seal``."""

    format: Count
    version: str = "?"
    crc32: int | None = None

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.format > FORMAT:
            raise PydanticCustomError(NEWER, "{version}", {"version": self.version})
        return self


class PositionPart(ClosedPart):
    """See ``tasks.engine.checkpoints.data_position.Position``."""

    step: Count
    batches: Count
    batches_per_epoch: Positive
    world_size: Positive
    validation_due: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        begun = min(self.batches, 1)
        if not begun <= self.step <= self.batches or self.validation_due > begun:
            raise ValueError(f"counts {self.step} steps of the optimiser in {self.batches} batches")
        return self


class RandomPart(ClosedPart):
    """State of a process's generators, see ``checkpoints.exact_resume.random_state``."""

    python: PythonState
    numpy: list[Any]
    torch: Tensor
    cuda: Tensor | None

    @model_validator(mode="after")
    def _is_state(self) -> Self:
        try:
            torch.Generator().set_state(self.torch)
            kind, words, place, has_gauss, gauss = self.numpy
            has_words = (
                isinstance(words, Tensor) and words.dtype == torch.int64 and type(place) is int
            )
            # numpy checks only the number of words.
            on_cpu = self.cuda is None or (self.cuda.dtype, self.cuda.ndim) == (torch.uint8, 1)
            if not (has_words and on_cpu and 0 <= place <= 624 and has_gauss in (0, 1)):
                raise ValueError
            state = (kind, words.numpy().astype(np.uint32), place, has_gauss, gauss)
            np.random.RandomState().set_state(state)
            if self.cuda is not None and (self.cuda.dtype, self.cuda.shape) != CUDA_STATE:
                raise ValueError
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError("is not a state of random generators") from error
        return self


class BestPart(ClosedPart):
    """State of Lightning's ModelCheckpoint, with a second score of each file."""

    monitor: str | None
    best_model_score: Score | None
    best_model_path: str
    current_score: Score | None
    dirpath: str | None
    best_k_models: dict[str, Score]
    kth_best_model_path: str
    kth_value: Score | None
    last_model_path: str
    best_k_second_scores: dict[str, Score] = Field(default_factory=dict)
    best_second_score: Score | None = None  # of the best file, in earlier ones

    @model_validator(mode="after")
    def _has_scores(self) -> Self:
        if self.kth_best_model_path not in {"", *self.best_k_models}:
            raise ValueError("names a checkpoint without a score")
        return self


class StoppingPart(ClosedPart):
    """State of Lightning's EarlyStopping."""

    wait_count: Count
    stopped_epoch: Count
    best_score: Score
    patience: Count
    stopping_reason: Annotated[int, Field(ge=0, le=4)] = 0
    stopping_reason_message: str | None = None


class TimerPart(ClosedPart):
    """State of Lightning's Timer: seconds per stage."""

    time_elapsed: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


# Schemas of callbacks' states by the class in their key; other callbacks check their own.
CALLBACKS: dict[str, type[ClosedPart]] = {
    "ModelCheckpoint": BestPart, "TopCheckpoints": BestPart, "EarlyStopping": StoppingPart,
    "StopEarly": StoppingPart, "Timer": TimerPart,
}  # fmt: skip


class GroupPart(OpenPart):
    """Parameter group of an optimiser; ``resume_checks`` of tasks knows the other options."""

    params: list[int] | list[str]
    lr: Finite | Tensor


class OptimizerPart(ClosedPart):
    """State of an optimiser."""

    state: dict[int | str, dict[str, Any]]
    param_groups: Annotated[list[GroupPart], Field(min_length=1)]
    rng_state: PythonState = Field(ABSENT)  # of timm's Kron


class ScalerPart(ClosedPart):
    """State of torch's GradScaler."""

    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    growth_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    backoff_factor: Annotated[float, Field(gt=0, lt=1)]
    growth_interval: Positive
    tracker: Count = Field(alias="_growth_tracker")


class FingerprintPart(ClosedPart):
    """Answers of a network's code; see ``backbones.checkpoints.behaviour``."""

    options: dict[str, Any]
    answers: dict[str, Annotated[list[Finite], Field(min_length=2, max_length=2)]]


class RecordPart(OpenPart):
    """Options that a network was built with; see ``backbones.checkpoints.equations``."""

    host: str | None = None
    mixer: dict[str, Any] | list[dict[str, Any] | None] | None = None
    token_mixer: dict[str, Any] | list[dict[str, Any] | None] | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    fingerprint: FingerprintPart = ABSENT
    grids: dict[str, Annotated[list[Positive], Field(min_length=2, max_length=2)]] = Field(
        default_factory=dict
    )


class SeriesPart(OpenPart):
    """Variables of a forecaster with their scaling, and its horizon."""

    names: list[str]
    targets: Positive
    horizon: Positive
    mean: list[Finite]
    std: list[Finite]
    time_format: str = ""
    step: str = ""

    @model_validator(mode="after")
    def _are_of_names(self) -> Self:
        if not self.targets <= len(self.names) == len(self.mean) == len(self.std):
            raise ValueError("has other numbers of targets, means or deviations than of names")
        return self


class CheckpointParts(OpenPart):
    """All parts of our checkpoints that are read; most are optional."""

    seal: SealPart = Field(ABSENT, alias="mixerlab")
    lightning: Annotated[str, Field(pattern=VERSION)] = Field(
        "2.0.0", alias="pytorch-lightning_version"
    )
    epoch: Count = 0
    global_step: Count = 0
    state_dict: Tensors = Field(default_factory=dict)
    state_dict_ema: Tensors = Field(default_factory=dict)
    state_dict_ema_not_reported: Tensors = Field(default_factory=dict)
    ema_steps: Count = 0
    position: PositionPart = Field(ABSENT)
    random_state: Annotated[list[RandomPart], Field(min_length=1)] = Field(ABSENT)
    callbacks: dict[str, dict[str, Any]] = Field(default_factory=dict)
    optimizer_states: list[OptimizerPart] = Field(default_factory=list)
    lr_schedulers: list[dict[str, Any]] = Field(default_factory=list)
    # Share of the rate, exemption from weight decay, and decay of each parameter by name.
    parameter_rules: dict[str, tuple[Finite, bool, Finite]] = Field(default_factory=dict)
    scaler: ScalerPart = Field(ABSENT, alias="MixedPrecision")
    config: dict[str, Any] = Field(default_factory=dict)
    record: RecordPart = Field(RecordPart(), alias="network")
    series: SeriesPart = Field(ABSENT)
    scale: Positive = Field(ABSENT)  # of super-resolution
    class_names: list[str] = Field(default_factory=list)
    category_ids: list[int] = Field(default_factory=list)
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    @field_validator("callbacks")
    @classmethod
    def _are_states(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, state in value.items():
            validate(CALLBACKS.get(name.partition("{")[0], OpenPart), state)
        return value

    @model_validator(mode="after")
    def _averages_are_counted(self) -> Self:
        averages = {"state_dict_ema", "state_dict_ema_not_reported"} & self.model_fields_set
        if averages and "ema_steps" not in self.model_fields_set:
            raise ValueError(f"has {averages.pop()} without ema_steps")
        return self


def check_tensors(content: object, path: object) -> None:
    """Check that a content is a tree of plain tensors and values of plausible size.

    Raises:
        DamagedCheckpoint: An entry is of another kind, or a limit is exceeded.
    """
    storages: dict[int, int] = {}
    budget, total = MOST_ENTRIES, 0
    branches: list[tuple[tuple[object, ...], object]] = [((), content)]
    while branches:
        place, value = branches.pop()
        budget -= 1
        if budget < 0 or len(place) > DEEPEST:
            raise DamagedCheckpoint(
                f"{path} is nested deeper than {DEEPEST} levels or has more than {MOST_ENTRIES:,} "
                "entries, which no checkpoint has"
            )
        if isinstance(value, Tensor):
            _check_tensor(value, place, path)
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            total += value.numel() * value.element_size()
        elif isinstance(value, Mapping):
            branches += [((*place, key), item) for key, item in value.items()]
        elif isinstance(value, list | tuple | set | frozenset):
            branches += [((*place, index), item) for index, item in enumerate(value)]
        elif isinstance(value, int) and abs(value) >= LARGEST:
            raise DamagedCheckpoint(f"{path}: {_dotted(place)} is a number of more than 64 bits")
    if total > SHARED * sum(storages.values()) + FREE:
        raise DamagedCheckpoint(
            f"{path} has tensors of {total:,} bytes that repeat {sum(storages.values()):,} stored "
            "ones; save them with contiguous()"
        )


def _check_tensor(value: Tensor, place: tuple[object, ...], path: object) -> None:
    kind = None
    if type(value) not in (Tensor, nn.Parameter) or value.__dict__:
        kind = type(value).__name__
    elif value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
    elif value.is_meta or value.is_quantized:
        kind = "on the device meta, without values" if value.is_meta else "quantised"
    elif value.dtype not in DTYPES:
        kind = str(value.dtype)
    if kind is not None:
        raise DamagedCheckpoint(
            f"{path}: {_dotted(place)} must be a dense tensor of floating-point or whole numbers, "
            f"got {kind}; save it as one"
        )


def _dotted(place: tuple[object, ...]) -> str:
    return ".".join(map(str, place))[-120:] or "its content"


def check_parts(content: object, path: object) -> frozenset[str]:
    """Check the parts of our checkpoints; return entries of other tools that differ in form.

    Raises:
        ValueError: A format newer than this version reads.
        DamagedCheckpoint: A part of ours has another type, length or range.
    """
    if not isinstance(content, dict):
        return frozenset()
    try:
        CheckpointParts.model_validate({k: v for k, v in content.items() if isinstance(k, str)})
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        newer = [problem["msg"] for problem in problems if problem["type"] == NEWER]
        if newer:
            raise ValueError(
                f"{path} was written by MixerLab {newer[0]} in a newer format than {FORMAT}, the "
                "latest that this version reads; update MixerLab"
            ) from None
        if KEY not in content and "position" not in content:
            return frozenset(str(problem["loc"][0]) for problem in problems if problem["loc"])
        raise DamagedCheckpoint(
            f"{path} is damaged: {describe_misfit(error)}; pass another checkpoint of the run, or "
            "copy it again"
        ) from None
    return frozenset()
