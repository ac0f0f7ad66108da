"""Options: what mixers and hosts reject, variants of builders, and messages that stay short."""

import inspect
import textwrap
from typing import Literal

import pytest
import torch

from backbones import create_backbone, create_mixer, list_mixers, mixer_options
from backbones.mixers.scheme import Scheme
from backbones.options import check_arguments, keywords, listed, shortened, unknown, variant_of
from tests.errors import refuses
from tools.config import help as topics
from tools.config.config_checks import resolve_config
from tools.config.lazy_groups import register_groups
from tools.config.name_checks import compose_checked
from tools.config.run_config import job_config
from tools.runs.components import check_config

MIXERS = [
    ("afob", {}, "no mixer called 'afob'; did you mean .*afbo"),
    ("iffn", {"n_branches": 5}, r"n_branches must divide 96: one of \[1, 2, .*, got 5"),
    ("iffn", {"dw_residual": "inside"}, "dw_residual=inside is not true or false or one of"),
    ("affn", {"kernel_size": 3}, "no option of mixer affn called 'kernel_size'"),
    ("afbo", {"g1": 3, "hidden_ratio": 8 / 3}, r"g1 must divide 24 and 64: one of \[1, 2, 4, 8\]"),
    ("afbo", {"g1": 8, "hidden_ratio": 1}, r"g1 \* rounds must divide 24: .*, got 16"),
    ("afbo", {"g2": 4, "window": 5}, "window must be from 1 to 4, got 5"),
    ("afbo", {"rounds": 3, "pairing": "cyclic"}, "rounds must be from 1 to 2, got 3"),
    ("afbo", {"sm": "conv"},
     r"sm=conv needs order=sc: .* 82,944 weights; .* one of dw, max, avg, sa"),
    ("sbm", {"use_bilinear": False, "use_linear": False}, "both false; SBM needs one branch"),
    ("sbm", {"x_width": 3}, r"x_width=3 is not one of 1, 2"),
    ("ggqpe", {"groups": 5}, "groups must divide 48: .*, got 5"),
    ("ggqpe", {"window": []}, "window must be a whole number or one per stage, got none"),
    ("ggqpe", {"hidden_ratio": 1.125}, "width that is split must be a multiple of 2, got 27"),
    ("scheme_12", {"g2": 7}, r"g2 must divide 192 and 24: .* 12, 24\], got 7"),
    ("sparse_moe", {"capacity": 0.0}, r"capacity must be above 0, got 0\.0"),
    ("agent", {"agents": 48}, "agents must be a square number such as 49, got 48"),
    ("gnconv", {"order": 5}, "dim with order=5 must be a multiple of 16, got 24"),
    ("bi_level", {"regions": 2, "topk": 5}, "topk must be from 1 to 4, got 5"),
    *[("random", {"grid": grid}, "random.grid=.* is not a list of whole") for grid in (None, 4)],
    *[("random", {"grid": g}, "two sides of grid must be at least 1") for g in ((0, 0), (4,))],
]  # fmt: skip
HOSTS = [
    ("deit_b_scheme_44", {}, "no deit_b_scheme_44: .*class token.*; it serves .*pvt_v2_b1"),
    ("swin_t_afob", {}, "no backbone called 'swin_t_afob'; did you mean .*swin_t_afbo"),
    ("swint_afbo", {}, "no backbone called 'swint_afbo'; did you mean .*swin_t_afbo"),
    ("zzz", {}, "'zzz'; known: .*deit_t, .*gcvit_t.* more; .*HOST_MIXER with .*afbo, .*list_"),
    ("resnet18_sbm", {}, "sbm is a token mixer; the only token mixer of resnet18 is"),
    ("posmlp_t_sgu_sbm", {}, "sbm is a token mixer; the only token mixer of posmlp_t_sgu is"),
    ("swin_t_afbo", {"mixer": {"g3": 6}}, r"no option of mixer afbo called 'g3'; did you mean g\d"),
    ("swin_t", {"drop_path": 0.1}, "no option of swin_t called 'drop_path'"),
    ("deit_t", {"mixer": {"hidden": 3}}, "mixer ffn called 'hidden'; did you mean hidden_ratio"),
    # The host fills in grid and slot.
    ("swin_t", {"token_mixer": {"name": "ggqpe", "grid": 1}}, "mixer ggqpe called 'grid'"),
    ("swin_t", {"token_mixer": {"name": "ggqpe", "slot": 1}}, "mixer ggqpe called 'slot'"),
    ("deit_t", {"token_mixer": "pool"}, "no token mixer called 'pool'"),
    ("deit_t", {"token_mixer": {"kernel_size": 3}}, "token_mixer needs a name"),
    ("sbm_t", {"preset": "fti"}, "preset=fti is not one of fit, alt, eq2"),
    ("sbm_t", {"rnk": 3}, "no option of sbm_t called 'rnk'; did you mean rank"),
    ("deit_t", {"img_size": 32}, "at least 64 .* deit_t takes 32 and more with patch_size=4"),
    ("swin_t", {"img_size": 32}, "at least 64 .* swin_t takes 32 and more with patch_size=2"),
    ("swin_t", {"img_size": 31, "patch_size": 1}, "at least 32 in both directions"),
    ("swin_t", {"patch_size": 3}, "patch_size of swin_t must be 4 or, .*, 2, 1; got 3"),
    ("deit_t", {"patch_size": 1}, "patch_size of deit_t must be 16 or, .*, 8, 4, 2; got 1"),
    ("swin_t", {"patch_size": 2, "dense": True}, "detectors and segmentors read maps at"),
    ("swin_t", {"patch_size": 2, "pretrained": True}, "weights of swin_t are for patch_size=4"),
    ("swin_t", {"drop_path_rate": 1.0}, r"drop_path_rate must be in \[0, 1\), got 1.0"),
    ("swin_t", {"img_size": (224, 32)}, r"img_size must be at least 64 .* got \(224, 32\)"),
    ("swin_t", {"img_size": (224, 224, 3)}, r"img_size must be a side or \(height, width\), got"),
    ("swin_t", {"img_size": "224"}, "img_size=224 is not a whole number"),
    ("swin_t", {"drop_path_rate": float("nan")}, "drop_path_rate=nan is not a number"),
    ("swin_t", {"mixer": "afob"}, "no channel mixer called 'afob'; did you mean .*afbo"),
    ("swin_t", {"mixer": 7}, "mixer=7 is not a group of options"),
    ("swin_t", {"mixer": {"hidden_ratio": float("nan")}},
     "^backbone.mixer.hidden_ratio=nan is not a num"),
    ("swin_t", {"token_mixer": {"name": "pooling", "kernel_size": "3"}},
     "^backbone.token_mixer.kernel_size=3 is not a whole number"),
    ("swin_t", {"pretrained": 3}, "pretrained=3 is not true or false or a text"),
    ("swin_t", {"dense": "yes"}, "dense=yes is not true or false"),
    ("visionllama_s", {"key_places": "grid"}, "key_places=grid is not one of released, regular"),
    ("resnet18", {"frozen_stages": 5}, "frozen_stages=5 must be from -1 to 4"),
    ("posmlp_t", {"mixer": {"hidden_ratio": 2}}, "posmlp_t lacks a slot for channel mixers"),
    ("posmlp_t_lrpe", {"token_mixer": "sgu"}, "posmlp_t_lrpe already has lrpe as token mixer"),
    ("deit_t", {"token_mixer": "ggqpe", "class_token": True},
     "gives deit_t class tokens, but ggqpe refuses them"),
    ("poolformer_s12", {"token_mixer": {"name": "ggqpe", "groups": 7}},
     "groups must divide 128: .*, got 7"),
    ("deit_t_afbo", {"mixer": {"g1": 7}}, r"^g1 must divide 192 and 768: .* got 7$"),
    ("deit_t", {"distilled": True, "class_token": False}, "distilled=True needs class_token=True"),
    ("deit_t", {"fc_norm": True}, "needs class_token=False"),
    ("gmlp_ti_ggqpe", {"gate_eps": 1e-6}, "gate_eps=1e-06 belongs to gMLP's own unit"),
    ("deit_t", {"in_chans": 13}, "in_chans must be from 1 to 12"),
    ("deit_t", {"fast": "often"}, r"backbone\.fast=often"),
    ("deit_t", {"lora": {"rank": 0}}, r"backbone\.lora\.rank must be at least 1, got 0"),
    ("deit_t", {"lora": {"alpha": 0.0}}, r"backbone\.lora\.alpha must be above 0, got 0"),
    ("deit_t", {"lora": {"dropout": 1.0}}, r"backbone\.lora\.dropout must be from 0 to below 1"),
    ("deit_t", {"lora": {"targets": []}}, r"backbone\.lora\.targets is empty; pass linear"),
    ("deit_t", {"token_mixer": {"name": ["sbm"]}}, "mixer's name=.'sbm'. is not a text"),
    ("patchtst", {"heads": 0}, "patchtst refuses backbone.heads=0: integer modulo by zero"),
    *[("timm", {"options": {option: value}}, f"timm refuses vit_tiny.* {option}={value}.*: .+")
      for option, value in {"norm_layer": 3, "act_layer": "x", "patch_size": 0,
                            "features_only": True, "checkpoint_path": "x"}.items()],
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "message"), MIXERS, ids=str)
def test_mixers_name_the_valid_options(name, options, message):
    refuses(message, create_mixer, name, 24, **options)


ODD_KERNELS = {
    "afbo", "afbo_cs", "afbo_s", "afbo_sc", "convnext", "convnext_v2", "ffnified", "full", "iffn",
    "iffn_bn", "iffn_spatial", "pooling", "sbm", "scfbo_gc", "scfbo_oc",
}  # fmt: skip


@pytest.mark.parametrize("name", list_mixers())
def test_text_options_and_kernels_of_mixers_name_their_values(name):
    for option, default in mixer_options(name).items():
        if isinstance(default, str):
            message = f"{option}( must be one of|=qqq is not (true or false or )?one of) "
            assert default in refuses(message, create_mixer, name, 24, **{option: "qqq"})
        if option == "kernel_size" and name in ODD_KERNELS:
            for size in (0, 2, 4, 6):
                message = rf"kernel_size must be odd \(1, 3, 5, 7, \.\.\.\), got {size}"
                refuses(message, create_mixer, name, 24, kernel_size=size)


@pytest.mark.parametrize("dim", [0, -8, 19.5, "192"])
def test_a_width_is_a_whole_number(dim):
    refuses(f"dim={dim}", create_mixer, "afbo", dim)


@pytest.mark.parametrize(("name", "options", "message"), HOSTS, ids=str)
def test_hosts_name_the_valid_options(name, options, message):
    with torch.device("meta"):  # some are refused only after building
        refuses(message, create_backbone, name, **options)


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


def test_variants_have_their_own_defaults_names_and_docstrings():
    assert blue(3) == (3, "blue", "light", 2)
    assert blue(size=3, coats=4) == (3, "blue", "light", 4)
    assert keywords(blue) == {"coats": 2}
    assert (blue.__name__, blue.__module__) == ("blue", __name__)
    assert inspect.getdoc(blue) == ("Blue paint.\n\nArgs:\n    size: Of it.\n    coats: How many.")
    without_coats = variant_of(paint, without=("coats",))(blue)
    assert "    colour: Any,\n        by name.\n    shade:" in inspect.getdoc(without_coats)
    whole = mixer_options("afbo")
    for name, fixed in {
        "scfbo_gc": {"cm_a", "cm_b", "g2", "window"},
        "afbo_c": {"cm_a", "cm_b", "sm", "kernel_size", "order"},
        "afbo_sc": {"cm_a", "cm_b", "order"},
        "afbo_cs": set(),
        "scfbo_oc": {"cm_a", "cm_b", "g1", "rounds", "pairing"},
    }.items():
        assert mixer_options(name) == {k: v for k, v in whole.items() if k not in fixed}
    assert mixer_options("full").keys() == mixer_options("afbo_s").keys()
    with pytest.raises(ValueError, match="there is no option of mixer afbo_c called 'order'"):
        create_mixer("afbo_c", 8, order="sc")


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
    assert keywords(wide) == {
        "hidden_ratio": 8.0,
        "g2": 3,
        "cca": "train",
        "act": "gelu",
        "drop": 0.0,
    }
    assert isinstance(wide(12), Scheme)
    refuses(r"group\.g2=x is not a whole number", check_arguments, wide, {"g2": "x"}, "group")


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
    words = ["task=classification", word]
    return lambda: check_config(resolve_config(job_config(words, compose_checked(words))))


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
