"""IFFN's compiled operator equals torch's own operations, forward and backward."""

import copy

import pytest
import torch

from backbones import create_backbone
from backbones.fast import switched_off
from backbones.fast.cpu.iffn import operands
from tests.forms import build_fast, compiled

# Lines and columns without neighbours, and a map in many pieces.
SIZES = [(1, 7), (9, 1), (5, 6), (70, 61)]


def both_ways(mixer, x):
    """Output, all gradients and running statistics, by the operator and without it."""
    results = []
    for is_off in (False, True):
        own, leaf = copy.deepcopy(mixer), x.clone().requires_grad_()
        assert own.is_fast(leaf)
        if is_off:
            with switched_off():
                assert not own.is_fast(leaf)
                y = own(leaf)
        else:
            y = own(leaf)
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        gradients = torch.autograd.grad(y, [leaf, *own.parameters()], probe)
        results.append([y, *gradients, *own.buffers()])
    return results


@compiled
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"n_branches": 4, "hidden_ratio": 2.9, "bn_out": False}], ids=str
)
def test_operator_equals_torch(options, size, training):
    dim = 40 if options else 24  # both have channels that fill no line of memory
    mixer = build_fast("iffn", dim, **options).train(training)
    x = torch.randn(3, *size, dim, dtype=torch.float64)
    mine, plain = both_ways(mixer, x)
    # Biases before a norm of the batch have no gradient but rounding's: 1e-10 covers both.
    torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10)
    if not training:
        with torch.inference_mode():
            torch.testing.assert_close(mixer(x), plain[0], rtol=1e-11, atol=1e-11)


@compiled
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_pieces_and_threads_change_nothing(training, threads):
    """Images by the dozen in one piece, and float32 against float64 to its rounding."""
    mixer, before = build_fast("iffn", 64).train(training), torch.get_num_threads()
    x = torch.randn(150, 6, 6, 64)
    expected = both_ways(mixer, x.double())[1]
    torch.set_num_threads(threads)
    try:
        found = both_ways(mixer.float(), x)[0]
        mixer.eval()
        with torch.no_grad():
            y = mixer(x)
            with switched_off():
                plain = mixer(x)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(y, plain, rtol=0, atol=2e-6 * float(plain.abs().max()))
    least = x[..., 0].numel() ** 0.5  # what rounding leaves of a sum over tokens that is zero
    for one, other in zip(found, expected, strict=True):
        other = other.double()
        scale = other.abs().max().clamp(min=least)
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=0, atol=5e-5)


@compiled
@pytest.mark.parametrize("value", [-40.0, -5.6, -5.4, -1.0, -1e-3, 0.0, 0.5, 3.0, 5.6, 40.0])
def test_gelu_is_torchs(value):
    """Far out, too, where a polynomial would go its own way."""
    mixer = build_fast("iffn", 16).float()
    with torch.no_grad():
        for branch in mixer.branches:
            branch.alpha.zero_()
            branch.gamma.fill_(value)
        x = torch.randn(1, 4, 4, 16)
        y = mixer(x)
        with switched_off():
            torch.testing.assert_close(y, mixer(x), rtol=1e-5, atol=1e-5)


@compiled
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_numbers_that_are_none_stay_none(training):
    mixer = build_fast("iffn", 16).float().train(training)
    x = torch.randn(1, 5, 5, 16)
    x[0, 0, 0, 3] = torch.nan
    with torch.no_grad():
        y = copy.deepcopy(mixer)(x)
        with switched_off():
            plain = mixer(x)
    assert torch.equal(y.isnan(), plain.isnan())
    assert y.isnan().any()
    assert bool(y.isnan().all()) == training


@compiled
def test_a_recomputed_block_learns_its_statistics_once():
    networks = []
    for recompute in (False, True):
        torch.manual_seed(0)
        network = create_backbone("deit_t_iffn", img_size=64).train()
        network.blocks = network.blocks[:1]
        if recompute:
            network.set_grad_checkpointing()
        torch.manual_seed(1)
        network.embed(torch.randn(2, 3, 64, 64)).sum().backward()
        networks.append(dict(network.named_buffers()))
    assert any("running_var" in key for key in networks[0])
    torch.testing.assert_close(*networks)


@compiled
def test_an_empty_batch_and_a_single_token_keep_to_torch():
    mixer = build_fast("iffn", 16)
    assert not mixer.is_fast(torch.empty(0, 4, 4, 16, dtype=torch.float64))
    assert not mixer.is_fast(torch.empty(1, 1, 1, 16, dtype=torch.float64))
    assert mixer.is_fast(torch.empty(1, 1, 2, 16, dtype=torch.float64))


@compiled
@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 5}, {"act": "silu"}, {"arb": "off"}, {"arb": "rprelu"}, {"channel": False},
     {"spatial": False}, {"bn_mid": False}, {"norm": "layer"}, {"dw_residual": True},
     {"dw_residual": "outside"}, {"dw_order": "act_bn"}],
    ids=str,
)  # fmt: skip
def test_other_forms_keep_to_torch(options):
    mixer = build_fast("iffn", 40, **options)
    assert not mixer.is_fast(torch.randn(1, 4, 4, 40, dtype=torch.float64))


@compiled
def test_other_norms_keep_to_torch():
    x = torch.randn(1, 4, 4, 40, dtype=torch.float64)
    for attribute, value in (("momentum", None), ("running_mean", None), ("training", True)):
        mixer = build_fast("iffn", 40)
        setattr(mixer.bn_mid, attribute, value)
        assert not mixer.is_fast(x)
    mixer = build_fast("iffn", 40)
    mixer.dw.bn = torch.nn.SyncBatchNorm.convert_sync_batchnorm(mixer.dw.bn)
    assert not mixer.is_fast(x)
    for norm in (
        torch.nn.BatchNorm1d(40, affine=False),
        torch.nn.BatchNorm1d(40, track_running_stats=False),
    ):
        mixer = build_fast("iffn", 40)
        mixer.bn_out = norm.double().eval()
        with torch.no_grad():
            y = mixer(x)
            with switched_off():
                torch.testing.assert_close(mixer(x), y)
    mixer = build_fast("iffn", 40)
    mixer.bn_mid.running_mean = torch.zeros(1, dtype=x.dtype)
    with torch.no_grad(), pytest.raises(RuntimeError, match="running statistics of"):
        mixer(x)
    weight = mixer.fc1.weight.detach()
    del mixer.fc1.weight
    mixer.fc1.weight = weight  # as in a replica
    assert not mixer.is_fast(x)
    mixer = build_fast("iffn", 40, drop=0.1)
    assert mixer.is_fast(x)
    assert not mixer.train().is_fast(x)


@compiled
def test_who_looks_inside_sees_the_parts():
    mixer = build_fast("iffn", 40)
    x, seen = torch.randn(1, 4, 4, 40, dtype=torch.float64), []
    handle = mixer.dw.conv.register_forward_hook(lambda *_: seen.append(1))
    with torch.enable_grad():
        mixer(x)
    assert seen
    handle.remove()
    assert mixer.is_fast(x)


@compiled
def test_autocast_and_compilers_keep_to_torch():
    mixer, x = build_fast("iffn", 40).float(), torch.randn(1, 4, 4, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert not mixer.is_fast(x)
    exported = torch.export.export(mixer, (x,))
    assert "branched_mixer" not in str(exported.graph)
    assert not mixer.bfloat16().is_fast(x.bfloat16())


@compiled
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_operator_is_whole_for_torch(training):
    """Its schema and its gradients agree: torch's own check."""
    mixer = build_fast("iffn", 16)
    tokens = torch.randn(2, 12, 16, dtype=torch.float64, requires_grad=True)
    first, coefficients, norms, running, eps, _, depthwise, last = operands(mixer)
    arguments = (tokens, 3, 4, *first, coefficients, norms, running, *eps, training)
    arguments += (*depthwise, *last, True)
    checks = ("test_schema", "test_autograd_registration")
    operator = torch.ops.mixerlab.branched_mixer.default
    torch.library.opcheck(operator, arguments, test_utils=checks)


@compiled
def test_gradients_of_gradients_say_what_to_do():
    mixer = build_fast("iffn", 16)
    x = torch.randn(1, 3, 3, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"switched_off\(\)"):
        torch.autograd.grad(mixer(x).square().sum(), x, create_graph=True)
