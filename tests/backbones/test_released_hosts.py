"""CycleMLP, Hire-MLP, VisionLLaMA and EdgeViT against plain networks under the authors' names."""

import functools

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone, list_mixers
from backbones.analysis.counting import count_macs, count_parameters
from backbones.hosts.edgevit import LocalAggregation, SparseAttention
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.layers.reweight import Reweight
from backbones.layers.rotary import Lattice, rotate, turning_angles
from backbones.mixers.token_mlps.cycle_fc import COLUMNS, ROWS, CycleFC, _cycled_any_size, cycled
from backbones.mixers.token_mlps.hire import HireMixer
from heads.linear import LinearClassifier
from tests.errors import refuses
from tests.families import load, meta_backbone, meta_classifier, rest_slow
from tests.references import cyclemlp, edgevit, hiremlp, visionllama
from tests.references.checkpoints import assert_equal, checkpoint, fill, in_float64
from tests.tensors import images

pytestmark = pytest.mark.usefixtures("no_grad")

NAME = "visionllama_s"
REFERENCES = {"cyclemlp_b1": cyclemlp, "hiremlp_t": hiremlp, NAME: visionllama}
# Each host's step between the numbers of its output norms, and the tensors of one norm.
NORMS = {
    "cyclemlp_b1": (2, lambda norm, width: cyclemlp.pair(norm, (width,))),
    "hiremlp_t": (2, hiremlp.batch_norm),
    NAME: (1, lambda norm, width: visionllama.pair(norm, (width,))),
}
every_host = pytest.mark.parametrize("name", REFERENCES)


@functools.cache
def released(name):
    return checkpoint(REFERENCES[name].shapes(name))


def model_of(name, tmp_path, **options):
    torch.save({"model": released(name)}, tmp_path / "released.pth")
    model = LinearClassifier.from_pretrained(name, tmp_path / "released.pth", **options)
    return model.double().eval()


@pytest.mark.parametrize(
    ("name", "parameters", "macs"),
    [
        ("cyclemlp_b1", 15_155_400, 2.1215), ("cyclemlp_b2", 26_802_504, 3.8758),
        ("hiremlp_t", 18_041_672, 2.1440), ("hiremlp_s", 33_113_848, 4.2311),
        ("visionllama_s", 25_903_976, 3.3093), ("visionllama_b", 56_029_480, 8.5575),
        ("visionllama_l", 104_721_128, 16.5693),
    ],
)  # fmt: skip
def test_has_the_tensors_and_counts_of_the_released_network(name, parameters, macs):
    reference = next(r for own, r in REFERENCES.items() if own.split("_")[0] == name.split("_")[0])
    shapes = [pair for pair in reference.shapes(name) if not pair[0].endswith(".offset")]
    with torch.device("meta"):
        model = LinearClassifier(create_backbone(name), 1000)
    assert count_parameters(model) == parameters
    assert count_macs(model) / 1e9 == pytest.approx(macs, abs=5e-5)
    own = {key.removeprefix("backbone."): tuple(p.shape) for key, p in model.state_dict().items()}
    assert own == {key.replace("head.", "classifier."): shape for key, shape in shapes}


@pytest.mark.parametrize(
    ("size", "parameters"), [("s", 24_028_520), ("b", 56_029_480), ("l", 99_201_512)]
)
def test_parameters_of_visionllama_with_hidden_widths_that_are_not_rounded(size, parameters):
    model = meta_classifier(f"visionllama_{size}", hidden_multiple=1)
    assert count_parameters(model) == parameters


@every_host
def test_released_checkpoint_gives_the_logits_of_the_released_network(name, tmp_path):
    model, tensors = model_of(name, tmp_path), in_float64(released(name))
    for size in [(64, 64), (72, 100), (128, 64), (200, 136)]:
        x = images(*size)
        assert_equal(model(x), REFERENCES[name].logits(tensors, x, name))


@every_host
def test_dense_maps_equal_those_of_the_stages_normed(name):
    reference, (step, tensors_of) = REFERENCES[name], NORMS[name]
    widths = reference.WIDTHS[name] if name == NAME else reference.WIDTHS
    norms = checkpoint(
        pair
        for stage, width in enumerate(widths)
        for pair in tensors_of(f"norm{step * stage}", width)
    )
    tensors = released(name)
    state = {k: v for k, v in tensors.items() if not k.startswith(("norm.", "head."))} | norms
    backbone, again = (create_backbone(name, dense=True) for _ in range(2))
    assert not load(backbone, state, "released").initialised
    load(again, backbone.state_dict(), "ours")
    x = images(65, 97)
    # The first map of the MLPs has a token for the last row and column too.
    padded, options = (x, {"auto_scale": True}) if name == NAME else (F.pad(x, (0, 3, 0, 3)), {})
    maps = reference.stages(in_float64(tensors), padded, name, **options)
    for stage, (found, y) in enumerate(zip(again.double().eval()(x), maps, strict=True)):
        normed = reference.norm(y, in_float64(norms), f"norm{step * stage}")
        assert_equal(found, to_nchw(normed))


@pytest.mark.parametrize("axis", [ROWS, COLUMNS])
@pytest.mark.parametrize("size", [(5, 6), (1, 4), (3, 1)], ids=str)
@torch.enable_grad()
def test_cycle_fc_and_its_derivatives_equal_those_of_the_loops(axis, size):
    torch.manual_seed(0)
    layer = CycleFC(7, axis).double()
    x = torch.randn(2, *size, 7, dtype=torch.float64, requires_grad=True)
    looped = cyclemlp.neighbours(x, axis)
    expected = looped @ layer.weight.flatten(1).T + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    grads = [
        torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()]) for y in (layer(x), expected)
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).sin(), x)


def test_merge_is_the_same_in_both_layouts():
    torch.manual_seed(0)
    last, first = Reweight(8, 4).double(), Reweight(8, 4, channels_first=True).double()
    weights = {
        key: value.reshape(first.state_dict()[key].shape)
        for key, value in last.state_dict().items()
    }
    first.load_state_dict(weights)
    branches = torch.randn(4, 2, 3, 5, 8, dtype=torch.float64)
    merged = last(*branches)
    torch.testing.assert_close(first(*map(to_nchw, branches)), to_nchw(merged))
    assert (merged <= branches.amax(0)).all()
    assert (merged >= branches.amin(0)).all()


def test_half_a_network_is_refused():
    half = {k: v for k, v in released("cyclemlp_b1").items() if "network.4.3." not in k}
    backbone = create_backbone("cyclemlp_b1")
    refuses(r"missing network\.4\.3\.norm1\.weight", load, backbone, half, "half")


@pytest.mark.parametrize("axis", [ROWS, COLUMNS])
def test_graphs_for_any_size_read_the_same_neighbours(axis):
    x = torch.randn(2, 5, 4, 8)
    assert torch.equal(_cycled_any_size(x, axis), cycled(x, axis))


@pytest.mark.parametrize("region", [2, 3, 4])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_regions_of_any_map_equal_those_of_the_lists(region, shift):
    torch.manual_seed(0)
    mixer = HireMixer(8, region, shift).double().eval()
    for norm in (mixer.mlp_h1_norm, mixer.mlp_w1_norm):
        norm.running_mean.normal_()
    state = {f"attn.{key}": value for key, value in mixer.state_dict().items()}
    for size in [(4, 6), (5, 7), (3, 2), (9, 4)]:
        x = torch.randn(2, *size, 8, dtype=torch.float64)
        expected = hiremlp.token_mixing(x, state, "attn", region, shift)
        torch.testing.assert_close(to_nhwc(mixer(to_nchw(x))), expected, rtol=1e-12, atol=1e-12)


def test_blocks_of_a_stage_shift_in_turn():
    backbone = meta_backbone("hiremlp_s")
    found = [[block.attn.shift for block in backbone.network[2 * stage]] for stage in range(4)]
    assert found == [[0, 2, 0], [0, 2, 0, 2], [0, 1, 2, 0, 1, 2, 0, 1, 2, 0], [0, 1, 0]]


@pytest.mark.slow
def test_options_undo_what_is_released(tmp_path):
    x, state = images(96, 128), in_float64(released(NAME))
    as_released = visionllama.logits(state, x, NAME)
    regular = visionllama.logits(state, x, NAME, regular_keys=True)
    assert_equal(model_of(NAME, tmp_path, key_places="regular")(x), regular)
    scaled = visionllama.logits(state, x, NAME, auto_scale=True)
    assert_equal(model_of(NAME, tmp_path, auto_scale=True)(x), scaled)
    pooled = visionllama.norm(visionllama.stages(state, x, NAME)[-1], state, "norm").mean((1, 2))
    once = visionllama.linear(pooled, state, "head")
    assert_equal(model_of(NAME, tmp_path, norm_twice=False)(x), once)
    for other in (regular, scaled, once):
        assert (other - as_released).abs().max() > 1e-3 * as_released.abs().max()


@pytest.mark.parametrize("channels", [4, 32])
def test_products_depend_on_differences_of_places_alone(channels):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, channels, dtype=torch.float64, generator=generator)

    def product(*offsets):
        turned = [
            rotate(x, Lattice(1, 1, offset=o)) for x, o in zip((query, key), offsets, strict=True)
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(3.0, 5.5), product(7.0, 9.5), rtol=1e-12, atol=1e-12)
    assert (product(3.0, 5.5) - product(3.0, 6.5)).abs() > 1e-3


@torch.enable_grad()
def test_turning_keeps_lengths():
    x = torch.randn(1, 6, 1, 8, requires_grad=True)
    rotate(x, Lattice(6, 3)).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x)


def test_turns_are_products_of_complex_numbers():
    lattice, x = Lattice(6, 4, step=2, offset=0.5, unit=1.5), torch.randn(2, 6, 3, 8)
    angles = turning_angles(lattice, 8, x.device, x.dtype)
    turns = torch.polar(torch.ones_like(angles), angles)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns
    torch.testing.assert_close(rotate(x, lattice), torch.view_as_real(turned).flatten(-2))


@every_host
def test_maps_of_as_many_tokens_have_their_own_places(name):
    backbone = create_backbone(name)
    load(backbone, released(name), "released")
    backbone.double().eval()
    wide, tall = images(64, 96), images(96, 64)
    alone = backbone(tall)[-1]
    backbone(wide)
    torch.testing.assert_close(backbone(tall)[-1], alone, rtol=0, atol=0)


SWAPPED = [name for name in list_mixers("channel") if name != "ffn"]


def test_released_edgevit_equals_the_equations(tmp_path):
    tensors = fill(edgevit.shapes())
    torch.save({"model": tensors}, tmp_path / "edgevit.pth")
    model = LinearClassifier.from_pretrained("edgevit_xxs", tmp_path / "edgevit.pth")
    theirs = edgevit.Network(in_float64(tensors))
    model.double().eval()
    for size in [(64, 96), (65, 97), (200, 304)]:
        torch.testing.assert_close(
            model(images(*size)), theirs.logits(images(*size)), rtol=1e-9, atol=1e-9
        )
        maps = theirs.maps(images(*size))
        torch.testing.assert_close(model.backbone(images(*size)), maps, rtol=1e-9, atol=1e-9)


def test_parameters_and_macs_of_edgevit():
    model = meta_classifier("edgevit_xxs")
    assert count_parameters(model) == 4_067_704
    assert count_macs(model) / 1e9 == pytest.approx(0.5513, abs=5e-5)
    ffns = [m.mlp for m in model.modules() if isinstance(m, LocalAggregation | SparseAttention)]
    assert len(ffns) == 12
    assert sum(count_parameters(ffn) for ffn in ffns) == 2_434_392


@pytest.mark.parametrize("name", rest_slow(SWAPPED, ("afbo", "iffn", "glu")))
def test_every_channel_mixer_fits_both_halves_of_edgevit(name):
    for dense in (False, True):
        backbone = meta_backbone(f"edgevit_xxs_{name}", dense=dense).eval()
        assert len(backbone(torch.empty(2, 3, 65, 97, device="meta"))) == 4
        halves = [key.split(".")[-3] for key in backbone.mixers()]
        assert (halves.count("local"), halves.count("sparse")) == (5, 7)
