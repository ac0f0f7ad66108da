"""The message that refuses an unknown name."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Mapping

LISTED = 400  # characters of a list of names: with what stands around it, ten lines of a terminal
NAMED = 100  # of the name that is refused


def listed(names: Iterable[object], most: int = LISTED) -> str:
    """Join names by commas, and count those for which there is no room.

    Args:
        names: At least the first is named.
        most: Characters.
    """
    texts = [shortened(str(name)) for name in names]
    ends = itertools.accumulate(len(text) + 2 for text in texts)
    fitting = max(1, sum(end <= most + 2 for end in ends))
    more = len(texts) - fitting
    return ", ".join(texts[:fitting]) + (f" and {more} more" if more > 0 else "")


def shortened(name: str) -> str:
    """Return a name of at most ``NAMED`` characters, the middle of a longer one left out."""
    half = NAMED // 2 - 2
    return name if len(name) <= NAMED else f"{name[:half]}...{name[-half:]}"


def unknown(what: str, name: str, known: Collection[str], summary: str = "") -> str:
    """The message that refuses a name: what is near to it, or all that there is.

    Args:
        what: What the name would be of.
        name: The name.
        known: The names that there are.
        summary: Said of them instead where they are too many for a message.
    """
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    summary = summary or f"{listed(known) or 'none'}."
    hint = f"did you mean {' or '.join(map(shortened, near))}?" if near else f"known: {summary}"
    return f"there is no {what} called {shortened(name)!r}; {hint}"


def unknown_backbone(
    name: str,
    known: Mapping[str, bool],
    hosts: Collection[str],
    mixers: Collection[str],
    token_mixers: Collection[str],
) -> str:
    """The message that refuses the name of a backbone.

    Args:
        name: The name.
        known: All names that there are, each with whether its token mixer is left to an option.
        hosts: Those of the hosts.
        mixers: Those of the channel mixers.
        token_mixers: Those of the token mixers, which are typed as an option and not as a suffix.
    """
    for mixer in token_mixers:
        base = name.removesuffix(f"_{mixer}")
        if base != name and base in known:
            remedy = (
                f"type backbone={base} backbone.token_mixer={mixer}, or in Python "
                f"create_backbone({base!r}, token_mixer={mixer!r})"
                if known[base]
                else f"{base} has no place for another one"
            )
            return f"there is no backbone called {name!r}: {mixer} is a token mixer; {remedy}"
    # Two lists share the ten lines.
    some, most = listed(hosts, 300), listed(mixers, 200)
    summary = f"{some}; most also as HOST_MIXER with {most}."
    everywhere = f"list_backbones() and run.py --help backbone have all {len(known)}."
    return f"{unknown('backbone', name, known, summary)} {everywhere}"
