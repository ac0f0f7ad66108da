"""Check that imports find our packages, not others of the same name."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check_packages(*names: str) -> None:
    """Check that Python finds our packages of these names.

    Raises:
        ImportError: Another package is found; the message says what to change.
    """
    for name in names:
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if (ROOT / name) not in [Path(place).resolve() for place in places]:
            path = places[0] if places else "nothing"
            raise ImportError(
                f"import {name} finds {path} instead of MixerLab's {ROOT / name}; rename that "
                f"folder, or put {ROOT} in front of its parent folder in PYTHONPATH"
            )
