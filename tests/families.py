"""Which backbones a test takes that holds for all: one host of each family, or fixed draws."""

import copy
import functools
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from backbones import Backbone, create_backbone, list_backbones, list_hosts, list_mixers
from backbones.checkpoints.adoption import LoadReport, adopt
from backbones.checkpoints.opening import in_memory
from backbones.registry import find_host, look_up
from heads.linear import LinearClassifier
from tests.tensors import drawn_tensors

# Tests over the registry give images to these; hosts of other modalities have tests of their own.
HOSTS, NAMES = list_hosts("image"), list_backbones(modality="image")


def rest_slow(cases: Sequence, quick: Collection) -> list:
    """The cases of a test, of which only the quick ones run by default."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def drawn(*seeds: int) -> list[str]:
    """Every host with every mixer by turns: for each seed one name of each host.

    A host takes one of the mixers that were taken least so far, its own among them, and of these
    the one that fewest hosts have. Channel mixers that none of them took come with one host more
    each, so that the names of one seed have all of these in them. Another seed gives other pairs.
    """
    names, hosts_with, chosen = defaultdict(dict), Counter(), []
    for name in NAMES:
        host, mixer = look_up(name)
        names[host.name][mixer] = name
        hosts_with[mixer] += 1
    for seed in seeds:
        generator, taken = random.Random(seed), Counter()
        for host in generator.sample(HOSTS, len(names)):
            rank = {m: (taken[m], hosts_with[m], generator.random()) for m in names[host]}
            mixer = min(rank, key=rank.get)
            taken[mixer] += len(rank) > 1
            chosen.append(names[host][mixer])
        for mixer in list_mixers("channel"):
            if mixer in hosts_with and not taken[mixer]:
                host = generator.choice([host for host in HOSTS if mixer in names[host]])
                chosen.append(names[host][mixer])
    return [name for name in NAMES if name in chosen]


def rest_slow_pairs(cases: Sequence[tuple], quick: Collection[tuple]) -> list:
    """``rest_slow`` for a test of several arguments."""
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


_FILES = {
    find_host(name).build.__module__.split(".")[2]: name  # backbones.hosts.<file or package>
    for name in reversed(HOSTS)
}
# The first host of each file or package of hosts.
SMALLEST = sorted(_FILES.values())
# Alone, and with a mixer in every FFN where there are any.
BOTH = [
    name
    for host in SMALLEST
    for name in (host, f"{host}_afbo")
    if name in list_backbones(f"{host}*")
]
SWAPPED = [name for name in BOTH if f"{name}_afbo" not in BOTH]
# Of those with mixers the default suite takes two, one for tokens and one for maps.
QUICK_NAMES = (*SMALLEST, "deit_t_afbo", "swin_t_afbo")
TOKEN_SLOTS = [host for host in SMALLEST if "token" in find_host(host).slots]


def by_turns(*targets: str) -> list[tuple[str, str]]:
    """(target, name): every host and every mixer goes to one target, by turns.

    The first host of each file goes to all of them, with the mixers of as many drawings.
    """
    drawings = [defaultdict(list) for _ in targets]
    for seed, drawing in enumerate(drawings):
        for name in drawn(seed):
            drawing[look_up(name)[0].name].append(name)
    cases = []
    for turn, host in enumerate(HOSTS):
        own = turn % len(targets)
        others = [i for i in range(len(targets)) if i != own] if host in SMALLEST else []
        # The first drawing has every mixer, so no name of it is left out.
        cases += [(targets[own], name) for name in drawings[0][host]]
        names = [drawing[host][0] for drawing in drawings[1:]]
        cases += [(targets[i], name) for i, name in zip(others, names, strict=False)]
    return cases


def sparse(seed: int) -> list[str]:
    """Return the part of a draw with the first host of each file, and the first with each mixer."""
    mixers, names = set(), []
    for name in drawn(seed):
        host, mixer = look_up(name)
        if host.name in SMALLEST or mixer not in mixers:
            names.append(name)
            mixers.add(mixer)
    return names


def meta_backbone(name: str, **options) -> Backbone:
    """Return a backbone without values, on the meta device."""
    with torch.device("meta"):
        return create_backbone(name, **options)


def meta_classifier(name: str, **options) -> LinearClassifier:
    """Return a classifier of 1000 classes without values."""
    with torch.device("meta"):
        return LinearClassifier(create_backbone(name, **options), 1000)


def load(network: nn.Module, tensors: Mapping[str, Tensor], name: str = "file") -> LoadReport:
    """Load tensors into a backbone as if they were read from a file."""
    return adopt(network, in_memory(dict(tensors), name))


def load_classifier(backbone: Backbone, tensors: Mapping[str, Tensor]) -> LinearClassifier:
    """Return a classifier in float64 with the authors' tensors, none of which may be missing."""
    report = load(backbone.double(), tensors)
    assert (report.initialised, report.loaded) == ((), len(backbone.state_dict()))
    renamed = backbone.convert_state_dict(dict(tensors))
    own = {part: renamed[f"classifier.{part}"] for part in ("weight", "bias")}
    model = LinearClassifier(backbone, len(own["bias"])).double().eval()
    model.classifier.load_state_dict(own)
    return model


def shorten(network: nn.Module) -> nn.Module:
    """Keep the first two of equal blocks in a row; shifted and plain windows are among them."""
    for module in list(network.modules()):
        for name, blocks in list(module.named_children()):
            if isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks) > 2:
                shapes = [{k: v.shape for k, v in b.state_dict().items()} for b in blocks]
                if shapes[0] and all(shape == shapes[0] for shape in shapes):
                    setattr(module, name, blocks[:2])
    return network


def build_short(name: str, **options) -> Backbone:
    """A backbone of few blocks, in which every part matters.

    It is built without memory, for drawing the weights of all blocks takes longer than most tests.
    """
    with torch.device("meta"):
        network = shorten(create_backbone(name, **options))
    network.load_state_dict(drawn_tensors(network.state_dict()), assign=True)
    return network


# As many as the default tests of a file ask for; all hosts with all mixers would take 8 GB.
_short = functools.lru_cache(maxsize=40)(build_short)


def short(name: str, *, dense: bool = False) -> Backbone:
    """``build_short`` for what is asked for many times: its weights are drawn once."""
    return copy.deepcopy(_short(name, dense=dense))
