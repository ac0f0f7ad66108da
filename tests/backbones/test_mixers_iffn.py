"""IFFN against its equations in float64, its switches, class tokens and published counts."""

import warnings

import pytest
import torch
from torch import nn

from backbones import backbone_schema, create_backbone, create_mixer, mixer_options
from backbones.analysis.counting import count_macs, count_parameters
from backbones.checkpoints.adoption import adopt, convert
from backbones.checkpoints.opening import in_memory
from backbones.fast import fast
from backbones.parameters.decay import without_decay
from backbones.parameters.layer_decay import layer_decay_groups
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import load, meta_backbone, meta_classifier, rest_slow
from tests.forms import both_forms
from tests.references import iffn as reference
from tests.references.checkpoints import fill, in_float64
from tests.references.iffn_released import Network, mixer_shapes, shapes
from tests.tensors import build_mixer, images, tokens
from tools.papers.published import load_rows

ACTS = ("gelu", "softplus", "elu", "silu", "relu", "prelu")
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def arguments(options):
    plain = not options.get("channel", True)
    return {
        "n_branches": 1 if plain else options.get("n_branches", 2),
        "act": options.get("act", "gelu"),
        "arb": "off" if plain else options.get("arb", "on"),
        "residual": options.get("dw_residual", "outside"),
        "order": options.get("dw_order", "bn_act"),
    }


BATCH = {"norm": "batch", "dw_residual": False}  # the form of iffn_bn
SWITCHES = [
    {}, {"spatial": False}, {"kernel_size": 5}, {"n_branches": 4}, {"init": "mirror"},
    {"dw_residual": True, "bn_mid": False}, {"channel": False, "bn_mid": True},
    {"spatial": False, "bn_out": False, "n_branches": 4}, {"dw_residual": False},
    *({**BATCH, **options} for options in (
        {}, {"channel": True, "spatial": False}, {"channel": False, "spatial": True},
        {"channel": False, "spatial": False}, {"n_branches": 4}, {"n_branches": 1},
        {"n_branches": 3, "hidden_ratio": 3}, *({"act": act} for act in ACTS),
        {"act": "prelu", "arb": "off"}, {"act": "silu", "channel": False}, {"arb": "off"},
        {"arb": "rprelu"}, {"arb": "rprelu", "bn_mid": False, "n_branches": 4},
        *({"kernel_size": k} for k in (1, 5, 7)), {"bn_mid": False}, {"bn_out": False},
        {"bn_mid": False, "bn_out": False, "arb": "off"},
        {"channel": False, "bn_mid": True, "bn_out": True}, {"dw_residual": True},
        {"dw_order": "act_bn"}, {"dw_residual": True, "dw_order": "act_bn", "kernel_size": 5},
        {"init": "mirror"}, {"dw_residual": "outside"},
        {"dw_residual": "outside", "dw_order": "act_bn"},
    )),
]  # fmt: skip
PLACES = [((3, 5), 0), ((4, 4), 2), ((1, 7), 1)]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("options", rest_slow(SWITCHES, SWITCHES[::2]), ids=str)
def test_is_its_equations(options, training):
    for size, num_prefix_tokens in PLACES:
        mixer = build_mixer("iffn", **options).train(training)
        x = torch.randn(3, *size, 8, dtype=torch.float64, requires_grad=True)
        prefix = torch.randn(3, num_prefix_tokens, 8, dtype=torch.float64, requires_grad=True)
        tensors = {key: value.detach().clone() for key, value in mixer.state_dict().items()}
        names = [name for name, _ in mixer.named_parameters()]
        for name in names:
            tensors[name].requires_grad_()
        leaves = [tensors[name] for name in names]
        expected = reference.iffn(x, prefix, tensors, training=training, **arguments(options))
        found = mixer(x, prefix) if num_prefix_tokens else (mixer(x), prefix[:, :0])
        torch.testing.assert_close(found, expected, **EXACT)
        running = {k: v for k, v in mixer.state_dict().items() if "running" in k}
        torch.testing.assert_close(running, {k: tensors[k] for k in running}, **EXACT)
        inputs = [x, prefix] if num_prefix_tokens else [x]
        weights = [torch.randn_like(part) for part in expected[: len(inputs)]]
        gradients = (
            torch.autograd.grad(outputs[: len(inputs)], [*inputs, *variables], weights)
            for outputs, variables in ((found, mixer.parameters()), (expected, leaves))
        )
        torch.testing.assert_close(*gradients, **EXACT)


@both_forms
@pytest.mark.parametrize("options", SWITCHES, ids=str)
def test_inference_is_the_same(options, form):
    mixer = form(build_mixer("iffn", **options))
    for size, num_prefix_tokens in PLACES:
        x = torch.randn(3, *size, 8, dtype=torch.float64)
        prefix = torch.randn(3, num_prefix_tokens, 8, dtype=torch.float64)
        tensors = mixer.state_dict()
        expected = reference.iffn(x, prefix, tensors, **arguments(options))
        before = x.clone()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(mixer(x), expected[0], **EXACT)
                torch.testing.assert_close(mixer(x, prefix), expected, **EXACT)
        assert torch.equal(x, before), "the input was written to"


def test_parts_of_iffn_and_initial_activations():
    for name, options in [
        ("affn", {**BATCH, "spatial": False}), ("iffn_spatial", {**BATCH, "channel": False}),
        ("iffn_bn", BATCH),
    ]:  # fmt: skip
        part, whole = create_mixer(name, 16), create_mixer("iffn", 16, **options)
        assert part.state_dict().keys() == whole.state_dict().keys()
        whole.load_state_dict(part.state_dict())
        x = torch.randn(2, 3, 4, 16)
        torch.testing.assert_close(part.eval()(x), whole.eval()(x), rtol=0, atol=0)
    assert set(mixer_options("iffn_bn")) == set(mixer_options("iffn"))
    assert set(mixer_options("affn")) < set(mixer_options("iffn"))
    assert set(mixer_options("iffn_spatial")) < set(mixer_options("iffn"))
    z = torch.randn(5, 32)
    for init, signs in (("ones", [1, 1, 1, 1]), ("mirror", [1, -1, 1, -1])):
        mixer = create_mixer("iffn", 32, n_branches=4, init=init)
        for sign, branch in zip(signs, mixer.branches, strict=True):
            torch.testing.assert_close(branch(z), nn.functional.gelu(sign * z))
    for word, value in (("on", True), ("off", False)):
        keys = [create_mixer("iffn", 8, arb=arb).state_dict().keys() for arb in (word, value)]
        assert keys[0] == keys[1]


@pytest.mark.parametrize("n_branches", [1, 2, 4])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_parameters_follow_the_closed_form(n_branches, kernel_size):
    mixer = create_mixer("iffn", 24, n_branches=n_branches, kernel_size=kernel_size)
    expected = (4 / n_branches + 4) * 24**2 + (4 / n_branches + 39 + 4 * kernel_size**2) * 24
    assert count_parameters(mixer) == expected


def test_deit_drops_its_class_token_beside_iffn():
    for name in ("deit_t_iffn", "deit_t_iffn_bn", "deit_t_affn", "deit_t_iffn_spatial"):
        assert backbone_schema(name)["class_token"] is False
    for name in ("deit_t", "deit_t_afbo", "deit_t_glu", "deit_t_nonlinear_sum"):
        assert backbone_schema(name)["class_token"] is True
    assert "class_token" not in backbone_schema("swin_t_iffn")
    without = meta_backbone("deit_t_iffn")
    kept = meta_backbone("deit_t_iffn", class_token=True)
    assert without.pos_embed.shape == (1, 196, 192)
    assert count_parameters(kept) == count_parameters(without) + 2 * 192
    assert "cls_token" not in without.state_dict()
    file = in_memory(create_backbone("deit_t", class_token=False).state_dict(), "file")
    small = create_backbone("deit_t", class_token=False, img_size=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adopt(create_backbone("deit_t", class_token=False), file)
    adopt(small, file)
    assert small.pos_embed.shape == (1, 16, 192)
    message = r"lack the class token .* build it with class_token=False"
    refuses(message, adopt, create_backbone("deit_t"), file)


@torch.no_grad()
def test_weights_with_a_class_token_load_into_deit_that_pools_the_map(tmp_path):
    backbone = create_backbone("deit_t", class_token=False).eval()
    assert backbone.no_weight_decay == {"pos_embed"}
    images = torch.randn(2, 3, 64, 96)
    (feature_map,) = backbone(images)
    assert feature_map.shape == (2, 192, 4, 6)
    torch.testing.assert_close(backbone.embed(images), feature_map.mean(dim=(2, 3)))
    dense = create_backbone("deit_t_iffn", dense=True).eval()
    assert [x.shape[-2:] for x in dense(images)] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    plain = LinearClassifier(create_backbone("deit_t"), 10)
    positions = nn.init.normal_(plain.backbone.pos_embed)[:, 1:]
    path, without = tmp_path / "plain.pth", create_backbone("deit_t_iffn")
    torch.save(plain.state_dict(), path)
    with pytest.warns(UserWarning, match="class token, which this DeiT lacks.*class_token=True"):
        report = load(without, plain.backbone.state_dict(), "plain")
    assert "cls_token" in report.skipped
    assert all(".mlp." in key for key in report.initialised)
    torch.testing.assert_close(without.pos_embed, positions)
    with pytest.warns(UserWarning, match="reads the mean of all tokens"):
        model = LinearClassifier.from_pretrained("deit_t", path, class_token=False)
    torch.testing.assert_close(model.backbone.pos_embed, positions)
    torch.testing.assert_close(model.classifier.weight, plain.classifier.weight)
    with pytest.warns(UserWarning, match="class token"):
        smaller = create_backbone("deit_t", class_token=False, img_size=64, pretrained=path)
    assert smaller.pos_embed.shape == (1, 16, 192)


@pytest.mark.parametrize("per", ["function", "element"])
@pytest.mark.parametrize("act", ["gelu", "silu", "softplus"])
@pytest.mark.parametrize("chunk", [1, 100, 2**20])  # 1: the plain form
def test_nonlinear_sum_is_its_equation(monkeypatch, per, act, chunk):
    monkeypatch.setattr("backbones.fast.torch.nonlinear_sum.CHUNK_ELEMENTS", chunk)
    mixer = build_mixer("nonlinear_sum", dim=5, act=act, per=per, scale=1.0)
    mixer = mixer if chunk == 1 else fast(mixer)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    expected = reference.nonlinear_sum(x, dict(mixer.named_parameters()), 20, act)
    torch.testing.assert_close(mixer(x), expected, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(mixer(x), expected, **EXACT)
    variables, weight = [x, *mixer.parameters()], torch.randn_like(x)
    gradients = (torch.autograd.grad(y, variables, weight) for y in (mixer(x), expected))
    torch.testing.assert_close(*gradients, **EXACT)


def test_nonlinear_sum_of_one_function_and_its_graph():
    x = torch.randn(2, 3, 5)
    plain = create_mixer("nonlinear_sum", 5, arb="off", scale=1.0)
    torch.testing.assert_close(plain(x), 20 * nn.functional.gelu(x))
    torch.testing.assert_close(create_mixer("nonlinear_sum", 5, arb="off")(x), plain(x) / 20)
    assert not list(plain.parameters())
    for per, expected in (("function", 2203816), ("element", 9244840)):
        backbone = meta_backbone("deit_t_nonlinear_sum", mixer={"per": per})
        assert count_parameters(LinearClassifier(backbone, 1000)) == expected
    mixer = fast(create_mixer("nonlinear_sum", 8)).eval()
    free = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(mixer, (torch.randn(2, 4, 4, 8),), dynamic_shapes=free).module()
    x = torch.randn(7, 4, 4, 8)
    torch.testing.assert_close(program(x), mixer(x))


def test_all_rows_but_one_of_the_ablations_and_those_of_lvt_agree():
    rows = [row for row in load_rows("iffn", "classification") if row.reported]
    other = {}
    for row in rows:
        assert row.rule == "torchprofile"
        verdict = row.verdict(row.residuals(row.params, row.exact_macs))
        if verdict != "agrees":
            other[row.backbone, row.table] = verdict
    assert other.pop(("deit_t_iffn_spatial", 2)) == "differs by -0.013 G: misprint"
    lvt = {(f"lvt_r{r}{mixer}", 1) for r in (1, 2, 3, 4) for mixer in ("", "_iffn")}
    assert other.keys() == lvt
    assert all(verdict.startswith("DIFFERS by +0.") for verdict in other.values())
    assert other["lvt_r1", 1] == "DIFFERS by +0.027 G"
    assert len(rows) == 32 + len(lvt)


def test_coefficients_decay_and_start_as_released():
    model = LinearClassifier(meta_backbone("deit_t_iffn", class_token=True), 10)
    exempt = without_decay(model)
    block = "backbone.blocks.0.mlp.branches.1"
    assert {f"{block}.{n}" for n in ("gamma", "theta")} <= exempt
    assert not {f"{block}.{n}" for n in ("alpha", "beta")} & exempt
    decayed = {n for n, p in model.named_parameters() if p.ndim <= 1} - exempt
    assert len(decayed) == 12 * 2 * 2
    groups = layer_decay_groups(model, {"decay_rate": 0.9}, 1e-3, 0.05)
    by_name = {name: g["weight_decay"] for g in groups for name in g["param_names"]}
    assert {n for n, decay in by_name.items() if not decay} == exempt
    plain = meta_backbone("deit_t_iffn_bn")
    assert {n for n, p in plain.named_parameters() if p.ndim <= 1} <= without_decay(plain)
    torch.manual_seed(0)
    spread = [create_mixer(name, 256).dw.conv for name in ("iffn", "iffn_bn")]
    # Uniform to 1 / 3 on both sides; normal of variance 2 / 9.
    torch.testing.assert_close(spread[0].weight.std(), torch.tensor(1 / 27**0.5), rtol=0.05, atol=0)
    torch.testing.assert_close(spread[1].weight.std(), torch.tensor(2**0.5 / 3), rtol=0.05, atol=0)
    assert spread[0].bias.any()
    assert not spread[1].bias.any()


RELEASED_HOSTS = {"deit_t": (192, 3), "deit_s": (384, 3), "deit_b": (768, 5)}
# Of the table that came with the code: parameters in millions, FLOPs in billions.
PRINTED = {"deit_t": (5.00, 1.10), "deit_s": (18.84, 3.93), "deit_b": (73.66, 14.92)}


@pytest.fixture(scope="module")
def released():
    """A checkpoint of DeiT-T under the authors' names, for images of 64 x 64, 10 classes."""
    return fill(shapes(192, 3, positions=16, num_classes=10))


def released_mixer(side):
    theirs = in_float64(fill(mixer_shapes(8, side)))
    mixer = create_mixer("iffn", 8, kernel_size=side).double()
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
    model = LinearClassifier.from_pretrained("deit_t_iffn", tmp_path / "iffn_ti.pth", img_size=64)
    x = images(64, 64, batch=2)
    expected = Network(in_float64(released), heads=3)(x)
    torch.testing.assert_close(model.double().eval()(x), expected, **EXACT)
    assert expected.std() > 0.01


@pytest.mark.parametrize("host", RELEASED_HOSTS)
def test_tensors_and_counts_of_released_checkpoints(host):
    file = {name: torch.empty(shape) for name, shape in shapes(*RELEASED_HOSTS[host], 196).items()}
    backbone = meta_backbone(f"{host}_iffn")
    conversion = convert(in_memory(file, "released"), backbone)
    report = conversion.check(trained=True)
    assert (report.initialised, report.resized, report.dead) == ((), (), ())
    assert set(report.skipped) == {"classifier.weight", "classifier.bias"}
    assert conversion.num_classes == 1000
    model = meta_classifier(f"{host}_iffn")
    params, macs = count_parameters(model), count_macs(model, rule="torchprofile")
    row = next(r for r in load_rows("iffn", "classification") if r.backbone == f"{host}_iffn")
    assert params == row.params
    assert macs / 1e9 == pytest.approx(row.macs, abs=5.1e-5)
    assert (round(params / 1e6, 2), round(macs / 1e9, 2)) == PRINTED[host]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("iffn_bn", {}, "norm=batch, dw_residual=False; build iffn with backbone.mixer.norm=layer "
         "backbone.mixer.dw_residual=outside$"),
        ("iffn", {"dw_residual": False}, "has dw_residual=False; build iffn with [^ ]*outside$"),
        ("iffn", {"act": "silu"}, "has act=silu; .*backbone.mixer.act=gelu$"),
        ("iffn", {"kernel_size": 5}, "has kernel_size=5; .*kernel_size=3$"),
        ("iffn", {"dw_order": "act_bn"}, "has dw_order=act_bn; .*dw_order=bn_act$"),
        ("affn", {"norm": "layer"}, "has spatial=False; build iffn with"),
    ],
    ids=str,
)  # fmt: skip
def test_released_weights_say_which_options_they_need(released, name, options, message):
    backbone = meta_backbone(f"deit_t_{name}", img_size=64, mixer=options)
    with pytest.raises(ValueError, match=f"these are IFFN's released weights.*{message}"):
        convert(in_memory(released, "released"), backbone)


def test_weights_of_other_forms_are_refused(released):
    names = ("deit_t_iffn", "deit_t_iffn_bn")
    forms = [create_backbone(name, img_size=64).state_dict() for name in names]
    backbone = meta_backbone("deit_t_iffn_bn", img_size=64)
    refuses(r"keys differ.*mlp\.bn_mid", convert(in_memory(forms[0], "file"), backbone).check)
    backbone = meta_backbone("deit_t_iffn", img_size=64)
    refuses("batch norms.*norm=batch", convert, in_memory(forms[1], "file"), backbone)
    extra = {f"blocks.0.mlp.conv5x5_dw.{what}": torch.ones(768) for what in ("weight", "bias")}
    backbone = meta_backbone("deit_t_iffn", img_size=64)
    with pytest.raises(ValueError, match=r"unexpected blocks\.0\.mlp\.conv5x5_dw\.weight"):
        convert(in_memory(released | extra, "released"), backbone).check()
