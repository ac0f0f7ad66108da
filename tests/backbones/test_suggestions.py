"""Messages that refuse a name fit into ten lines of a terminal, however many names there are."""

import textwrap

import pytest

from backbones import create_backbone, create_mixer
from backbones.options import check_arguments, listed, shortened, unknown
from tools.config import help as topics
from tools.config.lazy_groups import register_groups
from tools.config.name_checks import compose_checked

THOUSAND = [f"n{number:08d} a class of ImageNet" for number in range(1000)]


def lines(text):
    return textwrap.wrap(text, 80)


def test_long_lists_are_shortened_and_counted():
    assert listed(["a", "b"]) == "a, b"
    assert listed([]) == ""
    text = listed(THOUSAND)
    shown = text.partition(" and ")[0].split(", ")
    assert shown == THOUSAND[: len(shown)]
    assert text.endswith(f" and {1000 - len(shown)} more")
    assert 350 < len(text) < 450
    assert len(listed(["x" * 5000, "y"])) <= 103
    assert len(shortened("x" * 5000)) <= 100
    assert len(lines(unknown("class", "qqq", THOUSAND))) <= 10
    assert "did you mean" in unknown("class", THOUSAND[7][:-1], THOUSAND)


def configure(word):
    register_groups()
    return lambda: compose_checked(["task=classification", word])


@pytest.mark.parametrize(
    "refused",
    [
        lambda: create_backbone("qqq"),
        lambda: create_backbone("q" * 5000),
        lambda: create_backbone("deit_t", token_mixer="qqq"),
        lambda: create_backbone("deit_t", token_mixer={"dim": 1}),
        lambda: create_backbone("deit_t_qqq"),
        lambda: create_backbone("deit_t", qqq=1),
        lambda: create_mixer("qqq", 8),
        lambda: check_arguments(unknown, {"qqq": 1}, "backbone"),
        configure("recipe=qqq"),
        configure("experiment=qqq"),
        configure("data=qqq"),
        configure("data.qqq=1"),
        configure("task.qqq=1"),
        configure("qqq=1"),
        configure("backbone=qqq"),
        lambda: topics.help_text("qqq"),
    ],
)
def test_messages_fit_into_ten_lines(refused):
    with pytest.raises(ValueError, match=r"q|token_mixer needs a name") as error:
        refused()
    assert len(lines(str(error.value))) <= 10, str(error.value)
