"""The networks of a benchmark: how they are built and compared, and what papers report."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.cli.typed_network import Network, label, read_networks
from tools.cli.usual_family import usual_task
from tools.papers.published import list_papers, load_rows

NUM_CLASSES = 1000  # of ImageNet-1K, which papers count and time


@dataclass(frozen=True)
class Comparison:
    """Two forms of the same network, compared on every backbone asked for.

    Attributes:
        backbones: Compared if none are named.
        baseline: Options of the form that the other is divided by, as they are typed.
        other: Options of the other form.
    """

    backbones: str
    baseline: Sequence[str] = ()
    other: Sequence[str] = ()


COMPARISONS = {
    # Training form against the plain convolutions that it is folded into.
    "ffnet": Comparison("ffnet_1,ffnet_2", other=["backbone.fused=true"]),
    # The token matrices made anew in every pass against those kept from the first one.
    "posmlp": Comparison(
        "posmlp_t",
        baseline=["backbone.token_mixer.name=ggqpe", "backbone.token_mixer.cache=false"],
    ),
    # Softmax attention of the same width against SBM, in all blocks.
    "sbm": Comparison("sbm_t", baseline=["backbone.token_mixer=attention"]),
}


def comparison_runs(name: str, backbones: str, words: Sequence[str] = ()) -> list[list[Network]]:
    """Per backbone its baseline, the baseline again and the other form.

    Args:
        name: Of ``COMPARISONS``.
        backbones: As they are typed; empty for the usual ones.
        words: Options of all of them, as they are typed.
    """
    chosen = COMPARISONS[name]
    typed = backbones or chosen.backbones
    baselines = read_networks(typed, [*words, *chosen.baseline])
    others = read_networks(typed, [*words, *chosen.other])
    return [[one, one, other] for one, other in zip(baselines, others, strict=True)]


def build(network: Network, options: Mapping[str, str]) -> Any:
    """The classification network, on its device."""
    from backbones import create_backbone
    from heads.linear import LinearClassifier

    name, own = network
    return placed(LinearClassifier(create_backbone(name, **own), NUM_CLASSES), options)


def placed(model: Any, options: Mapping[str, str]) -> Any:
    """A module on its device, compiled if asked."""
    import torch

    model = model.to(options["device"])
    if options["compile"] == "false":
        return model
    # All networks share one code object, of which torch would leave all but 8 versions uncompiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4096
    return torch.compile(model, fullgraph=True, dynamic=False)


def paper_ratio(network: Network, baseline: Network) -> float | None:
    """The quotient of two latencies that one paper reports, on its own hardware."""
    one, other = (label((name, unusual(name, own))) for name, own in (network, baseline))
    for paper in list_papers():
        reported = _latencies(paper)
        if one != other and {one, other} <= reported.keys():
            return reported[one] / reported[other]
    return None


@functools.cache
def _latencies(paper: str) -> dict[str, float]:
    """Milliseconds by network, from the first table that has them."""
    found: dict[str, float] = {}
    for row in load_rows(paper, usual_task()):
        if "latency_ms" in row.reported:
            name = label((row.backbone, unusual(row.backbone, row.options)))
            found.setdefault(name, row.reported["latency_ms"])
    return found


def unusual(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from the backbone's defaults."""
    from backbones import backbone_schema

    defaults = backbone_schema(name)
    mixer = {k: v for k, v in options.get("mixer", {}).items() if v != defaults["mixer"].get(k)}
    others = {k: v for k, v in options.items() if k != "mixer" and v != defaults.get(k)}
    return others | ({"mixer": mixer} if mixer else {})
