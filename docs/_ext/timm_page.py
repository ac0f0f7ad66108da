"""List of timm's models with the slots that each has, from the list that comes with MixerLab."""

from __future__ import annotations

from markup import table

from backbones.hosts.timm_model.listing import count_families, read_list

INTRODUCTION = """# Models of timm

`backbone=timm backbone.model=NAME` builds any of these models. "channel" is the number of
feed-forward networks that a channel mixer replaces, "token" the number of token mixers that
`backbone.token_mixer` replaces. A part that keeps its own module is named with `*` for numbers, and
with the reason. The list is made by `python tools/timm_slots.py write=true`, which builds every
model on the meta device. [timm](../howto/timm.md) shows their use.
"""


def pages() -> dict[str, str]:
    """Return the page."""
    listed = read_list()
    families = count_families(listed)
    taking = [sum(one.channel > 0 for one in families), sum(one.token > 0 for one in families)]
    text = (
        f"{len(listed):,} models in {len(families)} families; {taking[0]} families take channel "
        f"mixers, {taking[1]} token mixers.\n\n"
    )
    rows = [
        [f"[{one.family}](#{one.family.replace('_', '-')})", one.models, one.channel, one.token]
        for one in families
    ]
    parts = [INTRODUCTION, text + table(["family", "models", "channel", "token"], rows)]
    for family in families:
        models = {name: one for name, one in listed.items() if one.family == family.family}
        rows = [[f"`{name}`", one.channel, one.token] for name, one in models.items()]
        reasons = {
            f"`{part}`: {why}" for one in models.values() for part, why in one.kept.items()
        } | {f"`{name}`: {one.error}" for name, one in models.items() if one.error}
        kept = "\n".join(f"* {reason}" for reason in sorted(reasons)[:12])
        parts.append(
            f"## {family.family}\n\n"
            + table(["model", "channel", "token"], rows)
            + (f"\n\nThese keep their own module:\n\n{kept}" if kept else "")
        )
    return {"timm": "\n\n".join(parts) + "\n"}
