"""The head of super-resolution: losses, and tiles that equal the whole image."""

import pytest
import torch

from backbones import create_backbone
from heads.super_resolution import SuperResolver, spans
from tests.families import shorten


def resolver(name="ffnet_sr_light", scale=2, radius=None, **options):
    """A whole network of few blocks, with the radius that they have."""
    torch.manual_seed(0)
    backbone = shorten(create_backbone(name, fast=False))
    if radius:
        backbone.radius = radius
    model = SuperResolver(backbone, scale, **options).eval()
    for parameter in model.parameters():  # so that every pixel within the radius counts
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double()


def pair():
    generator = torch.Generator().manual_seed(1)
    low = torch.rand(2, 3, 5, 6, generator=generator, dtype=torch.float64)
    return {"low": low, "high": torch.rand(2, 3, 10, 12, generator=generator, dtype=torch.float64)}


def test_l1_and_the_distance_of_the_transforms():
    model, batch = resolver(fft_weight=0.05), pair()
    losses, out = model.loss(batch), model(batch["low"])
    torch.testing.assert_close(losses["loss_l1"], (out - batch["high"]).abs().mean())
    rows, columns = (torch.arange(n, dtype=torch.float64) for n in (10, 12))
    angles = [2 * torch.pi * torch.outer(k, k) / len(k) for k in (rows, columns)]
    turns = [torch.complex(angle.cos(), -angle.sin()) for angle in angles]
    by_hand = turns[0] @ (out - batch["high"]).to(torch.complex128) @ turns[1]
    parts = torch.stack([by_hand.real, by_hand.imag])[..., :7]
    torch.testing.assert_close(losses["loss_fft"], 0.05 * parts.abs().mean())
    assert model.loss(batch).keys() == {"loss_l1", "loss_fft"}


def test_charbonnier():
    model, batch = resolver(loss="charbonnier", charbonnier_eps=0.1), pair()
    wanted = ((model(batch["low"]) - batch["high"]) ** 2 + 0.01).sqrt().mean()
    assert model.loss(batch).keys() == {"loss_charbonnier"}
    torch.testing.assert_close(model.loss(batch)["loss_charbonnier"], wanted)


@pytest.mark.parametrize(
    ("name", "radius", "tile", "size"),
    [
        ("ffnet_sr_light", 8, 27, (40, 30)),
        ("ffnet_sr_light_glu", 8, 28, (30, 29)),
        ("swinir_light", 35, 88, (11, 101)),
    ],
)
def test_tiles_equal_the_whole_image(name, radius, tile, size):
    # Radius: FFNet's two blocks reach 2 x 3 + 2, SwinIR's two groups of two blocks 4 x 7 + 7.
    model = resolver(name, 2, radius, tile=tile)
    low = torch.rand(3, *size, dtype=torch.float64)
    with torch.no_grad():
        whole, parts = model(low[None])[0], list(model.enlarge_rows(low))
    assert len(parts) > 1 or name == "swinir_light"
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)


def test_the_declared_radius_is_what_an_output_depends_on():
    for name, depth in (("ffnet_sr_light", 2), ("edsr_baseline", 2)):
        model = resolver(name)
        radius = {"ffnet_sr_light": 3 * depth + 2, "edsr_baseline": 2 * depth + 5}[name]
        low = torch.rand(1, 3, 1, 2 * radius + 5, dtype=torch.float64, requires_grad=True)
        middle = 2 * (radius + 2)
        (grad,) = torch.autograd.grad(model(low)[..., middle].sum(), low)
        reached = (grad[0].abs().sum((0, 1)) > 0).nonzero().flatten() - (radius + 2)
        assert reached.abs().max() <= radius
        assert reached.abs().max() >= radius - 2  # and hardly less


@pytest.mark.parametrize(
    ("name", "side", "part"),
    [("ffnet_sr_light", 24, 24), ("ffnet_sr_light", 8, 8), ("swinir_light", 16, 16),
     ("swinir_light", 8, 8), ("swinir_light", 12, 16)],
)  # fmt: skip
def test_a_network_of_global_mixers_takes_parts_of_its_build_resolution(name, side, part):
    torch.manual_seed(0)
    backbone = shorten(create_backbone(name, token_mixer="attention", img_size=side))
    seen = []
    backbone.register_forward_hook(lambda host, given, out: seen.append(given[0].shape[2:]))
    model = SuperResolver(backbone, 2).eval()
    for size in ((30, 61), (10, 24)):
        batch = {"low": torch.rand(1, 3, *size)}
        with torch.no_grad():
            (enlarged,) = model.predict(batch)
        assert enlarged.shape == (3, 2 * size[0], 2 * size[1])
    assert set(seen) == {(part, part)}


@pytest.mark.parametrize(("length", "size", "margin", "divisor"), [
    (1, 5, 2, 1), (100, 23, 8, 1), (101, 24, 8, 1), (96, 40, 16, 8), (104, 40, 16, 8),
    (41, 40, 3, 1),
])  # fmt: skip
def test_spans_cover_an_axis_once(length, size, margin, divisor):
    found = spans(length, size, margin, divisor)
    kept = [place for one in found for place in range(one.first, one.last)]
    assert kept == list(range(length))
    for one in found:
        assert one.start % divisor == 0
        assert one.stop - one.start <= size
        assert one.start == 0 or one.first - one.start >= margin
        assert one.stop == length or one.stop - one.last >= margin


def test_mistakes_are_refused():
    with pytest.raises(
        ValueError, match=r"head.tile \(parts overlap by .*\) must be at least 221, got 200"
    ):
        SuperResolver(create_backbone("ffnet_sr_light"), 2, tile=200)
    with pytest.raises(ValueError, match=r"head.fft_weight must be at least 0"):
        SuperResolver(create_backbone("bicubic"), 2, fft_weight=-1.0)
