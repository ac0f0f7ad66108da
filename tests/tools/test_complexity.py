"""Counting rules on single operations and on known networks, and complexity.py itself."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import flop_registry
from torchvision.ops import deform_conv2d

from backbones import create_backbone
from backbones.analysis.counting import RULES, _Counter, count_macs, count_parameters
from backbones.layers.pooling import NeighbourMean
from heads.linear import LinearClassifier
from tests.families import rest_slow
from tools import complexity
from tools.complexity import COUNTED
from tools.papers.dense_counts import count_dense_parts
from tools.papers.published import list_papers, load_rows


def classifier(name, device="meta"):
    with torch.device(device):
        return LinearClassifier(create_backbone(name), 1000)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        return x * self.scale


class Attention(nn.Module):
    """Two heads of 4 channels over 16 tokens."""

    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, images):
        x = images.new_zeros(1, 2, 16, 4)
        bias = images.new_zeros(16, 16) if self.bias else None
        return F.scaled_dot_product_attention(x, x, x, attn_mask=bias)


OPERATIONS = {
    "conv": (nn.Conv2d(3, 5, 3, padding=1), 64 * 5 * 27, 64 * 5 * 27, 64 * 5 * 27),
    "depthwise": (nn.Conv2d(3, 3, 3, padding=1, groups=3), 64 * 27, 64 * 27, 64 * 27),
    "strided": (nn.Conv2d(3, 2, 4, stride=4), 4 * 2 * 48, 4 * 2 * 48, 4 * 2 * 48),
    "linear": (nn.Linear(8, 7), 24 * 56, 24 * 56, 24 * 56),
    "layer_norm": (nn.LayerNorm(8), 0, 5 * 192, 192),
    "layer_norm_without_weights": (nn.LayerNorm(8, elementwise_affine=False), 0, 4 * 192, 0),
    "group_norm": (nn.GroupNorm(1, 3), 0, 5 * 192, 192),
    "batch_norm": (nn.BatchNorm2d(3), 0, 2 * 192, 192),
    "product": (Scaled(), 0, 0, 192),
    "global_mean": (nn.AdaptiveAvgPool2d(1), 0, 192, 3),
    "average_pool": (nn.AvgPool2d(2), 0, 0, 48),
    "neighbour_mean": (NeighbourMean(3), 0, 0, 192),
    "gelu": (nn.GELU(), 0, 0, 0),
    "max_pool": (nn.MaxPool2d(2), 0, 0, 0),
    "attention": (Attention(bias=False), *[2 * 2 * 256 * 4] * 2, 2 * 2 * 256 * 4 + 2 * 256),
    "attention_bias": (Attention(bias=True), *[2 * 2 * 256 * 4] * 2, 2 * 2 * 256 * 4 + 128),
}


def assert_counts(module, macs, fvcore, torchprofile):
    assert count_macs(module, 8) == macs
    assert count_macs(module, (8, 8), "torchprofile") == torchprofile
    pytest.importorskip("fvcore")
    assert count_macs(module, 8, "fvcore") == fvcore


@pytest.mark.parametrize("name", OPERATIONS)
def test_rules_on_operations(name):
    assert_counts(*OPERATIONS[name])


class Function(nn.Module):
    """A function of the images as a module; fvcore needs its parameter."""

    def __init__(self, function):
        super().__init__()
        self.function, self.spare = function, nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.function(x)


def zeros(x, *shape):
    return x.new_zeros(shape)


def filter_spectrum(x, axes, *, norm=None, size=None):
    """A global filter: half spectrum, complex product, and back."""
    spectrum = torch.fft.rfftn(x, s=size, dim=axes, norm=norm)
    return torch.fft.irfftn(spectrum * spectrum.conj(), s=size, dim=axes, norm=norm)


COMPLEX = 3 * 8 * 5  # elements of the half spectrum
# (function of 3 channels of 8x8 pixels, multiply-adds by each rule)
SPECTRA = {
    "real_2d": (lambda x: torch.fft.rfft2(x), 3 * 64 * 6),
    "real_2d_of_other_axes": (lambda x: torch.fft.rfft2(x, dim=(1, 2)), 8 * 24 * math.log2(24)),
    "real_1d_in_other_norm": (lambda x: torch.fft.rfft(x, norm="ortho"), 24 * 8 * 3),
    "padded": (lambda x: torch.fft.rfft(x, n=32), 24 * 32 * 5),
    "complex_2d": (lambda x: torch.fft.fft2(x), 2 * 3 * 64 * 6),
    "and_back": (lambda x: torch.fft.ifft2(torch.fft.fft2(x)), 4 * 3 * 64 * 6),
    "global_filter": (lambda x: filter_spectrum(x, (-2, -1)), 2 * 3 * 64 * 6 + 4 * COMPLEX),
    "filter_of_rows": (lambda x: filter_spectrum(x, (-1,)), 2 * 24 * 8 * 3 + 4 * COMPLEX),
    "by_real": (lambda x: torch.fft.rfft2(x) * x[..., :5], 3 * 64 * 6),
    "matrix": (lambda x: (x + 0j) @ zeros(x + 0j, 8, 7), 4 * 24 * 8 * 7),
    "einsum": (lambda x: torch.einsum("bchw,dc->bdhw", torch.fft.fft2(x), zeros(x + 0j, 5, 3)),
               2 * 3 * 64 * 6 + 4 * 64 * 15),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECTRA)
def test_transforms_and_complex_products(name):
    """By hand: 2 n log2 n for a complex transform, half for a real one, 4 per complex product."""
    function, macs = SPECTRA[name]
    assert_counts(Function(function), *[round(macs)] * 3)


PRODUCTS = {
    "matrix_by_vector": (lambda x: x @ zeros(x, 8), 192),
    "vectors": (lambda x: x.flatten() @ x.flatten(), 192),
    "outer": (lambda x: torch.addr(zeros(x, 8, 8), x[0, 0, 0], x[0, 0, 1]), 64),
    "sum_of_products": (lambda x: torch.addbmm(zeros(x, 8, 8), x[0], x[0]), 3 * 512),
    "bilinear": (lambda x: F.bilinear(x, x[..., :4], zeros(x, 5, 8, 4)), 24 * 5 * (32 + 4)),
    "distances": (lambda x: torch.cdist(x, x), 3 * 64 * 8),
    "deformable": (lambda x: deform_conv2d(x, zeros(x, 1, 18, 8, 8), zeros(x, 5, 3, 3, 3),
                                           padding=1), 64 * 5 * 27),
    "transposed": (lambda x: F.conv_transpose2d(x, zeros(x, 3, 5, 2, 2), stride=2), 64 * 3 * 20),
    "grouped": (lambda x: F.conv2d(x, zeros(x, 6, 1, 3, 3), padding=1, groups=3), 64 * 6 * 9),
    "grouped_attention": (lambda x: F.scaled_dot_product_attention(
        zeros(x, 1, 4, 9, 8), zeros(x, 1, 2, 9, 8), zeros(x, 1, 2, 9, 8), enable_gqa=True,
    ), 2 * 4 * 81 * 8),
    "own_function": (lambda x: Doubled.apply(x), 192 * 8),
    "free": (lambda x: F.grid_sample(x, zeros(x, 1, 4, 4, 2), align_corners=True).cumsum(-1)
             .sort(-1)[0], 0),
}  # fmt: skip


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x @ x.mT


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_kind_of_product_is_counted_on_meta_and_with_weights(name):
    function, macs = PRODUCTS[name]
    assert count_macs(function, 8) == macs
    counter = _Counter(function)
    with counter.counting():
        function(torch.zeros(1, 3, 8, 8))
    assert counter.macs == macs


@torch.library.custom_op("mixerlab_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_operators_without_a_rule_are_named(monkeypatch):
    def inverse(x):
        return torch.linalg.inv(x + torch.eye(8, device=x.device))

    model = nn.Sequential(
        Function(lambda x: inverse(inverse(x))), nn.Sequential(Function(inverse), nn.ReLU())
    )
    for rule in ("macs", "torchprofile"):
        with pytest.warns(UserWarning, match="which are unknown") as caught:
            assert count_macs(model, 8, rule) == 0
        assert [str(one.message).split(",")[0] for one in caught] == [
            f"multiply-adds of {name} (Function) leave out aten.linalg_inv_ex"
            for name in ("0", "1.0")
        ]
    model = nn.Sequential(Function(twice))
    with pytest.warns(UserWarning, match=r"of 0 \(Function\) leave out mixerlab_tests.twice"):
        assert count_macs(model, 8) == 0
    with pytest.raises(ValueError, match=r"^0 \(Function\) cannot be counted by shapes alone: an "):
        count_macs(nn.Sequential(Function(twice)).to("meta"), 8)
    monkeypatch.setitem(
        flop_registry, torch.ops.mixerlab_tests.twice, lambda x, out_val: 2 * out_val.numel()
    )
    assert count_macs(model, 8) == 192


def test_parameters_bound_to_the_grid_equal_those_of_the_image_size(capsys, newcomer):
    """Each of 12 filters has 2 H (W // 2 + 1) values per channel; the position table grows too."""
    newcomer("fourier_filter")
    large, small, oblong = (
        records(capsys, "backbone=deit_t_fourier_filter", f"image_size={size}")[0]
        for size in ("224", "96", "96x160")
    )
    change = 192 * (12 * 2 * (14 * 8 - 6 * 4) + 14 * 14 - 6 * 6)
    assert large["params"] - small["params"] == change
    change = 192 * (12 * 2 * (6 * 6 - 6 * 4) + 6 * 10 - 6 * 6)
    assert oblong["params"] - small["params"] == change
    tokens, half = 14 * 14, 14 * 8
    spectra = 12 * 192 * (2 * tokens * math.log2(tokens) + 4 * half)
    attention = 12 * (197 * 4 * 192 * 192 + 2 * 197 * 197 * 192)
    rest = tokens * 768 * 192 + 192 * 1000
    assert large["macs_g"] * 1e9 == pytest.approx(spectra + attention + rest, abs=1)


def test_image_size_is_height_by_width_and_parameters_are_counted_once():
    conv = nn.Conv2d(3, 1, (2, 1), stride=(2, 1))
    assert count_macs(conv, (4, 6)) == 2 * 6 * 6
    layer = nn.Linear(4, 4)
    assert count_parameters(nn.Sequential(layer, layer, nn.BatchNorm1d(4))) == 20 + 8


def test_an_unknown_rule_and_a_missing_package_raise(monkeypatch):
    with pytest.raises(ValueError, match="one of macs, fvcore, torchprofile; got 'flops'"):
        count_macs(nn.Conv2d(3, 1, 1), 8, "flops")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package fvcore: pip install fvcore"):
        count_macs(nn.Conv2d(3, 1, 1), 8, "fvcore")


@pytest.mark.parametrize(
    ("name", "macs", "torchprofile", "fvcore"),
    [
        ("deit_t", 1.2537, 1.2560, 1.2582),
        ("deit_s", 4.5989, 4.6036, None),
        ("swin_t", 4.4906, 4.4957, 4.5092),
        pytest.param("swin_b", 15.4309, 15.4414, None, marks=pytest.mark.slow),
        pytest.param("poolformer_m48", 11.5333, 11.5619, None, marks=pytest.mark.slow),
    ],
)
def test_rules_on_hosts(name, macs, torchprofile, fvcore):
    model = classifier(name)
    assert count_macs(model) / 1e9 == pytest.approx(macs, abs=5e-5)
    # 1e-5: only the class token passes DeiT's last norm, but PoolFormer's norm sees the whole map.
    assert count_macs(model, rule="torchprofile") / 1e9 == pytest.approx(torchprofile, rel=3e-5)
    if fvcore:
        pytest.importorskip("fvcore")
        with pytest.raises(ValueError, match="not on meta"):
            count_macs(model, rule="fvcore")
        counted = count_macs(classifier(name, "cpu"), rule="fvcore")
        assert counted / 1e9 == pytest.approx(fvcore, abs=5e-5)


def test_counting_on_cpu_on_meta_and_by_fvcore_agree():
    name, size = "swin_t_afbo", (96, 64)
    assert count_macs(classifier(name, "cpu"), size) == count_macs(classifier(name), size)
    pytest.importorskip("fvcore")
    model = classifier("poolformer_s12_afbo", "cpu")
    macs = count_macs(model, 64)
    norms = sum(
        5 * 2 * depth * dim * (16 // 2**stage) ** 2
        for stage, (dim, depth) in enumerate([(64, 2), (128, 2), (320, 6), (512, 2)])
    )
    assert count_macs(model, 64, "fvcore") == macs + norms + 5 * 512 * 4


def run_complexity(capsys, *arguments):
    assert complexity.main(arguments) == 0
    return capsys.readouterr().out


def records(capsys, *arguments):
    return json.loads(run_complexity(capsys, *arguments, "format=json"))


def test_records_of_backbones_sizes_and_rules(capsys):
    keys = ("backbone", "params", "params_m", "macs_g")
    assert records(capsys, "backbone=swin_t_ffn,deit_t_afbo") == [
        dict(zip(keys, ("swin_t_ffn", 28288354, 28.288354, 4.490566656), strict=True)),
        dict(zip(keys, ("deit_t_afbo", 5910952, 5.910952, 1.373343744), strict=True)),
    ]
    arguments = ("backbone=poolformer_s12", "rule=torchprofile")
    (small,) = records(capsys, *arguments, "image_size=128")
    (wide,) = records(capsys, *arguments, "image_size=128x512")
    assert wide["macs_g"] == pytest.approx(4 * small["macs_g"], rel=1e-3)
    assert wide["params"] == small["params"] == 11915176


@pytest.mark.parametrize(
    ("typed", "count", "shown"),
    [
        ("paper=afbo backbone=deit_t_glu,deit_t_swiglu", 2, ["agrees", "5,720,488"]),
        # PosMLP's table prints 5.10 G, and SBM's whole millions.
        ("paper=posmlp table=3 backbone=posmlp_t_sgu", None, [" 5.10 "]),
        ("paper=iffn table=2 backbone=deit_t_iffn", None, [" 5.00 "]),
        # Reported, its change, ours, and their difference: of parameters, then of FLOPs.
        ("paper=afbo backbone=poolformer_s24_afbo", None,
         ["22.0 +0.6 +0.56 -0.04", "3.7 +0.3 +0.54 +0.24"]),
    ],
)  # fmt: skip
def test_a_papers_table_shows_its_digits_and_changes(typed, count, shown, capsys):
    header, *lines = run_complexity(capsys, *typed.split()).splitlines()
    assert header.split("  ")[0] == "backbone"
    assert "s24" not in typed or header.count("paper change") == 2
    assert count in (None, len(lines))
    for line in lines if count else lines[:1]:
        assert all(words in f" {' '.join(line.split())} " for words in shown)


def test_causes_only_apply_to_the_published_count(capsys):
    typed = ("paper=posmlp", "table=2", "backbone=gmlp_b")
    (own,), (other,) = records(capsys, *typed), records(capsys, *typed, "image_size=256")
    assert own["verdict"] == "differs by -0.08 G: counting by fvcore"
    assert "DIFFERS by +" in other["verdict"]
    assert "counting" not in other["verdict"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("bakbone=deit_t", "did you mean backbone=?"),
        ("--rule=macs", "arguments are key=value"),
        ("rule=flops", "rule must be one of macs, fvcore, torchprofile; got 'flops'"),
        ("image_size=big", "must be 224 or 800x1280, from 64 up (32 with patch_size)"),
        ("backbone=swin_x", "no backbone called 'swin_x'; did you mean swin_t"),
        ("table=3", "table=3 needs a paper"),
        ("backbone=vgg*", "no backbone matches 'vgg*'"),
        ("head=mask_rcnn", "head=mask_rcnn needs a task: pass task=detection"),
        ("task=transfer", "task must be one of classification, detection, forecasting, gen"),
        ("mixer.g2=6", "did you mean backbone.mixer.g2=6?"),
        ("backbone.dense=true", "leave backbone.dense=true out: the classification network is"),
        ("paper=afbo backbone=deit_t_afbo backbone.mixer.g2=6", "leave backbone.mixer.g2=6 out"),
        ("paper=afbo backbone=swin_s_glu", "backbone=swin_s_glu is not in paper=afbo"),
        ("task=detection head=upernet backbone=deit_t",
         "head=upernet is not for task=detection; pass one of cascade_mask_rcnn"),
    ],
)  # fmt: skip
def test_wrong_arguments_end_with_one_line(capsys, typed, message):
    assert complexity.main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_an_ablation_is_counted_from_the_command_line(capsys):
    first, second = records(
        capsys, "backbone=deit_t_afbo", "backbone.mixer.g1=2", "backbone.mixer.g2=4,6"
    )
    (row,) = (row for row in load_rows("afbo") if row.options == {"mixer": {"g1": 2, "g2": 6}})
    assert first["backbone"] == "deit_t_afbo backbone.mixer.g1=2 backbone.mixer.g2=4"
    assert second["backbone"] == str(row)
    assert first["params"] < second["params"] == row.params
    assert complexity.CHOICES["rule"] == tuple(RULES)


ROWS = [row for paper in list_papers() for row in load_rows(paper)]
DENSE = [row for row in ROWS if row.task in ("detection", "segmentation")]


@pytest.fixture
def _toolkits():
    pytest.importorskip("mmdet")
    pytest.importorskip("mmseg")


def test_every_dense_row_has_counts():
    assert all(row.counted_at for row in DENSE)
    assert len(DENSE) > 40
    # An independent count with replicas of UPerHead and FFNet_seg.
    printed = [941.6, 1009.1, 1157.3, 74.57, 572.64]
    rows = load_rows("ffnet", "segmentation")
    found = [row.macs for row in rows if row.backbone.startswith("ffnet")]
    assert found == pytest.approx(printed, abs=0.051)


@pytest.mark.parametrize("name", rest_slow([r.name for r in DENSE], ["ffnet_t3_ffnet_seg_ade20k"]))
@pytest.mark.usefixtures("_toolkits")
def test_dense_rows_are_exact(name):
    (row,) = (row for row in DENSE if row.name == name)
    typed = {key: value for key, value in row.options.items() if key != "fused"}
    parts = count_dense_parts(
        row.backbone, json.dumps(typed), row.task, row.head, json.dumps(dict(row.head_options)),
        row.classes or COUNTED[row.task].targets["num_classes"], tuple(row.counted_at), row.rule,
    )  # fmt: skip
    assert sum(params for _, params, _ in parts) == row.params
    assert sum(macs for *_, macs in parts) == row.exact_macs


@pytest.mark.usefixtures("_toolkits")
def test_second_stages_and_auxiliary_heads_are_counted_as_the_toolkits_do(capsys):
    """1000 boxes through two linear layers, 100 through the masks' convolutions."""
    counted = records(capsys, "task=detection", "backbone=resnet18", "image_size=256x320")
    found = {record["part"]: record["macs_g"] for record in counted}
    assert list(found) == ["backbone", "neck", "rpn head", "bbox head", "mask head", "whole"]
    linear = 1000 * (256 * 49 * 1024 + 1024 * 1024 + 1024 * (81 + 320))
    assert found["bbox head"] == pytest.approx(linear / 1e9)
    side, wide = 14 * 14, 28 * 28
    masks = 100 * (4 * side * 256 * 256 * 9 + side * 256 * 256 * 4 + wide * 256 * 80)
    assert found["mask head"] == pytest.approx(masks / 1e9)
    assert found["whole"] == pytest.approx(sum(found.values()) - found["whole"])
    assert {record["head"] for record in counted} == {"mask_rcnn"}
    counted = records(capsys, "task=segmentation", "backbone=resnet18", "image_size=64")
    (auxiliary,) = (one for one in counted if one["part"] == "auxiliary head (training)")
    assert auxiliary["macs_g"] == 0 < auxiliary["params"]
