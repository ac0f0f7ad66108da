"""Names, options and errors of the registry; every backbone's size against the published rows."""

import copy
import functools
import inspect
import pickle
import re
import subprocess
import sys
from itertools import cycle

import pytest
import torch

from backbones import (
    Slot,
    backbone_schema,
    create_backbone,
    create_mixer,
    list_backbones,
    list_hosts,
    list_mixers,
    mixer_options,
    register_host,
    register_mixer,
)
from backbones.analysis.counting import count_macs, count_parameters
from backbones.hosts.deit import deit_t
from backbones.mixers.ffn import FFN
from backbones.options import variant_of
from backbones.registry import find_host, find_mixer, temporary_registrations, why_unfit
from heads.linear import LinearClassifier
from tests.families import SMALLEST, SWAPPED, rest_slow, short
from tests.rows import SHAPES, all_rows
from tools.papers.published import list_papers, load_rows

ROWS = all_rows()


# Names


def test_every_host_has_every_channel_mixer():
    hosts = list_hosts()
    assert set(SHAPES) <= set(hosts)
    mixers = [mixer for mixer in list_mixers("channel") if mixer != "ffn"]
    open_hosts = [host for host in hosts if "channel" in find_host(host).slots]
    pairs = {
        (host, mixer)
        for host in open_hosts
        for mixer in mixers
        if not why_unfit(find_host(host), find_mixer(mixer))
    }
    expected = {*hosts, *(f"{host}_{mixer}" for host, mixer in pairs)}
    named = set(list_backbones()) - expected
    assert expected <= set(list_backbones())
    assert len(list_backbones()) == len(expected) + len(named)
    assert named <= {f"{host}_{mixer}" for host in hosts for mixer in list_mixers("token")}


LINK = r"https://(arxiv\.org/abs|doi\.org|openreview\.net|proceedings\.mlr\.press|openaccess)"


@pytest.mark.parametrize("name", [*list_hosts(), *list_mixers()])
def test_every_host_and_mixer_links_its_paper(name):
    """The link is in the module's docstring.

    Sources without a year, section or table, such as README's "an example", need no link.
    """
    entry = find_host(name) if name in list_hosts() else find_mixer(name)
    if re.search(r"\d", entry.source):
        assert re.search(LINK, sys.modules[entry.build.__module__].__doc__)


def identity(dim, *, size=3, slot=None):
    """A token mixer that keeps the slot it was given."""
    mixer = create_mixer("ffn", dim)
    mixer.slot, mixer.size = slot, size
    return mixer


def test_token_mixers_are_named_where_they_say_so(registering):
    options = {"swin_s": {"size": 5}}
    register_mixer(
        "still", kind="token", source="this test", named_on=("swin_[st]",), options_on=options
    )(identity)
    assert {n for n in list_backbones() if n.endswith("_still")} == {"swin_s_still", "swin_t_still"}
    assert backbone_schema("swin_t_still")["token_mixer"] == {"size": 3}
    assert backbone_schema("swin_s_still")["token_mixer"] == {"size": 5}
    assert backbone_schema("swin_s_still")["mixer"] == backbone_schema("swin_s")["mixer"]
    with torch.device("meta"):
        backbone = create_backbone("swin_t_still", dense=True, img_size=(96, 128))
        given = create_backbone("swin_t_still", token_mixer={"size": 7, "name": "still"})
    block = backbone.layers[2].blocks[5].attn
    assert block.size == 3
    assert block.slot == Slot(384, 4.0, (6, 8), stage=2, block=5, dense=True)
    assert given.layers[0].blocks[0].attn.size == 7
    assert not given.layers[0].blocks[0].attn.slot.dense
    with pytest.raises(ValueError, match="swin_t_still already has still as token mixer;"):
        create_backbone("swin_t_still", token_mixer="other")


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("host", [host for host in SMALLEST if find_host(host).slots])
def test_slots_tell_whether_the_host_is_dense(registering, host, dense):
    slots = []

    def spy(dim, *, slot=None):
        slots.append(slot)
        return FFN(dim)

    kinds = find_host(host).slots
    for kind in kinds:
        register_mixer(f"spy_{kind}", kind=kind, source="this test")(spy)
    name = f"{host}_spy_channel" if "channel" in kinds else host
    token_mixer = "spy_token" if "token" in kinds else None
    with torch.device("meta"):
        create_backbone(name, token_mixer=token_mixer, dense=dense)
    assert {slot.dense for slot in slots} == {dense}


def test_the_first_33_names():
    first = {f"{host}{suffix}" for host in SHAPES for suffix in ("", "_glu", "_afbo")}
    assert len(first) == 33
    assert first <= set(list_backbones())
    assert first <= set(ROWS)


def test_patterns_and_order():
    assert list_backbones("swin_t") == ["swin_t"]
    assert [
        name for name in list_backbones("swin_t*") if name.endswith(("_t", "t_afbo", "t_glu"))
    ] == [
        "swin_t",
        "swin_t_afbo",
        "swin_t_glu",
    ]
    assert list_backbones("vgg*") == []


def test_own_ffn_is_an_alias():
    assert "swin_t_ffn" not in list_backbones()
    with torch.device("meta"):
        alias, plain = create_backbone("swin_t_ffn"), create_backbone("swin_t")
    assert alias.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("name", ["swin_t_afob", "swint_afbo", "swin-t_afbo", "Swin_T_afbo"])
def test_unknown_backbone_is_refused_with_the_nearest(name):
    with pytest.raises(
        ValueError, match=f"no backbone called '{name}'; did you mean .*swin_t_afbo"
    ):
        create_backbone(name)


@pytest.mark.parametrize(
    ("base", "mixer"),
    [
        (base, mixer)
        for base, mixer in zip(cycle(("swin_t", "swin_t_afbo")), list_mixers("token"), strict=False)
        if f"{base}_{mixer}" not in list_backbones()  # as it is by named_on
    ],
)
def test_a_token_mixer_as_a_suffix_is_refused_with_the_option(base, mixer):
    with pytest.raises(ValueError, match=f"no backbone called '{base}_{mixer}'") as refused:
        create_backbone(f"{base}_{mixer}")
    assert "did you mean" not in str(refused.value)
    typed = f"backbone={base} backbone.token_mixer={mixer}"
    call = f"create_backbone('{base}', token_mixer='{mixer}')"
    assert f": {mixer} is a token mixer; type {typed}, or in Python {call}" in str(refused.value)
    with torch.device("meta"):
        create_backbone(base, token_mixer=mixer)


@pytest.mark.parametrize("base", ["resnet18", "posmlp_t_sgu"])
def test_a_token_mixer_as_a_suffix_is_refused_where_none_can_be(base):
    message = f"called '{base}_sbm': sbm is a token mixer; the only token mixer of {base} is"
    with pytest.raises(ValueError, match=message):
        create_backbone(f"{base}_sbm")
    with pytest.raises(ValueError, match="token"):
        create_backbone(base, token_mixer="sbm")


def test_name_like_nothing_is_refused_with_hosts_and_mixers():
    known = "known: .*deit_t, .*gcvit_t.* more; .*HOST_MIXER with .*afbo, .*glu, .*list_backbones()"
    with pytest.raises(ValueError, match=f"called 'zzz'; {known}"):
        create_backbone("zzz")


def test_taken_names_are_refused_naming_both(registering):
    with pytest.raises(
        ValueError, match=r"'deit_t' is taken by backbones\.hosts\.deit\.deit_t; give "
    ):
        register_host("deit_t", source="again")(deit_t)

    class Ffn:
        pass

    both = r"'ffn' is taken by backbones\.mixers\.ffn\.FFN; give .*Ffn another one"
    with pytest.raises(ValueError, match=both):
        register_mixer("ffn", kind="channel", source="again")(Ffn)
    assert find_mixer("ffn").build is FFN


@pytest.mark.parametrize("name", ["my-mixer", "Afbo", "2way", "", "a b", "_a", "é", None])
def test_names_that_cannot_stand_in_a_backbones_are_refused(name, registering):
    with pytest.raises(ValueError, match=f"{name!r} is not a valid name for a host, .*; use lower"):
        register_mixer(name, kind="channel", source="this test")
    with pytest.raises(ValueError, match="is not a valid name for a host, mixer or modality"):
        register_host(name, source="this test")


def test_other_kinds_are_refused(registering):
    with pytest.raises(ValueError, match="kind=chanel is not one of channel, token"):
        register_mixer("mine", kind="chanel", source="this test")
    with pytest.raises(ValueError, match="slots=tokens is not one of channel, token"):
        register_host("mine", slots=("channel", "tokens"), source="this test")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda dim, *, width: 0, "mine needs a default; add one"),
        (lambda dim, hidden_ratio=4, act=1: 0, r"by position.*write \(dim, \*, hidden_ratio, act,"),
        (lambda dim, *, act=torch.nn.GELU: 0, "mine has the default act=<class .*cannot be typed"),
        (lambda dim, *, sizes=(1, {2: 3}): 0, "mine has the default sizes=.*cannot be typed"),
    ],
    ids=["none", "position", "class", "key"],
)
def test_options_that_cannot_be_typed_are_refused(registering, build, message):
    with pytest.raises(ValueError, match=f"mixer {message}" if "mine" in message else message):
        register_mixer("mine", kind="channel", source="this test")(build)
    with pytest.raises(ValueError, match=message):
        register_host("mine", source="this test")(build)
    assert "mine" not in [*list_mixers(), *list_hosts()]


def test_what_is_filled_in_needs_no_default(registering):
    @register_mixer("mine", kind="channel", source="this test")
    def build(dim, *, hidden_ratio, grid, slot, sizes=(1, [2.0, None]), more=None):
        return FFN(dim)

    assert mixer_options("mine") == {
        "hidden_ratio": None, "sizes": (1, [2.0, None]), "more": None
    }  # fmt: skip
    assert isinstance(create_mixer("mine", 8), FFN)


def test_what_is_defined_again_takes_its_own_place(registering):
    """As a notebook's cell does that is run twice."""
    cell = """@register_mixer("celled", kind="channel", source="this test")
def celled(dim): return FFN(dim)"""
    for _ in range(2):
        space = {"register_mixer": register_mixer, "FFN": FFN, "__name__": "__main__"}
        exec(cell, space)
        assert find_mixer("celled").build is space["celled"]
    with pytest.raises(ValueError, match=r"'celled' is taken by __main__\.celled; give "):
        register_mixer("celled", kind="channel", source="this test")(space["celled"])


def test_temporary_registrations_are_forgotten_even_after_an_error():
    def fail():
        with temporary_registrations():
            register_host("brief", source="this test")(deit_t)
            register_mixer("short", kind="channel", source="this test")(FFN)
            assert {"brief", "brief_short", "deit_t_short"} <= set(list_backbones())
            raise RuntimeError

    before = list_backbones()
    with pytest.raises(RuntimeError):
        fail()
    assert list_backbones() == before
    with pytest.raises(ValueError, match="no host called 'brief'"):
        find_host("brief")


def test_two_pairs_of_one_name_are_refused(registering):
    register_host("swin", source="this test")(deit_t)
    register_mixer("t_afbo", kind="channel", source="this test")(FFN)
    with pytest.raises(ValueError, match="two pairs are called 'swin_t_afbo'"):
        list_backbones()


def test_pair_that_does_not_fit_is_refused_with_the_reason(registering):
    register_mixer(
        "picky", kind="channel", source="this test", unfit_for={"deit_*": "it has a class token"}
    )(FFN)
    assert not list_backbones("deit_*_picky")
    fitting = [host for host in list_hosts() if "channel" in find_host(host).slots]
    assert len(list_backbones("*_picky")) == len(fitting) - len(list_backbones("deit_?"))
    message = (
        "no deit_t_picky: picky does not serve deit_t, because it has a class token; it serves "
    )
    with pytest.raises(ValueError, match=f"{message}.*swin_t"):
        create_backbone("deit_t_picky")
    with pytest.raises(ValueError, match=r"scheme_12 does not serve deit_s, because .*class token"):
        backbone_schema("deit_s_scheme_12")
    # Near misses are still answered with what exists.
    with pytest.raises(ValueError, match="no backbone called 'swin_t_pickyy'; did you mean swin_t"):
        create_backbone("swin_t_pickyy")


def test_error_inside_a_builder_reaches_the_user(registering):
    def broken(dim, *, kernel_size=3):
        raise KeyError("inside")

    register_mixer("broken", kind="channel", source="this test")(broken)
    with pytest.raises(KeyError, match="inside"):
        create_backbone("deit_t_broken")


def test_what_a_library_says_in_a_builder_becomes_the_mixers_refusal(registering):
    @register_mixer("mine", kind="channel", source="this test")
    def build(dim, *, drop=0.0, size=1):
        torch.nn.Dropout(drop)
        torch.nn.Linear(dim, size)
        return FFN(dim) + 1 if size == 2 else FFN(dim)

    with pytest.raises(
        ValueError,
        match=r"^mixer mine refuses backbone\.mixer\.drop=2: dropout probability .* but got 2$",
    ) as caught:
        create_backbone("deit_t_mine", mixer={"drop": 2})
    assert caught.value.__cause__ is not None
    with pytest.raises(
        ValueError, match=r"^mixer mine refuses mixer\.drop=2, mixer\.size=3: dropout"
    ):
        create_mixer("mine", 8, drop=2, size=3)
    with pytest.raises(
        ValueError, match=r"refuses mixer\.size=-1: .*\(RuntimeError, .*registry\.py:"
    ):
        create_mixer("mine", 8, size=-1)
    with pytest.raises(
        ValueError, match=r"unsupported operand .* \(TypeError, .*test_registry\.py:"
    ):
        create_mixer("mine", 8, size=2)


def test_a_builder_that_takes_no_width_is_refused(registering):
    register_mixer("mine", kind="channel", source="this test")(lambda *, act=1: FFN(act))
    with pytest.raises(ValueError, match=r"mixer mine refuses 8 channels: .* takes 0 positional"):
        create_mixer("mine", 8)


def test_an_own_check_in_a_builder_is_said_as_it_is():
    with pytest.raises(ValueError, match=r"^g1 must divide the input width 192, .* got 7$"):
        create_backbone("deit_t_afbo", mixer={"g1": 7})


# Options


@pytest.fixture
def on_meta():
    """Build on the meta device, because some options are refused only after building."""
    with torch.device("meta"):
        yield


@pytest.mark.usefixtures("on_meta")
def test_unknown_options_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"no option of mixer afbo called 'g3'; did you mean g\d"):
        create_backbone("swin_t_afbo", mixer={"g3": 6})
    with pytest.raises(ValueError, match="no option of swin_t called 'drop_path'"):
        create_backbone("swin_t", drop_path=0.1)
    with pytest.raises(
        ValueError, match="no option of mixer ffn called 'hidden'; did you mean hidden_ratio"
    ):
        create_backbone("deit_t", mixer={"hidden": 3})
    for kind in ("grid", "slot"):  # which the host fills in
        with pytest.raises(ValueError, match=f"no option of mixer ggqpe called '{kind}'"):
            create_backbone("swin_t", token_mixer={"name": "ggqpe", kind: {"a": 1}})
    with pytest.raises(ValueError, match="no token mixer called 'pool'"):
        create_backbone("deit_t", token_mixer="pool")
    with pytest.raises(ValueError, match="token_mixer needs a name"):
        create_backbone("deit_t", token_mixer={"kernel_size": 3})


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_path_rate": 1.0}, r"drop_path_rate must be in \[0, 1\), got 1.0"),
        ({"drop_path_rate": -0.1}, r"drop_path_rate must be in \[0, 1\), got -0.1"),
        ({"img_size": 32}, r"img_size must be at least 64 in both directions, got \(32, 32\)"),
        ({"img_size": (224, 32)}, r"img_size must be at least 64 .* got \(224, 32\)"),
        ({"img_size": (224, 224, 3)}, r"img_size must be a side or \(height, width\), got"),
        ({"img_size": "224"}, "img_size=224 is not a whole number"),
        ({"drop_path_rate": float("nan")}, "drop_path_rate=nan is not a number"),
        ({"mixer": "afbo"}, "mixer=afbo is not a group of options"),
        (
            {"mixer": {"hidden_ratio": float("nan")}},
            "^backbone.mixer.hidden_ratio=nan is not a num",
        ),
        (
            {"token_mixer": {"name": "pooling", "kernel_size": "3"}},
            "^backbone.token_mixer.kernel_size=3 is not a whole number",
        ),
        ({"img_size": 0}, r"img_size must be at least 64 in both directions, got \(0, 0\)"),
        ({"pretrained": 3}, "pretrained=3 is not true or false or a text"),
        ({"dense": "yes"}, "dense=yes is not true or false"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        create_backbone("swin_t", **options)


@pytest.mark.parametrize("dim", [0, -8, 19.5, "192"])
def test_a_mixer_of_no_width_is_refused(dim):
    with pytest.raises(ValueError, match=f"dim must be a whole number of at least 1, got {dim!r}"):
        create_mixer("afbo", dim)


def test_a_mixer_alone_gets_its_block(registering):
    register_mixer("still", kind="token", source="this test")(identity)
    assert create_mixer("still", 8).slot.block == 0
    assert create_mixer("still", 8, block=3, grid=(5, 7)).slot == Slot(
        8, 4.0, (5, 7), stage=0, block=3, dense=False
    )
    for block in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match=f"block must be a whole number .*, got {block!r}"):
            create_mixer("still", 8, block=block)


def test_host_without_the_slot_refuses_a_mixer(registering):
    register_host("closed", slots=("token",), source="this test")(deit_t)
    assert list_backbones("closed*") == ["closed"]
    with pytest.raises(ValueError, match="closed lacks a slot for channel mixers; it has"):
        create_backbone("closed", mixer={"hidden_ratio": 2})


def test_defaults_of_a_paper_by_host():
    assert mixer_options("afbo")["g2"] == 4
    found = {host: mixer_options("afbo", host)["g2"] for host in SHAPES}
    assert {host for host, g2 in found.items() if g2 == 3} == {
        "deit_s",
        "deit_b",
        "swin_t",
        "swin_s",
        "swin_b",
    }
    with torch.device("meta"):
        assert len(create_backbone("swin_t_afbo").layers[0].blocks[0].mlp.cm_a.weights) == 3
        changed = create_backbone("swin_t_afbo", mixer={"g2": 6, "kernel_size": 5})
    assert len(changed.layers[0].blocks[0].mlp.cm_a.weights) == 6
    assert changed.layers[0].blocks[0].mlp.sm_a.kernel_size == (5, 5)


@pytest.mark.parametrize("host", [n for n in SMALLEST if "channel" in find_host(n).slots])
def test_options_rebuild_ffns_that_are_plain_and_no_others(host):
    with torch.device("meta"):
        if find_host(host).plain_ffn:
            for mixer in create_backbone(host, mixer={"hidden_ratio": 3.5}).mixers().values():
                kinds = [key.rpartition(".")[2] for key in mixer.replaced]
                assert kinds == ["weight", "bias"] * 2
        else:
            with pytest.raises(ValueError, match=f"need a mixer.s name: .* such as {host}_afbo"):
                create_backbone(host, mixer={"hidden_ratio": 3.5})


def test_hosts_of_one_file_agree_whether_their_ffn_is_plain():
    found = {}
    for host in list_hosts():
        entry = find_host(host)
        found.setdefault(entry.build.__module__, set()).add(entry.plain_ffn)
    assert {len(values) for values in found.values()} == {1}


def test_options_of_a_plain_host_rebuild_its_ffn():
    with torch.device("meta"):
        same = create_backbone("deit_t", mixer={"hidden_ratio": None, "drop": 0.0})
        narrow = create_backbone("deit_t", mixer={"hidden_ratio": 3})
    assert count_parameters(same) == count_parameters(create_backbone("deit_t"))
    assert not isinstance(same.blocks[0].mlp, FFN)
    assert narrow.blocks[0].mlp.fc1.out_features == 576
    assert count_parameters(same) - count_parameters(narrow) == 12 * (2 * 192 * 192 + 192)


def test_schema_lists_every_option_with_its_default():
    schema = backbone_schema("swin_t_afbo")
    keywords = inspect.signature(create_backbone).parameters
    expected = {name for name, p in keywords.items() if p.kind is not p.VAR_KEYWORD}
    assert set(schema) == expected
    assert schema["name"] == "swin_t_afbo"
    assert schema["mixer"] == {
        "hidden_ratio": None,
        "cm_a": "occm",
        "cm_b": "gccm",
        "g1": 2,
        "g2": 3,
        "window": None,
        "rounds": 2,
        "pairing": "anti",
        "sm": "dw",
        "kernel_size": 3,
        "order": "cs",
        "act": "silu",
        "act_on": "a",
        "init": "ours",
        "bias": True,
        "drop": 0.0,
    }
    for name in list_backbones():
        assert backbone_schema(name)["drop_path_rate"] == 0.0


@pytest.mark.parametrize("name", ["deit_t_afbo", "swin_t", "poolformer_s12_glu"])
def test_schema_can_be_passed_back(name):
    with torch.device("meta"):
        again = create_backbone(**backbone_schema(name))
        plain = create_backbone(name)
    assert again.name == plain.name == name
    assert count_parameters(again) == count_parameters(plain)


def test_mixer_follows_its_slot(registering):
    seen = []

    def watch(dim, *, hidden_ratio=4.0, grid=(14, 14), extra=1):
        seen.append((dim, hidden_ratio, grid, extra))
        return create_mixer("ffn", dim)

    options = {"swin_*": {"extra": 2}}
    register_mixer(
        "watch", kind="channel", source="this test", hidden_scale=0.5, options_on=options
    )(watch)
    with torch.device("meta"):
        create_backbone("swin_t_watch", img_size=(96, 128))
    assert seen[0] == (96, 2.0, (24, 32), 2)
    assert seen[-1] == (768, 2.0, (3, 4), 2)
    assert mixer_options("watch", "swin_b") == {"hidden_ratio": None, "extra": 2}
    seen.clear()
    with torch.device("meta"):
        create_backbone("deit_t_watch", mixer={"hidden_ratio": 3, "extra": 7})
    assert set(seen) == {(192, 3, (14, 14), 7)}


def test_variants_inherit_what_their_mixer_sets_for_single_hosts(registering):
    def comet(dim, *, hidden_ratio=4.0, size=3, depth=1):
        mixer = create_mixer("ffn", dim, hidden_ratio=hidden_ratio)
        mixer.typed = (size, depth)
        return mixer

    register_mixer(
        "comet",
        kind="channel",
        source="this test",
        hidden_scale=0.5,
        options_on={"swin_*": {"size": 5, "depth": 2}, "swin_t": {"size": 6}},
        host_overrides={"deit_*": {"class_token": False}},
        unfit_for={"pvt_*": "this test says so"},
    )(comet)

    @register_mixer("comet_sum", kind="channel", source="this test")
    @variant_of(comet, fixed={"depth": 1})
    def comet_sum():
        """One of its options is fixed."""

    own = {"swin_s": {"depth": 4}}

    @register_mixer("comet_deep", kind="channel", source="this test", options_on=own, unfit_for={})
    @variant_of(comet, defaults={"depth": 3})
    def comet_deep():
        """Another default, and a host of its own."""

    @register_mixer("comet_last", kind="channel", source="this test", hidden_scale=1.0)
    @variant_of(comet_sum)
    def comet_last():
        """A variant of a variant."""

    every = {"hidden_ratio": None}
    assert mixer_options("comet_sum", "swin_t") == {**every, "size": 5}
    assert mixer_options("comet_sum", "deit_t") == {**every, "size": 3}
    assert mixer_options("comet_deep", "swin_t") == {**every, "size": 5, "depth": 3}
    assert mixer_options("comet_deep", "swin_s") == {**every, "size": 5, "depth": 4}
    assert mixer_options("comet_last", "swin_b") == {**every, "size": 5}
    assert backbone_schema("deit_t_comet_last")["class_token"] is False
    assert not list_backbones("pvt_v2_b?_comet_sum")
    assert list_backbones("pvt_v2_b?_comet_deep")
    with torch.device("meta"):
        half, whole = (create_backbone(f"swin_t_{name}") for name in ("comet_sum", "comet_last"))
    assert half.layers[0].blocks[0].mlp.typed == (5, 1)
    assert half.layers[0].blocks[0].mlp.fc1.out_features == 2 * 96
    assert whole.layers[0].blocks[0].mlp.fc1.out_features == 4 * 96


def test_parts_of_a_mixer_have_its_values_on_the_hosts_that_its_paper_names():
    """IFFN's kernels are larger on four hosts, and so are those of its spatial half alone."""
    for host in ("deit_b", "swin_b", "poolformer_m48", "lvt_r1"):
        assert mixer_options("iffn", host)["kernel_size"] == 5
        assert mixer_options("iffn_spatial", host)["kernel_size"] == 5
    assert mixer_options("iffn_spatial", "deit_t")["kernel_size"] == 3


# Published rows


def test_published_names_are_those_with_a_row():
    rows = {row.backbone for paper in list_papers() for row in load_rows(paper)}
    assert set(list_backbones(published=True)) == rows | set(list_hosts())
    everything = [*list_backbones(published=True), *list_backbones(published=False)]
    assert sorted(everything) == sorted(list_backbones())


@functools.cache
def plain_classifier(name):
    return classifier(name)


def classifier(name, **options):
    with torch.device("meta"):
        return LinearClassifier(create_backbone(name, **options), 1000)


@pytest.mark.parametrize("name", rest_slow(list(ROWS), [*SMALLEST, *SWAPPED]))
def test_parameters_are_exact(name):
    assert count_parameters(plain_classifier(name)) == ROWS[name][0]


@pytest.mark.parametrize("name", rest_slow(list(ROWS), [*SMALLEST, *SWAPPED]))
def test_macs_are_exact(name):
    assert count_macs(plain_classifier(name)) == round(1e9 * ROWS[name][1])


@pytest.mark.slow  # also what `python tools/complexity.py paper=...` prints
@pytest.mark.parametrize("paper", list_papers())
def test_published_rows_with_options_or_another_size_are_exact(paper):
    for row in load_rows(paper, task="classification"):
        if row.options or row.image_size != 224:
            model = classifier(row.backbone, **row.options)
            assert count_parameters(model) == row.params, row
            assert count_macs(model, row.image_size, rule=row.rule) == row.exact_macs, row


def test_change_of_a_detector_is_the_change_of_its_backbone():
    rows = [row for row in load_rows("afbo", task="detection") if row.head]
    params = {(row.head, row.backbone): row.params for row in rows}
    for head, name in params:
        if name.endswith("_afbo"):
            host = name.removesuffix("_afbo")
            assert params[head, name] - params[head, host] == ROWS[name][0] - ROWS[host][0]


@pytest.mark.slow
def test_detectors_have_the_parameters_of_their_rows():
    pytest.importorskip("mmdet")
    from heads.toolkits.detectors import build_detector

    for row in load_rows("afbo", task="detection"):
        detector = build_detector(create_backbone(row.backbone, dense=True), 80, name=row.head)
        assert count_parameters(detector) == row.params, row


# What a built backbone can do

# Hosts of tokens and of maps, with and without windows, positions, batch norms and forms.
QUICK = ("deit_t", "ffnet_1", "poolformer_s12", "swin_t")


@pytest.mark.parametrize("name", rest_slow(SWAPPED, [f"{host}_afbo" for host in QUICK]))
@torch.no_grad()
def test_deepcopy_pickle_and_state_dict_keep_a_backbone(name):
    backbone = short(name, dense=True).eval()
    images = torch.randn(1, 3, 64, 64)
    expected = backbone(images)
    other = short(name, dense=True).eval()
    for parameter in other.parameters():
        parameter.zero_()
    other.load_state_dict(backbone.state_dict())
    for again in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone)), other):
        assert again.feature_info == backbone.feature_info
        # Another size than the first shows state that belongs to the original.
        again(torch.randn(1, 3, 96, 80))
        for found, wanted in zip(again(images), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", rest_slow(SWAPPED, ["deit_t_afbo"]))
@torch.no_grad()
@pytest.mark.slow  # so do the blocks in tests/tasks/test_compilation.py
def test_compiles_into_one_graph(name):
    # A compiler sees torch's operations, whose rounding is another than that of our operators.
    backbone = short(name).eval().double()
    images = torch.randn(1, 3, 96, 64, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(backbone, fullgraph=True, backend="eager")
    for found, expected in zip(compiled(images), backbone(images), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow  # a minute of a C++ compiler each, so every second host
@pytest.mark.parametrize("name", SWAPPED[::2])
@torch.no_grad()
def test_compiled_code_gives_the_same(name):
    backbone = short(name).eval()
    images = torch.randn(1, 3, 96, 64)
    torch._dynamo.reset()
    compiled = torch.compile(backbone, fullgraph=True)
    for found, expected in zip(compiled(images), backbone(images), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SWAPPED)
def test_compiled_training_step_gives_the_same_gradients(name):
    backbone = short(name).double().train()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch._dynamo.reset()
    gradients = []
    # Of MLP-Mixer torch 2.12 expects other strides of LayerNorm's gradient than a CPU gives.
    backend = "aot_eager_decomp_partition" if name.startswith("mixer_") else "aot_eager"
    for run in (backbone, torch.compile(backbone, fullgraph=True, backend=backend)):
        backbone.zero_grad()
        run(images)[-1].square().mean().backward()
        gradients.append(
            {k: p.grad.clone() for k, p in backbone.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for key, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_import_is_the_only_act_that_registers():
    code = "from backbones import list_backbones; print(len(list_backbones()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(len(list_backbones()))]


def test_a_mixer_of_another_type_is_refused(registering):
    register_mixer("linear", kind="channel", source="test")(lambda dim: torch.nn.Linear(dim, dim))
    with pytest.raises(ValueError, match=r"derive it from backbones\.Mixer"):
        create_mixer("linear", 8)
