"""Hosts against their originals: whole networks, the names in checkpoints, attention in windows."""

import functools
import itertools

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.swin_transformer import shifted_window_attention

from backbones import create_backbone, list_hosts
from backbones.analysis.counting import count_parameters
from backbones.hosts import swin
from backbones.mixers.attentions import window_attention
from heads.linear import LinearClassifier
from tests.families import (
    HOSTS,
    SMALLEST,
    load_classifier,
    meta_backbone,
    meta_classifier,
    rest_slow,
    short,
)
from tests.references.names import AUTHORS
from tests.references.posmlp import place
from tests.tensors import images, randomise_network

pytestmark = pytest.mark.usefixtures("no_grad")

TIMM_NAMES = {
    "deit_t": "deit_tiny_patch16_224", "deit_s": "deit_small_patch16_224",
    "deit_b": "deit_base_patch16_224", "swin_t": "swin_tiny_patch4_window7_224",
    "swin_s": "swin_small_patch4_window7_224", "swin_b": "swin_base_patch4_window7_224",
    "gcvit_xxt": "gcvit_xxtiny", "gcvit_xt": "gcvit_xtiny", "gcvit_t": "gcvit_tiny",
    "mixer_s16": "mixer_s16_224", "mixer_b16": "mixer_b16_224", "convnext_t": "convnext_tiny",
    **{name: name for name in list_hosts() if name.startswith(("poolformer", "pvt_v2", "resnet"))},
}  # fmt: skip
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.parametrize("name", rest_slow(TIMM_NAMES, SMALLEST))
def test_has_the_tensors_of_timm(name):
    model = meta_classifier(name)
    with torch.device("meta"):
        theirs = timm.create_model(TIMM_NAMES[name], num_classes=1000)
    assert count_parameters(model) == count_parameters(theirs)
    converted = model.backbone.convert_state_dict(dict(theirs.state_dict()))
    own = {key.removeprefix("backbone."): value for key, value in model.state_dict().items()}
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in converted.items()}


@pytest.mark.parametrize(("built", "run"), [(224, (224, 224)), ((96, 128), (96, 128))], ids=str)
def test_deit_equals_timm(built, run):
    theirs = randomise_network(timm.create_model(TIMM_NAMES["deit_t"], img_size=built))
    model = load_classifier(create_backbone("deit_t", img_size=built), theirs.state_dict())
    torch.testing.assert_close(model(images(*run)), theirs(images(*run)), **CLOSE)
    tokens = theirs.forward_features(images(*run))
    expected = tokens[:, 1:].transpose(1, 2).unflatten(2, (run[0] // 16, run[1] // 16))
    torch.testing.assert_close(model.backbone(images(*run))[0], expected, **CLOSE)


@pytest.mark.parametrize("size", [(96, 128), (70, 100)], ids=str)
def test_deit_equals_timm_at_other_sizes_than_built_for(size):
    options = {"dynamic_img_size": True, "dynamic_img_pad": True}
    theirs = randomise_network(timm.create_model(TIMM_NAMES["deit_t"], **options))
    model = load_classifier(create_backbone("deit_t"), theirs.state_dict())
    torch.testing.assert_close(model(images(*size)), theirs(images(*size)), **CLOSE)


def test_deit_positions_are_resampled_from_the_grid_it_was_built_for():
    built = create_backbone("deit_t", img_size=(96, 128)).eval()
    turned = create_backbone("deit_t", img_size=(128, 96)).eval()
    weights = randomise_network(built).float().state_dict()
    turned.load_state_dict(weights | {"pos_embed": turned.pos_embed})
    table = built.pos_embed[:, 1:].unflatten(1, (6, 8)).permute(0, 3, 1, 2)
    table = F.interpolate(table, (8, 6), mode="bicubic", antialias=True).flatten(2).mT
    turned.pos_embed.data = torch.cat([built.pos_embed[:, :1], table], dim=1)
    x = images(128, 96).float()
    torch.testing.assert_close(built.embed(x), turned.embed(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("swin_t", (224, 224)),
        pytest.param("gcvit_xxt", (224, 224), marks=pytest.mark.slow),
        pytest.param("mixer_s16", (224, 224), marks=pytest.mark.slow),
        ("pvt_v2_b1", (75, 110)),
        ("resnet18", (75, 110)),
        pytest.param("resnet50", (75, 110), marks=pytest.mark.slow),
        pytest.param("convnext_t", (64, 96), marks=pytest.mark.slow),  # by the test below as well
    ],
    ids=str,
)
def test_equals_timm(name, size):
    theirs = randomise_network(timm.create_model(TIMM_NAMES[name]))
    model, x = load_classifier(create_backbone(name), theirs.state_dict()), images(*size)
    torch.testing.assert_close(model(x), theirs(x), **CLOSE)
    # The last map, which the classifier reads, may be normed; ResNet's first is the stem's.
    maps = theirs.forward_intermediates(x, intermediates_only=True)[-4:-1]
    for found, expected in zip(model.backbone(x)[:-1], maps, strict=False):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("size", [(64, 64), (75, 110)], ids=str)
def test_poolformer_equals_the_authors(size):
    theirs = randomise_network(timm.create_model("poolformer_s12"))
    model = load_classifier(create_backbone("poolformer_s12"), theirs.state_dict())
    # Ours pads to a multiple of the stem's stride, or the first map would lose a column.
    maps = theirs.forward_features(F.pad(images(*size), (0, -size[1] % 4, 0, -size[0] % 4)))
    norm, head = theirs.head.norm, theirs.head.fc
    normed = F.group_norm(maps, 1, norm.weight, norm.bias, eps=1e-5)
    expected = normed.mean(dim=(2, 3)) @ head.weight.T + head.bias
    torch.testing.assert_close(model(images(*size)), expected, **CLOSE)
    torch.testing.assert_close(model.backbone(images(*size))[-1], maps, **CLOSE)


@pytest.mark.parametrize("name", rest_slow(list(AUTHORS), list(AUTHORS)[:1]))
def test_takes_the_authors_names(name):
    model = LinearClassifier(create_backbone(name), 1000)
    randomise_network(model)
    plain = {key.removeprefix("backbone."): value for key, value in model.state_dict().items()}
    theirs = AUTHORS[name](plain)
    assert len(set(theirs) - set(plain)) > 4
    again = load_classifier(create_backbone(name), theirs)
    torch.testing.assert_close(again(images(64, 64)), model(images(64, 64)), rtol=0, atol=0)


@functools.cache
def swin_block(index, dense=False):
    return randomise_network(short("swin_t", dense=dense).layers[0].blocks[index])


def by_torchvision(block, x, shift):
    attn = block.attn
    weights = (attn.qkv.weight, attn.proj.weight, attn._get_rel_pos_bias())
    biases = {"qkv_bias": attn.qkv.bias, "proj_bias": attn.proj.bias, "training": False}
    return shifted_window_attention(x, *weights, [7, 7], attn.num_heads, [shift, shift], **biases)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("index", [0, 1], ids=["plain", "shifted"])
@pytest.mark.parametrize("size", [(25, 28), (50, 76), (8, 30)], ids=str)
def test_swin_attention_equals_torchvision(size, index, dense):
    block = swin_block(index, dense)
    x = torch.randn(2, *size, 96, dtype=torch.float64)
    expected = by_torchvision(block, x, shift=3 * index)
    torch.testing.assert_close(block._attn(x), expected, rtol=0, atol=1e-10)


def test_swin_classifier_leaves_a_single_window_unshifted():
    x = torch.randn(2, 7, 7, 96, dtype=torch.float64)
    for index in (0, 1):
        expected = by_torchvision(swin_block(index), x, shift=0)
        torch.testing.assert_close(swin_block(index)._attn(x), expected, rtol=0, atol=1e-10)


def one_window(block, x, shift=(0, 0)):
    """Attention within one window by loops over all pairs of its tokens.

    After rolling, tokens attend to each other only if no edge of the map lies between them.
    """
    batch, height, width, dim = x.shape
    heads, table = block.attn.num_heads, block.attn.relative_position_bias_table
    tokens = x.reshape(batch, height * width, dim)
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in block.attn.qkv(tokens).chunk(3, dim=-1))
    logits = torch.einsum("bnhc,bmhc->bhnm", q, k) * (dim // heads) ** -0.5
    places = [(i, j) for i in range(height) for j in range(width)]
    for n, (i, j) in enumerate(places):
        for m, (r, c) in enumerate(places):
            same = (i < shift[0], j < shift[1]) == (r < shift[0], c < shift[1])
            rolled = [(i - shift[0]) % height, (j - shift[1]) % width]
            others = [(r - shift[0]) % height, (c - shift[1]) % width]
            dy, dx = (a - b for a, b in zip(rolled, others, strict=True))
            logits[:, :, n, m] += table[(dy + 6) * 13 + dx + 6] if same else -100.0
    mixed = torch.einsum("bhnm,bmhc->bnhc", logits.softmax(-1), v)
    return block.attn.proj(mixed.reshape(tokens.shape)).reshape(x.shape)


@pytest.mark.parametrize(
    ("size", "shift", "dense"),
    [
        ((7, 7), (3, 3), True), ((7, 7), (0, 0), False), ((4, 5), (0, 0), True),
        ((4, 5), (0, 0), False), ((1, 6), (0, 0), True), ((2, 7), (0, 3), True),
    ],
    ids=str,
)  # fmt: skip
def test_swin_attention_of_small_maps_equals_the_loops(size, shift, dense):
    block = swin_block(1, dense)
    x = torch.randn(1, *size, 96, dtype=torch.float64)
    expected = one_window(block, x, shift)
    torch.testing.assert_close(block._attn(x), expected, rtol=0, atol=1e-10)


@torch.enable_grad()
def test_swin_mask_made_in_inference_mode_serves_training():
    backbone = create_backbone("swin_t")
    with torch.inference_mode():
        backbone(torch.zeros(1, 3, 72, 88))
    backbone(torch.zeros(1, 3, 72, 88))[-1].sum().backward()


def gcvit_attention(block, x, query):
    """Windows one by one, zeros where the map ends, softmax over all places."""
    side, (_, height, width, dim) = block.window()[0], x.shape
    heads, table = block.attn.num_heads, block.attn.rel_pos.relative_position_bias_table
    places = [(i, j) for i in range(side) for j in range(side)]
    offsets = [[(i - r + side - 1) * (2 * side - 1) + j - c + side - 1 for r, c in places]
               for i, j in places]  # fmt: skip
    bias = table[torch.tensor(offsets)].permute(2, 0, 1)
    out = torch.zeros_like(x)
    for top in range(0, height, side):
        for left in range(0, width, side):
            part = x[0, top : top + side, left : left + side]
            rows, columns = part.shape[:2]
            window = torch.zeros(side, side, dim, dtype=x.dtype)
            window[:rows, :columns] = part
            mapped = list(
                block.attn.qkv(window.flatten(0, 1)).chunk(2 if block.attn.use_global else 3, -1)
            )
            if block.attn.use_global:
                mapped = [query[0].flatten(0, 1), *mapped]
            q, k, v = (m.unflatten(-1, (heads, -1)).transpose(0, 1) for m in mapped)
            weights = (q @ k.mT * (dim // heads) ** -0.5 + bias).softmax(-1)
            mixed = block.attn.proj((weights @ v).transpose(0, 1).flatten(1))
            out[0, top : top + side, left : left + side] = mixed.unflatten(0, (side, side))[
                :rows, :columns
            ]
    return out


@pytest.mark.parametrize("index", [0, 1], ids=["local", "global"])
@pytest.mark.parametrize("size", [(9, 16), (4, 7), (14, 7)], ids=str)
def test_gcvit_attention_equals_the_loops(index, size):
    stage = randomise_network(short("gcvit_xxt").stages[0])
    x = torch.randn(1, *size, 64, dtype=torch.float64)
    query = stage._global_query(torch.randn(1, 64, 3, 5, dtype=torch.float64))
    assert query.shape == (1, 7, 7, 64)
    found = stage.blocks[index]._window_attn(x, query)
    expected = gcvit_attention(stage.blocks[index], x, query)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [(14, 14), (5, 9), (15, 4), (30, 17)], ids=str)
def test_mixer_of_tokens_equals_the_loops(size, shifted):
    mlp = randomise_network(short("mixer_s16", dense=True).blocks[int(shifted)].mlp_tokens)
    x = torch.randn(1, *size, 3, dtype=torch.float64)
    groups: dict = {}
    for i in range(size[0]):
        for j in range(size[1]):
            (row, down), (column, across) = (
                place(index, length, 14, shifted)
                for index, length in zip((i, j), size, strict=True)
            )
            groups.setdefault((row, column), []).append((i, j, 14 * down + across))
    expected = torch.zeros_like(x)
    for tokens in groups.values():
        rows, columns, places = map(list, zip(*tokens, strict=True))
        hidden = F.gelu(mlp.fc1.weight[:, places] @ x[0, rows, columns] + mlp.fc1.bias[:, None])
        mixed = mlp.fc2.weight[places] @ hidden + mlp.fc2.bias[places, None]
        expected[0, rows, columns] = mixed
    torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-10)


PATHLESS = {"bicubic", "edsr_baseline"}


@pytest.mark.parametrize("host", rest_slow(sorted({*HOSTS} - PATHLESS), SMALLEST))
def test_drop_path_rises_linearly(host):
    backbone, plain = meta_backbone(host, drop_path_rate=0.3), meta_backbone(host)

    def rates(model, path):
        paths = [getattr(m, path) for m in model.modules() if hasattr(m, path)]
        return [getattr(path, "drop_prob", 0.0) for path in paths]

    names = [n for n in ("drop_path", "drop_path1", "drop_path2") if rates(backbone, n)]
    assert names in (["drop_path"], ["drop_path1", "drop_path2"])
    for path in names:
        found = rates(backbone, path)
        found = list(dict.fromkeys(found)) if host == "edgevit_xxs" else found  # halves share it
        assert found == pytest.approx([0.3 * i / (len(found) - 1) for i in range(len(found))])
        assert set(rates(plain, path)) == {0.0}


# Below, at and above one and two windows of 7, on either axis.
WINDOW_SIZES = [*itertools.product((7, 8), (5, 7, 9)), (3, 6), (13, 14), (15, 10), (14, 21)]
WINDOW_SIZES += [(20, 7)]


@pytest.fixture(scope="module")
def window_blocks():
    """Blocks of either host in float64, their tables of offsets drawn anew to be felt."""
    torch.manual_seed(0)
    hosts = {"swin": create_backbone("swin_t"), "gcvit": create_backbone("gcvit_xxt")}
    for host in hosts.values():
        host.double().eval()
        for name, parameter in host.named_parameters():
            if "relative_position_bias_table" in name:
                nn.init.normal_(parameter)
    return hosts


def any_size(monkeypatch, value):
    monkeypatch.setattr(window_attention, "is_any_size", lambda size: value)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("size", WINDOW_SIZES)
def test_swins_windows_in_graphs(window_blocks, size, number, single, monkeypatch):
    block = next(m for m in window_blocks["swin"].modules() if isinstance(m, nn.Sequential)
                 and len(m) == 2 and isinstance(m[0], swin.SwinBlock))[number]  # fmt: skip
    monkeypatch.setattr(block, "shift_single_window", single)
    x = torch.randn(2, *size, 96, dtype=torch.float64)
    any_size(monkeypatch, False)
    expected = block(x)
    any_size(monkeypatch, True)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-9)
