"""Messages for unknown names."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

LISTED = 400  # characters of a list of names, so that a message fits into ten lines
NAMED = 100  # characters of the unknown name
TIMM_MODELS = Path(__file__).parents[1] / "hosts/timm_model/models.json"


def plural(modality: str) -> str:
    """Return the plural of a modality: "images", "series", "point clouds"."""
    words = modality.replace("_", " ")
    return words if words.endswith("s") else f"{words}s"


def listed(names: Iterable[object], most: int = LISTED) -> str:
    """Join names by commas, and count the names beyond a limit.

    Args:
        names: At least the first is listed.
        most: Limit in characters.
    """
    texts = [shortened(str(name)) for name in names]
    ends = itertools.accumulate(len(text) + 2 for text in texts)
    count = max(1, sum(end <= most + 2 for end in ends))
    more = len(texts) - count
    return ", ".join(texts[:count]) + (f" and {more} more" if more > 0 else "")


def shortened(name: str) -> str:
    """Return a name, shortened in the middle to ``NAMED`` characters."""
    half = NAMED // 2 - 2
    return name if len(name) <= NAMED else f"{name[:half]}...{name[-half:]}"


def unknown(kind: str, name: str, valid_names: Collection[str], summary: str = "") -> str:
    """Return the message for an unknown name, with similar names or all known ones.

    Args:
        kind: Kind of thing, such as "mixer".
        name: The name.
        valid_names: All known names.
        summary: Text instead of the list of known names.
    """
    by_lower = {entry.lower(): entry for entry in valid_names}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=3, cutoff=0.5)
    near = [by_lower[match] for match in matches]
    if near and near[0].lower() == name.lower():
        near = near[:1]
    summary = summary or f"{listed(valid_names) or 'none'}."
    hint = f"did you mean {' or '.join(map(shortened, near))}?" if near else f"known: {summary}"
    return f"there is no {kind} called {shortened(name)!r}; {hint}"


def unknown_backbone(
    name: str,
    valid_names: Mapping[str, bool],
    hosts: Collection[str],
    mixers: Collection[str],
    token_mixers: Collection[str],
) -> str:
    """Return the message for an unknown name of a backbone.

    Args:
        name: The name.
        valid_names: All known names, True for those that take the option ``token_mixer``.
        hosts: Names of the hosts.
        mixers: Names of the channel mixers.
        token_mixers: Names of the token mixers, which are typed as an option, not as a suffix.
    """
    # A copy of the package in an export has code alone.
    models = json.loads(TIMM_MODELS.read_text())["models"] if TIMM_MODELS.exists() else ()
    if name.partition(".")[0] in models:
        return (
            f"there is no backbone called {name!r}: it is a model of timm; type backbone=timm "
            f"backbone.model={name}, or in Python create_backbone('timm', model={name!r})"
        )
    for mixer in token_mixers:
        base = name.removesuffix(f"_{mixer}")
        if base != name and base in valid_names:
            remedy = (
                f"type backbone={base} backbone.token_mixer={mixer}, or in Python "
                f"create_backbone({base!r}, token_mixer={mixer!r})"
                if valid_names[base]
                else f"the only token mixer of {base} is already replaced"
            )
            return f"there is no backbone called {name!r}: {mixer} is a token mixer; {remedy}"
    # Limits by which both lists fit into ten lines.
    some, most = listed(hosts, 300), listed(mixers, 200)
    summary = f"{some}; most also as HOST_MIXER with {most}."
    everywhere = f"list_backbones() and run.py --help backbone have all {len(valid_names)}."
    return f"{unknown('backbone', name, valid_names, summary)} {everywhere}"
