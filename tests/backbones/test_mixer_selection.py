"""One mixer per stage and per block, activations by name, and mixers of other packages."""

import re
import sys

import pytest
import torch
from torch import nn

from backbones import create_backbone, create_mixer, list_mixers, mixer_options
from backbones.analysis.counting import count_macs, count_parameters
from backbones.analysis.matching import solve_match
from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import in_memory
from backbones.mixers.ffn import FFN
from backbones.options import mixer_label
from backbones.registry import temporary_registrations
from tests.errors import refuses
from tests.families import meta_backbone, rest_slow_pairs
from tests.tensors import images


def kinds(mixers):
    return [type(mixer).__name__ for mixer in mixers.values()]


def test_the_hybrids_of_ffnet():
    backbone = meta_backbone("ffnet_1", token_mixer=[*["ffnified"] * 3, "attention"])
    own = meta_backbone("ffnet_1")
    depths = backbone.layer_ids.depths
    names = list(backbone.token_mixers())
    changed = [name for name in names if name.startswith("stages.3.")]
    assert len(changed) == depths[3]
    whole = meta_backbone("ffnet_1", token_mixer="attention")
    for name, mixer in backbone.token_mixers().items():
        like = whole if name in changed else meta_backbone("ffnet_1", token_mixer="ffnified")
        assert count_parameters(mixer) == count_parameters(like.token_mixers()[name])
    assert count_parameters(own) != count_parameters(backbone)


def test_one_mixer_per_stage_with_options_and_the_hosts_own():
    mixer = ["afbo", None, {"name": "glu", "hidden_ratio": 2}, {"hidden_ratio": 2}]
    token_mixer = ["sbm", "pooling", {"name": "identity"}, None]
    backbone = create_backbone("swin_t", img_size=64, mixer=mixer, token_mixer=token_mixer)
    own = create_backbone("swin_t", img_size=64)
    channel, token = kinds(backbone.channel_mixers()), kinds(backbone.token_mixers())
    assert channel[2:4] == kinds(own.channel_mixers())[2:4]
    assert channel[4] == "GLU"
    assert isinstance(list(backbone.channel_mixers().values())[-1], FFN)
    assert token[10:] == kinds(own.token_mixers())[10:]
    assert token[4:10] == ["IdentityMixing"] * 6
    backbone(images(64, 64).float())[-1].sum().backward()
    entries = backbone.record["mixer"]
    assert [one and one["name"] for one in entries] == ["afbo", "ffn", "glu", "ffn"]
    assert entries[2]["hidden_ratio"] == 2
    assert mixer_label(token_mixer) == "sbm-pooling-identity-own"


def test_one_mixer_per_block():
    blocks = ["sbm"] * 6 + ["attention"] * 5 + [None]
    backbone = meta_backbone("deit_t", token_mixer=blocks)
    assert not backbone.num_prefix_tokens  # sbm takes no class token
    found = kinds(backbone.token_mixers())
    assert found[:6] == ["FastStarBilinearMapping"] * 6
    assert found[6] != found[11]
    channel = meta_backbone("swin_t", mixer=["afbo"] * 12)
    assert count_parameters(channel) == count_parameters(meta_backbone("swin_t_afbo"))
    assert mixer_label(blocks) == "6xsbm-5xattention-own"
    pooled = meta_backbone("deit_t", mixer=["iffn"] * 2 + ["ffn"] * 10)
    assert not pooled.num_prefix_tokens


@pytest.mark.parametrize("host", ["gcvit_xxt", "edgevit_xxs", "lvt_r1", "pvt_v2_b1", "ffnet_1"])
def test_stages_of_hosts_that_fill_their_slots_otherwise(host):
    mixers = {
        "token_mixer": ["pooling", None, None, "pooling"],
        "mixer": ["glu", None, None, "glu"],
    }
    backbone = create_backbone(host, img_size=64, **mixers)
    x = images(64, 64, batch=2).float()
    sum(one.sum() for one in (backbone.embed(x), *backbone(x))).backward()
    unused = [name for name, p in backbone.named_parameters() if p.grad is None]
    assert unused == [] or set(unused) <= {
        name for name, p in _with_gradients(host, x) if p.grad is None
    }
    again = create_backbone(host, img_size=64, **mixers)
    adopt(again, in_memory(backbone.state_dict(), "file"))
    with torch.no_grad():
        torch.testing.assert_close(again.eval().embed(x), backbone.eval().embed(x))


def test_stages_of_a_timm_model():
    typed = {"token_mixer": ["pooling", None, "attention", None], "mixer": [None, "glu"] * 4}
    backbone = meta_backbone("timm", model="pvt_v2_b0", img_size=64, **typed)
    token, channel = kinds(backbone.token_mixers()), kinds(backbone.channel_mixers())
    expected = ["Pooling", "Attention", "SelfAttention", "Attention"]  # timm's where none is typed
    assert token == [name for name in expected for _ in range(2)]
    assert channel[1::2] == ["GLU"] * 4
    assert "GLU" not in channel[::2]
    refuses("has 3 entries, but pvt_v2_b0 has 4 stages of 2, 2, 2, 2 blocks", meta_backbone,
            "timm", model="pvt_v2_b0", img_size=64, mixer=["glu"] * 3)  # fmt: skip


def _with_gradients(host, x):
    backbone = create_backbone(host, img_size=64)
    sum(one.sum() for one in (backbone.embed(x), *backbone(x))).backward()
    return backbone.named_parameters()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("swin_t", {"token_mixer": ["sbm"] * 3}, "3 entries, but swin_t has 4 stages of 2, 2, 6,"
         " 2 blocks; give 4 entries, one per stage, or 12, one per block"),
        ("deit_t", {"mixer": ["glu"] * 4}, "has 4 entries, but deit_t has 12 blocks; give 12, one"),
        ("ffnet_3d_tiny", {"mixer": ["glu"] * 9}, "has 9 entries, but ffnet_3d_tiny has . stages"),
        ("lvt_r1", {"mixer": ["glu"] * 9}, "lvt_r1 has 4 stages of 2, 2, 2, 2 blocks; give 4"),
        ("swin_t", {"token_mixer": []}, "token_mixer is an empty list"),
        ("swin_t", {"mixer": ["afbo", "gluu", None, None]}, "gluu.*did you mean glu"),
        ("swin_t", {"mixer": ["sbm", None, None, None]}, "no channel mixer called 'sbm'"),
        ("swin_t", {"token_mixer": [3, None, None, None]}, "takes names, options .*; got 3"),
        ("swin_t_afbo", {"mixer": ["glu"] * 4}, "swin_t_afbo already has afbo as channel mixer"),
        ("swin_t_afbo", {"mixer": "glu"}, "swin_t_afbo already has afbo; type"),
        ("swin_t", {"mixer": [{"name": "afbo", "g9": 1}] * 4}, "no option g9|option .*g9"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_wrong_lists_are_refused(name, options, message):
    refuses(message, meta_backbone, name, **options)


WITH_ACT = [name for name in list_mixers() if "act" in mixer_options(name)]


@pytest.mark.parametrize("name", WITH_ACT)
def test_activations_of_timm_by_name(name):
    x = torch.randn(2, 4, 4, 8)
    outputs = []
    for act in ("mish", "hard_swish", "star_relu", "relu2", "prelu"):
        torch.manual_seed(0)
        mixer = create_mixer(name, 8, act=act).eval()
        outputs.append(mixer(x))
        extra = {n for n, _ in mixer.named_parameters()} - {
            n for n, _ in create_mixer(name, 8).named_parameters()
        }
        assert bool(extra) == (act in ("star_relu", "prelu"))
    assert all(not torch.equal(one, outputs[0]) for one in outputs[1:])


@pytest.mark.parametrize(
    ("name", "match"),
    rest_slow_pairs(
        [("deit_t_glu", "params"), ("swin_t_glu", "macs"), ("swin_t_scheme_12", "params"),
         ("poolformer_s12_low_rank", "macs"), ("deit_t_iffn", "params"), ("deit_t_kan", "params")],
        [("deit_t_glu", "params"), ("poolformer_s12_low_rank", "macs")],
    ),
)  # fmt: skip
def test_a_mixer_matches_the_plain_host(name, match):
    options = solve_match(name, mixer={"match": match}, img_size=64)
    assert set(options["mixer"]) == {"expansion" if name == "deit_t_kan" else "hidden_ratio"}
    host = name.partition("_t_")[0] + "_t" if "_t_" in name else "poolformer_s12"
    sizes = []
    for one, given in ((name, options), (host, {"img_size": 64})):
        backbone = meta_backbone(one, **given)
        if match == "params":
            sizes.append(count_parameters(backbone))
        else:
            sizes.append(count_macs(Embedded(backbone), 64))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


class Embedded(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, x):
        return self.backbone.embed(x)


def test_a_list_matches_by_one_factor():
    glu, lean = {"name": "glu", "match": "params"}, {"name": "low_rank", "match": "params"}
    kept = [{"name": "star", "hidden_ratio": 2, "match": "params"},
            {"name": "cheby_kan", "match": "params"}]  # fmt: skip
    lines = []
    given = {"mixer": [glu, lean, None, *kept, *["afbo"] * 7], "img_size": 64}
    options = solve_match("deit_t", report=lines.append, **given)
    first, second, third, *rest = options["mixer"]
    assert (first["name"], second["name"]) == ("glu", "low_rank")
    assert first["hidden_ratio"] / second["hidden_ratio"] == pytest.approx(2 / 3, abs=1e-3)
    assert third is None
    assert rest == [{"name": "star", "hidden_ratio": 2}, {"name": "cheby_kan"}, *["afbo"] * 7]
    sizes = [
        count_parameters(meta_backbone("deit_t", **one)) for one in (options, {"img_size": 64})
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    assert f"of glu, hidden_ratio={second['hidden_ratio']:g} of low_rank gives {sizes[0]:,}" in str(
        lines
    )
    assert "match" in given["mixer"][0]


SLOWLY = ["itransformer", "u_dit_tiny", "ffnet_3d_tiny", "swinir_light"]


@pytest.mark.parametrize(
    "name",
    ["bert_tiny", "patchtst", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOWLY)],
)
def test_multiply_adds_of_every_modality_match(name):
    lines = []
    solve_match(f"{name}_glu", report=lines.append, mixer={"match": "macs"})
    found, target = re.search(r"gives ([\d,]+) multiply-adds; .* has ([\d,]+)$", lines[0]).groups()
    found, target = (int(number.replace(",", "")) for number in (found, target))
    assert found == pytest.approx(target, rel=0.01)
    assert target > 1e7


def test_matches_that_cannot_be_solved():
    glu = {"name": "glu", "match": "params"}
    refuses("match=params and match=macs; give one", solve_match, "deit_t",
            mixer=[glu, {"name": "glu", "match": "macs"}])  # fmt: skip
    refuses("cheby_kan has no option for its width", solve_match, "deit_t",
            mixer=[{"name": "cheby_kan", "match": "params"}, None])  # fmt: skip
    refuses("no hidden_ratio of glu gives deit_t's .* to 1 %; the nearest is .* of glu",
            solve_match, "deit_t", mixer=[glu, *["cheby_kan"] * 11], img_size=64)  # fmt: skip
    refuses("pvt_v2_b1 keeps a module of its own", solve_match, "pvt_v2_b1",
            mixer=[{"match": "params"}, None, None, None])  # fmt: skip
    refuses("hidden_ratio, which is 3 already", solve_match, "deit_t_glu",
            mixer={"match": "params", "hidden_ratio": 3})  # fmt: skip
    refuses("cheby_kan has no option for its width", solve_match, "deit_t_cheby_kan",
            mixer={"match": "params"})  # fmt: skip
    refuses("one of mixer and token_mixer", solve_match, "deit_t_glu",
            mixer={"match": "params"}, token_mixer={"name": "sbm", "match": "params"})  # fmt: skip
    refuses("needs a channel mixer's name", solve_match, "posmlp_t_lrpe",
            mixer={"match": "params"})  # fmt: skip
    refuses("match=size is not one of params, macs", solve_match, "deit_t_glu",
            mixer={"match": "size"})  # fmt: skip
    refuses("solved before a network is built", create_backbone, "deit_t_glu",
            mixer={"match": "params"})  # fmt: skip
    assert solve_match("deit_t", img_size=64) == {"img_size": 64}


@pytest.mark.parametrize("name", ["identity", "random"])
def test_controls_of_both_kinds_share_a_name(name):
    mixer = [name, *[None] * 11]
    backbone = create_backbone("deit_t", img_size=64, mixer=mixer, token_mixer=name)
    assert backbone.record["mixer"][0]["name"] == f"{name}_ffn"
    assert backbone.record["token_mixer"]["name"] == name
    assert not list(next(iter(backbone.channel_mixers().values())).parameters())
    whole = meta_backbone("deit_t", mixer=name)
    assert whole.name == f"deit_t_{name}_ffn"
    refuses("there is no channel mixer called 'sbm'", meta_backbone, "deit_t", mixer="sbm")


MODULE = '''
from torch import nn
from backbones import PointwiseMixer, register_mixer


@register_mixer("shift_of_another_package", kind="channel", source="a test")
class Shift(PointwiseMixer):
    """Add a vector."""

    def __init__(self, dim, *, size: float = 1.0):
        super().__init__()
        self.layer = nn.Linear(dim, dim)

    def mix(self, x):
        return x + self.layer(x)
'''


def install(folder, monkeypatch, text):
    (folder / "lab_mixers.py").write_text(text)
    info = folder / "lab_mixers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-mixers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mixerlab.mixers]\nshift = lab_mixers\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("backbones.registry._COMPLETE", set())
    monkeypatch.delitem(sys.modules, "lab_mixers", raising=False)


def test_a_package_outside_the_repository_registers_a_mixer(tmp_path, monkeypatch):
    from tools.cli.catalogue import fingerprint, read_registry

    before = fingerprint()
    with temporary_registrations():
        install(tmp_path, monkeypatch, MODULE)
        assert "shift_of_another_package" in list_mixers("channel")
        backbone = create_backbone("swin_t_shift_of_another_package", img_size=64)
        assert kinds(backbone.channel_mixers()) == ["Shift"] * 12
        after = fingerprint()
        assert ["shift", "lab_mixers", "1.0"] in after
        assert ["shift", "lab_mixers", "1.0"] not in before
        assert read_registry().mixers["shift_of_another_package"]["options"] == {"size": 1.0}


TAKEN = MODULE.replace("shift_of_another_package", "afbo")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines;"),
        (TAKEN, "'afbo' is taken by backbones.mixers.afbo.variants.afbo; give lab_mixers"),
    ],
    ids=["raises", "exits", "lines", "taken"],
)
def test_a_broken_package_is_named(tmp_path, monkeypatch, text, error):
    with temporary_registrations():
        install(tmp_path, monkeypatch, text)
        with pytest.raises(ImportError, match=rf"^the mixers .* lab-mixers .*shift = .*{error}"):
            list_mixers()


@pytest.mark.parametrize(
    "text",
    ["shift = my package:::x", "shift = lab_mixers:", "shift = lab-mixers", "shift = .lab_mixers",
     "shift", "= \n[[[", "shift = \udcff"],
)  # fmt: skip
def test_malformed_entry_points_are_named(tmp_path, monkeypatch, text):
    with temporary_registrations():
        install(tmp_path, monkeypatch, MODULE)
        file = tmp_path / "lab_mixers-1.0.dist-info" / "entry_points.txt"
        file.write_text(f"[mixerlab.mixers]\n{text}\n", errors="surrogateescape")
        with pytest.raises(ImportError, match=r"^the mixers of the installed package lab-mixers"):
            list_mixers()
