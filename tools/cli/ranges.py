"""Ranges of numeric options, in run.py's config and in ``key=value`` arguments.

Lower bounds that depend on a module are checked by that module. These upper bounds are far above
sensible values: they stop a command before an absurd value costs hours or all memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, RangeSweep

from backbones.options import shortened

Range = tuple[float, float]

INTEGER = (-(2**63), 2**63 - 1)
SIDE = (1, 16_384)  # of an image in pixels
EDGE = (1, 100_000)  # of a resized image that keeps its aspect ratio
BATCH = (1, 1_000_000)
IMAGES = (1, 10_000_000)
EPOCHS = (0, 1_000_000)
STEPS = (-1, 10**12)
RATE = (0, 1_000)
FACTOR = (0, 100)
SHARE = (0, 1)

# Keys are dotted config names or their last part, which is also the name in commands.
RANGES: Mapping[str, Range] = {
    # Images and batches
    "image_size": SIDE,
    "img_size": SIDE,
    "size": SIDE,
    "resize": SIDE,
    "picture_size": (1, 4_096),
    "scene_size": (1, 4_096),
    "crop_size": SIDE,
    "pad_to": SIDE,
    "test_crop": SIDE,
    "test_stride": SIDE,
    "grid": SIDE,
    "data.scale": EDGE,
    "train_sizes": EDGE,
    "scale_jitter": FACTOR,
    "test_scales": FACTOR,
    "batch": BATCH,
    "batch_size": BATCH,
    "eval_batch_size": BATCH,
    "repeated_augmentation": (1, 1_000),
    "train_copies": (1, 1_000),
    "val_copies": (1, 1_000),
    "digits_per_class": (1, 1_000),
    "num_train": IMAGES,
    "num_val": IMAGES,
    "train_per_class": IMAGES,
    "val_per_class": IMAGES,
    "num_classes": (1, 1_000_000),
    "latent_channels": (1, 65_536),
    # Processes and lengths
    "devices": (-1, 1_024),
    "num_nodes": (1, 100_000),
    "num_workers": (0, 1_024),
    "workers": (1, 1_024),
    "threads": (1, 1_024),
    "max_epochs": (-1, 1_000_000),
    "max_steps": STEPS,
    "accumulate_grad_batches": BATCH,
    "log_every_n_steps": STEPS,
    "check_val_every_n_epoch": EPOCHS,
    "limit_train_batches": STEPS,
    "limit_val_batches": STEPS,
    "val_check_interval": STEPS,
    "overfit_batches": STEPS,
    "gradient_clip_val": (0, 1e12),
    "checkpoint_every": (0, 10_000_000),
    "top_k": (-1, 1_000),
    "gradient_norm": STEPS,
    "patience": STEPS,
    "min_delta": (-1e12, 1e12),
    # Optimiser, schedule and loss
    "lr": RATE,
    "weight_decay": RATE,
    "eps": RATE,
    "betas": SHARE,
    "momentum": SHARE,
    "reference_batch": (1, 10**9),
    "warmup_lr": RATE,
    "min_lr": RATE,
    "warmup": EPOCHS,
    "cooldown": EPOCHS,
    "milestones": EPOCHS,
    "lag": EPOCHS,
    "gamma": RATE,
    "power": FACTOR,
    "lr_scale": RATE,
    "mixup_alpha": RATE,
    "cutmix_alpha": RATE,
    "temperature": (0, 1_000_000),
    "task.distillation.alpha": SHARE,
    # Arguments of the commands
    "seed": (0, 2**32 - 1),
    "images": IMAGES,
    "rounds": (1, 1_000_000),
    "iterations": (1, 10_000_000),
    "trials": (1, 1_000_000),
    "sampler_seed": (0, 2**32 - 1),
    "dim": (1, 65_536),
    "bins": (1, 1_000_000),
    "points": (2, 10_000),
    "steps": (1, 1_000_000),
    "window": (0, 16_384),
    "reach": (1, 16_384),
    "layers": (1, 100_000),
    "groups": (1, 100_000),
    "pairs": (1, 100_000),
    "top": (1, 100_000),
    # Heads and augmentations
    "channels": (1, 65_536),
    "num_rois": (1, 65_536),
    "num_proposals": (1, 65_536),
    "mask_size": (1, 4_096),
    "draws": (1, 100_000),
    "shots": (1, 1_000_000),
    "neighbours": (1, 1_000_000),
    "max_iter": (1, 10_000_000),
    "color_jitter": FACTOR,
    "crop_scale": FACTOR,
    "crop_ratio": FACTOR,
    "degrees": (0, 360),
}
NETWORK_SIZE = (-65_536, 65_536)  # sizes, numbers and widths of a network
MOST_RUNS = 10_000  # per sweep


def find_range(key: str) -> Range | None:
    """Return the range of an option, by its dotted name or last part, or None."""
    found = RANGES.get(key) or RANGES.get(key.rpartition(".")[2])
    return found or (NETWORK_SIZE if key.startswith("backbone.") else None)


def check_ranges(config: Mapping[str, Any]) -> None:
    """Check that every number of a config is within its range.

    Raises:
        ValueError: A number is out of range.
    """
    for key, value in _find_numbers(config, ""):
        least, most = find_range(key) or (-math.inf, math.inf)
        if isinstance(value, int) and not INTEGER[0] <= value <= INTEGER[1]:
            least, most = max(least, INTEGER[0]), min(most, INTEGER[1])
        # Modules check for infinite, NaN and slightly too low values with clearer messages.
        if isinstance(value, float) and not math.isfinite(value):
            continue
        if not -max(abs(least), abs(most)) <= value <= most:
            allowed = f"pass a number from {_format_number(least)} to {_format_number(most)}"
            raise ValueError(f"{key}={_shorten(value)} is out of range; {allowed}")


def _shorten(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 10_000:  # str() of longer ones raises
        return "..."
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _format_number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _find_numbers(value: Any, key: str) -> Iterator[tuple[str, int | float]]:
    """Yield each number of a config with the dotted name of its option."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _find_numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for inner in value:
            yield from _find_numbers(inner, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def count_jobs(overrides: Iterable[Any], options: Callable[[str], list[str]] | None = None) -> int:
    """Count the combinations of values in Hydra's parsed overrides.

    Args:
        overrides: From Hydra's parser.
        options: Returns the options of a group, for ``glob``; None without groups.

    Raises:
        ValueError: There are more than ``MOST_RUNS`` combinations, or an override has zero or
            infinitely many values.
    """
    total: float = 1
    for override in overrides:
        if not override.is_sweep_override():
            continue
        names = options(override.key_or_group) if options else []
        count = _count_values(override.value(), names)
        if count == 0:
            raise ValueError(f"{override.input_line} must have at least one value")
        total *= count
        if total > MOST_RUNS:
            shown = f"{total:,.0f}" if total < 10**15 else "too many"
            raise ValueError(
                f"{shortened(override.input_line)} makes {shown} combinations of values; "
                f"pass at most {MOST_RUNS:,}"
            )
    return int(total)


def _count_values(sweep: Any, names: list[str]) -> float:
    """Return how many values a sweep has, without listing them; infinity for an interval."""
    if isinstance(sweep, IntervalSweep):
        return math.inf
    if isinstance(sweep, Glob):
        return len(sweep.filter(names))
    if isinstance(sweep, ChoiceSweep):
        return len(sweep.list)
    if not isinstance(sweep, RangeSweep):
        return 1
    start, stop, step = sweep.start, sweep.stop, sweep.step
    numbers = [float(number) for number in (start, stop, step) if number is not None]
    if not all(map(math.isfinite, numbers)) or not step:
        return math.inf
    count = (numbers[1] - numbers[0]) / numbers[2]
    return max(0, math.ceil(count)) if math.isfinite(count) else math.inf
