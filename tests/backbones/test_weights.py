"""Which checkpoint files are taken, which are refused, and what the messages say."""

import logging
import pickle
from typing import ClassVar

import pytest
import safetensors.torch
import timm
import torch
from timm.layers import resample_abs_pos_embed

from backbones import create_backbone, list_hosts
from backbones.checkpoints.adoption import LoadReport, adopt
from backbones.checkpoints.opening import in_memory, open_checkpoint
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import drawn, meta_backbone, rest_slow

IMAGES = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
HOSTS = rest_slow(("deit_t", "swin_t", "poolformer_s12"), quick=("deit_t", "poolformer_s12"))


@pytest.fixture(scope="module")
def weights():
    """The classification state dict of a small model, with classifier, random in every entry."""
    torch.manual_seed(0)
    model = LinearClassifier(create_backbone("poolformer_s12_afbo"), 5)
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return {key.removeprefix("backbone."): value for key, value in model.state_dict().items()}


def prefixed(state_dict, prefix):
    return {prefix + key: value for key, value in state_dict.items()}


def as_classifier(state_dict, wrapper):
    """Keys of a module that holds backbone and classifier side by side."""
    return {
        f"{wrapper}{key if key.startswith('classifier.') else f'backbone.{key}'}": value
        for key, value in state_dict.items()
    }


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


def zeros(state_dict):
    return {key: torch.zeros_like(value) for key, value in state_dict.items()}


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
    path = tmp_path / f"file.{suffix}"
    save = safetensors.torch.save_file if suffix == "safetensors" else torch.save
    save(CONTENTS[content](inside), path)
    found = open_checkpoint(path).state_dict
    assert found.keys() == inside.keys()
    assert all(torch.equal(found[key], inside[key]) for key in inside)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_pretrained_takes_a_path(suffix, weights, tmp_path):
    path = tmp_path / f"file.{suffix}"
    (safetensors.torch.save_file if suffix == "safetensors" else torch.save)(weights, path)
    for given in (path, str(path)):
        backbone = create_backbone("poolformer_s12_afbo", pretrained=given)
        for key, value in backbone.state_dict().items():
            assert torch.equal(value, weights[key]), key


@pytest.mark.parametrize("name", ["convnext_t_convglu", "convnext_t_convnext"])
def test_parts_of_a_mixer_keep_their_names(name):
    check_own_names(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn(0, 1, 2, 3))
def test_names_of_hosts_with_mixers_of_ours_are_kept(name):
    check_own_names(name)


def check_own_names(name):
    backbone = meta_backbone(name)
    own = backbone.state_dict()
    assert backbone.convert_state_dict(dict(own)).keys() == own.keys()


def test_older_torch_files_are_read(tmp_path):
    path = tmp_path / "old.pth"
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    assert open_checkpoint(path).state_dict == {"a": torch.ones(1)}


def test_batchnorms_of_early_torch_have_no_counters(tmp_path):
    weights = create_backbone("resnet18").state_dict()
    kept = {k: v for k, v in weights.items() if not k.endswith("num_batches_tracked")}
    assert len(kept) == len(weights) - 20
    torch.save(kept, tmp_path / "resnet18-5c106cde.pth")
    back = create_backbone("resnet18", pretrained=tmp_path / "resnet18-5c106cde.pth").state_dict()
    assert all(torch.equal(back[key], value) for key, value in weights.items())


def test_report_of_a_new_mixer(weights, caplog):
    plain = LinearClassifier(create_backbone("poolformer_s12"), 5)
    tensors = {key.removeprefix("backbone."): v for key, v in plain.state_dict().items()}
    backbone = create_backbone("poolformer_s12_afbo")
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    with caplog.at_level(logging.INFO, logger="backbones.checkpoints.adoption"):
        report = adopt(backbone, in_memory(tensors, "plain.pth"))
    mixers = {key for key in before if ".mlp." in key}
    assert set(report.initialised) == mixers
    assert set(report.skipped) == {key for key in tensors if ".mlp." in key} | {
        "classifier.weight",
        "classifier.bias",
    }
    assert report.loaded == len(before) - len(mixers)
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, before[key] if key in mixers else tensors[key]), key
    assert f"plain.pth: {report.loaded} tensors loaded" in caplog.text
    assert "stages.0.blocks.0.mlp.cm_a.bias" in str(report)


def mixer_keys(state_dict):
    return {key for key in state_dict if ".mlp." in key}


@pytest.mark.parametrize("host", HOSTS)
def test_mixer_with_the_names_of_the_ffn_at_other_widths(host):
    plain = create_backbone(host).state_dict()
    backbone = create_backbone(host, mixer={"hidden_ratio": 3})
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    assert mixer_keys(before) == mixer_keys(plain)
    report = adopt(backbone, in_memory(dict(plain), "plain.pth"))
    assert set(report.skipped) == set(report.initialised) == mixer_keys(plain)
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, (before if ".mlp." in key else plain)[key]), key
    # A file of the same model fills its mixers too.
    again = create_backbone(host, mixer={"hidden_ratio": 3})
    report = adopt(again, in_memory(dict(before), "own.pth"))
    assert report == LoadReport("own.pth", len(before), (), (), ())


@pytest.mark.parametrize("host", HOSTS)
def test_weights_around_another_mixer(host):
    theirs = create_backbone(f"{host}_glu").state_dict()
    backbone = create_backbone(f"{host}_afbo")
    own = mixer_keys(backbone.state_dict())
    report = adopt(backbone, in_memory(dict(theirs), "glu.pth"))
    assert set(report.initialised) == own
    assert set(report.skipped) == mixer_keys(theirs)
    for key, value in backbone.state_dict().items():
        assert key in own or torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("host", HOSTS)
def test_classification_checkpoint_loads_into_a_dense_backbone(host):
    model = LinearClassifier(create_backbone(f"{host}_afbo"), 3)
    tensors = {key.removeprefix("backbone."): v for key, v in model.state_dict().items()}
    dense = create_backbone(f"{host}_afbo", dense=True)
    report = adopt(dense, in_memory(tensors, "file"))
    assert report.initialised
    assert all(key.startswith(dense.map_keys) for key in report.initialised)
    assert set(report.skipped) == {
        "norm.weight",
        "norm.bias",
        "classifier.weight",
        "classifier.bias",
    }
    with torch.no_grad():
        if host != "deit_t":
            dense.eval()
            for i in range(4):
                setattr(dense, f"norm{i}", torch.nn.Identity())
            torch.testing.assert_close(dense(IMAGES)[0], model.backbone.eval()(IMAGES)[0])


@pytest.mark.parametrize("host", HOSTS)
def test_dense_checkpoint_loads_into_a_dense_backbone(host):
    tensors = create_backbone(host, dense=True).state_dict()
    report = adopt(create_backbone(host, dense=True), in_memory(tensors, "file"))
    assert report == LoadReport("file", len(tensors), (), (), ())


def refuse(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        create_backbone("poolformer_s12", pretrained=path)
    assert str(path) in str(caught.value)


def saved(tmp_path, content, name="file.pth"):
    torch.save(content, tmp_path / name)
    return tmp_path / name


def test_missing_file(tmp_path):
    refuse(tmp_path / "absent.pth", "there is no checkpoint at")
    refuse(tmp_path, "there is no checkpoint at")


@pytest.mark.parametrize("kept", [0, 7, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["pth", "old.pth", "safetensors"])
def test_truncated_file(kind, kept, tmp_path):
    path = tmp_path / f"file.{kind}"
    tensors = {f"w{i}": torch.ones(100) for i in range(50)}
    if kind == "safetensors":
        safetensors.torch.save_file(tensors, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "pth")
    content = path.read_bytes()
    path.write_bytes(content[: kept if kept > 1 else int(kept * len(content))])
    refuse(path, "truncated|not a checkpoint|is no checkpoint")


@pytest.mark.parametrize(
    "content",
    [b"hello", b"<html>404</html>", b"\x80\x02}", b"version https://git-lfs", b"PK\x03\x04"],
    ids=str,
)
def test_file_of_another_kind(content, tmp_path):
    path = tmp_path / "file.pth"
    path.write_bytes(content)
    refuse(path, "not a checkpoint|is no checkpoint")


class Code:
    """Runs a function when it is unpickled."""

    calls: ClassVar[list] = []

    def __reduce__(self):
        return self.calls.append, (1,)


def test_file_with_code_is_not_opened(tmp_path):
    path = tmp_path / "file.pth"
    for content in (Code(), {"state_dict": {"a": torch.ones(1)}, "extra": Code()}):
        torch.save(content, path)
        refuse(path, "holds more than tensors and plain values.*it could run code.*safetensors")
        path.write_bytes(pickle.dumps(content, protocol=2))
        refuse(path, "it could run code")
    assert Code.calls == []


def test_pickled_module_is_not_opened(tmp_path):
    refuse(saved(tmp_path, torch.nn.Linear(2, 2)), "holds more than tensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a list, not a state_dict"),
        (
            {"epoch": 1, "args": {"lr": 0.1}},
            r"holds no tensors; its entries are \['args', 'epoch'\]",
        ),
        ({"state_dict": {}}, "holds no tensors"),
        ({1: torch.ones(1)}, r"keys of tensors must be text, got \[1\]"),
        ({"a": torch.eye(2).to_sparse()}, "a must be a dense tensor of .*, got torch.sparse_coo"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "a must be a dense tensor of .*complex64"),
    ],
)
def test_file_without_weights(content, message, tmp_path):
    refuse(saved(tmp_path, content), message)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_a_number(value, tmp_path):
    content = {"a.weight": torch.ones(2), "b.weight": torch.tensor([1.0, value])}
    refuse(saved(tmp_path, content), r"b\.weight holds NaN or Inf; use an earlier checkpoint")


def misfit(tensors, message, name="poolformer_s12_afbo", **options):
    backbone = create_backbone(name, **options)
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    refuses(message, adopt, backbone, in_memory(tensors, "file"))
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} was changed by a refused load"


def test_half_a_mixer(weights):
    key = "stages.2.blocks.1.mlp.cm_b.weight"
    half = {k: v for k, v in weights.items() if k != key}
    misfit(half, f"file does not fit poolformer_s12_afbo: 1 keys differ .missing {key}")


def test_half_a_mixer_beside_another(weights):
    key = "stages.2.blocks.1.mlp.cm_b.weight"
    theirs = create_backbone("poolformer_s12_glu").state_dict() | {key: weights[key]}
    misfit(theirs, r"18 keys differ \(missing stages\.2\.blocks\.1\.mlp\.cm_a\.bias, ")


def test_half_a_mixer_with_the_names_of_the_ffn():
    options = {"name": "deit_t", "mixer": {"hidden_ratio": 3}}
    half = create_backbone(**options).state_dict()
    del half["blocks.5.mlp.fc2.weight"]
    misfit(half, r"1 keys differ \(missing blocks\.5\.mlp\.fc2\.weight\)", **options)


def test_mixer_with_other_options(weights):
    end = ".*name the backbone and options it was trained with"
    misfit(weights, rf"missing .*cm_a\.weights\.4{end}", mixer={"g2": 5})
    misfit(weights, rf"unexpected .*cm_a\.weights\.3{end}", mixer={"g2": 3})
    shapes = r"sm_a\.weight: \(256, 1, 3, 3\) instead of \(256, 1, 5, 5\)"
    misfit(weights, shapes + end, mixer={"kernel_size": 5})


def test_host_whose_own_ffn_is_absent(weights):
    misfit(weights, r"does not fit poolformer_s12: .*missing stages\.0.*mlp\.fc1", "poolformer_s12")


def test_host_with_other_depth(weights):
    deeper = weights | {"stages.3.blocks.2.norm1.weight": torch.ones(512)}
    misfit(deeper, r"1 keys differ \(unexpected stages\.3\.blocks\.2\.norm1\.weight\)")


def test_quantised_weights(weights):
    key = "stages.2.blocks.1.norm1.weight"
    quantised = weights | {key: weights[key].to(torch.int8)}
    misfit(quantised, rf"1 keys differ \({key}: torch\.int8 instead of torch\.float32\)")


def test_weights_with_another_mixer_give_their_host(weights):
    report = adopt(create_backbone("poolformer_s12_glu"), in_memory(dict(weights), "file"))
    assert all(".mlp.w" in key for key in report.initialised)
    assert len(report.initialised) == 12 * 6


@pytest.mark.parametrize(
    ("theirs", "host"),
    [
        ("swin_small_patch4_window7_224", "swin_t"),
        ("swin_base_patch4_window7_224", "swin_s"),
        ("deit_small_patch16_224", "deit_t"),
        ("deit_tiny_distilled_patch16_224", "deit_t"),
        ("poolformer_s24", "poolformer_s12"),
        ("poolformer_m36", "poolformer_s36"),
        ("swin_tiny_patch4_window7_224", "deit_t"),
        ("poolformer_s12", "swin_t"),
        ("deit_tiny_patch16_224", "swin_t_afbo"),
    ],
)
def test_another_model(theirs, host):
    with torch.device("meta"):
        tensors = timm.create_model(theirs).state_dict()
        backbone = create_backbone(host)
    with pytest.raises(ValueError, match=f"does not fit {host}: \\d+ keys differ|distilled=true"):
        adopt(backbone, in_memory(dict(tensors), "file"))


@pytest.mark.parametrize("size", [(96, 96), (96, 160)], ids=str)
@torch.no_grad()
def test_position_table_is_resampled(size):
    theirs = timm.create_model("deit_tiny_patch16_224").eval()
    torch.nn.init.normal_(theirs.pos_embed)
    backbone = create_backbone("deit_t", img_size=size).eval()
    report = adopt(backbone, in_memory(theirs.state_dict(), "file"))
    assert not report.initialised
    grid = [size[0] // 16, size[1] // 16]
    expected = resample_abs_pos_embed(theirs.pos_embed, grid, num_prefix_tokens=1)
    torch.testing.assert_close(backbone.pos_embed.data, expected)
    # The same as running the model of 224 pixels at this size.
    other = create_backbone("deit_t").eval()
    adopt(other, in_memory(theirs.state_dict(), "file"))
    images = torch.randn(1, 3, *size)
    torch.testing.assert_close(other.embed(images), backbone.embed(images), rtol=1e-4, atol=1e-4)


def test_position_table_of_an_oblong_grid():
    oblong = create_backbone("deit_t", img_size=(96, 128))
    torch.nn.init.normal_(oblong.pos_embed)
    tensors = oblong.state_dict()
    other = create_backbone("deit_t", img_size=(128, 96))
    adopt(other, in_memory(dict(tensors), "file"))
    expected = resample_abs_pos_embed(oblong.pos_embed, [8, 6], [6, 8])
    torch.testing.assert_close(other.pos_embed, expected)
    del tensors["pos_grid"]
    adopt(create_backbone("deit_t", img_size=(96, 128)), in_memory(dict(tensors), "file"))
    misfit(tensors, r"pos_embed of 49 positions .*build with the img_size", "deit_t")


@pytest.mark.parametrize("class_token", [False, True])
def test_square_table_for_an_oblong_grid_of_as_many_positions(class_token, tmp_path):
    square, oblong, again, back = (
        create_backbone("deit_t", img_size=size, class_token=class_token)
        for size in ((128, 128), (64, 256), (64, 256), (128, 128))
    )
    torch.nn.init.normal_(square.pos_embed)
    adopt(oblong, in_memory(square.state_dict(), "file"))
    old = square.pos_embed
    expected = resample_abs_pos_embed(old, [4, 16], [8, 8], num_prefix_tokens=int(class_token))
    torch.testing.assert_close(oblong.pos_embed, expected)
    # Files of our own state their grid, which is loaded exactly where it is the same.
    adopt(again, open_checkpoint(saved(tmp_path, oblong.state_dict())))
    assert torch.equal(again.pos_embed, oblong.pos_embed)
    adopt(back, open_checkpoint(saved(tmp_path, oblong.state_dict())))
    old = oblong.pos_embed
    expected = resample_abs_pos_embed(old, [8, 8], [4, 16], num_prefix_tokens=int(class_token))
    torch.testing.assert_close(back.pos_embed, expected)
    again.load_state_dict(oblong.state_dict())
    assert "pos_grid" not in square.state_dict()


@pytest.mark.parametrize("host", HOSTS)
@torch.no_grad()
def test_classifier_comes_with_timms_names(host, tmp_path):
    names = {"deit_t": "deit_tiny_patch16_224", "swin_t": "swin_tiny_patch4_window7_224"}
    theirs = timm.create_model(names.get(host, host), num_classes=7)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(theirs.state_dict(), path)
    model = LinearClassifier.from_pretrained(host, path).eval()
    head = theirs.get_classifier()
    torch.testing.assert_close(model.classifier.weight, head.weight, rtol=0, atol=0)
    expected = head(model.backbone.embed(IMAGES))
    torch.testing.assert_close(model(IMAGES), expected)


@torch.no_grad()
def test_classifier_comes_back_from_our_own_file(tmp_path):
    model = LinearClassifier(create_backbone("poolformer_s12_afbo"), 5).eval()
    path = saved(tmp_path, {"state_dict": prefixed(model.state_dict(), "model.")}, "last.ckpt")
    again = LinearClassifier.from_pretrained("poolformer_s12_afbo", path).eval()
    assert again.classifier.out_features == 5
    torch.testing.assert_close(again(IMAGES), model(IMAGES), rtol=0, atol=0)


def test_file_without_classifier(weights, tmp_path):
    bare = {key: v for key, v in weights.items() if not key.startswith("classifier.")}
    with pytest.raises(ValueError, match="holds a backbone without classifier"):
        LinearClassifier.from_pretrained("poolformer_s12_afbo", saved(tmp_path, bare))


def test_pretrained_weights_without_network_name_the_file_to_fetch(monkeypatch):
    def no_network(*arguments, **options):
        if options.get("pretrained"):
            raise OSError("no route to host")
        raise AssertionError("timm is asked for its weights first")

    monkeypatch.setattr(timm, "create_model", no_network)
    refuses(
        r"deit_tiny_patch16_224 \(OSError\); download .*huggingface",
        create_backbone,
        "deit_t_afbo",
        pretrained=True,
    )
    with pytest.raises(ValueError, match=r"download https://github\.com/.*gcvit_xxtiny.*\.pth on"):
        create_backbone("gcvit_xxt", pretrained=True)
    refuses(
        "publishes no weights for mixer_s16_224; pass pretrained=",
        create_backbone,
        "mixer_s16",
        pretrained=True,
    )
    for host in list_hosts():
        refuses("weights", create_backbone, host, pretrained=True)


def test_a_whole_model_gives_its_backbone_and_classifier_without_the_neck(tmp_path):
    tensors = {
        "backbone.a": torch.ones(1),
        "classifier.bias": torch.ones(1),
        "neck.b": torch.ones(1),
    }
    path = saved(tmp_path, tensors)
    assert set(open_checkpoint(path).state_dict) == {"a", "classifier.bias"}


def test_trained_ffns_of_another_width_are_refused(tmp_path):
    narrow = create_backbone("deit_t", img_size=64, mixer={"hidden_ratio": 2})
    torch.save(narrow.state_dict(), tmp_path / "narrow.pth")
    refuses(
        "keys differ",
        create_backbone,
        "deit_t",
        img_size=64,
        mixer={"hidden_ratio": 3},
        pretrained=tmp_path / "narrow.pth",
    )


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
    adopt(model.backbone, in_memory(usual.state_dict(), "file"))
    assert torch.equal(model.backbone.embed(images), usual.embed(images))
    with pytest.raises(ValueError, match=r"missing norm\.weight; missing norm\.bias|missing norm"):
        create_backbone("deit_t", class_token=False, fc_norm=False, pretrained=path)
    refuses("add class_token=False", create_backbone, "deit_t", fc_norm=True)


def test_deit_without_class_token_gives_its_weights_to_dense_prediction(tmp_path):
    path = saved(tmp_path, without_class_token().state_dict())
    with pytest.warns(UserWarning, match=r"keep their initialisation \(pyramid\.scales"):
        dense = create_backbone("deit_t", class_token=False, dense=True, pretrained=path)
    assert dense(IMAGES)[0].isfinite().all()


def test_what_python_loads_is_reported_where_more_than_the_mixer_is_missing(tmp_path, recwarn):
    plain = create_backbone("deit_t", img_size=64)
    path = saved(tmp_path, plain.state_dict())
    create_backbone("deit_t_afbo", img_size=64, pretrained=path)
    assert not [warning for warning in recwarn if "gave" in str(warning.message)]
    with pytest.warns(
        UserWarning, match=r"file\.pth gave \d+\.\d% of the network's values"
    ) as given:
        create_backbone("deit_t", img_size=64, dense=True, pretrained=path)
    assert given[0].filename.endswith("factory.py")


def test_nearly_nothing_is_not_taken_over_in_silence():
    weights = meta_backbone("gmlp_ti").state_dict()
    backbone = create_backbone("gmlp_ti_ggqpe", stem_norm=False)
    weights = {key: torch.zeros(value.shape) for key, value in weights.items()}
    with pytest.warns(
        UserWarning, match=r"gave \d\.\d% .*30 mixers keep their initialisation \(blocks\.0\.mlp"
    ):
        adopt(backbone, in_memory(weights, "file"))


def test_a_classifier_that_is_loaded_is_not_called_unused(tmp_path, caplog):
    network = LinearClassifier(create_backbone("deit_t", img_size=64), 3)
    torch.save(network.state_dict(), tmp_path / "timm.pth")
    with caplog.at_level("INFO"):
        again = LinearClassifier.from_pretrained("deit_t", tmp_path / "timm.pth", img_size=64)
        report = again.load_weights(tmp_path / "timm.pth")
    assert report.skipped == ()
    assert report.loaded == len(network.state_dict())
    assert caplog.text.count("0 in the file not used") == 2
    assert "classifier.weight" not in caplog.text
    with caplog.at_level("INFO"):
        create_backbone("deit_t", img_size=64, pretrained=tmp_path / "timm.pth")
    assert "2 in the file not used (classifier.weight, classifier.bias)" in caplog.text
