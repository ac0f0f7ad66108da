"""Source files that a run folder keeps because the commit of the run lacks them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import backbones
from backbones.checkpoints.equations import SOURCE
from backbones.options import mixer_names

ROOT = Path(backbones.__file__).parents[1]
FOLDER = SOURCE  # in a run folder
PACKAGES = ("backbones/mixers", "backbones/hosts")


def check_sources(folder: Path, backbone: Mapping[str, Any], root: Path = ROOT) -> None:
    """Refuse a run of a host or mixer that this checkout lacks and the run folder keeps.

    Args:
        folder: Run folder.
        backbone: Options of its backbone.
        root: The checkout.

    Raises:
        ValueError: Names the files and where they are kept.
    """
    base = folder / FOLDER
    files = [path for package in PACKAGES for path in sorted((base / package).rglob("*.py"))]
    names = [path.relative_to(base) for path in files]
    missing = [str(name) for name in names if not (root / name).exists()]
    if not missing or _are_known(backbone):
        return
    text = ", ".join(missing)
    raise ValueError(
        f"{folder} is a run of a network that this checkout lacks: {text} "
        f"{'is' if len(missing) == 1 else 'are'} missing from it and kept in {base}. Read the code,"
        f" then type: cp -r {base / 'backbones'} {root}"
    )


def _are_known(backbone: Mapping[str, Any]) -> bool:
    """Return True if the registry has the backbone and its token mixer."""
    from backbones.registry import find_mixer, look_up

    try:
        look_up(str(backbone.get("name")))
        for name in (
            *mixer_names(backbone.get("mixer")),
            *mixer_names(backbone.get("token_mixer")),
        ):
            find_mixer(name)
    except ValueError:
        return False
    return True
