"""Tables that depend on the map size, resized to other sizes; weights used in other equations."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.layers import resample_abs_pos_embed
from torch import nn

from backbones import Mixer, create_backbone, list_hosts, register_mixer
from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.behaviour import fingerprint
from backbones.checkpoints.equations import FINGERPRINT, RECORD, START, first_change, plain_value
from backbones.checkpoints.opening import Checkpoint
from backbones.layers.grid_tables import common_source, resize_table
from backbones.mixers.ffn import FFN
from backbones.options import variant_of
from backbones.registry import find_mixer
from heads.linear import LinearClassifier
from tests.families import drawn, meta_backbone, rest_slow
from tests.tensors import tokens

SMALL, LARGE = (4, 4), (6, 7)


def test_tables_are_resampled_as_in_timm_and_gfnet():
    table = tokens(16, 5)
    expected = resample_abs_pos_embed(table[None], LARGE, SMALL, 0)[0]
    close = {"rtol": 1e-5, "atol": 1e-5}  # timm computes in single precision
    torch.testing.assert_close(resize_table(table, "N C", SMALL, LARGE), expected, **close)
    oblong = resize_table(table.unflatten(0, SMALL), "H W C", SMALL, LARGE)
    torch.testing.assert_close(oblong, expected.unflatten(0, LARGE), **close)
    first = resize_table(table.T.unflatten(1, SMALL)[None], "1 C H W", SMALL, LARGE)
    torch.testing.assert_close(first[0], expected.T.unflatten(1, LARGE), **close)
    table = tokens(4, 3, 5, 2)
    picture = table.reshape(1, 4, 3, 10).permute(0, 3, 1, 2)
    resized = F.interpolate(picture, (6, 4), mode="bicubic", align_corners=True)
    expected = resized.permute(0, 2, 3, 1).reshape(6, 4, 5, 2)
    torch.testing.assert_close(resize_table(table, "H F C 2", SMALL, LARGE), expected)
    last = resize_table(table.permute(2, 3, 0, 1), "C 2 H F", SMALL, LARGE)
    torch.testing.assert_close(last, expected.permute(2, 3, 0, 1))
    mean = torch.full((16, 16), 1 / 16, dtype=torch.float64)
    torch.testing.assert_close(
        resize_table(mean, "N n", SMALL, LARGE), torch.full((42, 42), 1 / 42, dtype=torch.float64)
    )
    rows = torch.full((4, 4), 1 / 4, dtype=torch.float64)
    torch.testing.assert_close(
        resize_table(rows, "H h", SMALL, LARGE), torch.full((6, 6), 1 / 6, dtype=torch.float64)
    )
    # The resized matrix has about the same effect on a smooth picture.
    matrix = torch.softmax(-torch.cdist(places(8, 8), places(8, 8)) / 0.2, dim=-1)
    grown = resize_table(matrix, "N n", (8, 8), (12, 16))
    pictures = [(2 * places(*size)).sin().sum(-1) for size in ((8, 8), (12, 16))]
    small, large = matrix @ pictures[0], grown @ pictures[1]
    expected = F.interpolate(small.view(1, 1, 8, 8), (12, 16), mode="bilinear")[0, 0].flatten()
    assert (large - expected).abs().max() < 0.1 * small.abs().max()


def places(height, width):
    rows, columns = ((torch.arange(n, dtype=torch.float64) + 0.5) / n for n in (height, width))
    return torch.cartesian_prod(rows, columns)


@pytest.mark.parametrize(
    "axes", ["N C", "H W", "H F C 2", "N n", "R heads", "hidden n", "W", "w w"]
)
def test_tables_at_their_own_size_are_returned_unchanged(axes):
    sizes = {"N": 20, "H": 4, "W": 5, "F": 3, "R": 63}
    table = tokens(*(sizes.get(word.upper(), 2) for word in axes.split()))
    assert resize_table(table, axes, (4, 5), (4, 5)) is table
    back = resize_table(table.half(), axes, (4, 5), (9, 3))
    assert back.dtype == torch.float16
    assert back.is_contiguous()


@pytest.mark.parametrize(
    ("own", "theirs", "found"),
    {
        "filter": ((6, 4, 8, 2), (4, 3, 8, 2), ((4, 4), "H F axis2 axis3")),
        "filter_in_front": ((8, 6, 4), (8, 14, 8), ((14, 14), "axis0 H F")),
        "places": ((1, 36, 8), (1, 196, 8), ((14, 14), "axis0 N axis2")),
        "map": ((8, 6, 6), (8, 4, 4), ((4, 4), "axis0 H W")),
        "oblong": ((8, 6, 6), (8, 4, 5), ((4, 5), "axis0 H W")),
        "matrix": ((36, 36), (16, 16), ((4, 4), "N n")),
        "offsets": ((121, 3), (49, 3), ((4, 4), "R axis1")),
        "rows": ((6, 6), (4, 4), ((4, 4), "H W")),
        "oblong_of_unknown_sides": ((36, 8), (15, 8), None), "channels": ((8, 8), (4, 16), None),
        "more_axes": ((6, 6), (4, 4, 1), None),
    }.values(),
)  # fmt: skip
def test_undeclared_axes_are_recognised(own, theirs, found):
    result = common_source({"table": (own, theirs)}, (6, 6), {})
    assert result == (None if found is None else (found[0], {"table": found[1]}))


class Naive(Mixer):
    def __init__(self, dim, *, grid=(14, 14)):
        super().__init__()
        count = grid[0] * grid[1]
        self.tokens, self.places = nn.Linear(count, count), nn.Parameter(torch.zeros(count, dim))
        self.register_buffer("index", torch.arange(count))

    def mix(self, x):
        mixed = self.tokens((x.flatten(1, 2) + self.places).mT).mT
        return mixed.unflatten(1, x.shape[1:3])

    def mix_prefix(self, prefix):
        return prefix


def make_checkpoint(backbone, record=True):
    content = {"network": backbone.record} if record else {}
    return Checkpoint("x.ckpt", content, weights=dict(backbone.state_dict()))


def load_checkpoint(checkpoint, name, **options):
    backbone = create_backbone(name, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = adopt(backbone, checkpoint)
    return backbone, report, [str(one.message) for one in caught]


@pytest.mark.parametrize("record", [True, False])
def test_filters_are_resized_to_other_sizes_and_dense_networks(newcomer, record):
    newcomer("fourier_filter")
    name, key = "poolformer_s12_fourier_filter", "stages.0.blocks.{}.mlp.filter"
    file = make_checkpoint(create_backbone(name, img_size=64), record)
    same, _, warned = load_checkpoint(file, name, img_size=64)
    assert not warned
    assert all(torch.equal(v, file.tensors[k]) for k, v in same.state_dict().items())
    for options, side in (({"img_size": 96}, 24), ({"dense": True}, 56)):
        backbone, report, warned = load_checkpoint(file, name, **options)
        shapes = f"(16, 9, 64, 2) -> ({side}, {side // 2 + 1}, 64, 2)"
        assert [line for line in warned if "interpolated" in line] == [
            "x.ckpt: 12 tables of mixers were interpolated to this map size "
            f"({key.format(0)} {shapes}, {key.format(1)} {shapes}, ...)"
        ]
        assert len(report.resized) == 12
        expected = resize_table(file.tensors[key.format(0)], "H F C 2", (16, 16), (side, side))
        torch.testing.assert_close(backbone.state_dict()[key.format(0)], expected)
        with torch.no_grad():
            assert backbone.eval()(torch.zeros(1, 3, 70, 130))[0].shape[-2:] == (18, 33)


def test_tables_are_resized_with_and_without_declared_axes(registering):
    register_mixer("naive", kind="channel", source="this test")(Naive)
    first = create_backbone("deit_t_naive", img_size=64)
    second, _, warned = load_checkpoint(make_checkpoint(first), "deit_t_naive", img_size=96)
    assert any(line.startswith("x.ckpt: 48 tables of mixers were interpolated") for line in warned)
    old, new = first.blocks[3].mlp, second.blocks[3].mlp
    for key, axes in (("tokens.weight", "N n"), ("tokens.bias", "N"), ("places", "N C")):
        expected = resize_table(old.get_parameter(key), axes, (4, 4), (6, 6))
        torch.testing.assert_close(new.get_parameter(key), expected)
    assert torch.equal(new.index, torch.arange(36))

    class Declared(Naive):
        def __init__(self, dim, *, grid=(14, 14)):
            super().__init__(dim, grid=grid)
            self.grid_axes = {"tokens.weight": "N n", "tokens.bias": "N", "places": "N C"}

    register_mixer("declared", kind="channel", source="this test")(Declared)
    first = create_backbone("deit_t_declared", img_size=(64, 144))
    second, _, warned = load_checkpoint(make_checkpoint(first), "deit_t_declared", img_size=96)
    assert any("interpolated to this map size" in line for line in warned)
    expected = resize_table(first.blocks[0].mlp.places, "N C", (4, 9), (6, 6))
    torch.testing.assert_close(second.blocks[0].mlp.places, expected)


@pytest.mark.parametrize("name", ["deit_t", "sbm_t", "deit_t_fourier_filter"])
def test_a_task_s_checkpoint_works_at_another_size(newcomer, name):
    newcomer("fourier_filter")
    first, second = (
        LinearClassifier(create_backbone(name, img_size=size), 3).eval() for size in (64, 96)
    )
    tensors = {f"model.{key}": value for key, value in first.state_dict().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adopt(second, Checkpoint("x.ckpt", {"state_dict": tensors}))
    assert ["interpolated" in str(one.message) for one in caught] == [True] * ("_f" in name)
    images = tokens(1, 3, 64, 64).float()
    with torch.no_grad():
        torch.testing.assert_close(first(images), second(images), rtol=0.5, atol=0.5)


OBLONG = [((64, 96), (96, 64)), ((64, 144), (96, 96)), ((96, 96), (64, 144))]


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize(("old", "new"), OBLONG)
def test_positions_are_interpolated_at_equal_token_counts(old, new, class_token):
    first, second, again = (
        LinearClassifier(create_backbone("deit_t", img_size=size, class_token=class_token), 3)
        for size in (old, new, old)
    )
    rows, expected = (places(*network.backbone.grid)[:, 0] for network in (first, second))
    first.backbone.pos_embed.data[0, class_token:, 0] = rows
    tensors = {f"model.{key}": value for key, value in first.state_dict().items()}
    for network in (second, again):
        adopt(network, Checkpoint("x.ckpt", {"state_dict": tensors}))
    found = second.backbone.pos_embed.detach()[0, class_token:, 0]
    assert (found - expected).abs().max() < 0.05
    assert torch.equal(again.backbone.pos_embed, first.backbone.pos_embed)


@pytest.fixture
def stars(registering):
    class Star(FFN):
        def __init__(self, dim, *, hidden_ratio=4.0, plus=False, drop=0.0):
            super().__init__(dim, hidden_ratio=hidden_ratio, drop=drop)
            self.plus = plus

        def mix(self, x):
            h = self.fc1(x)
            return self.fc2(h + h.tanh() if self.plus else h * h.tanh())

    register_mixer("comet", kind="channel", source="this test")(Star)

    @register_mixer("comet_sum", kind="channel", source="this test")
    @variant_of(Star, fixed={"plus": True})
    def comet_sum():
        """The sum."""


AS_TRAINED = "was trained with other options and equal shapes; this network has "


@pytest.mark.parametrize(
    ("first", "second", "warned"),
    [
        ({}, {}, ""),
        ({}, {"mixer": {"drop": 0.1}}, ""),
        ({}, {"name": "deit_t_comet_sum"}, "channel mixer comet_sum instead of comet; train"),
        ({"name": "deit_t"}, {"name": "deit_t"}, ""),
        ({"name": "deit_t"}, {"name": "deit_t", "mixer": {"act": "silu"}}, "act=silu instead of"),
        ({"mixer": {"plus": True}}, {}, "backbone.mixer.plus=False instead of True; train"),
        ({"name": "deit_t"}, {}, "channel mixer comet instead of ffn"),
        ({"name": "deit_t"}, {"name": "deit_t_glu"}, ""),  # GLU is initialised from scratch
        ({"name": "sbm_t"}, {"name": "sbm_t", "shortcut": False}, "backbone.shortcut=False inst"),
    ],
)
def test_loading_weights_into_another_equation_warns(stars, first, second, warned):
    one, other = (
        {"name": "deit_t_comet", "img_size": 64, **options} for options in (first, second)
    )
    with torch.device("meta"):
        file = make_checkpoint(create_backbone(**one))
    with torch.device("meta"):
        _, _, found = load_checkpoint(file, **other)
    found = [line for line in found if AS_TRAINED in line]
    assert len(found) == bool(warned)
    assert all(warned in line for line in found)


PROBED = ("resnet18", "bert_tiny", "dit_tiny", "ffnet_1d", "ffnet_3d_tiny", "edsr_baseline",
          "last_value")  # fmt: skip


@pytest.mark.parametrize("name", rest_slow(sorted({*PROBED, *list_hosts(), *drawn(5)}), PROBED))
def test_a_fingerprint_has_each_part_and_leaves_no_trace(name):
    options = {"model": "vit_tiny_patch16_224"} if name.startswith("timm") else {}
    like, state = meta_backbone(name, **options), torch.get_rng_state()
    found = fingerprint(create_backbone, like.made_by, like.record)
    assert torch.equal(torch.get_rng_state(), state)
    parts = {*like.block_names(), *like.token_mixers(), *like.channel_mixers()}
    assert found.keys() == {*parts, "output", "embedding", START}
    if name in PROBED:
        assert fingerprint(create_backbone, like.made_by, like.record) == found


def test_the_fingerprint_of_a_checkpoint_is_of_its_equation_alone(stars, monkeypatch, tmp_path):
    backbone = create_backbone("deit_t_comet", img_size=64)
    path, record = tmp_path / "checkpoints" / "best.ckpt", dict(backbone.record)
    answers = fingerprint(create_backbone, backbone.made_by, record)
    record[FINGERPRINT] = {"options": plain_value(backbone.made_by), "answers": answers}
    file = {RECORD: record, "state_dict": backbone.state_dict()}
    path.parent.mkdir()
    torch.save(file, path)
    star = find_mixer("comet").build

    def said():
        with warnings.catch_warnings(record=True) as caught:
            create_backbone("deit_t_comet", img_size=96, pretrained=path)
        return [str(one.message) for one in caught if "code" in str(one.message)]

    assert not said()
    build = star.__init__
    monkeypatch.setattr(star, "__init__", lambda self, *a, **k: (
        build(self, *a, **k), self.fc1.weight.data.normal_())[0])  # fmt: skip
    again = fingerprint(create_backbone, backbone.made_by, record)
    assert (said(), first_change(answers, again)) == ([], START)
    monkeypatch.setattr(star, "mix", lambda self, x: self.fc2(self.fc1(x).cos()))
    (line,) = said()
    assert line.startswith(f"{path} was trained by other code: blocks.0.mlp computes another fun")
    assert f"no file in {tmp_path / 'source'} differs" in line
    record[FINGERPRINT]["options"]["name"] = "absent"
    torch.save(file, path)
    assert "builds another network today (there is no backbone called 'absent'" in said()[0]


@pytest.mark.parametrize("size", [(7, 1), (1, 7), (2, 1), (1, 1), (5, 3)])
def test_a_table_of_two_axes_is_resampled_as_by_pillow(size):
    table = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    found = resize_table(table, "H W", (4, 6), size)
    picture = Image.fromarray(table.numpy())
    wanted = np.asarray(picture.resize(size[::-1], Image.Resampling.BICUBIC))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)
