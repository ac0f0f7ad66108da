"""Networks of a benchmark: how they are built and paired, and the ratios that papers report."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backbones.options.suggestions import plural
from tasks.engine.family import Family, find_family, imported
from tools.cli.arguments import parse_image_size
from tools.cli.typed_network import Network, network_label, read_networks
from tools.cli.usual_family import family_of_backbone, usual_task
from tools.papers.published import list_papers, load_rows

IMAGE_AXES = 3  # channels, height and width
NUM_CLASSES = 1000  # of ImageNet-1K, used in the papers' counts and times


@dataclass(frozen=True)
class Comparison:
    """Two forms of the same network, compared on each backbone.

    Attributes:
        backbones: Compared by default.
        baseline: Options of the baseline form, as typed.
        variant: Options of the other form.
    """

    backbones: str
    baseline: Sequence[str] = ()
    variant: Sequence[str] = ()


COMPARISONS = {
    # Training form against the plain convolutions that it is folded into.
    "ffnet": Comparison("ffnet_1,ffnet_2", variant=["backbone.fused=true"]),
    # Token matrices computed in every pass against cached ones.
    "posmlp": Comparison(
        "posmlp_t",
        baseline=["backbone.token_mixer.name=ggqpe", "backbone.token_mixer.cache=false"],
    ),
    # Softmax attention of the same width against SBM, in all blocks.
    "sbm": Comparison("sbm_t", baseline=["backbone.token_mixer=attention"]),
}


def select_comparison_runs(
    name: str, backbones: str, words: Sequence[str] = ()
) -> list[list[Network]]:
    """Return the networks per backbone: its baseline, the baseline again, and the other form.

    Args:
        name: A key of ``COMPARISONS``.
        backbones: As typed; empty for the default ones.
        words: Options of all of them, as typed.
    """
    comparison = COMPARISONS[name]
    names = backbones or comparison.backbones
    baselines = read_networks(names, [*words, *comparison.baseline])
    variants = read_networks(names, [*words, *comparison.variant])
    return [[base, base, form] for base, form in zip(baselines, variants, strict=True)]


def timed_family(name: str, task: str = "") -> Family:
    """Return the family of a typed task, else the usual one of a backbone's modality."""
    return find_family(task) if task else family_of_backbone(name)


def input_shapes(names: Sequence[str], image_sizes: str, task: str = "") -> list[tuple[int, ...]]:
    """Return the shapes of inputs to time backbones on, without the batch.

    Args:
        names: The backbones.
        image_sizes: As typed; empty for the usual one.
        task: As typed; empty for that of the backbones' modality.

    Raises:
        ValueError: The backbones take different inputs, or ones that lack an image size.
    """
    takers = {family.modality: family for family in (timed_family(name, task) for name in names)}
    if len(takers) > 1:
        raise ValueError(
            f"backbones for {' and '.join(map(plural, takers))} need different inputs; time them "
            "separately"
        )
    (family,) = takers.values()
    if family.counted is None:
        raise ValueError(f"task={family.name} does not define an input to time {names[0]} on")
    shape = family.counted.shape
    if shape and not image_sizes:
        return [shape]
    if shape and len(shape) != IMAGE_AXES:
        raise ValueError(f"{names[0]} takes {plural(family.modality)}; leave image_size= out")
    sizes = (image_sizes or family.counted.size).split(",")
    return [(3, *parse_image_size(size or " ")) for size in sizes]


def example_input(family: Family, batch: int, shape: Sequence[int]) -> Any:
    """Return a batch of inputs to time, on the CPU: normal random numbers by default."""
    import torch

    if family.counted is None or not family.counted.inputs:
        return torch.randn(batch, *shape)
    return imported(family.counted.inputs)(batch, shape)


def build_network(network: Network, options: Mapping[str, str]) -> Any:
    """Build the network of a task on its device: by default a classifier."""
    from backbones import create_backbone
    from heads.linear import LinearClassifier

    name, values = network
    family = timed_family(name, options.get("task", ""))
    if family.name == usual_task():
        return to_device(LinearClassifier(create_backbone(name, **values), NUM_CLASSES), options)
    from tasks.engine.instantiate import build
    from tools.papers.dense_counts import head_config

    counted = family.counted
    assert counted is not None
    config = {"head": head_config(family.name, counted.head)}
    values = {**values, "dense": True} if counted.parts else values
    model = build(
        config["head"], "head", backbone=create_backbone(name, **values), **counted.targets
    )
    return to_device(model, options)


def to_device(model: Any, options: Mapping[str, str]) -> Any:
    """Move a module to its device, and compile it if requested."""
    model = model.to(options["device"])
    return model if options["compile"] == "false" else compile_network(model)


def compile_network(model: Any, *, in_parts: bool = False) -> Any:
    """Compile a network for each size of its inputs.

    Args:
        model: The network.
        in_parts: Python may compute between parts of it, such as the size of a detector's answers.
    """
    import torch

    # All networks share one code object, and by default torch compiles at most 8 versions of it.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(model, fullgraph=not in_parts, dynamic=False)


def find_paper_ratio(network: Network, baseline: Network, task: str = "") -> float | None:
    """Return the ratio of two latencies that one paper reports, on its own hardware."""
    ours, reference = (
        network_label((name, non_default_options(name, options)))
        for name, options in (network, baseline)
    )
    for paper in list_papers():
        reported = _latencies(paper, timed_family(network[0], task).name)
        if ours != reference and {ours, reference} <= reported.keys():
            return reported[ours] / reported[reference]
    return None


@functools.cache
def _latencies(paper: str, task: str) -> dict[str, float]:
    """Return milliseconds by network, from the first table that reports them."""
    latencies: dict[str, float] = {}
    for row in load_rows(paper, task):
        if "latency_ms" in row.reported:
            name = network_label((row.backbone, non_default_options(row.backbone, row.options)))
            latencies.setdefault(name, row.reported["latency_ms"])
    return latencies


def non_default_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the backbone's defaults."""
    from backbones import backbone_schema

    defaults = backbone_schema(name)
    mixer = options.get("mixer") or {}
    if isinstance(mixer, Mapping):
        mixer = {k: v for k, v in mixer.items() if v != defaults["mixer"].get(k)}
    changes = {k: v for k, v in options.items() if k != "mixer" and v != defaults.get(k)}
    return changes | ({"mixer": mixer} if mixer else {})
