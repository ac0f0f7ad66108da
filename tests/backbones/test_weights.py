"""Which checkpoint files are taken, which are refused, and what the messages say."""

import itertools
import pickle
from typing import ClassVar

import pytest
import safetensors.torch
import timm
import torch
from timm.layers import resample_abs_pos_embed

from backbones import create_backbone
from backbones.checkpoints.adoption import LoadReport
from backbones.checkpoints.opening import open_checkpoint
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import drawn, load, meta_backbone, rest_slow

IMAGES = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
HOSTS = rest_slow(("deit_t", "swin_t", "poolformer_s12"), quick=("deit_t", "poolformer_s12"))


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    model = LinearClassifier(create_backbone("poolformer_s12_afbo"), 5)
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return {key.removeprefix("backbone."): value for key, value in model.state_dict().items()}


def prefixed(state_dict, prefix):
    return {prefix + key: value for key, value in state_dict.items()}


def zeros(state_dict):
    return {key: torch.zeros_like(value) for key, value in state_dict.items()}


def as_classifier(state_dict, wrapper):
    """Return the keys of a module that holds backbone and classifier side by side."""
    return {
        f"{wrapper}{key if key.startswith('classifier.') else f'backbone.{key}'}": value
        for key, value in state_dict.items()
    }


def assert_same(found, expected):
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)


def saved(tmp_path, content, name="file.pth", **options):
    save = safetensors.torch.save_file if name.endswith("safetensors") else torch.save
    save(content, tmp_path / name, **options)
    return tmp_path / name


# Containers and prefixes around a backbone with classifier, or around a detector's backbone.
CONTENTS = {
    "bare": lambda w: w,
    "timm": lambda w: {"state_dict": w, "epoch": 3, "arch": "x", "metric": 81.2},
    "timm_ema": lambda w: {"state_dict": zeros(w), "state_dict_ema": w},
    "deit_release": lambda w: {"model": w},
    "deit_release_ema": lambda w: {"model": zeros(w), "model_ema": w},
    "mmengine_ema": lambda w: {
        "state_dict": w,
        "ema_state_dict": {"steps": torch.tensor(7), **prefixed(zeros(w), "module.")},
    },
    "lightning": lambda w: {
        "state_dict": as_classifier(w, "model."),
        "pytorch-lightning_version": "2.6.6",
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}}],
    },
    "detector": lambda w: {
        "meta": {"epoch": 1},
        "state_dict": as_classifier(w, "") | {"neck.conv.weight": torch.ones(1)},
    },
    "lightning_detector": lambda w: {
        "state_dict": as_classifier(w, "model.model.") | {"model.model.neck.b": torch.ones(1)}
    },
    "data_parallel": lambda w: prefixed(w, "module."),
    "compiled": lambda w: {"state_dict": prefixed(w, "_orig_mod.")},
    "compiled_data_parallel": lambda w: as_classifier(w, "module._orig_mod."),
    "data_parallel_detector": lambda w: as_classifier(w, "module.detector."),
}
BARE = {"bare", "data_parallel", "compiled_data_parallel", "data_parallel_detector"}


@pytest.mark.parametrize(
    ("content", "suffix"),
    [(c, "pth") for c in CONTENTS]
    + [(c, "safetensors") for c in sorted(BARE)]
    + [("lightning", "ckpt")],
)
def test_containers_and_prefixes(content, suffix, tmp_path):
    inside = {
        "stem.weight": torch.randn(2, 3),
        "model.block.bias": torch.randn(4),
        "classifier.weight": torch.randn(2),
    }
    path = saved(tmp_path, CONTENTS[content](inside), f"file.{suffix}")
    assert_same(open_checkpoint(path).state_dict, inside)
    if suffix == "pth":
        options = {"_use_new_zipfile_serialization": False}
        path = saved(tmp_path, CONTENTS[content](inside), "old.pth", **options)
        assert_same(open_checkpoint(path).state_dict, inside)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_pretrained_takes_a_path(suffix, weights, tmp_path):
    path = saved(tmp_path, weights, f"file.{suffix}")
    own = {key: value for key, value in weights.items() if not key.startswith("classifier.")}
    for given in (path, str(path)):
        assert_same(create_backbone("poolformer_s12_afbo", pretrained=given).state_dict(), own)


OWN_NAMES = ("convnext_t_convglu", "convnext_t_convnext")


@pytest.mark.parametrize("name", rest_slow(sorted({*OWN_NAMES, *drawn(0)}), OWN_NAMES))
def test_own_names_are_kept(name):
    backbone = meta_backbone(name)
    own = backbone.state_dict()
    assert backbone.convert_state_dict(dict(own)).keys() == own.keys()


def test_batchnorms_of_early_torch_lack_counters(tmp_path):
    weights = create_backbone("resnet18").state_dict()
    kept = {k: v for k, v in weights.items() if not k.endswith("num_batches_tracked")}
    assert len(kept) == len(weights) - 20
    path = saved(tmp_path, kept, "resnet18-5c106cde.pth")
    assert_same(create_backbone("resnet18", pretrained=path).state_dict(), weights)


def mixer_keys(state_dict):
    return {key for key in state_dict if ".mlp." in key}


@pytest.mark.parametrize("host", HOSTS)
def test_mixer_with_the_names_of_the_ffn_at_other_widths(host):
    plain = create_backbone(host).state_dict()
    backbone = create_backbone(host, mixer={"hidden_ratio": 3})
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    assert mixer_keys(before) == mixer_keys(plain)
    report = load(backbone, plain, "plain.pth")
    assert set(report.skipped) == set(report.initialised) == mixer_keys(plain)
    expected = {key: (before if ".mlp." in key else plain)[key] for key in before}
    assert_same(backbone.state_dict(), expected)
    # Files of the same model fill its mixers and the norms of its maps too.
    for options in ({"mixer": {"hidden_ratio": 3}}, {"dense": True}):
        tensors = create_backbone(host, **options).state_dict()
        report = load(create_backbone(host, **options), tensors, "own.pth")
        assert report == LoadReport("own.pth", len(tensors), (), (), ())


@pytest.mark.parametrize("host", HOSTS)
def test_weights_load_around_other_mixers_and_for_dense_prediction(host):
    theirs = create_backbone(f"{host}_glu").state_dict()
    backbone = create_backbone(f"{host}_afbo")
    own = mixer_keys(backbone.state_dict())
    report = load(backbone, theirs, "glu.pth")
    assert set(report.initialised) == own
    assert set(report.skipped) == mixer_keys(theirs)
    for key, value in backbone.state_dict().items():
        assert key in own or torch.equal(value, theirs[key]), key
    model = LinearClassifier(create_backbone(f"{host}_afbo"), 3)
    tensors = {key.removeprefix("backbone."): v for key, v in model.state_dict().items()}
    dense = create_backbone(f"{host}_afbo", dense=True)
    report = load(dense, tensors)
    assert report.initialised
    assert all(key.startswith(dense.map_keys) for key in report.initialised)
    parts = itertools.product(("norm", "classifier"), ("weight", "bias"))
    assert set(report.skipped) == set(map(".".join, parts))
    with torch.no_grad():
        if host != "deit_t":
            dense.eval()
            for i in range(4):
                setattr(dense, f"norm{i}", torch.nn.Identity())
            torch.testing.assert_close(dense(IMAGES)[0], model.backbone.eval()(IMAGES)[0])


def refuse(path, message):
    assert str(path) in refuses(message, create_backbone, "poolformer_s12", pretrained=path)


@pytest.mark.parametrize("kept", [0, 7, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["pth", "old.pth", "safetensors"])
def test_absent_and_truncated_files(kind, kept, tmp_path):
    refuse(tmp_path / f"file.{kind}", "there is no checkpoint at")
    refuse(tmp_path, "there is no checkpoint at")
    options = {"_use_new_zipfile_serialization": False} if kind == "old.pth" else {}
    tensors = {f"w{i}": torch.ones(100) for i in range(50)}
    path = saved(tmp_path, tensors, f"file.{kind}", **options)
    content = path.read_bytes()
    path.write_bytes(content[: kept if kept > 1 else int(kept * len(content))])
    refuse(path, "truncated|not a checkpoint|is no checkpoint")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a list, not a state_dict"),
        ({"epoch": 1, "args": {"lr": 0.1}}, r"no tensors; its entries are \['args', 'epoch'\]"),
        ({"state_dict": {}}, "holds no tensors"),
        ({1: torch.ones(1)}, r"tensors whose names are not text: \[1\]"),
        ({"a": torch.eye(2).to_sparse()}, "a must be a dense tensor of .*, got torch.sparse_coo"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "a must be a dense tensor of .*complex64"),
        ({"b": torch.tensor([1.0, float("nan")])}, "b holds NaN or Inf; use an earlier checkpoint"),
        ({"b": torch.tensor([1.0, float("inf")])}, "b holds NaN or Inf; use an earlier checkpoint"),
    ],
)
def test_file_without_usable_weights(content, message, tmp_path):
    refuse(saved(tmp_path, content), message)


class Code:
    calls: ClassVar[list] = []

    def __reduce__(self):
        return self.calls.append, (1,)


def test_file_with_code_is_refused(tmp_path):
    path = tmp_path / "file.pth"
    for content in (Code(), {"state_dict": {"a": torch.ones(1)}, "extra": Code()}):
        torch.save(content, path)
        refuse(path, "holds more than tensors and plain values.*it could run code.*safetensors")
        path.write_bytes(pickle.dumps(content, protocol=2))
        refuse(path, "it could run code")
    assert Code.calls == []


KEY = "stages.2.blocks.1.mlp.cm_b.weight"
NORM = "stages.2.blocks.1.norm1.weight"
DEEPER = {"stages.3.blocks.2.norm1.weight": torch.ones(512)}
END = ".*name the backbone and options it was trained with"
SHAPES = r"sm_a\.weight: \(256, 1, 3, 3\) instead of \(256, 1, 5, 5\)"


def without(tensors, key):
    return {k: v for k, v in tensors.items() if k != key}


def glu_with_part_of_afbo(weights):
    return create_backbone("poolformer_s12_glu").state_dict() | {KEY: weights[KEY]}


# Change of the weights of poolformer_s12_afbo, the network that they do not fit, and the message.
MISFITS = {
    "half a mixer": (lambda w: without(w, KEY), {},
     f"file does not fit poolformer_s12_afbo: 1 keys differ .missing {KEY}"),
    "half a mixer beside another": (glu_with_part_of_afbo, {},
     r"18 keys differ \(missing stages\.2\.blocks\.1\.mlp\.cm_a\.bias, "),
    "half a mixer with the names of the FFN": (
     lambda _: without(create_backbone(**NARROW).state_dict(), "blocks.5.mlp.fc2.weight"),
     {"name": "deit_t", "mixer": {"hidden_ratio": 3}},
     r"1 keys differ \(missing blocks\.5\.mlp\.fc2\.weight\)"),
    "FFNs of another width": (lambda _: create_backbone(**NARROW).state_dict(),
     {"name": "deit_t", "mixer": {"hidden_ratio": 2}}, "keys differ"),
    "more groups": (lambda w: w, {"mixer": {"g2": 5}}, rf"missing .*cm_a\.weights\.4{END}"),
    "fewer groups": (lambda w: w, {"mixer": {"g2": 3}}, rf"unexpected .*cm_a\.weights\.3{END}"),
    "another kernel": (lambda w: w, {"mixer": {"kernel_size": 5}}, SHAPES + END),
    "absent FFN": (lambda w: w, {"name": "poolformer_s12"},
     r"does not fit poolformer_s12: .*missing stages\.0.*mlp\.fc1"),
    "another depth": (lambda w: w | DEEPER, {},
     r"1 keys differ \(unexpected stages\.3\.blocks\.2\.norm1\.weight\)"),
    "quantised": (lambda w: w | {NORM: w[NORM].to(torch.int8)}, {},
     rf"1 keys differ \({NORM}: torch\.int8 instead of torch\.float32\)"),
}  # fmt: skip
NARROW = {"name": "deit_t", "mixer": {"hidden_ratio": 3}}


def misfit(tensors, message, name="poolformer_s12_afbo", **options):
    backbone = create_backbone(name, **options)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    refuses(message, load, backbone, tensors)
    assert_same(backbone.state_dict(), before)


@pytest.mark.parametrize("case", MISFITS)
def test_weights_of_other_networks_are_refused_and_change_nothing(case, weights):
    change, options, message = MISFITS[case]
    misfit(change(weights), message, **options)


@pytest.mark.parametrize("size", [(96, 96), (96, 160)], ids=str)
@torch.no_grad()
def test_position_table_is_resampled(size):
    theirs = timm.create_model("deit_tiny_patch16_224").eval()
    torch.nn.init.normal_(theirs.pos_embed)
    backbone = create_backbone("deit_t", img_size=size).eval()
    report = load(backbone, theirs.state_dict())
    assert not report.initialised
    grid = [size[0] // 16, size[1] // 16]
    expected = resample_abs_pos_embed(theirs.pos_embed, grid, num_prefix_tokens=1)
    torch.testing.assert_close(backbone.pos_embed.data, expected)
    # The same as running the model of 224 pixels at this size.
    other = create_backbone("deit_t").eval()
    load(other, theirs.state_dict())
    images = torch.randn(1, 3, *size)
    torch.testing.assert_close(other.embed(images), backbone.embed(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("host", HOSTS)
@torch.no_grad()
def test_classifier_comes_with_timms_names_and_ours(host, tmp_path):
    names = {"deit_t": "deit_tiny_patch16_224", "swin_t": "swin_tiny_patch4_window7_224"}
    theirs = timm.create_model(names.get(host, host), num_classes=7)
    path = saved(tmp_path, theirs.state_dict(), "model.safetensors")
    model = LinearClassifier.from_pretrained(host, path).eval()
    head = theirs.get_classifier()
    torch.testing.assert_close(model.classifier.weight, head.weight, rtol=0, atol=0)
    expected = head(model.backbone.embed(IMAGES))
    torch.testing.assert_close(model(IMAGES), expected)
    path = saved(tmp_path, {"state_dict": prefixed(model.state_dict(), "model.")}, "last.ckpt")
    again = LinearClassifier.from_pretrained(host, path).eval()
    assert again.classifier.out_features == 7
    torch.testing.assert_close(again(IMAGES), model(IMAGES), rtol=0, atol=0)
    path = saved(tmp_path, model.backbone.state_dict())
    message = "holds a backbone without classifier"
    refuses(message, LinearClassifier.from_pretrained, host, path)


def without_class_token():
    torch.manual_seed(0)
    options = {"class_token": False, "global_pool": "avg", "num_classes": 7}
    theirs = timm.create_model("deit_tiny_patch16_224", **options).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    assert "fc_norm.weight" in theirs.state_dict()
    return theirs


@torch.no_grad()
def test_deit_without_class_token_takes_timms_fc_norm(tmp_path):
    theirs, images = without_class_token(), torch.randn(2, 3, 224, 224)
    path = saved(tmp_path, theirs.state_dict())
    model = LinearClassifier.from_pretrained("deit_t", path, class_token=False).eval()
    torch.testing.assert_close(model(images), theirs(images), rtol=1e-4, atol=1e-5)
    # Its own checkpoint says so by its names, and one of the usual order turns it back.
    own = saved(tmp_path, model.state_dict(), "own.pth")
    again = LinearClassifier.from_pretrained("deit_t", own, class_token=False, fc_norm=True).eval()
    assert torch.equal(again(images), model(images))
    usual = create_backbone("deit_t", class_token=False).eval()
    load(model.backbone, usual.state_dict())
    assert torch.equal(model.backbone.embed(images), usual.embed(images))
    with pytest.raises(ValueError, match=r"missing norm\.weight; missing norm\.bias|missing norm"):
        create_backbone("deit_t", class_token=False, fc_norm=False, pretrained=path)
    refuses("needs class_token=False", create_backbone, "deit_t", fc_norm=True)


def test_large_gaps_in_a_file_are_reported(tmp_path):
    path = saved(tmp_path, without_class_token().state_dict())
    with pytest.warns(UserWarning, match=r"keep their initialisation \(pyramid\.scales"):
        dense = create_backbone("deit_t", class_token=False, dense=True, pretrained=path)
    assert dense(IMAGES)[0].isfinite().all()
    weights = meta_backbone("gmlp_ti").state_dict()
    backbone = create_backbone("gmlp_ti_ggqpe", stem_norm=False)
    weights = {key: torch.zeros(value.shape) for key, value in weights.items()}
    with pytest.warns(
        UserWarning, match=r"gave \d\.\d% .*30 mixers keep their initialisation \(blocks\.0\.mlp"
    ):
        load(backbone, weights)
