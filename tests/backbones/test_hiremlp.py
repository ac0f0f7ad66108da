"""Hire-MLP against a plain network that reads the authors' names."""

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone
from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import in_memory
from backbones.layers.axes import to_nchw, to_nhwc
from backbones.mixers.token_mlps.hire import HireMixer
from heads.linear import LinearClassifier
from tests.counts import assert_tensors_and_counts
from tests.references import hiremlp as reference
from tests.references.released import assert_equal, checkpoint, double
from tests.tensors import images


@pytest.fixture(scope="module")
def released():
    return checkpoint(reference.shapes("hiremlp_t"))


@pytest.mark.parametrize(
    ("name", "parameters", "macs"),
    [("hiremlp_t", 18_041_672, 2.1440), ("hiremlp_s", 33_113_848, 4.2311)],
)
def test_has_the_tensors_and_counts_of_the_released_network(name, parameters, macs):
    assert_tensors_and_counts(name, reference.shapes(name), parameters, macs)


@torch.no_grad()
def test_released_checkpoint_gives_the_logits_of_the_released_network(released, tmp_path):
    torch.save(released, tmp_path / "hiremlp_t.pth")
    model = LinearClassifier.from_pretrained("hiremlp_t", tmp_path / "hiremlp_t.pth")
    model, tensors = model.double().eval(), double(released)
    for size in [(64, 64), (72, 100), (200, 136)]:
        assert_equal(model(images(*size)), reference.logits(tensors, images(*size), "hiremlp_t"))


@torch.no_grad()
def test_dense_maps_equal_those_of_the_stages_normed(released):
    norms = checkpoint(
        pair
        for stage, width in enumerate(reference.WIDTHS)
        for pair in reference.batch_norm(f"norm{2 * stage}", width)
    )
    state = {k: v for k, v in released.items() if not k.startswith(("norm.", "head."))} | norms
    backbone = create_backbone("hiremlp_t", dense=True)
    assert not adopt(backbone, in_memory(state, "released")).initialised
    x = images(65, 97)
    # The first map has a token for the last row and column too.
    maps = reference.stages(double(released), F.pad(x, (0, 3, 0, 3)), "hiremlp_t")
    for stage, (found, y) in enumerate(zip(backbone.double().eval()(x), maps, strict=True)):
        assert_equal(found, to_nchw(reference.norm(y, double(norms), f"norm{2 * stage}")))


@pytest.mark.parametrize("region", [2, 3, 4])
@pytest.mark.parametrize("shift", [0, 1, 2])
@torch.no_grad()
def test_regions_of_any_map_equal_those_of_the_lists(region, shift):
    torch.manual_seed(0)
    mixer = HireMixer(8, region, shift).double().eval()
    for norm in (mixer.mlp_h1_norm, mixer.mlp_w1_norm):
        norm.running_mean.normal_()
    state = {f"attn.{key}": value for key, value in mixer.state_dict().items()}
    for size in [(4, 6), (5, 7), (3, 2), (9, 4)]:
        x = torch.randn(2, *size, 8, dtype=torch.float64)
        expected = reference.token_mixing(x, state, "attn", region, shift)
        torch.testing.assert_close(to_nhwc(mixer(to_nchw(x))), expected, rtol=1e-12, atol=1e-12)


def test_blocks_of_a_stage_shift_in_turn():
    with torch.device("meta"):
        backbone = create_backbone("hiremlp_s")
    found = [[block.attn.shift for block in backbone.network[2 * stage]] for stage in range(4)]
    assert found == [[0, 2, 0], [0, 2, 0, 2], [0, 1, 2, 0, 1, 2, 0, 1, 2, 0], [0, 1, 0]]
