"""A family of builders says its options once: a variant is one with some of them fixed."""

import inspect
from typing import Literal

import pytest

from backbones import create_mixer, mixer_options
from backbones.mixers.scheme import Scheme
from backbones.options import check_arguments, keywords, variant_of
from tests.errors import refuses

Shade = Literal["light", "dark"]


def paint(size: int, *, colour: str = "red", shade: Shade = "light", coats: int = 1):
    """Paint something.

    Args:
        size: Of it.
        colour: Any,
            by name.
        shade: "light" or "dark".
        coats: How many.
    """
    return size, colour, shade, coats


@variant_of(paint, fixed={"colour": "blue"}, defaults={"coats": 2}, without=("shade",))
def blue():
    """Blue paint."""


def test_a_variant_has_its_own_defaults_name_and_docstring():
    assert blue(3) == (3, "blue", "light", 2)
    assert blue(size=3, coats=4) == (3, "blue", "light", 4)
    assert keywords(blue) == {"coats": 2}
    assert (blue.__name__, blue.__module__) == ("blue", __name__)
    assert inspect.getdoc(blue) == ("Blue paint.\n\nArgs:\n    size: Of it.\n    coats: How many.")
    without_coats = variant_of(paint, without=("coats",))(blue)
    assert "    colour: Any,\n        by name.\n    shade:" in inspect.getdoc(without_coats)


@pytest.mark.parametrize("option", [{"colour": "red"}, {"shade": "dark"}, {"other": 1}])
def test_what_a_variant_does_not_have_is_refused(option):
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        blue(3, **option)
    with pytest.raises(ValueError, match=f"there is no option group.{next(iter(option))}"):
        check_arguments(blue, option, "group")


def test_options_of_variants_are_checked():
    shaded = variant_of(paint, fixed={"colour": "blue"})(blue)
    check_arguments(shaded, {"shade": "dark"}, "group")
    with pytest.raises(ValueError, match=r"group\.shade=grey is not one of light, dark"):
        check_arguments(shaded, {"shade": "grey"}, "group")
    refuses(r"group\.coats=x is not a whole number", check_arguments, blue, {"coats": "x"}, "group")
    for wrong in ({"fixed": {"color": "blue"}}, {"defaults": {"size": 3}}, {"without": ("n",)}):
        with pytest.raises(TypeError, match="paint has no option"):
            variant_of(paint, **wrong)
    wide = variant_of(Scheme, fixed={"g1": 1}, defaults={"g2": 3})(blue)
    assert keywords(wide) == {"hidden_ratio": 8.0, "g2": 3, "cca": "train", "drop": 0.0}
    assert isinstance(wide(12), Scheme)
    refuses(r"group\.g2=x is not a whole number", check_arguments, wide, {"g2": "x"}, "group")


def test_registered_variants_differ_from_the_first_by_what_they_fix():
    whole = mixer_options("afbo")
    for name, fixed in {
        "scfbo_gc": {"cm_a", "cm_b", "g2", "window"},
        "afbo_c": {"cm_a", "cm_b", "sm", "kernel_size", "order"},
        "afbo_sc": {"cm_a", "cm_b", "order"},
        "afbo_cs": {"cm_a", "cm_b", "order"},
        "scfbo_oc": {"cm_a", "cm_b", "g1", "rounds", "pairing"},
    }.items():
        assert mixer_options(name) == {k: v for k, v in whole.items() if k not in fixed}
    with pytest.raises(ValueError, match="there is no option of mixer afbo_c called 'order'"):
        create_mixer("afbo_c", 8, order="sc")
