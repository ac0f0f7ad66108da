"""DiT, U-DiT and U-FFNet against plain references and diffusers; counts and checkpoints."""

import pytest
import torch

from backbones import create_backbone
from backbones.analysis.counting import count_macs, count_parameters
from backbones.hosts.dit import DiT
from backbones.hosts.u_dit.host import AUTHORS, OUTER, PARTS, UDiT
from backbones.slots import HostConfig
from heads.generation import Generator
from tests.references import diffusion as plain
from tests.steps import assert_a_step_lowers_the_loss
from tools.papers.published import load_rows

SIZES = {"channels": 3, "num_classes": 5, "learn_sigma": True}


def randomised(module):
    """Every tensor drawn at random: nothing left at zero, as adaLN-Zero starts."""
    generator = torch.Generator().manual_seed(1)
    for value in module.state_dict().values():
        value.copy_(0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
    return module


def inputs(side=8):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, side, side, generator=generator, dtype=torch.double)
    return x, torch.tensor([7, 800]), torch.tensor([3, 5])


def small_dit(**options):
    config = HostConfig((8, 8), patch_size=2)
    return randomised(DiT(config, **SIZES, dim=16, depth=2, heads=2, **options).double().eval())


def compare(host, wanted_of, x, times, labels):
    """Compare predictions and the gradients of inputs and weights."""
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in host.state_dict().items()
    }
    one, other = (x.clone().requires_grad_() for _ in range(2))
    (found,), wanted = host(one, times, labels), wanted_of(other, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    by = torch.randn_like(wanted)
    (found * by).sum().backward()
    (wanted * by).sum().backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-6)
    for name, parameter in host.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-6, atol=1e-6, msg=name
        )


def test_dit_equals_a_plain_one_with_gradients():
    x, times, labels = inputs()
    compare(small_dit(), lambda x, w: plain.dit(x, times, labels, w, 2, 2, 2), x, times, labels)


def authors_names(host):
    """Our names of U-DiT by the authors'."""
    names = {}
    for key in host.state_dict():
        found = key
        for theirs, ours in OUTER.items():
            if key.startswith(f"{ours}."):
                found = theirs + key.removeprefix(ours)
        parts = key.split(".")
        if parts[0] == "stages" and parts[2] == "blocks":
            stage, block, rest = int(parts[1]), int(parts[3]), ".".join(parts[4:])
            theirs, ours = next(
                (a, b) for a, b in PARTS.items() if rest == b or rest.startswith(f"{b}.")
            )
            inner = theirs.format(block % 2 + 1) + rest.removeprefix(ours)
            found = f"{AUTHORS[stage]}.{block // 2}.{inner}"
        names[key] = found
    return names


def test_u_dit_equals_a_plain_one_by_the_authors_names():
    config = HostConfig((8, 8), patch_size=1)
    host = randomised(UDiT(config, **SIZES, dim=8, depths=(2,) * 5, heads=2).double().eval())
    names = authors_names(host)
    x, times, labels = inputs()
    compare(
        host,
        lambda x, w: plain.u_dit(
            x, times, labels, {names[k]: v for k, v in w.items()}, (1,) * 5, 2
        ),
        x, times, labels,
    )  # fmt: skip
    given = {names[key]: value for key, value in host.state_dict().items()}
    assert given.keys() != host.state_dict().keys()
    assert host.convert_state_dict(given).keys() == host.state_dict().keys()
    (before,) = host(x, times, labels)
    (after,) = host.fuse()(x, times, labels)
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


def test_dit_equals_that_of_diffusers():
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=6, num_layers=2,
        sample_size=8, patch_size=2, num_embeds_ada_norm=5, norm_num_groups=1,
        norm_eps=1e-6,  # the authors'; diffusers' files say 1e-5
    )  # fmt: skip
    randomised(theirs)
    tensors = theirs.state_dict()
    for key in tensors:  # diffusers keeps one embedder per block; DiT has one
        if ".norm1.emb." in key and not key.startswith("transformer_blocks.0."):
            tensors[key].copy_(tensors["transformer_blocks.0." + key.split(".", 2)[2]])
    host = small_dit(frequency_shift=1).float()
    converted = host.convert_state_dict(dict(tensors))
    converted.pop("pos_embed", None)
    host.load_state_dict(converted)
    x, times, labels = inputs()
    with torch.no_grad():
        wanted = theirs.eval()(x.float(), times, labels).sample
        (found,) = host(x.float(), times, labels)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_counts():
    with torch.device("meta"):
        xl = create_backbone("dit_xl")
        fused = create_backbone("u_dit_b", fused=True)
        plain_reading = create_backbone("u_ffnet_b", fused=True, projections=1)
        three = create_backbone("u_ffnet_b", fused=True)
        tiny = create_backbone("u_ffnet_tiny", channels=1, num_classes=10)
    latents = (4, 32, 32)
    positions = 16 * 16 * 1152  # a buffer here, a frozen table in the authors' count
    assert count_parameters(xl) + positions == 675_129_632
    assert round(count_macs(xl, shape=latents) / 1e9, 2) == 118.62  # the paper's Gflops: 118.6
    assert round(count_macs(fused, shape=latents) / 1e9, 2) == 22.18
    assert round(count_macs(plain_reading, shape=latents) / 1e9, 2) == 16.51
    assert round(count_macs(three, shape=latents) / 1e9, 2) == 19.53
    assert count_macs(tiny, shape=(1, 32, 32)) <= 0.05e9


@pytest.mark.parametrize("name", ["dit_tiny", "u_dit_tiny", "u_ffnet_tiny"])
@pytest.mark.parametrize("options", [{}, {"token_mixer": "sep_conv"}], ids=["own", "sep_conv"])
def test_small_hosts_start_at_zero_and_learn_everywhere(name, options):
    host = create_backbone(name, channels=1, num_classes=10, img_size=16, **options)
    x = torch.randn(2, 1, 16, 16)
    (found,) = host(x, torch.tensor([3, 999]), torch.tensor([1, 10]))
    assert found.shape == x.shape
    assert (found == 0).all()
    randomised(host)
    host(x, torch.tensor([3, 999]), torch.tensor([1, 10]))[0].square().mean().backward()
    assert all(p.grad is not None for p in host.parameters())
    with pytest.raises(ValueError, match=r"data\.image_size must be a multiple of"):
        host(torch.randn(1, 1, 18, 18))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["u_ffnet_b", "dit_s"])
def test_full_hosts_take_a_training_step(name):
    torch.manual_seed(0)
    model = Generator(create_backbone(name)).train()
    batch = {"images": torch.randn(1, 4, 32, 32), "labels": torch.tensor([3])}
    assert_a_step_lowers_the_loss(model, batch)


def test_files_of_diffusers_with_several_embedders_are_refused():
    key = "transformer_blocks.{}.norm1.emb.timestep_embedder.linear_1.weight"
    tensors = {key.format(i): torch.full((2, 2), float(i)) for i in range(2)}
    with pytest.raises(ValueError, match="DiT has one embedder of times and classes"):
        small_dit().convert_state_dict(tensors)


@pytest.mark.parametrize("row", load_rows("ffnet", "generation"), ids=lambda row: row.name)
def test_published_rows(row):
    with torch.device("meta"):
        host = create_backbone(row.backbone, **row.options)
    assert count_parameters(host) == row.params
    assert count_macs(host, shape=(4, 32, 32)) == row.exact_macs
