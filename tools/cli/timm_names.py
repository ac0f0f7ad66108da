"""Names of timm's models, without importing timm."""

from __future__ import annotations

import difflib
import json

from tools.cli.paths import ROOT

LIST = ROOT / "backbones/hosts/timm_model/models.json"


def check_timm_name(model: str) -> None:
    """Check a model's name against the list that comes with this version.

    A name that is missing from it may belong to a newer timm, if nothing is similar.

    Raises:
        ValueError: The name is unknown and similar to others.
    """
    names = json.loads(LIST.read_text())["models"]
    name = model.partition(".")[0]
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    if near:
        raise ValueError(f"timm has no model {model!r}; did you mean {' or '.join(near)}?")
