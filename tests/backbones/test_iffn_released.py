"""IFFN in the form that its authors released, and their checkpoints of DeiT."""

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone, create_mixer
from backbones.analysis.counting import count_macs, count_parameters
from backbones.checkpoints.adoption import convert
from backbones.checkpoints.opening import in_memory
from backbones.mixers.iffn import IFFN
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import meta_backbone, meta_classifier
from tests.references.checkpoints import fill, in_float64
from tests.references.iffn_released import Network, mixer_shapes, shapes
from tests.tensors import images, tokens
from tools.papers.published import load_rows

FORM = {"norm": "layer", "dw_residual": "outside"}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
HOSTS = {"deit_t": (192, 3), "deit_s": (384, 3), "deit_b": (768, 5)}
# Of the table that came with the code: parameters in millions, FLOPs in billions.
PRINTED = {"deit_t": (5.00, 1.10), "deit_s": (18.84, 3.93), "deit_b": (73.66, 14.92)}


@pytest.fixture(scope="module")
def released():
    """A checkpoint of DeiT-T under the authors' names, for images of 64 x 64, 10 classes."""
    return fill(shapes(192, 3, positions=16, num_classes=10))


def released_mixer(side):
    theirs = in_float64(fill(mixer_shapes(8, side)))
    mixer = create_mixer("iffn", 8, kernel_size=side, **FORM).double()
    mixer.load_state_dict(mixer.convert_state_dict(theirs))
    return mixer, theirs


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("side", [3, 5])
def test_the_mixer_equals_the_released_one(side, training):
    mixer, theirs = released_mixer(side)
    mixer.train(training)
    names = [n for n in theirs if "running" not in n and "tracked" not in n]
    leaves = {name: theirs[name].clone().requires_grad_() for name in names}
    x = tokens(2, 4, 4, 8).requires_grad_()
    reference = Network(theirs | leaves, training=training)
    expected = reference.mixer(x.flatten(1, 2)).unflatten(1, (4, 4))
    found = mixer(x)
    torch.testing.assert_close(found, expected, **EXACT)
    weights = tokens(2, 4, 4, 8, seed=2)
    given, *theirs_by = torch.autograd.grad((expected * weights).sum(), [x, *leaves.values()])
    converted = mixer.convert_state_dict(dict(zip(names, theirs_by, strict=True)))
    own = dict(mixer.named_parameters())
    assert own.keys() == converted.keys()
    gradient, *ours_by = torch.autograd.grad((found * weights).sum(), [x, *own.values()])
    torch.testing.assert_close(gradient, given, **EXACT)
    for name, value in zip(own, ours_by, strict=True):
        torch.testing.assert_close(value, converted[name], **EXACT)
    for what in ("running_mean", "running_var"):
        moved = mixer.get_buffer(f"dw.bn.{what}")
        torch.testing.assert_close(moved, reference.t[f"ln.{what}"], **EXACT)
    with torch.no_grad():
        again = Network(reference.t, training=training).mixer(x.flatten(1, 2))
        torch.testing.assert_close(mixer(x), again.unflatten(1, (4, 4)), **EXACT)


@torch.no_grad()
def test_a_released_checkpoint_gives_the_released_logits(released, tmp_path):
    torch.save({"model": released, "epoch": 299}, tmp_path / "iffn_ti.pth")
    model = LinearClassifier.from_pretrained(
        "deit_t_iffn", tmp_path / "iffn_ti.pth", img_size=64, mixer=FORM
    )
    x = images(64, 64, batch=2)
    expected = Network(in_float64(released), heads=3)(x)
    torch.testing.assert_close(model.double().eval()(x), expected, **EXACT)
    assert expected.std() > 0.01


@pytest.mark.parametrize("host", HOSTS)
def test_tensors_and_counts_of_released_checkpoints(host):
    file = {name: torch.empty(shape) for name, shape in shapes(*HOSTS[host], 196).items()}
    backbone = meta_backbone(f"{host}_iffn", mixer=FORM)
    conversion = convert(in_memory(file, "released"), backbone)
    report = conversion.check(trained=True)
    assert (report.initialised, report.resized, report.dead) == ((), (), ())
    assert set(report.skipped) == {"classifier.weight", "classifier.bias"}
    assert conversion.num_classes == 1000
    model = meta_classifier(f"{host}_iffn", mixer=FORM)
    params, macs = count_parameters(model), count_macs(model, rule="torchprofile")
    row = next(r for r in load_rows("iffn", "classification") if r.backbone == f"{host}_iffn")
    assert params == row.params
    assert macs / 1e9 == pytest.approx(row.macs, abs=5.1e-5)
    assert (round(params / 1e6, 2), round(macs / 1e9, 2)) == PRINTED[host]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("iffn", {}, "norm=batch, dw_residual=False; build iffn with backbone.mixer.norm=layer "
         "backbone.mixer.dw_residual=outside$"),
        ("iffn", {"norm": "layer"}, "has dw_residual=False; build iffn with [^ ]*outside$"),
        ("iffn", {**FORM, "act": "silu"}, "has act=silu; .*backbone.mixer.act=gelu$"),
        ("iffn", {**FORM, "kernel_size": 5}, "has kernel_size=5; .*kernel_size=3$"),
        ("iffn", {**FORM, "dw_order": "act_bn"}, "has dw_order=act_bn; .*dw_order=bn_act$"),
        ("affn", {"norm": "layer"}, "has spatial=False, dw_residual=False; build iffn with"),
    ],
    ids=str,
)  # fmt: skip
def test_released_weights_say_which_options_they_need(released, name, options, message):
    backbone = meta_backbone(f"deit_t_{name}", img_size=64, mixer=options)
    with pytest.raises(ValueError, match=f"these are IFFN's released weights.*{message}"):
        convert(in_memory(released, "released"), backbone)


def test_weights_of_other_forms_are_refused(released):
    forms = [create_backbone("deit_t_iffn", img_size=64, mixer=m).state_dict() for m in ({}, FORM)]
    for options, tensors in zip((FORM, {}), forms, strict=True):
        backbone = meta_backbone("deit_t_iffn", img_size=64, mixer=options)
        refuses(r"keys differ.*mlp\.[bl]n_mid", convert(in_memory(tensors, "file"), backbone).check)
    extra = {f"blocks.0.mlp.conv5x5_dw.{what}": torch.ones(768) for what in ("weight", "bias")}
    backbone = meta_backbone("deit_t_iffn", img_size=64, mixer=FORM)
    with pytest.raises(ValueError, match=r"unexpected blocks\.0\.mlp\.conv5x5_dw\.weight"):
        convert(in_memory(released | extra, "released"), backbone).check()


@pytest.mark.parametrize("options", [{}, FORM], ids=["paper", "released"])
@pytest.mark.parametrize("autograd", [True, False])
def test_dropout_follows_the_norms_in_the_released_form(options, autograd, monkeypatch):
    dropped = []
    monkeypatch.setattr(F, "dropout", lambda x, *_: dropped.append(x.clone()) or 0 * x)
    mixer = create_mixer("iffn", 8, drop=0.5, **options).train()
    assert isinstance(mixer, IFFN)
    read = []
    mixer.dw.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    x = torch.randn(2, 4, 4, 8)
    with torch.set_grad_enabled(autograd):
        out = mixer(x)
    assert [d.shape[-1] for d in dropped] == [32, 8]
    assert not out.any()
    assert read[0].any() != bool(options)
    if options:
        torch.testing.assert_close(dropped[0].mean(-1), torch.zeros(2, 4, 4), atol=1e-5, rtol=0)
        torch.testing.assert_close(dropped[1].mean(-1), torch.zeros(2, 4, 4), atol=1e-5, rtol=0)
