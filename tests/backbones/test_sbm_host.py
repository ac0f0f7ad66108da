"""The SBM networks against a plain one, the paper's counts, and what a backbone must survive."""

import copy
import math

import pytest
import torch

from backbones import backbone_schema, create_backbone, mixer_options
from backbones.analysis.counting import count_macs, count_parameters
from backbones.hosts.sbm.blocks import SBMBlock
from backbones.hosts.sbm.host import SBM
from backbones.layers.axes import to_nchw
from backbones.mixers.sbm import StarBilinearMapping
from backbones.slots import HostConfig
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import load, meta_backbone, meta_classifier, rest_slow, rest_slow_pairs
from tests.references import sbm as reference
from tests.tensors import images


class Small(SBM):
    width, depths = 8, (1, 2, 1, 1)


def small(img_size=(96, 64), dense=False, seed=0, **options):
    """Return a network in float64 and evaluation, with parameters and statistics away from 0 and 1.

    Without norms, small weights keep the products of the blocks finite.
    """
    torch.manual_seed(seed)
    model = Small(HostConfig(img_size, dense=dense), rank=4, **options).double().eval()
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            spread = 1 / math.sqrt(tensor[0].numel()) if tensor.ndim in (2, 4) else 0.2
            spread *= options.get("block_norm", True) or 0.3
            tensor.data = spread * torch.randn_like(tensor) + (tensor.ndim == 1)
            if key.endswith("running_var"):
                tensor.data = tensor.data.abs() + 0.5
    return model


OPTIONS = [
    {}, {"preset": "alt"}, {"preset": "eq2"}, {"num_cpe": 1, "kernel_size": 5}, {"pos": "none"},
    {"pos": "ape", "resample": "bilinear"}, {"shortcut": False}, {"block_norm": False},
    {"use_linear": False}, {"use_bilinear": False}, {"use_gate": False},
    {"mlp_ratio": 2.0, "x_width": 1, "out_proj": False},
]  # fmt: skip


@pytest.mark.parametrize("options", rest_slow(OPTIONS, OPTIONS[:3]), ids=str)
def test_network_equals_the_equations(options):
    model = small(**options)
    tensors = model.state_dict(keep_vars=True)
    shared = {"use_linear", "use_bilinear", "x_width"} & set(options)
    split = options.get("preset") != "eq2" and not shared
    sizes = [(65, 83)] if options else [(65, 83), (96, 64)]
    mode, shortcut = options.get("resample", "bicubic"), options.get("shortcut", True)
    for size in sizes:
        expected = reference.network(
            images(*size, batch=2), tensors, split=split, shortcut=shortcut, mode=mode
        )
        found = model(images(*size, batch=2))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        parameters = list(model.parameters())
        gradients = [
            torch.autograd.grad(
                sum(m.sin().sum() for m in maps), parameters, materialize_grads=True
            )
            for maps in (found, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_norms_of_maps_and_embedding_equal_the_equations():
    model, dense = small(), small(dense=True)
    tensors = dense.state_dict()
    maps = reference.network(images(70, 90, batch=2), tensors, split=True)
    for i, (ours, plain) in enumerate(zip(dense(images(70, 90, batch=2)), maps, strict=True)):
        normed = reference.layer_norm(reference.nhwc(plain), tensors, f"norm{i}")
        torch.testing.assert_close(ours, to_nchw(normed), rtol=1e-9, atol=1e-9)
    last = reference.network(images(70, 90, batch=2), model.state_dict(), split=True)[-1]
    normed = reference.layer_norm(reference.nhwc(last), model.state_dict(), "norm")
    torch.testing.assert_close(model.embed(images(70, 90, batch=2)), normed.mean((1, 2)))
    refuses("build it with dense=False", dense.embed, images(64, 64, batch=2))


def in_g(macs):
    return pytest.approx(macs, abs=5e-5)


PRESETS = [
    ({}, (25_275_080, 43_282_376, 93_440_696), (4.4957, 8.1490, 18.0134)),
    ({"preset": "alt"}, (25_237_640, 43_206_920, 93_327_512), (4.4833, 8.1264, 17.9795)),
    ({"preset": "eq2"}, (22_485_000, 38_184_840, 82_040_408), (4.0465, 7.2273, 15.9564)),
]


@pytest.mark.parametrize(
    ("options", "parameters", "macs"), rest_slow_pairs(PRESETS, PRESETS[:1]), ids=str
)
def test_parameters_and_macs_of_the_presets(options, parameters, macs):
    for name, params, giga in zip("tsb", parameters, macs, strict=True):
        model = meta_classifier(f"sbm_{name}", **options)
        assert count_parameters(model) == params
        assert count_macs(model) / 1e9 == in_g(giga)


@pytest.mark.parametrize(
    ("name", "backbone", "factors"),
    [
        ("sbm_t", 24_762_976, 1_724_800),
        ("sbm_s", 42_770_272, 2_533_888),
        ("sbm_b", 92_673_040, 2_533_888),
    ],
)
def test_parameters_of_dense_networks_and_of_factors(name, backbone, factors):
    model = meta_backbone(name, dense=True)
    assert count_parameters(model) == backbone
    sizes = [p.numel() for key, p in model.named_parameters() if ".space_" in key]
    assert sum(sizes) == factors


FVCORE = [
    ("sbm_t", {}, 4.5213), ("sbm_t", {"use_linear": False}, 4.0721),
    ("sbm_t", {"use_bilinear": False}, 3.8955), ("sbm_t", {"use_gate": False}, 4.3029),
    ("sbm_s", {}, 8.1915), ("sbm_b", {}, 18.0772),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "macs"), rest_slow_pairs(FVCORE, FVCORE[:1]), ids=str)
def test_fvcore_counts_equal_tables_1_and_5(name, options, macs):
    pytest.importorskip("fvcore")
    model = LinearClassifier(create_backbone(name, **options), 1000)
    assert count_macs(model, rule="fvcore") / 1e9 == in_g(macs)


@pytest.mark.parametrize("pos", ["cpe", "ape"])
@torch.no_grad()
def test_checkpoint_of_another_size_gives_what_its_own_network_gives(pos):
    source, other = small((96, 64), pos=pos), small((160, 224), pos=pos, seed=1)
    x = images(160, 224, batch=2)
    expected = source(x)
    report = load(other, source.state_dict(), "source")
    assert not report.initialised
    assert not report.skipped
    baked = copy.deepcopy(source)
    baked.set_grid((40, 56))
    shapes = {key: value.shape for key, value in other.state_dict().items()}
    assert {key: value.shape for key, value in baked.state_dict().items()} == shapes
    for model in (other, baked):
        torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)


def test_checkpoint_of_another_preset_is_refused():
    other = meta_backbone("sbm_t", preset="alt").state_dict()
    refuses(r"187 keys differ .*pre_proj", load, create_backbone("sbm_t"), other, "alt")
    without = {k: v for k, v in create_backbone("sbm_t").state_dict().items() if ".mlp." not in k}
    with pytest.raises(ValueError, match=r"missing stages\.0\.0\.mlp"):
        load(create_backbone("sbm_t"), without, "no FFN")


def test_blocks_follow_the_options_and_the_map():
    backbone = meta_backbone("sbm_s", drop_path_rate=0.3, shortcut=False)
    blocks = [m for m in backbone.modules() if isinstance(m, SBMBlock)]
    paths = [path for block in blocks for path in (block.drop_path1, block.drop_path2)]
    assert {getattr(path, "drop_prob", 0.0) for path in paths} == {0.0}
    backbone = meta_backbone("sbm_b", img_size=(200, 328))
    for stage, blocks in enumerate(backbone.stages):
        stride = 4 * 2**stage
        for block in blocks:
            assert isinstance(block.mixer, StarBilinearMapping)
            assert block.mixer.bilinear.grid == (-(-200 // stride), -(-328 // stride))
    model = meta_classifier("sbm_t")
    assert count_macs(model, 448) / count_macs(model, 224) == pytest.approx(4, abs=1e-3)
    assert mixer_options("ffn", host="sbm_t")["act"] == "silu"
    with torch.device("meta"):
        backbone = create_backbone("sbm_t", mixer={"hidden_ratio": 2})
        again = create_backbone(**backbone_schema("sbm_t"))
    ffn = backbone.stages[0][0].mlp
    assert (ffn.act, ffn.fc1.out_features) == ("silu", 128)
    assert again.mixers() == {}
    assert len(backbone.mixers()) == 17


def test_initialisation():
    torch.manual_seed(0)
    backbone = create_backbone("sbm_t", pos="ape")
    assert backbone.no_weight_decay == {"pos_embed"}
    for key, p in backbone.named_parameters():
        if key == "pos_embed" or ".mlp." in key or "_proj" in key or ".proj." in key:
            expected = 0.0 if key.endswith("bias") else 0.02
            assert p.std().item() == pytest.approx(expected, rel=0.1), key
        elif key.endswith("space_read"):
            assert p.std().item() == pytest.approx((p.shape[1] * p.shape[2]) ** -0.5, rel=0.1)
        elif key.endswith("space_write"):
            assert p.std().item() == pytest.approx(64**-0.5, rel=0.1)
