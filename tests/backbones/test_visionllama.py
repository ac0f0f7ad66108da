"""Pyramid-VisionLLaMA against a plain network that reads the authors' names."""

import pytest
import torch

from backbones import create_backbone
from backbones.analysis.counting import count_parameters
from backbones.checkpoints.adoption import adopt
from backbones.checkpoints.opening import in_memory
from backbones.layers.axes import to_nchw
from backbones.layers.rotary import Lattice, rotate, turning_angles
from heads.linear import LinearClassifier
from tests.counts import assert_tensors_and_counts
from tests.families import meta_classifier
from tests.references import visionllama as reference
from tests.references.released import assert_equal, checkpoint, double
from tests.tensors import images

NAME = "visionllama_s"


@pytest.fixture(scope="module")
def released():
    return checkpoint(reference.shapes(NAME))


def model_of(released, tmp_path, **options):
    torch.save(released, tmp_path / "released.pth")
    return (
        LinearClassifier.from_pretrained(NAME, tmp_path / "released.pth", **options).double().eval()
    )


@pytest.mark.parametrize(
    ("name", "parameters", "macs", "unrounded"),
    [
        ("visionllama_s", 25_903_976, 3.3093, 24_028_520),
        ("visionllama_b", 56_029_480, 8.5575, 56_029_480),
        ("visionllama_l", 104_721_128, 16.5693, 99_201_512),
    ],
)
def test_has_the_tensors_and_counts_of_the_released_network(name, parameters, macs, unrounded):
    assert_tensors_and_counts(name, reference.shapes(name), parameters, macs)
    narrow = meta_classifier(name, hidden_multiple=1)
    assert count_parameters(narrow) == unrounded


@torch.no_grad()
def test_released_checkpoint_gives_the_logits_of_the_released_network(released, tmp_path):
    model, tensors = model_of(released, tmp_path), double(released)
    for size in [(64, 96), (72, 100), (128, 64)]:
        assert_equal(model(images(*size)), reference.logits(tensors, images(*size), NAME))


@torch.no_grad()
@pytest.mark.slow
def test_options_undo_what_is_released(released, tmp_path):
    x, state = images(96, 128), double(released)
    as_released = reference.logits(state, x, NAME)
    regular = reference.logits(state, x, NAME, regular_keys=True)
    assert_equal(model_of(released, tmp_path, key_places="regular")(x), regular)
    scaled = reference.logits(state, x, NAME, auto_scale=True)
    assert_equal(model_of(released, tmp_path, auto_scale=True)(x), scaled)
    pooled = reference.norm(reference.stages(state, x, NAME)[-1], state, "norm").mean((1, 2))
    once = reference.linear(pooled, state, "head")
    assert_equal(model_of(released, tmp_path, norm_twice=False)(x), once)
    for other in (regular, scaled, once):
        assert (other - as_released).abs().max() > 1e-3 * as_released.abs().max()


@torch.no_grad()
def test_dense_maps_equal_those_of_the_stages_normed(released):
    widths = reference.WIDTHS[NAME]
    norms = checkpoint(
        pair
        for stage, width in enumerate(widths)
        for pair in reference.pair(f"norm{stage}", (width,))
    )
    state = {k: v for k, v in released.items() if not k.startswith(("norm.", "head."))} | norms
    backbone = create_backbone(NAME, dense=True)
    assert not adopt(backbone, in_memory(state, "released")).initialised
    x = images(65, 97)
    maps = reference.stages(double(released), x, NAME, auto_scale=True)
    for stage, (found, y) in enumerate(zip(backbone.double().eval()(x), maps, strict=True)):
        assert_equal(found, to_nchw(reference.norm(y, double(norms), f"norm{stage}")))


@torch.no_grad()
def test_maps_of_as_many_tokens_do_not_share_places(released):
    """256x320 and 320x256 have as many tokens, and places of their own."""
    backbone = create_backbone(NAME)
    adopt(backbone, in_memory(released, "released"))
    backbone.double().eval()
    wide, tall = images(64, 96), images(96, 64)
    alone = backbone(tall)[-1]
    backbone(wide)
    torch.testing.assert_close(backbone(tall)[-1], alone, rtol=0, atol=0)


@pytest.mark.parametrize("channels", [4, 32])
@torch.no_grad()
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
