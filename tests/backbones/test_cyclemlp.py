"""CycleMLP against a plain network that reads the authors' names."""

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone
from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import in_memory
from backbones.layers.axes import to_nchw
from backbones.layers.reweight import Reweight
from backbones.mixers.token_mlps.cycle_fc import COLUMNS, ROWS, CycleFC, _cycled_any_size, cycled
from heads.linear import LinearClassifier
from tests.counts import assert_tensors_and_counts
from tests.families import rest_slow
from tests.references import cyclemlp as reference
from tests.references.released import assert_equal, checkpoint, double
from tests.tensors import images


@pytest.fixture(scope="module")
def released():
    return checkpoint(reference.shapes("cyclemlp_b1"))


@pytest.mark.parametrize(
    ("name", "parameters", "macs"),
    [("cyclemlp_b1", 15_155_400, 2.1215), ("cyclemlp_b2", 26_802_504, 3.8758)],
)
def test_has_the_tensors_and_counts_of_the_released_network(name, parameters, macs):
    shapes = [(key, shape) for key, shape in reference.shapes(name) if not key.endswith(".offset")]
    assert_tensors_and_counts(name, shapes, parameters, macs)


@torch.no_grad()
def test_released_checkpoint_gives_the_logits_of_the_released_network(released, tmp_path):
    torch.save({"model": released}, tmp_path / "cyclemlp_b1.pth")
    model = LinearClassifier.from_pretrained("cyclemlp_b1", tmp_path / "cyclemlp_b1.pth")
    model, tensors = model.double().eval(), double(released)
    for size in [(64, 64), (72, 100)]:
        assert_equal(model(images(*size)), reference.logits(tensors, images(*size), "cyclemlp_b1"))


@pytest.mark.parametrize("names", rest_slow(["released", "ours"], ["released"]))
@torch.no_grad()
def test_dense_maps_equal_those_of_the_stages_normed(released, names):
    norms = checkpoint(
        [
            (f"norm{n}.{kind}", (width,))
            for n, width in zip((0, 2, 4, 6), reference.WIDTHS, strict=True)
            for kind in ("weight", "bias")
        ]
    )
    state = {k: v for k, v in released.items() if not k.startswith(("norm.", "head."))} | norms
    backbone = create_backbone("cyclemlp_b1", dense=True)
    assert not adopt(backbone, in_memory(state, "released")).initialised
    if names == "ours":
        again = create_backbone("cyclemlp_b1", dense=True)
        adopt(again, in_memory(backbone.state_dict(), "ours"))
        backbone = again
    x = images(65, 97)
    # The first map has a token for the last row and column too.
    maps = reference.stages(double(released), F.pad(x, (0, 3, 0, 3)), "cyclemlp_b1")
    for stage, (found, y) in enumerate(zip(backbone.double().eval()(x), maps, strict=True)):
        assert_equal(found, to_nchw(reference.norm(y, double(norms), f"norm{2 * stage}")))


@pytest.mark.parametrize("axis", [ROWS, COLUMNS])
@pytest.mark.parametrize("size", [(5, 6), (1, 4), (3, 1)], ids=str)
def test_cycle_fc_and_its_derivatives_equal_those_of_the_loops(axis, size):
    torch.manual_seed(0)
    layer = CycleFC(7, axis).double()
    x = torch.randn(2, *size, 7, dtype=torch.float64, requires_grad=True)
    looped = reference.neighbours(x, axis)
    expected = looped @ layer.weight.flatten(1).T + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    grads = [
        torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()]) for y in (layer(x), expected)
    ]
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
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


@torch.no_grad()
def test_weights_of_timm_are_refused_and_half_a_network_too(released):
    with pytest.raises(ValueError, match="timm publishes no weights of cyclemlp_b2; download its"):
        create_backbone("cyclemlp_b2", pretrained=True)
    state = {k: v for k, v in released.items() if "network.4.3." not in k}
    with pytest.raises(ValueError, match=r"missing network\.4\.3\.norm1\.weight"):
        adopt(create_backbone("cyclemlp_b1"), in_memory(state, "half"))


@pytest.mark.parametrize("axis", [ROWS, COLUMNS])
def test_graphs_for_any_size_read_the_same_neighbours(axis):
    x = torch.randn(2, 5, 4, 8)
    assert torch.equal(_cycled_any_size(x, axis), cycled(x, axis))
