"""Plain and fast forms of mixers, for tests that hold for both."""

import pytest

from backbones import create_mixer, list_mixers
from backbones.fast import FastModule, fast, is_available, plain, status
from tests.tensors import build_mixer

compiled = pytest.mark.skipif(not is_available(), reason=f"no compiled operators: {status()}")


def is_fast(name):
    """Return True if a mixer has a fast form, as a whole or of a part."""
    return any(isinstance(part, FastModule) for part in fast(create_mixer(name, 8)).modules())


# Every mixer as it is built, and those that differ also in their fast form.
FORMS = [
    (name, form)
    for name in list_mixers()
    for form in (plain, fast)
    if form is plain or is_fast(name)
]
every_form = pytest.mark.parametrize(
    ("name", "form"), FORMS, ids=[f"{name}-{form.__name__}" for name, form in FORMS]
)
both_forms = pytest.mark.parametrize("form", [plain, fast], ids=["plain", "fast"])


def build_fast(name, *args, **options):
    """Build a mixer with random weights in its fast form."""
    return fast(build_mixer(name, *args, **options))
