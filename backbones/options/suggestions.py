"""The message that refuses an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping


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
    summary = f"{', '.join(hosts)}; most also as HOST_MIXER with {', '.join(mixers)}."
    everywhere = f"list_backbones() and run.py --help backbone have all {len(known)}."
    return f"{unknown('backbone', name, known, summary)} {everywhere}"
