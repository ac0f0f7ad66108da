"""Names, options and errors of the registry; every backbone's size against the published rows."""

import contextlib
import copy
import inspect
import pickle
import re
import sys

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
    registry,
)
from backbones.analysis.counting import count_macs, count_parameters
from backbones.hosts.deit import deit_t
from backbones.mixers.ffn import FFN
from backbones.options import variant_of
from backbones.registry import find_host, find_mixer, temporary_registrations, why_unfit
from tests.errors import refuses
from tests.families import (
    SMALLEST,
    SWAPPED,
    build_short,
    meta_backbone,
    meta_classifier,
    rest_slow,
    rest_slow_pairs,
)
from tests.rows import SHAPES, all_rows
from tools.papers.published import list_papers, load_rows


def test_every_host_has_every_channel_mixer():
    hosts, names = list_hosts(), set(list_backbones())
    pairs = {
        f"{host}_{mixer}"
        for host in hosts
        for mixer in list_mixers("channel")
        if mixer != "ffn" and "channel" in find_host(host).slots
        if not why_unfit(find_host(host), find_mixer(mixer))
    }
    expected = {*hosts, *pairs}
    assert expected <= names
    tokens = {f"{host}_{mixer}" for host in hosts for mixer in list_mixers("token")}
    assert names - expected <= tokens
    first = {f"{host}{suffix}" for host in SHAPES for suffix in ("", "_glu", "_afbo")}
    assert len(first) == 33
    assert first <= expected
    assert {(name, "macs") for name in first} <= set(ROWS)


LINK = r"https://(arxiv\.org/abs|doi\.org|openreview\.net|proceedings\.mlr\.press|openaccess)"


def test_every_host_and_mixer_links_its_paper():
    entries = [*map(find_host, list_hosts()), *map(find_mixer, list_mixers())]
    papers = [entry for entry in entries if re.search(r"\d", entry.source)]  # not "an example"
    modules = {entry.build.__module__ for entry in papers}
    assert not [name for name in modules if not re.search(LINK, sys.modules[name].__doc__)]


def identity(dim, *, size=3, slot=None):
    mixer = create_mixer("ffn", dim)
    mixer.slot, mixer.size = slot, size
    return mixer


def test_named_on_adds_names_of_token_mixers(registering):
    options = {"swin_s": {"size": 5}}
    register_mixer(
        "still", kind="token", source="this test", named_on=("swin_[st]",), options_on=options
    )(identity)
    assert {n for n in list_backbones() if n.endswith("_still")} == {"swin_s_still", "swin_t_still"}
    small, tiny = (backbone_schema(f"swin_{size}_still") for size in "st")
    assert (small["token_mixer"], tiny["token_mixer"]) == ({"size": 5}, {"size": 3})
    assert small["mixer"] == backbone_schema("swin_s")["mixer"]
    backbone = meta_backbone("swin_t_still", dense=True, img_size=(96, 128))
    given = meta_backbone("swin_t_still", token_mixer={"size": 7, "name": "still"})
    block = backbone.layers[2].blocks[5].attn
    assert block.size == 3
    assert block.slot == Slot(384, 4.0, (6, 8), stage=2, block=5, dense=True)
    assert given.layers[0].blocks[0].attn.size == 7
    assert not given.layers[0].blocks[0].attn.slot.dense
    message = "swin_t_still already has still as token mixer;"
    refuses(message, create_backbone, "swin_t_still", token_mixer="other")


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


def test_patterns_aliases_and_published_names():
    assert list_backbones("swin_t") == ["swin_t"]
    names = [n for n in list_backbones("swin_t*") if n.endswith(("_t", "_t_afbo", "_t_glu"))]
    assert names == ["swin_t", "swin_t_afbo", "swin_t_glu"]
    assert list_backbones("vgg*") == []
    assert "swin_t_ffn" not in list_backbones()
    alias, plain = meta_backbone("swin_t_ffn"), meta_backbone("swin_t")
    assert alias.state_dict().keys() == plain.state_dict().keys()
    rows = {row.backbone for paper in list_papers() for row in load_rows(paper)}
    assert set(list_backbones(published=True)) == rows | set(list_hosts())
    everything = [*list_backbones(published=True), *list_backbones(published=False)]
    assert sorted(everything) == sorted(list_backbones())


def register(name, kind="channel", **options):
    return register_mixer(name, kind=kind, source="this test", **options)


def test_the_files_declare_what_they_register():
    assert sorted(registry.declared_modules("mixers")) == list_mixers()
    assert list(registry.declared_modules("hosts")) == list_hosts()


def test_taken_names_are_refused_naming_both(registering):
    taken = r"'deit_t' is taken by backbones\.hosts\.deit\.deit_t; give "
    refuses(taken, register_host("deit_t", source="again"), deit_t)
    taken = r"'ffn' is taken by backbones\.mixers\.ffn\.FFN; give .*FFNet another one"
    refuses(taken, register("ffn"), type("FFNet", (), {}))
    assert find_mixer("ffn").build is FFN
    register_host("swin", source="this test")(deit_t)
    register("t_afbo")(FFN)
    refuses("two pairs are called 'swin_t_afbo'", list_backbones)


@pytest.mark.parametrize("name", ["my-mixer", "Afbo", "2way", "", "a b", "_a", "é", None])
def test_names_and_kinds_that_are_not_valid_are_refused(name, registering):
    refuses(f"{name!r} is not a valid name for a host, .*; use lower", register, name)
    message = "is not a valid name for a host, mixer or modality"
    refuses(message, register_host, name, source="this test")
    refuses("kind=chanel is not one of channel, token", register, "mine", kind="chanel")
    message = "slots=tokens is not one of channel, token"
    refuses(message, register_host, "mine", slots=("channel", "tokens"), source="this test")


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
    refuses(f"mixer {message}" if "mine" in message else message, register("mine"), build)
    refuses(message, register_host("mine", source="this test"), build)
    assert "mine" not in [*list_mixers(), *list_hosts()]


def test_registrations_need_few_defaults_and_may_be_repeated(registering):
    @register("mine")
    def build(dim, *, hidden_ratio, grid, slot, sizes=(1, [2.0, None]), more=None):
        return FFN(dim)

    options = {"hidden_ratio": None, "sizes": (1, [2.0, None]), "more": None}
    assert mixer_options("mine") == options
    assert isinstance(create_mixer("mine", 8), FFN)
    cell = """@register("celled")
def celled(dim): return FFN(dim)"""
    for _ in range(2):
        space = {"register": register, "FFN": FFN, "__name__": "__main__"}
        exec(cell, space)
        assert find_mixer("celled").build is space["celled"]
    taken = r"'celled' is taken by __main__\.celled; give "
    refuses(taken, register("celled"), space["celled"])


def test_temporary_registrations_are_forgotten_even_after_an_error():
    before = list_backbones()
    with contextlib.suppress(RuntimeError), temporary_registrations():
        register_host("brief", source="this test")(deit_t)
        register("short")(FFN)
        assert {"brief", "brief_short", "deit_t_short"} <= set(list_backbones())
        raise RuntimeError
    assert list_backbones() == before
    refuses("no host called 'brief'", find_host, "brief")


def test_pair_that_does_not_fit_is_refused_with_the_reason(registering):
    register("picky", unfit_for={"deit_*": "it has a class token"})(FFN)
    assert not list_backbones("deit_*_picky")
    fitting = [host for host in list_hosts() if "channel" in find_host(host).slots]
    assert len(list_backbones("*_picky")) == len(fitting) - len(list_backbones("deit_?"))
    why = "because it has a class token; it serves .*pvt_v2_b1"
    refuses(f"no deit_t_picky: picky does not serve deit_t, {why}", create_backbone, "deit_t_picky")
    why = "scheme_12 does not serve deit_s, because .*class token"
    refuses(why, backbone_schema, "deit_s_scheme_12")
    nearest = "no backbone called 'swin_t_pickyy'; did you mean swin_t"
    refuses(nearest, create_backbone, "swin_t_pickyy")
    register_host("closed", slots=("token",), source="this test")(deit_t)
    assert list_backbones("closed*") == ["closed"]
    message = "closed lacks a slot for channel mixers; it has"
    refuses(message, create_backbone, "closed", mixer={"hidden_ratio": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": 2, "size": 3}, r"^mixer mine refuses mixer\.drop=2, mixer\.size=3: dropout"),
        ({"size": -1}, r"refuses mixer\.size=-1: .*\(RuntimeError, .*registry\.py:"),
        ({"size": 2}, r"unsupported operand .* \(TypeError, .*test_registry\.py:"),
        ({"size": 4}, r"derive it from backbones\.Mixer"),
    ],
)
def test_errors_of_a_builder_become_the_mixers(registering, options, message):
    @register("mine")
    def build(dim, *, drop=0.0, size=1):
        torch.nn.Dropout(drop)
        if size == 5:
            raise KeyError("inside")
        layer = torch.nn.Linear(dim, size)
        return {2: lambda: FFN(dim) + 1, 4: lambda: layer}.get(size, lambda: FFN(dim))()

    refuses(message, create_mixer, "mine", 8, **options)
    message = r"^mixer mine refuses backbone\.mixer\.drop=2: dropout probability .* but got 2$"
    with pytest.raises(ValueError, match=message) as caught:
        create_backbone("deit_t_mine", mixer={"drop": 2})
    assert caught.value.__cause__ is not None
    with pytest.raises(KeyError, match="inside"):
        create_backbone("deit_t_mine", mixer={"size": 5})
    register("wide")(lambda *, act=1: FFN(act))
    refuses(r"mixer wide refuses 8 channels: .* takes 0 positional", create_mixer, "wide", 8)


def test_defaults_of_a_paper_by_host():
    for mixer in ("afbo", "afbo_cs", "afbo_c", "afbo_sc", "scfbo_oc"):
        assert mixer_options(mixer)["g2"] == 4
        found = {host for host in SHAPES if mixer_options(mixer, host)["g2"] == 3}
        assert found == {"deit_s", "deit_b", "swin_t", "swin_s", "swin_b"}
    assert len(meta_backbone("swin_t_afbo").layers[0].blocks[0].mlp.cm_a.weights) == 3
    changed = meta_backbone("swin_t_afbo", mixer={"g2": 6, "kernel_size": 5})
    assert len(changed.layers[0].blocks[0].mlp.cm_a.weights) == 6
    assert changed.layers[0].blocks[0].mlp.sm_a.kernel_size == (5, 5)
    # IFFN's kernels are larger on some hosts, and so are those of its spatial half alone.
    large = {"deit_b", "swin_b", "poolformer_m48", *(f"lvt_r{steps}" for steps in (1, 2, 3, 4))}
    for mixer in ("iffn", "iffn_spatial"):
        hosts = [name.removesuffix(f"_{mixer}") for name in list_backbones(f"*_{mixer}")]
        found = {host for host in hosts if mixer_options(mixer, host)["kernel_size"] == 5}
        assert found == large


@pytest.mark.parametrize("host", [n for n in SMALLEST if "channel" in find_host(n).slots])
def test_options_rebuild_plain_ffns_only(host):
    with torch.device("meta"):
        if find_host(host).plain_ffn:
            for mixer in create_backbone(host, mixer={"hidden_ratio": 3.5}).mixers().values():
                kinds = [key.rpartition(".")[2] for key in mixer.replaced]
                assert kinds == ["weight", "bias"] * 2
        else:
            with pytest.raises(ValueError, match=f"need a mixer.s name: .* such as {host}_afbo"):
                create_backbone(host, mixer={"hidden_ratio": 3.5})


def test_ffns_of_hosts_are_plain_or_rebuilt():
    found = {}
    for host in list_hosts():
        entry = find_host(host)
        if entry.modality != "text":  # GPT-1 and BERT share a file
            found.setdefault(entry.build.__module__, set()).add(entry.plain_ffn)
    assert {len(values) for values in found.values()} == {1}
    same = meta_backbone("deit_t", mixer={"hidden_ratio": None, "drop": 0.0})
    narrow = meta_backbone("deit_t", mixer={"hidden_ratio": 3})
    assert count_parameters(same) == count_parameters(create_backbone("deit_t"))
    assert not isinstance(same.blocks[0].mlp, FFN)
    assert narrow.blocks[0].mlp.fc1.out_features == 576
    assert count_parameters(same) - count_parameters(narrow) == 12 * (2 * 192 * 192 + 192)


def test_schema_lists_every_option_with_its_default():
    schema = backbone_schema("swin_t_afbo")
    keywords = inspect.signature(create_backbone).parameters
    assert set(schema) == {name for name, p in keywords.items() if p.kind is not p.VAR_KEYWORD}
    assert schema["name"] == "swin_t_afbo"
    assert schema["mixer"] == {
        "hidden_ratio": None, "cm_a": "occm", "cm_b": "gccm", "g1": 2, "g2": 3, "window": None,
        "rounds": 2, "pairing": "anti", "sm": "dw", "kernel_size": 3, "order": "cs", "act": "silu",
        "act_on": "a", "init": "ours", "bias": True, "drop": 0.0,
    }  # fmt: skip
    for name in list_backbones():
        assert backbone_schema(name)["drop_path_rate"] == 0.0
    for name in ("deit_t_afbo", "swin_t", "poolformer_s12_glu"):
        again, plain = meta_backbone(**backbone_schema(name)), meta_backbone(name)
        assert again.name == plain.name == name
        assert count_parameters(again) == count_parameters(plain)


def test_variants_inherit_what_their_mixer_sets_for_single_hosts(registering):
    def comet(dim, *, hidden_ratio=4.0, size=3, depth=1):
        mixer = create_mixer("ffn", dim, hidden_ratio=hidden_ratio)
        mixer.typed = (size, depth)
        return mixer

    register(
        "comet",
        hidden_scale=0.5,
        options_on={"swin_*": {"size": 5, "depth": 2}, "swin_t": {"size": 6}},
        host_overrides={"deit_*": {"class_token": False}},
        unfit_for={"pvt_*": "this test says so"},
    )(comet)

    @register("comet_sum")
    @variant_of(comet, fixed={"depth": 1})
    def comet_sum():
        """Fix an option."""

    own = {"swin_s": {"depth": 4}}

    @register("comet_deep", options_on=own, unfit_for={})
    @variant_of(comet, defaults={"depth": 3})
    def comet_deep():
        """Change a default."""

    @register("comet_last", hidden_scale=1.0)
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
    half, whole = (meta_backbone(f"swin_t_{name}") for name in ("comet_sum", "comet_last"))
    assert half.layers[0].blocks[0].mlp.typed == (5, 1)
    assert half.layers[0].blocks[0].mlp.fc1.out_features == 2 * 96
    assert whole.layers[0].blocks[0].mlp.fc1.out_features == 4 * 96


# (name, rule of counting) -> (parameters, MACs) of plain networks for 224 pixels.
ROWS = {(name, "macs"): (params, round(1e9 * macs)) for name, (params, macs) in all_rows().items()}
ROWS |= {
    (row.backbone, row.rule): (row.params, row.exact_macs)
    for paper in list_papers()
    for row in load_rows(paper, "classification")
    if not row.options and row.image_size == 224
}
QUICK_ROWS = [*SMALLEST, *SWAPPED, *(f"{host}_iffn" for host in SMALLEST), "gmlp_s_ggqpe"]


@pytest.mark.parametrize(
    ("name", "rule"), rest_slow_pairs(list(ROWS), [row for row in ROWS if row[0] in QUICK_ROWS])
)
def test_parameters_and_macs_are_exact(name, rule):
    model = meta_classifier(name)
    assert (count_parameters(model), count_macs(model, rule=rule)) == ROWS[name, rule]


OPTION_ROWS = [
    row
    for paper in list_papers()
    for row in load_rows(paper, "classification")
    if row.options or row.image_size != 224
]
QUICK_OPTIONS = [r for r in OPTION_ROWS if r.paper == "afbo" and r.backbone.startswith("deit_t")][
    ::2
]


@pytest.mark.parametrize("row", rest_slow(OPTION_ROWS, QUICK_OPTIONS), ids=str)
def test_published_rows_with_options_or_another_size_are_exact(row):
    model = meta_classifier(row.backbone, **row.options)
    assert count_parameters(model) == row.params
    assert count_macs(model, row.image_size, rule=row.rule) == row.exact_macs


@pytest.mark.slow
@pytest.mark.parametrize("paper", [paper for paper in list_papers() if paper != "ffnet"])
def test_detectors_and_segmentors_have_the_parameters_of_their_rows(paper):
    pytest.importorskip("mmdet")
    pytest.importorskip("mmseg")
    from heads.toolkits.detectors import build_detector
    from heads.toolkits.segmentors import build_segmentor

    builders = {"detection": (build_detector, 80), "segmentation": (build_segmentor, 150)}
    for row in load_rows(paper):
        if row.head:
            build, classes = builders[row.task]
            backbone = create_backbone(row.backbone, dense=True, **row.options)
            assert count_parameters(build(backbone, classes, name=row.head)) == row.params, row


# Hosts of tokens and of maps, with and without windows, positions, batch norms and forms.
QUICK = ("deit_t", "ffnet_1", "poolformer_s12", "swin_t")


@pytest.mark.parametrize(
    ("name", "options"),
    rest_slow_pairs(
        [*((name, {}) for name in SWAPPED), ("ffnet_1", {"fused": True})],
        [(f"{host}_afbo", {}) for host in QUICK],
    ),
    ids=str,
)
@torch.no_grad()
def test_deepcopy_pickle_and_state_dict_keep_a_backbone(name, options):
    backbone, other = (build_short(name, dense=True, **options).eval() for _ in range(2))
    images = torch.randn(1, 3, 64, 64)
    expected = backbone(images)
    for parameter in other.parameters():
        parameter.zero_()
    other.load_state_dict(backbone.state_dict())
    for again in (copy.deepcopy(backbone), pickle.loads(pickle.dumps(backbone)), other):
        assert again.feature_info == backbone.feature_info
        # Another size than the first shows state that belongs to the original.
        again(torch.randn(1, 3, 96, 80))
        torch.testing.assert_close(again(images), expected, rtol=0, atol=0)
