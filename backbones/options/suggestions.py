"""The message that refuses an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def unknown(what: str, name: str, known: Collection[str], summary: str = "") -> str:
    """The message that refuses a name: what is near to it, or all that there is.

    Args:
        what: What the name would be of.
        name: The name.
        known: The names that there are.
        summary: Said of them instead where they are too many for a message.
    """
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    summary = summary or f"{', '.join(known) or 'none'}."
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {summary}"
    return f"there is no {what} called {name!r}; {hint}"


def unknown_backbone(
    name: str, known: Collection[str], hosts: Collection[str], mixers: Collection[str]
) -> str:
    """The message that refuses the name of a backbone.

    Args:
        name: The name.
        known: All names that there are.
        hosts: Those of the hosts.
        mixers: Those of the channel mixers.
    """
    summary = f"{', '.join(hosts)}; most also as HOST_MIXER with {', '.join(mixers)}."
    everywhere = f"list_backbones() and run.py --help backbone have all {len(known)}."
    return f"{unknown('backbone', name, known, summary)} {everywhere}"
