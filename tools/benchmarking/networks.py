"""The networks of a benchmark: how they are typed, built and compared, and what papers report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tools.command_line.arguments import value_of
from tools.comparing.published import dotted, list_papers, load_rows

NUM_CLASSES = 1000  # of ImageNet-1K, which papers count and time
Network = tuple[str, dict[str, Any]]  # name and options


@dataclass(frozen=True)
class Comparison:
    """Two forms of the same network, compared on every backbone asked for.

    Attributes:
        backbones: Compared if none are named.
        baseline: Settings of the form that the other is divided by.
        other: Settings of the other form.
    """

    backbones: str
    baseline: str = ""
    other: str = ""


COMPARISONS = {
    # Training form against the plain convolutions that it is folded into.
    "ffnet": Comparison("ffnet_1,ffnet_2", other="fused=true"),
    # The token matrices made anew in every pass against those kept from the first one.
    "posmlp": Comparison("posmlp_t", baseline="token_mixer.name=ggqpe token_mixer.cache=false"),
    # Softmax attention of the same width against SBM, in all blocks.
    "sbm": Comparison("sbm_t", baseline="token_mixer.name=attention"),
}


def comparison_runs(name: str, backbones: str) -> list[list[Network]]:
    """Per backbone its baseline, the baseline again and the other form."""
    chosen = COMPARISONS[name]
    runs = []
    for backbone in (backbones or chosen.backbones).split(","):
        baseline = parse_network(f"{backbone} {chosen.baseline}")
        runs.append([baseline, baseline, parse_network(f"{backbone} {chosen.other}")])
    return runs


def parse_network(text: str) -> Network:
    """``deit_t_afbo mixer.g2=6`` as a name and options.

    Raises:
        ValueError: An unknown name or option, with the nearest ones.
    """
    from backbones import backbone_schema

    # The schema refuses an unknown name itself.
    return parse_named(text, backbone_schema, groups=("mixer", "token_mixer"))


def parse_named(
    text: str, schema: Callable[[str], Collection[str]], groups: Collection[str] = ()
) -> Network:
    """``name key=value group.key=value`` as a name and options.

    Args:
        text: What was typed.
        schema: Known options of a name; refuses an unknown name.
        groups: Options that hold options of their own.
    """
    from backbones.options import unknown

    name, *settings = text.split() or [""]
    known = schema(name)
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        group, _, option = key.rpartition(".")
        if not equals or (group or option) not in known or (group and group not in groups):
            raise ValueError(unknown(f"option of {name}", setting, list(known)))
        place = options.setdefault(group, {}) if group else options
        if not isinstance(place, dict) or isinstance(place.get(option), dict):
            whole = group or option
            raise ValueError(
                f"{setting} and another setting of {whole} exclude each other; write all of them "
                f"as {whole}.KEY=VALUE, its name as {whole}.name=NAME"
            )
        place[option] = value_of(key, value)
    return name, options


def label(network: Network) -> str:
    """Name and options as they are typed."""
    return " ".join([network[0], *dotted(network[1])])


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
    for row in load_rows(paper, "classification"):
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
