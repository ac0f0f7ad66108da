"""SBM as one compiled operator: what torch's operations give, where it says that it serves."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from backbones.fast import fast, switched_off
from backbones.fast.cpu.sbm import operands
from backbones.layers.conv_pos_enc import ConvPosEnc
from tests.forms import build_fast, compiled
from tests.tensors import randomise, tokens

pytestmark = compiled
# Channels that fill lines of memory and that do not; more tokens than go through at a time.
MAPS = [
    (1, (13, 11), 24), (1, (1, 150), 17), (1, (150, 1), 5), (1, (4, 5), 8), (3, (1, 9), 6),
    (2, (9, 1), 19), (2, (13, 11), 24), (1, (7, 6), 64),
]  # fmt: skip


def without_operators(mixer, x):
    with switched_off():
        return mixer(x)


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("batch", "size", "dim"), MAPS, ids=str)
def test_operator_equals_torch(batch, size, dim, threads):
    mixer = build_fast("sbm", dim, grid=(4, 5), rank=3, out_proj=dim == 6)
    x = tokens(batch, *size, dim)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert mixer.is_fast(x)
        found = mixer(x)
    finally:
        torch.set_num_threads(before)
    with torch.enable_grad():
        expected = mixer(x).detach()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(without_operators(mixer, x), expected, rtol=1e-10, atol=1e-10)
    single = mixer.float()(x.float())
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-5)
    assert single.dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 5}, {"x_width": 1}, {"pre_proj": True}, {"norm": False},
        {"use_gate": False}, {"use_linear": False}, {"use_bilinear": False},
    ],
    ids=str,
)  # fmt: skip
def test_other_forms_are_torchs(options):
    mixer, x = build_fast("sbm", 8, grid=(4, 5), rank=3, **options), tokens(2, 4, 5, 8)
    assert not mixer.is_fast(x)
    torch.testing.assert_close(mixer(x), without_operators(mixer, x), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_it_serves_without_hooks_and_tracers():
    mixer, x = build_fast("sbm", 8, grid=(4, 5), rank=3), tokens(2, 4, 5, 8)
    assert mixer.is_fast(x)
    with torch.enable_grad():
        assert not mixer.is_fast(x)
    assert not mixer.is_fast(tokens(2, 1, 3, 8))  # no more tokens than the rank
    assert not mixer.is_fast(x.float())
    assert not mixer.is_fast(x.transpose(1, 2))
    with torch.autocast("cpu"):
        assert not mixer.is_fast(x)
    with forward_ad.dual_level():
        assert not mixer.is_fast(x)
    handle = mixer.bilinear.proj.register_forward_hook(lambda *_: None)
    assert not mixer.is_fast(x)
    handle.remove()
    mixer.lin_proj.bias = None
    assert not mixer.is_fast(x)
    torch.testing.assert_close(mixer(x), without_operators(mixer, x), rtol=1e-10, atol=1e-10)


class Turned(nn.Module):
    """A parametrization whose result lies transposed in memory."""

    def forward(self, weight):
        return weight.transpose(0, -1).contiguous().transpose(0, -1)


@torch.no_grad()
@pytest.mark.parametrize("part", ["conv", "bilinear.proj", "gate_proj"])
def test_weights_that_are_computed_are_torchs(part):
    mixer, x = build_fast("sbm", 8, grid=(4, 5), rank=3), tokens(2, 4, 5, 8)
    expected = mixer(x)
    parametrize.register_parametrization(mixer.get_submodule(part), "weight", Turned())
    assert not mixer.is_fast(x)
    torch.testing.assert_close(mixer(x), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("name", ["sbm", "iffn"])
@pytest.mark.parametrize("dim", [4, 6, 9, 16])
def test_another_number_of_channels_is_refused(name, dim):
    options = {"grid": (4, 5), "rank": 3} if name == "sbm" else {}
    mixer = build_fast(name, 8, **options)
    with pytest.raises(RuntimeError, match="shape"):
        mixer(tokens(2, 4, 5, dim))


@pytest.mark.parametrize("index", [0, 3, 4, 5, 6])
def test_the_operator_itself_refuses_other_sizes(index):
    given = list(arguments(build_fast("sbm", 8, grid=(4, 5), rank=3), tokens(2, 4, 5, 8)))
    for wrong in (given[index][..., :-1].contiguous(), given[index].float()):
        with pytest.raises(RuntimeError, match="star_mixer needs a contiguous tensor"):
            torch.ops.mixerlab.star_mixer(*given[:index], wrong, *given[index + 1 :])


@torch.no_grad()
def test_weights_that_changed_count():
    mixer, x = build_fast("sbm", 8, grid=(4, 5), rank=3), tokens(2, 6, 7, 8)
    before = mixer(x)
    for parameter in (mixer.bilinear.space_read, mixer.conv.weight, mixer.norm.bias):
        parameter.mul_(1.5)
        after = mixer(x)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, without_operators(mixer, x), rtol=1e-10, atol=1e-10)
        before = after


def arguments(mixer, x):
    with torch.no_grad():
        return (x, *operands(mixer, x))


def test_its_schema_is_right():
    """torch's own check."""
    mixer, x = build_fast("sbm", 8, grid=(4, 5), rank=3), tokens(2, 4, 5, 8)
    operator = torch.ops.mixerlab.star_mixer.default
    torch.library.opcheck(operator, arguments(mixer, x), test_utils=("test_schema",))


@torch.no_grad()
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("batch", "size", "dim"), MAPS, ids=str)
def test_a_positional_encoding_equals_torchs(batch, size, dim, has_bias):
    encoding, x = fast(randomise(ConvPosEnc(dim))), tokens(batch, *size, dim)
    if not has_bias:
        encoding.bias = None
    for given in (x, x.transpose(1, 2), x[:0]):
        assert encoding.is_fast(given)
        with switched_off():
            assert not encoding.is_fast(given)
            expected = encoding(given)
        torch.testing.assert_close(encoding(given), expected, rtol=1e-10, atol=1e-10)
    with torch.enable_grad():
        assert not encoding.is_fast(x)  # the operator has no gradient
        assert encoding(x).requires_grad


def test_the_encoding_refuses_what_does_not_fit():
    operator, kernel = torch.ops.mixerlab.conv_pos_enc, torch.ones(5, 1, 3, 3)
    x = torch.ones(2, 3, 4, 5)
    torch.library.opcheck(operator, (x, kernel, None), test_utils=("test_schema",))
    for given, text in (
        ((x[0], kernel, None), "contiguous map"),
        ((x.transpose(1, 2), kernel, None), "contiguous map"),
        ((x, kernel[:4], None), "kernel"),
        ((x, kernel, torch.ones(4)), "a bias of 5"),
        ((x, kernel.double(), None), "weights of Float"),
    ):
        with pytest.raises(RuntimeError, match=text):
            operator(*given)
