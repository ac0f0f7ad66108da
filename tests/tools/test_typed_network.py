"""Networks have one syntax in all commands."""

import pytest

from tests.errors import refuses
from tests.runs import composed
from tools.cli.network_names import name_with_model
from tools.cli.typed_network import (
    join_channel_mixer,
    merge_options,
    network_label,
    read_network,
    read_networks,
)
from tools.config.overrides import read_command

SBM = {"token_mixer": {"name": "sbm", "rank": 32}}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["backbone.mixer.g2=6"], {"mixer": {"g2": 6}}),
        (["backbone.mixer={g2: 6}", "backbone.mixer.g1=2"], {"mixer": {"g2": 6, "g1": 2}}),
        (["backbone.drop_path_rate=1e-1"], {"drop_path_rate": 0.1}),
        (["+backbone.img_size=[64,96]"], {"img_size": [64, 96]}),
        (["backbone.img_size=null"], {"img_size": None}),
        (["backbone.mixer.bias=false"], {"mixer": {"bias": False}}),
        (["backbone.token_mixer=sbm"], {"token_mixer": {"name": "sbm"}}),
        (["backbone.token_mixer=sbm", "backbone.token_mixer.rank=32"], SBM),
        (["backbone.token_mixer.rank=32", "backbone.token_mixer.name=sbm"], SBM),
        (["backbone.token_mixer={name: sbm, rank: 32}"], SBM),
    ],
    ids=" ".join,
)
def test_words_become_options(words, options):
    found = read_network("swin_t_afbo", words)
    assert found == ("swin_t_afbo", options)
    assert read_network(network_label(found)) == found  # the printed form can be typed again


@pytest.mark.parametrize(
    "words",
    [
        ["backbone.mixer.g2=6", "backbone.drop_path_rate=0.1"],
        ["backbone.token_mixer=sbm"],
        ["backbone.token_mixer.name=sbm", "backbone.token_mixer.rank=32"],
        ["backbone.token_mixer=sbm", "backbone.token_mixer.rank=32"],
        ["backbone.token_mixer={name: sbm, rank: 32}"],
    ],
    ids=" ".join,
)
def test_a_run_takes_the_same_options(words):
    typed = ["backbone=swin_t_afbo", *words]
    given = read_command(typed).words
    assert read_command(given).words == given  # processes of a run start with the result again
    name, options = read_network("swin_t_afbo", words)
    config = composed(*given).backbone
    if isinstance(config["token_mixer"], str):
        config["token_mixer"] = {"name": config["token_mixer"]}
    assert config["name"] == name
    assert merge_options(config, options) == config  # everything is included


def test_values_and_names_with_commas_make_a_network_each():
    found = read_networks(
        "deit_t_afbo backbone.mixer={g1: 2, g2: 6},swin_?", ["backbone.drop_path_rate=0,0.1"]
    )
    assert [network_label(one) for one in found] == [
        f"{name} backbone.drop_path_rate={rate}{own}"
        for name, own in (
            ("deit_t_afbo", " backbone.mixer.g1=2 backbone.mixer.g2=6"),
            *(("swin_" + size, "") for size in "tsb"),
        )
        for rate in (0, 0.1)
    ]
    merged = {"token_mixer": {"name": "sbm", "rank": 8}}
    assert merge_options(SBM, {"token_mixer": {"rank": 8}}) == merged
    other = {"token_mixer": {"name": "pooling"}}
    assert merge_options(SBM, other) == other


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["backbone.drop_pth_rate=1"], "of deit_t called .*; did you mean backbone.drop_path_rate"),
        (["backbone.mixer.drp=1"], r"did you mean backbone.mixer.drop"),
        (["backbone.token_mixer.rnk=1"], r"did you mean backbone.token_mixer.rank"),
        (["backbone.name=swin_t"], r"backbone.name=swin_t is not an option; pass backbone=NAME"),
        (["backbone.mixer"], r"cannot use 'backbone.mixer'; arguments are key=value"),
        (["backbone.mixer.drop=interval(0,1)"], r"has no end or no step"),
        (["backbone.mixer.drop=0,0.1"], r"names 2 networks; this command takes one"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_mistakes_are_one_sentence(words, message):
    with pytest.raises(ValueError, match=message) as refused:
        read_network("deit_t", words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("typed", "joined"),
    [
        (["backbone=swin_t", "backbone.mixer.name=afbo"], ["backbone=swin_t_afbo"]),
        (["backbone=swin_t", "backbone.mixer=iffn", "seed=1"], ["backbone=swin_t_iffn", "seed=1"]),
        (
            ["backbone=swin_t,deit_t", "backbone.mixer.name=afbo,ffn"],
            ["backbone=swin_t_afbo,swin_t,deit_t_afbo,deit_t"],
        ),
        (["backbone=swin_t", "backbone.mixer=random"], ["backbone=swin_t_random_ffn"]),
        (["backbone=swin_t", "backbone.mixer.g2=6"], ["backbone=swin_t", "backbone.mixer.g2=6"]),
        (["seed=1"], ["seed=1"]),
    ],
)
def test_a_named_channel_mixer_joins_the_backbone(typed, joined):
    assert join_channel_mixer(typed) == joined


def test_another_channel_mixer_is_refused():
    typed = ["backbone=swin_t_afbo", "backbone.mixer.name=iffn"]
    refuses("swin_t_afbo already has a channel mixer", join_channel_mixer, typed)


def test_options_of_timm_pass_through():
    words = ["backbone.model=test_vit", "backbone.options.init_values=0.1"]
    ((name, options),) = read_networks("timm_afbo", words)
    assert (name, options["model"]) == ("timm_afbo", "test_vit")
    assert options["options"] == {"init_values": 0.1}
    assert name_with_model("timm_afbo", "test_vit") == "timm_test_vit_afbo"
