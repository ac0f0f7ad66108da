"""The patch check stops wrong mixers before a training and leaves the state unchanged."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from backbones import Backbone, Mixer, list_mixers, register_mixer
from backbones.base import FeatureInfo
from backbones.layers.axes import to_nchw, to_nhwc
from heads.linear import LinearClassifier, LinearProbe
from tasks.classification.patch_check import unseen_patches
from tasks.classification.task import ClassificationTask
from tasks.engine.checkpoints.exact_resume import random_state
from tests.families import build_short
from tests.running.tiny import ADAMW, CONSTANT, train_on_digits

LIKE = torch.empty(0)


class Linear(Mixer):
    """Leaves the map unchanged; subclasses mix the class tokens in different ways."""

    prefix_mixing = "joint"

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def mix(self, x):
        return self.linear(x)

    def mix_joint(self, x, prefix):
        return self.mix(x), self.read(x, prefix)


def reading(name, read):
    return type(name, (Linear,), {"read": read})


Dead = reading("Dead", lambda self, x, prefix: prefix)
Pointwise = reading("Pointwise", lambda self, x, prefix: self.linear(prefix))
Detached = reading("Detached", lambda _, x, prefix: prefix + x.detach().mean((1, 2))[:, None])
TopRows = reading("TopRows", lambda _, x, prefix: prefix + x[:, :1].mean((1, 2))[:, None])
# Reads the maximum per channel: a few patches, which differ between images.
Maximum = reading("Maximum", lambda _, x, prefix: prefix + x.amax((1, 2))[:, None, :])


class Gated(Linear):
    """Reads through a gate that is 0 at the start."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.gates = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        self.unrelated = nn.Parameter(torch.zeros(3, 3))

    def read(self, x, prefix):
        return prefix + self.gates[0].tanh() * x.mean((1, 2))[:, None] + self.unrelated.sum()


class GatedDead(Gated):
    """Has zeros without effect."""

    def read(self, x, prefix):
        return prefix + self.unrelated.sum()


class HalfGated(Linear):
    """Has one vector of gates; those of the map are 0 at the start."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.gates = nn.Parameter(torch.ones(2, dim))

    def read(self, x, prefix):
        return self.gates[0] * prefix + self.gates[1] * x.mean((1, 2))[:, None]


class LinearAttention(Mixer):
    """Multi-head linear attention of all tokens, including class tokens."""

    prefix_mixing = "joint"

    def __init__(self, dim: int, *, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def mix_joint(self, x, prefix):
        z = torch.cat([prefix, x.flatten(1, 2)], dim=1)
        q, k, v = self.qkv(z).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = q.softmax(-1) @ (k.softmax(-2).mT @ v)
        y = self.proj(mixed.transpose(1, 2).flatten(2))
        count = prefix.shape[1]
        return y[:, count:].unflatten(1, x.shape[1:3]), y[:, :count]


class Fourier(Mixer):
    """Fixed-size filter in the frequency domain, without class tokens."""

    def __init__(self, dim: int, *, grid: tuple[int, int] = (14, 14)) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(dim, grid[0], grid[1] // 2 + 1, 2))

    def mix(self, x):
        spectrum = torch.fft.rfft2(to_nchw(x), norm="ortho") * torch.view_as_complex(self.weight)
        return to_nhwc(torch.fft.irfft2(spectrum, s=x.shape[1:3], norm="ortho"))


class PooledLinear(Linear):
    prefix_mixing = "pooled"


@pytest.fixture
def deit(registering):
    """Build a short DeiT of 4 x 4 patches with a token mixer."""

    def build(mixer, size=64, **options):
        name = mixer.__name__.lower()
        if name not in list_mixers():
            register_mixer(name, kind="token", source="this test")(mixer)
        return build_short("deit_t", token_mixer=name, img_size=size, **options)

    return build


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        (Dead, "in all 16 patches of 16 x 16 pixels: its class token never sees the image"),
        (Pointwise, "in all 16 patches"),
        (Detached, "in all 16 patches"),
        (GatedDead, "in all 16 patches"),
        (TopRows, r"in 12 of 16 patches .*from 0: row 1 column 0, row 1 column 1, .*\.\.\.\)"),
    ],
)
def test_a_class_token_blind_to_the_image_is_found(deit, mixer, said):
    problem = unseen_patches(deit(mixer), (64, 64), LIKE)
    with pytest.raises(ValueError, match=rf"^the gradient of deit_t's embedding is 0 {said}"):
        raise ValueError(problem)
    assert f"mix_joint of {mixer.__name__}, or declare prefix_mixing='pooled'" in problem
    assert problem.endswith("or pass task.check_patches=false to train anyway")


@pytest.mark.parametrize("mixer", [LinearAttention, Fourier, PooledLinear, Maximum])
@pytest.mark.parametrize("size", [(64, 64), (70, 90)])
def test_correct_mixers_pass(deit, mixer, size):
    assert unseen_patches(deit(mixer, size=size), size, LIKE) is None


class Stub(Backbone):
    """Convolution with an embedding by ``pool``."""

    feature_info = (FeatureInfo(4, 8),)
    num_features = 4

    def __init__(self, pool=None, gain=1.0):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 8, 8)
        self.head = nn.Linear(4, 4)
        self.pool, self.gain = pool, gain

    def embed(self, images):
        images.mul_(self.gain)  # a host may write to its input
        x = self.stem(images)
        return self.head(x.mean((2, 3)) if self.pool is None else self.pool(x))


def test_cropped_pixels_and_small_gradients_pass():
    assert unseen_patches(Stub(), (30, 29), LIKE) is None
    cropped = Stub(lambda x: x[:, :, 1:].mean((2, 3)))
    assert "3 of 9 patches of 8 x 8" in unseen_patches(cropped, (30, 29), LIKE)
    assert "Look at how tokens are mixed in Stub" in unseen_patches(cropped, (30, 29), LIKE)
    network = Stub(gain=1e-5)
    with torch.autocast("cpu", torch.float16):
        assert unseen_patches(network, (24, 24), LIKE) is None
    assert unseen_patches(network.bfloat16(), (24, 24), LIKE.bfloat16()) is None


def test_frozen_parts_may_compute_without_gradient():
    class NoGradient(Stub):
        def embed(self, images):
            with torch.no_grad():
                x = self.stem(images)
            return self.head(x.mean((2, 3)) * self.gain)

    assert "in all 9 patches" in unseen_patches(NoGradient(), (24, 24), LIKE)
    for gain, passes in ((1.0, True), (0.0, False)):
        network = NoGradient(gain=gain)
        network.stem.requires_grad_(False)
        assert (unseen_patches(network, (24, 24), LIKE) is None) == passes


ZEROS = {
    "gate": (Gated, "blocks.*.attn.gates.*"),
    "projection": (LinearAttention, "blocks.*.attn.proj.weight"),
    "scale": (LinearAttention, "blocks.*.ls1.gamma"),
    "some of the gates": (HalfGated, "blocks.*.attn.gates"),
}


@pytest.fixture
def zeroed(deit):
    def build(case):
        network = deit(ZEROS[case][0])
        for block in network.blocks:
            if case == "gate":
                nn.init.zeros_(block.attn.gates[0])
            elif case == "scale":
                forward = {"forward": lambda s, x: s.gamma * x}
                block.ls1 = type("LayerScale", (nn.Module,), forward)()
                block.ls1.gamma = nn.Parameter(torch.zeros(192))
            elif case == "some of the gates":
                nn.init.zeros_(block.attn.gates[1])
            else:
                nn.init.zeros_(block.attn.proj.weight)
        return network

    return build


@pytest.mark.parametrize("case", ZEROS)
def test_zero_initialised_parameters_are_named_and_accepted(zeroed, case, caplog):
    network = zeroed(case)
    before = copy.deepcopy(network.state_dict())
    with torch.no_grad():
        assert unseen_patches(network, (64, 64), LIKE) is None
    (line,) = caplog.messages
    assert line.endswith(f"as they are at the start: {ZEROS[case][1]}")
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
    network.requires_grad_(False)
    problem = unseen_patches(network, (64, 64), LIKE)
    assert problem.endswith(f"are 0 and frozen: {ZEROS[case][1]}; unfreeze them")


class Restless(LinearAttention):
    """Draws numbers, counts in buffers and caches its outputs, also in evaluation."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("latest", torch.zeros(1))
        self.norm = nn.BatchNorm1d(dim)
        self.cached, self.seen, self.table = None, [], {}

    def mix_joint(self, x, prefix):
        assert not self.training
        self.calls += 1
        self.latest = self.calls + 1
        self.cached = x * float(torch.rand(())) * random.random() * np.random.rand()
        self.seen.append(self.cached)
        self.table["x"] = x
        x = self.norm(x.flatten(0, 2)).view(x.shape)
        return super().mix_joint(x, prefix)


def same_state(first, second):
    for name in ("python", "torch", "cuda"):
        assert np.array_equal(first[name], second[name]) or first[name] == second[name]
    assert first["numpy"][0] == second["numpy"][0]
    assert torch.equal(first["numpy"][1], second["numpy"][1])
    assert first["numpy"][2:] == second["numpy"][2:]


def test_the_state_stays_unchanged(deit):
    network = deit(Restless).train()
    network.blocks[0].attn.eval()
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
    values = copy.deepcopy(network.state_dict())
    modes = [module.training for module in network.modules()]
    state = random_state()
    for wrong in (False, True):
        if wrong:
            for block in network.blocks:
                block.attn.proj.weight.data.zero_()
                values = copy.deepcopy(network.state_dict())
        unseen_patches(network, (64, 64), LIKE)
        same_state(random_state(), state)
        assert [module.training for module in network.modules()] == modes
        torch.testing.assert_close(network.state_dict(), values, rtol=0, atol=0)
        assert all(p is parameters[name] for name, p in network.named_parameters())
        assert all(b is buffers[name] for name, b in network.named_buffers())
        assert all((p.grad == 1).all() for p in network.parameters())
        for block in network.blocks:
            assert (block.attn.cached, block.attn.seen, block.attn.table) == (None, [], {})


@pytest.fixture
def train(sample_cache, tmp_path, deit, one_thread):
    """Train two epochs of two batches."""

    def train(folder, mixer=LinearAttention, *, head=LinearClassifier, check=True, **given):
        def task():
            backbone = deit(mixer, size=32, patch_size=8, drop_path_rate=0.2).float()
            options = {"optimizer": ADAMW, "schedule": CONSTANT, "check_patches": check}
            return ClassificationTask(head(backbone, 10), "0123456789", **options)

        given = {"limit_train_batches": 2, **given}
        return train_on_digits(tmp_path / folder, sample_cache, task, **given)

    return train


@pytest.mark.parametrize(("mixer", "check"), [(Fourier, True), (PooledLinear, True), (Dead, False)])
def test_correct_mixers_train_and_others_without_the_check(train, mixer, check):
    assert train("run", mixer, check=check, max_epochs=1)["global_step"] == 2


@pytest.mark.parametrize(
    "given",
    [{}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"}, {"head": LinearProbe}],
    ids=str,
)
def test_a_wrong_mixer_is_stopped_before_its_first_step(train, tmp_path, given):
    with pytest.raises(ValueError, match="its class token never sees the image"):
        train("run", Dead, **given)
    assert not (tmp_path / "run" / "checkpoints").exists()
