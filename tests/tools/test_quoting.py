"""Hydra reads values exactly as the shell passed them."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tools.cli.quoting import quote_arguments
from tools.cli.typed_network import read_network
from tools.config import overrides
from tools.config.name_checks import compose_checked

PATHS = ("ckpt", "input", "output_dir", "data.root", "backbone.pretrained", "data.val_images",
         "task.distillation.checkpoint")  # fmt: skip
TEXTS = [
    "epoch=9-step=100.ckpt", "a=b", "été.jpg", "猫/犬.png", "[a]", "a[1].jpg", "a,b.jpg", "a&b",
    "it's.jpg", 'say "hi".jpg', "a b", "a  b", " a", "a ", "(1).jpg", "{x}", "a:b", "#1", "100%",
    "1e5", "007", "2024", "a\\b", "tail\\", "it\\'s", "it\\\\'s", "a;b", "~/x", "!x", "a|b", "`x`",
    "<a>", "a*", "x=1,y=2", "$HOME", "a$b", "f(x)", "range", "[", "]", "{", "a,", ",", "'", '"',
    "'a",
]  # fmt: skip


def read_with_hydra(word):
    override = OverridesParser.create().parse_override(word)
    sweep = override.is_sweep_override()
    return list(override.sweep_string_iterator()) if sweep else override.value()


MEANT = ("[a]", "{x}", " a", "a ", "f(x)", "$HOME", "a$b")  # the grammar reads them otherwise


def test_paths_and_other_texts_are_taken_as_typed():
    for text in TEXTS:
        for key in PATHS:
            (word,) = quote_arguments([f"{key}={text}"])
            assert read_with_hydra(word) == text
            assert quote_arguments([word]) == [word]  # as other processes of the run start with it
        if "," not in text and text not in ("1e5", "2024"):
            (word,) = quote_arguments([f"head.name={text}"])
            assert read_with_hydra(word) == text or text in MEANT


@pytest.mark.parametrize(
    ("typed", "value"),
    [("x=[猫,狗]", ["猫", "狗"]), ("x={a: é, b: 1}", {"a": "é", "b": 1}),
     ("x=[a=b,'c,d',3]", ["a=b", "c,d", 3]), ("x=[[é],null]", [["é"], None]), ("+x.y=é", "é"),
     ("ckpt=null", None), ("backbone.pretrained=true", True), ("ckpt='a,b'", "a,b"),
     ("data.root=${oc.env:HOME}", "${oc.env:HOME}")],
)  # fmt: skip
def test_lists_words_and_quoted_texts_keep_their_meaning(typed, value):
    assert read_with_hydra(quote_arguments([typed])[0]) == value


def test_commas_of_a_sweep_are_between_values_unless_the_path_is_there(tmp_path):
    (word,) = quote_arguments(["ckpt=a=1.ckpt,é"], sweep=True)
    assert read_with_hydra(word) == ["'a=1.ckpt'", "'é'"]
    there = tmp_path / "a,b"
    there.touch()
    assert read_with_hydra(quote_arguments([f"ckpt={there}"], sweep=True)[0]) == str(there)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("é", "'é' is not an option name; options are key=value"),
        ("dàta.root=x", "'dàta.root' is not an option name"),
        ("a b=c", "'a b' is not an option name"),
        ("@", "cannot use '@'; arguments are key=value"),
    ],
)
def test_keys_are_named(typed, message):
    with pytest.raises(ValueError, match=message) as refused:
        quote_arguments([typed])
    assert "hydra" not in str(refused.value)


def test_several_values_networks_and_paths():
    with pytest.raises(ValueError, match=r"seed=1,2 has several values; pass -m seed=1,2") as said:
        compose_checked(["seed=1,2"])
    line = str(said.value).partition(", or ")[2].removesuffix(" for one text")
    assert shlex.split(line) == ["seed='1,2'"]
    options = read_network("deit_t", ["backbone.pretrained=a=é [1].ckpt"])[1]
    assert options == {"pretrained": "a=é [1].ckpt"}
    path = "/data/a=b, é [1] & 'x'"
    typed = ["data=folder", f"data.root={path}", f"output_dir={path}"]
    config = overrides.read_command(typed).config
    assert (config.data.root, config.output_dir) == (path, path)
