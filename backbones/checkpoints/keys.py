"""Names of tensors: removal of wrappers' prefixes, and renaming by patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

# Prefixes of wrappers, anywhere within a name.
INNER = re.compile(
    r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
BACKBONE = "backbone"
NETWORK = "network"  # part of our host for timm's models, and a wrapper in files of others
# Names of classifiers after a backbone; MMPretrain's is head.fc.
CLASSIFIER = re.compile(
    r"classifier\.(?P<own>.+)|(fc|head|head\.fc|linear)\.(?P<other>weight|bias)"
)
COPY = re.compile(r"^(module|model)\.")  # prefix of a copy's names
AVERAGE = re.compile(r"ema|averag", re.IGNORECASE)


def without_inner_wrappers(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes of torch.compile, FSDP and recomputation."""
    return {INNER.sub("", key): value for key, value in state_dict.items()}


def strip_wrappers(
    state_dict: dict[str, Tensor], source: str = "the file", kept_wrapper: str | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Remove the prefixes of wrappers, and the tensors outside the wrapped network.

    A wrapper is ``backbone``, or the first part of most names; a network's own first parts are
    followed by numbers (``blocks.0``). A classifier after a backbone is kept.

    Args:
        state_dict: Tensors of a file.
        source: Name of the file in messages.
        kept_wrapper: A wrapper that stays, with what is beside it.

    Returns:
        The network's tensors, and the prefixes of the tensors left out.

    Raises:
        ValueError: The file has two networks of the same names.
    """
    left_out: list[str] = []
    while (wrapper := _wrapper(state_dict, source)) not in (None, kept_wrapper):
        inside = {k.removeprefix(f"{wrapper}."): v for k, v in _below(wrapper, state_dict).items()}
        beside = {k: v for k, v in state_dict.items() if not k.startswith(f"{wrapper}.")}
        outside = {} if wrapper != BACKBONE and _classifier(inside) else _classifier(beside)
        lost = [key for key in beside if not (outside and CLASSIFIER.fullmatch(key))]
        left_out += dict.fromkeys(key.partition(".")[0] for key in lost)
        state_dict = inside | outside
    return state_dict, left_out


def _classifier(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a classifier under ``classifier.``."""
    tensors = {
        f"classifier.{match['own'] or match['other']}": value
        for key, value in state_dict.items()
        if (match := CLASSIFIER.fullmatch(key))
    }
    has_classifier = any(key.startswith("classifier.") for key in state_dict)
    return tensors if has_classifier or "classifier.weight" in tensors else {}


def _wrapper(state_dict: Mapping[str, Tensor], source: str) -> str | None:
    groups: dict[str, set[str]] = {}
    for key in state_dict:
        first, dot, rest = key.partition(".")
        groups.setdefault(first, set()).add(rest if dot else "")
    # LVT's authors call their stages backbone.0 to backbone.3.
    if any(rest and not rest[0].isdigit() for rest in groups.get(BACKBONE, ())):
        return BACKBONE
    groups = {
        name: inside
        for name, inside in groups.items()
        if not any(rest[:1].isdigit() or not rest for rest in inside)
    }
    largest = max(groups, key=lambda name: len(groups[name]), default=None)
    if largest is None:
        return None
    groups_of_wrapper = {
        name: {COPY.sub("", rest) for rest in inside if "." in rest}
        for name, inside in groups.items()
    }
    copies = [
        name
        for name in groups_of_wrapper
        if name == largest
        or (groups_of_wrapper[name] == groups_of_wrapper[largest] and groups_of_wrapper[name])
    ]
    if 2 * sum(len(groups[name]) for name in copies) <= len(state_dict):
        return None
    averages = [name for name in copies if AVERAGE.search(name)]
    if len(copies) > 1 and len(averages) != 1:
        raise ValueError(
            f"{source} holds {len(copies)} networks of the same names, under "
            f"{' and '.join(f'{name}.' for name in copies)}; save one of them to a separate file"
        )
    return averages[0] if len(copies) > 1 else largest


def _below(prefix: str, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state_dict.items() if key.startswith(f"{prefix}.")}


def rename(
    state_dict: Mapping[str, Tensor], patterns: Iterable[tuple[str, str]]
) -> dict[str, Tensor]:
    """Rename keys by regular expressions and replacements, in order."""
    renamed = {}
    for key, value in state_dict.items():
        for pattern, replacement in patterns:
            key = re.sub(pattern, replacement, key)
        renamed[key] = value
    return renamed
