"""Lists of mixers and equal sizes as users type them: run.py, complexity.py, export.py."""

import pytest
import yaml

from backbones.analysis.counting import count_parameters
from tests.errors import refuses
from tests.families import meta_backbone
from tests.runs import completed, composed
from tools.cli.network_names import config_network_name
from tools.cli.typed_network import read_network
from tools.config.overrides import read_command

HYBRID = "backbone.token_mixer=[ffnified,ffnified,ffnified,attention]"


def backbone_of(*typed):
    return composed(*read_command(["data.batch_size=2", *typed]).words).backbone


def test_run_py_takes_lists():
    hybrid = backbone_of("backbone=ffnet_1", HYBRID)
    assert hybrid["token_mixer"] == ["ffnified", "ffnified", "ffnified", "attention"]
    assert config_network_name(hybrid) == "ffnet_1+3xffnified-attention"
    typed = "backbone.mixer=[afbo,null,{name: glu, hidden_ratio: 2},afbo]"
    mixed = backbone_of("backbone=swin_t", typed)
    assert mixed["mixer"] == ["afbo", None, {"name": "glu", "hidden_ratio": 2}, "afbo"]
    assert config_network_name(mixed) == "swin_t+afbo-own-glu-afbo"
    named = backbone_of("backbone=swin_t", "backbone.mixer={name: afbo, g2: 6}")
    assert named["name"] == "swin_t_afbo"
    assert named["mixer"]["g2"] == 6
    assert config_network_name(named) == "swin_t_afbo"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["backbone=deit_t"], True),
        (["backbone=deit_t", f"backbone.token_mixer=[{','.join(['sbm'] * 12)}]"], False),
        (["backbone=deit_t", f"backbone.token_mixer=[{','.join(['attention'] * 12)}]"], True),
        (["backbone=deit_t", f"backbone.mixer=[iffn,{','.join(['ffn'] * 11)}]"], False),
    ],
    ids=["plain", "sbm", "attention", "iffn"],
)
def test_lists_decide_about_class_tokens(typed, expected):
    assert backbone_of(*typed)["class_token"] is expected


def test_match_is_solved_and_printed(capsys):
    name, options = read_network("deit_t_glu", ["backbone.mixer.match=params"])
    printed = capsys.readouterr().err
    assert options == {"mixer": {"hidden_ratio": pytest.approx(8 / 3, abs=0.01)}}
    value = options["mixer"]["hidden_ratio"]
    assert f"deit_t_glu: backbone.mixer.hidden_ratio={value} gives 5," in printed
    assert "parameters; deit_t has 5," in printed
    refuses("match=size is not one of params, macs", read_network, name,
            ["backbone.mixer.match=size"])  # fmt: skip


LISTED = "backbone.mixer=[glu,null,{name: low_rank, act: mish},glu]"


def test_match_beside_a_list_marks_its_entries(capsys):
    marked = {"name": "glu", "match": "params"}
    typed = [LISTED, "backbone.mixer.match=params"]
    expected = {"name": "low_rank", "act": "mish", "match": "params"}
    for words in (typed, typed[::-1]):
        mixed = backbone_of("backbone=swin_t", *words)["mixer"]
        assert mixed == [marked, None, expected, marked]
    solved = read_network("swin_t", typed)[1]["mixer"]
    assert [one and set(one) - {"name"} for one in solved] == [
        {"hidden_ratio"}, None, {"hidden_ratio", "act"}, {"hidden_ratio"},
    ]  # fmt: skip
    assert "of glu, hidden_ratio=" in capsys.readouterr().err
    token = backbone_of(
        "backbone=swin_t", "backbone.token_mixer=[sbm,null,sbm,sbm]",
        "backbone.token_mixer.match=params",
    )["token_mixer"]  # fmt: skip
    assert token[:2] == [{"name": "sbm", "match": "params"}, None]


def test_options_beside_a_list_are_refused():
    for read in (backbone_of, lambda name, *typed: read_network("swin_t", typed)):
        refuses(r"mixer is a list, so .*act has no mixer .* as in \{name: glu, act: mish\}", read,
                "backbone=swin_t", LISTED, "backbone.mixer.act=mish")  # fmt: skip


@pytest.mark.slow
def test_a_run_keeps_its_lists_and_solved_widths(tmp_path, capsys, sample_cache):
    short = ["trainer=cpu", "trainer.max_epochs=1", "trainer.limit_train_batches=2", "logger=csv",
             "trainer.limit_val_batches=1", "data.batch_size=4",
             f"output_dir={tmp_path}"]  # fmt: skip
    typed = ["backbone=swin_t_glu", "backbone.mixer.match=params", "backbone.patch_size=2",
             "backbone.token_mixer=[pooling,identity,identity,null]"]  # fmt: skip
    folder = completed([*typed, *short], capsys).folder()
    saved = yaml.safe_load((folder / "config.yaml").read_text())["backbone"]
    assert "match" not in saved["mixer"]
    plain = meta_backbone("swin_t", patch_size=2, img_size=saved["img_size"])
    size = count_parameters(meta_backbone(**saved))
    assert size == pytest.approx(count_parameters(plain), rel=0.01)
    assert "swin_t_glu+pooling-2xidentity-own" in str(folder)
    tested = completed(["mode=test", f"ckpt={folder}", "trainer=cpu", f"output_dir={tmp_path}"],
                       capsys)  # fmt: skip
    again = yaml.safe_load((tested.folder() / "config.yaml").read_text())["backbone"]
    assert again["token_mixer"] == ["pooling", "identity", "identity", None]
