"""PosMLP's released checkpoints by their names, and tables that belong to another window."""

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone, create_mixer
from backbones.hosts.posmlp.checkpoint_conversion import rename_to_authors, rename_to_ours
from backbones.hosts.posmlp.host import PosMLP
from backbones.slots import HostConfig
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import load, meta_backbone
from tests.references.checkpoints import fill, pair

pytestmark = pytest.mark.usefixtures("no_grad")


def authors_shapes(depths=(2, 2, 18, 2), unit="ggqpe"):
    """Names and shapes of the released PosMLP-T, and of the same network with other units."""
    shapes = pair("norm", 768) | pair("head", 1000, 768)
    for i, (width, channels, side) in enumerate([(48, 3, 3), (96, 48, 3), (96, 96, 1)]):
        shapes |= pair(f"patch_embed.projs.{i}", width, channels, side, side)
        norm = f"patch_embed.norms.{i}"
        shapes |= pair(norm, width) | {f"{norm}.num_batches_tracked": ()}
        shapes |= {f"{norm}.running_mean": (width,), f"{norm}.running_var": (width,)}
    for i, depth in enumerate(depths):
        d, gamma, window, s = 96 * 2**i, (4, 4, 4, 2)[i], (14, 14, 14, 7)[i], 8 * 2**i
        if i:
            pool = f"levels.{i}.pool"
            shapes |= pair(f"{pool}.conv", d, 1, 3, 3) | pair(f"{pool}.norm", d)
        for j in range(depth):
            block = f"levels.{i}.encoder.{j}"
            shapes |= pair(f"{block}.norm", d)
            shapes |= pair(f"{block}.proj_c_e", gamma * d, d)
            shapes |= pair(f"{block}.proj_c_s", d, gamma * d // 2)
            unit_shapes = authors_unit(unit, gamma * d // 2, window, s)
            shapes |= {f"{block}.gate_unit.{name}": shape for name, shape in unit_shapes.items()}
    return shapes


def authors_unit(unit, width, window, s):
    n = window * window
    if unit == "sgu":
        return pair("proj_list.0", n, n) | pair("norm_list.0", width)
    shapes = {"pos.token_proj_n_bias": (1, n, 1)}
    if unit == "ggqpe":
        shapes |= {"pos.attention_centers": (s, 2), "pos.attention_spreads": (s, 2, 2)}
        return shapes | {"pos.rel_indices": (n, n, 5)}
    table = ((2 * window - 1) ** 2, s if unit == "glrpe" else 1)
    shapes["pos.window_relative_position_bias_table"] = table
    shapes["pos.window_relative_position_index"] = (n, n)
    return shapes | ({"token_proj_n_weight": (1, n, n)} if unit == "lrpe_m" else {})


def test_released_checkpoint_of_277_entries_loads(tmp_path):
    assert len(authors_shapes()) == 277
    theirs = fill(authors_shapes())
    path = tmp_path / "posmlp_t.pth.tar"
    torch.save({"state_dict_ema": theirs, "state_dict": {}, "epoch": 254}, path)
    model = LinearClassifier.from_pretrained("posmlp_t", path).eval()
    block = model.backbone.stages[2].blocks[17]
    names = "levels.2.encoder.17"
    relation = block.mixer.gate.relation
    for ours, name in (
        (relation.centers, "gate_unit.pos.attention_centers"),
        (relation.spreads, "gate_unit.pos.attention_spreads"),
        (relation.bias, "gate_unit.pos.token_proj_n_bias"),
        (block.mixer.fc1.weight, "proj_c_e.weight"),
        (block.mixer.fc2.bias, "proj_c_s.bias"),
        (block.norm.weight, "norm.weight"),
    ):
        value = theirs[f"{names}.{name}"]
        torch.testing.assert_close(ours, value.reshape(ours.shape), rtol=0, atol=0)
    torch.testing.assert_close(model.classifier.weight, theirs["head.weight"], rtol=0, atol=0)
    dense = create_backbone("posmlp_t", dense=True, pretrained=path).eval()
    small = torch.randn(1, 3, 64, 64)
    assert dense(small)[0].isfinite().all()
    assert create_backbone("posmlp_t", pretrained=path).eval().embed(small).isfinite().all()


@pytest.mark.parametrize("unit", ["ggqpe", "sgu", "lrpe_m", "lrpe", "glrpe"])
def test_every_name_of_theirs_has_a_place_and_comes_back(unit):
    theirs = fill(authors_shapes((1, 1, 1, 1), unit))
    ours = rename_to_ours(dict(theirs))
    backbone = meta_backbone("posmlp_t" if unit == "ggqpe" else f"posmlp_t_{unit}")
    own = {
        key: value.shape
        for key, value in LinearClassifier(backbone, 1000).state_dict().items()
        if key.count("blocks.") == 0 or ".blocks.0." in key
    }
    own = {key.removeprefix("backbone."): shape for key, shape in own.items()}
    assert {key: value.shape for key, value in ours.items()} == own
    back = rename_to_authors(ours)
    computed = {key for key in theirs if key.endswith(("rel_indices", "position_index"))}
    assert back.keys() == theirs.keys() - computed
    for key, value in back.items():
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=0)
    assert rename_to_ours(dict(ours)).keys() == ours.keys()


def narrow_unit(slot):
    return create_mixer("lrpe", slot.dim, hidden_ratio=slot.hidden_ratio, window=4)


def test_another_unit_is_initialised_and_the_rest_is_loaded():
    weights = create_backbone("posmlp_t").state_dict()
    with pytest.warns(UserWarning, match=r"gave \d\d\.\d% .*24 tensors of the network are missing"):
        report = load(create_backbone("posmlp_t_lrpe"), weights)
    assert {key.rpartition(".")[2] for key in report.initialised} == {"table"}
    assert report.loaded == len(weights) - 2 * 24
    assert {key.rpartition(".")[2] for key in report.skipped} == {"centers", "spreads"}


def test_a_bias_that_their_model_never_adds_is_dropped(recwarn):
    """Their code with bias off keeps one of zeros; one that was trained is another network's."""
    theirs = fill(authors_shapes())
    for key in theirs:
        if key.endswith("token_proj_n_bias"):
            theirs[key].zero_()
    options = {"token_mixer": {"name": "ggqpe", "bias": False}}
    report = load(create_backbone("posmlp_t", **options), theirs)
    assert len(report.dead) == 24
    assert all(key.endswith("gate.relation.bias") for key in report.dead)
    assert not report.initialised
    assert "24 dropped that change nothing (stages.0.blocks.0.mixer.gate.rel" in str(report)
    assert not [w for w in recwarn if "gave" in str(w.message)]
    dead_only = "stages.2.blocks.3.mixer.gate.relation.bias"
    assert dead_only in report.dead


def test_weights_that_lack_units_or_biases_are_refused():
    weights = meta_backbone("posmlp_t", token_mixer={"name": "ggqpe", "bias": False})
    backbone = meta_backbone("posmlp_t")
    refuses(
        r"24 keys differ \(missing .*relation\.bias.*options it was",
        load,
        backbone,
        weights.state_dict(),
    )
    free = meta_backbone("posmlp_t_sgu")
    larger = meta_backbone("posmlp_t", token_mixer={"name": "sgu", "window": (7, 14, 14, 7)})
    with pytest.raises(ValueError, match=r"relation\.weight: \(49, 49\) instead of \(196, 196\)"):
        load(free, larger.state_dict())
    # PosMLP's own units must be in the file; only swapped-in mixers may be initialised.
    theirs = fill(authors_shapes())
    theirs = {k: v for k, v in theirs.items() if ".encoder.5.gate" not in k and ".5.proj" not in k}
    backbone = meta_backbone("posmlp_t")
    refuses(r"missing stages\.2\.blocks\.5\.mixer", load, backbone, theirs)


def test_other_windows_and_absolute_positions_are_resampled():
    torch.manual_seed(0)
    small = create_mixer("glrpe", 12, groups=2, window=5)
    large = create_mixer("glrpe", 12, groups=2, window=7)
    relation = small.gate.relation
    relation.table.data.fill_(0.3)
    relation.bias.data.fill_(0.7)
    large.load_state_dict(large.convert_state_dict(small.state_dict()))
    grown = large.gate.relation
    torch.testing.assert_close(grown.table, torch.full((169, 2), 0.3 * 25 / 49))
    torch.testing.assert_close(grown.bias, torch.full((49, 1), 0.7))
    # A sum over all tokens of a constant map keeps its size.
    ones = torch.ones(1, 7, 7, 4)
    torch.testing.assert_close(
        grown(ones).mean(), relation(ones[:, :5, :5]).mean(), rtol=1e-5, atol=1e-5
    )
    ramp = torch.arange(25.0).reshape(25, 1)
    converted = large.convert_state_dict({"gate.relation.bias": ramp})["gate.relation.bias"]
    expected = F.interpolate(ramp.reshape(1, 1, 5, 5), (7, 7), mode="bicubic").reshape(49, 1)
    torch.testing.assert_close(converted, expected)
    gaussian = create_mixer("ggqpe", 12, groups=2, window=5)
    wide = create_mixer("ggqpe", 12, groups=2, window=7)
    wide.load_state_dict(wide.convert_state_dict(gaussian.state_dict()))
    assert torch.equal(wide.gate.relation.spreads, gaussian.gate.relation.spreads)
    model = PosMLP(HostConfig((64, 64), token_mixer=narrow_unit), width=16, position=True)
    theirs = torch.arange(16.0 * 256).reshape(1, 256, 16)
    converted = model.convert_state_dict({"absolute_pos_embed": theirs})["pos_embed"]
    torch.testing.assert_close(converted, theirs.reshape(1, 16, 16, 16), rtol=0, atol=0)
    larger = torch.rand(1, 576, 16)
    converted = model.convert_state_dict({"absolute_pos_embed": larger})["pos_embed"]
    picture = larger.reshape(1, 16, 24, 24)
    expected = F.interpolate(picture, (16, 16), mode="bicubic", antialias=True)
    torch.testing.assert_close(converted, expected)


# gMLP as released: github.com/Zhicaiwww/PosMLP at f675cbb, models/gmlp.py and models/patch_emb.py.
WIDTH, HIDDEN, DEPTH, N = 128, 768, 30, 196
LAST_WITH_BIAS = 25  # of the free unit


def gmlp_shapes(unit):
    """Names and shapes of their gMLP-Ti: its own unit ("sgu") or PosMLP's ("ggqpe")."""
    shapes = pair("stem.proj", WIDTH, 3, 16, 16) | pair("stem.norm", WIDTH)
    shapes |= pair("norm", WIDTH) | pair("head", 10, WIDTH)
    for i in range(DEPTH):
        block = f"blocks.{i}.mlp_channels"
        shapes |= pair(f"blocks.{i}.norm", WIDTH) | pair(f"{block}.fc1", HIDDEN, WIDTH)
        shapes |= pair(f"{block}.fc2", WIDTH, HIDDEN // 2)
        if unit == "sgu":
            shapes |= pair(f"{block}.gate.proj_list.0", N, N)
            shapes |= pair(f"{block}.gate.norm_list.0", HIDDEN // 2)
            if i > LAST_WITH_BIAS:
                del shapes[f"{block}.gate.proj_list.0.bias"]
        else:
            pos = f"{block}.gate.pos"
            shapes |= {f"{pos}.attention_centers": (8, 2), f"{pos}.attention_spreads": (8, 2, 2)}
            shapes |= {f"{pos}.token_proj_n_bias": (1, N, 1), f"{pos}.rel_indices": (N, N, 5)}
    return shapes


def their_network(weights, images):
    """Logits by the equations, with their unit: the first half is mixed, the second gates."""

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], scale, shift, 1e-6)

    x = F.conv2d(images, weights["stem.proj.weight"], weights["stem.proj.bias"], 16)
    x = norm(x.flatten(2).mT, "stem.norm")
    for i in range(DEPTH):
        block = f"blocks.{i}.mlp_channels"
        u, v = F.gelu(linear(norm(x, f"blocks.{i}.norm"), f"{block}.fc1")).chunk(2, dim=-1)
        mixed = linear(norm(u, f"{block}.gate.norm_list.0").mT, f"{block}.gate.proj_list.0").mT
        x = x + linear(mixed * v, f"{block}.fc2")
    return linear(norm(x, "norm").mean(dim=1), "head")


@pytest.mark.parametrize(
    "options",
    [{"stem_norm": True, "gate_eps": 1e-6}, {"token_mixer": "sgu"}],
    ids=["own unit", "sgu"],
)
def test_weights_of_their_gmlp_give_their_outputs(options, tmp_path):
    weights = {key: value.double() for key, value in fill(gmlp_shapes("sgu")).items()}
    torch.save({"state_dict": weights}, tmp_path / "gmlp.pth.tar")
    model = LinearClassifier.from_pretrained("gmlp_ti", tmp_path / "gmlp.pth.tar", **options)
    images = torch.rand(2, 3, 224, 224, dtype=torch.float64)
    expected = their_network(weights, images)
    found = model.double().eval()(images)
    # The weights were read as float32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max())


def test_weights_of_their_gmlp_load_with_their_stem_and_epsilon(tmp_path):
    weights = fill(gmlp_shapes("ggqpe"))
    torch.save({"state_dict_ema": weights}, tmp_path / "gmlp.pth.tar")
    model = LinearClassifier.from_pretrained("gmlp_ti_ggqpe", tmp_path / "gmlp.pth.tar")
    relation = model.backbone.blocks[29].mlp_channels.gate.relation
    pos = "blocks.29.mlp_channels.gate.pos"
    assert torch.equal(relation.centers, weights[f"{pos}.attention_centers"])
    assert torch.equal(relation.bias, weights[f"{pos}.token_proj_n_bias"][0])
    assert torch.equal(model.classifier.weight, weights["head.weight"])
    torch.save(fill(gmlp_shapes("sgu")), tmp_path / "gmlp.pth.tar")
    with pytest.raises(ValueError, match="build with stem_norm=True"):
        create_backbone("gmlp_ti", pretrained=tmp_path / "gmlp.pth.tar")
    images = torch.rand(1, 3, 64, 64)
    found = []
    for options in ({}, {"gate_eps": 1e-5}, {"gate_eps": 1e-2}):
        torch.manual_seed(0)
        backbone = create_backbone("gmlp_ti", **options).eval()
        for block in backbone.blocks:
            block.mlp_channels.gate.proj.weight.fill_(0.01)
        found.append(backbone.embed(images))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    with pytest.raises(ValueError, match="gate_eps=1e-06 belongs to gMLP's own unit"):
        create_backbone("gmlp_ti_ggqpe", gate_eps=1e-6)
