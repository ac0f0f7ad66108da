"""What every registered mixer must do; a new one is picked up by its registration alone."""

import copy
import functools
import itertools
import math
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from backbones import (
    Mixer,
    PointwiseMixer,
    create_backbone,
    create_mixer,
    list_backbones,
    list_mixers,
    mixer_options,
    register_mixer,
)
from backbones.fast import plain
from backbones.layers.reparam import fuse
from backbones.registry import find_mixer
from tests.errors import refuses
from tests.families import rest_slow
from tests.forms import every_form
from tests.tensors import build_mixer, randomise, tokens

DIM = 24
# Maps in (H, W): square, oblong, one row, one token; several are smaller than any kernel.
MAPS = [(8, 8), (5, 9), (1, 7), (2, 2), (1, 1)]
TUTORIAL = Path(__file__).resolve().parents[2] / "docs/examples/new/backbones/mixers/tanh_ffn.py"

CHECKS = []
build = functools.partial(build_mixer, dim=DIM, grid=MAPS[0])


def check(function):
    CHECKS.append(function)
    return function


def takes_prefix(mixer):
    return find_mixer(mixer).takes_prefix


@check
def keeps_the_shape_of_any_map(name):
    mixer = build(name)
    for size in MAPS:
        assert mixer(tokens(2, *size, DIM)).shape == (2, *size, DIM)


@check
def gives_a_gradient_to_input_and_every_parameter(name):
    """All are used in training, as DDP asks; in evaluation some may not be."""
    mixer = build(name)
    # Two windows of PVT's 8 x 8: the softmax over one key is constant.
    x = tokens(2, 8, 16, DIM).requires_grad_()
    sizes = []
    for training in (True, False):
        mixer.train(training).zero_grad()
        mixer(x).square().sum().backward()
        if training:
            for key, parameter in mixer.named_parameters():
                assert parameter.grad is not None, f"{key} is not used"
        sizes.append(
            {k: p.grad.abs().sum() for k, p in mixer.named_parameters() if p.grad is not None}
        )
    assert x.grad.abs().sum() > 0
    for key, size in sizes[0].items():
        assert max(size, sizes[1].get(key, 0)) > 0, f"the gradient of {key} is 0"


@check
def treats_images_of_a_batch_apart(name):
    mixer = build(name)
    x = tokens(3, 5, 6, DIM)
    apart = torch.cat([mixer(image[None]) for image in x])
    torch.testing.assert_close(mixer(x), apart, rtol=1e-10, atol=1e-10)


@check
def ignores_how_the_map_lies_in_memory(name):
    mixer = build(name)
    x = tokens(2, 5, 6, DIM)
    strided = x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    before = strided.clone()
    torch.testing.assert_close(mixer(strided), mixer(x), rtol=1e-10, atol=1e-10)
    assert torch.equal(strided, before), "the input was written to"


@check
def computes_the_same_without_autograd(name):
    mixer = build(name)
    x, prefix = tokens(2, 5, 6, DIM), tokens(2, 1, DIM)
    inputs = (x, prefix) if takes_prefix(name) else (x,)
    expected = mixer(*inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = mixer(*inputs)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def rounding(mixer, found, expected):
    """The relative difference; where it may turn a choice, that of most tokens."""
    if mixer.makes_choices:
        return ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median()
    return (found - expected).norm() / expected.norm()


def build_for_rounding(name):
    """Build a mixer; gr_kan near its start, since random rational functions have steep peaks."""
    if name != "gr_kan":
        return build(name).float()
    torch.manual_seed(0)
    return randomise(create_mixer(name, DIM), scale=0.01).float()


@check
def runs_in_bfloat16_autocast(name):
    mixer = build_for_rounding(name)
    x = tokens(2, 5, 6, DIM).float()
    expected = mixer(x)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            found = mixer(x).float()
        assert rounding(mixer, found, expected) < 0.05


@check
def runs_with_half_precision_weights(name):
    mixer = build_for_rounding(name)
    x = tokens(2, 5, 6, DIM).float()
    expected = mixer(x)
    for dtype, share in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                found = copy.deepcopy(mixer).to(dtype)(x.to(dtype))
            assert found.dtype == dtype
            assert rounding(mixer, found, expected) < share


@check
def comes_back_from_state_dict_deepcopy_and_pickle(name):
    mixer, other = build(name), build(name, seed=1)
    x = tokens(2, 5, 6, DIM)
    expected = mixer(x)
    if mixer.state_dict():
        assert not torch.equal(other(x), expected), "the seed changes nothing"
    other.load_state_dict(mixer.state_dict())
    for restored in (other, copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
        torch.testing.assert_close(restored(x), expected, rtol=0, atol=0)


@check
def treats_prefix_tokens_as_it_declares(name):
    mixer = build(name)
    x, prefix = tokens(2, 5, 6, DIM), tokens(2, 2, DIM)
    if not takes_prefix(name):
        if mixer.kind == "channel" or type(mixer).mix_prefix is Mixer.mix_prefix:
            refuses("takes no class tokens", mixer, x, prefix)
        return
    mixed, mixed_prefix = mixer(x, prefix)
    assert mixed_prefix.shape == prefix.shape
    exact = {"rtol": 1e-12, "atol": 1e-12}
    other_map, other_prefix = mixer(x + tokens(2, 5, 6, DIM, seed=2), prefix)[1], prefix.flip(-1)
    if mixer.prefix_mixing == "joint":
        nothing = mixer(x, prefix[:, :0])
        torch.testing.assert_close(nothing[0], mixer(x), **exact)
        assert nothing[1].shape == (2, 0, DIM)
    else:
        torch.testing.assert_close(mixed, mixer(x), **exact)
        torch.testing.assert_close(mixer(x, prefix + 1)[0], mixed, **exact)
    if mixer.prefix_mixing == "pooled":
        mean = mixed.mean((1, 2))[:, None].expand(-1, 2, -1)
        torch.testing.assert_close(mixed_prefix, mean, **exact)
    if mixer.prefix_mixing == "none":  # a channel mixer, which treats them apart
        torch.testing.assert_close(other_map, mixed_prefix, **exact)
    else:
        assert not torch.allclose(other_map, mixed_prefix)
    if mixer.prefix_mixing != "pooled":
        assert not torch.allclose(mixer(x, other_prefix)[1], mixed_prefix)


@check
def commutes_with_permutations_if_pointwise(name):
    mixer = build(name)
    if not isinstance(mixer, PointwiseMixer):
        return
    x = tokens(2, 30, DIM)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixer(x[:, order]), mixer(x)[:, order], rtol=1e-12, atol=1e-12)


@check
def refuses_an_unknown_option_with_the_nearest(name):
    options = mixer_options(name)
    misspelt = f"{next(iter(options))}s" if options else "x"
    with pytest.raises(ValueError, match=f"option of mixer {name} called '{misspelt}'") as caught:
        create_mixer(name, DIM, **{misspelt: 1})
    assert all(option in str(caught.value) for option in list(options)[:1])


@check
def refuses_an_option_of_the_wrong_type(name):
    option = next(iter(mixer_options(name)), "")
    if option:
        with pytest.raises(ValueError, match=rf"mixer\.{option}=\[\] is not (a|one|true)"):
            create_mixer(name, DIM, **{option: []})


@check
def follows_every_change_of_its_weights(name):
    mixer, x = build(name), tokens(2, 5, 6, DIM)
    with torch.no_grad():
        mixer(x)
        for parameter in mixer.parameters():
            parameter.data.mul_(1.1)
        found = mixer(x)
    expected = copy.deepcopy(mixer)(x).detach()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@check
def drops_in_training_what_it_gives_and_what_its_last_layer_reads(name):
    """As FFNs do; the gating units of gMLP and PosMLP drop what they give alone."""
    if "drop" not in mixer_options(name):
        return
    off = {"cca": "off"} if "cca" in mixer_options(name) else {}  # a branch of training alone
    x, mixer, undropped = (
        tokens(2, 5, 6, DIM), build(name, drop=0.5, **off), build(name, drop=0.0, **off)
    )  # fmt: skip
    torch.testing.assert_close(mixer(x), undropped(x), rtol=0, atol=0)
    found, expected = mixer.train()(x), 2 * undropped.train()(x)
    stays = found != 0
    assert 0.4 < stays.double().mean() < 0.6
    assert torch.allclose(found[stays], expected[stays]) == (find_mixer(name).kind == "token")


@check
def takes_its_own_defaults(name):
    options = mixer_options(name)
    x = tokens(1, 4, 4, DIM)
    torch.testing.assert_close(build(name, **options)(x), build(name)(x), rtol=0, atol=0)


@every_form
def test_every_mixer(name, form, monkeypatch, subtests):
    plainly = build
    monkeypatch.setattr(f"{__name__}.build", lambda *a, **options: form(plainly(*a, **options)))
    for what in CHECKS:
        with subtests.test(what.__name__):
            what(name)


@pytest.mark.parametrize("name", list_mixers())
def test_numbers_out_of_range_are_named_or_give_a_map(name):
    x, refusals = tokens(2, 5, 6, DIM).float(), {}
    for option, default in mixer_options(name).items():
        if isinstance(default, bool | str):
            continue
        for value in (0.0, -1.0, 3.0) if isinstance(default, float) else (0, -1, 5, 25):
            try:
                mixer = create_mixer(name, DIM, grid=(5, 6), **{option: value})
            except ValueError as error:
                refusals[option] = str(error)
                continue
            y = mixer.eval()(x)
            assert y.shape == x.shape, (option, value)
            assert y.isfinite().all(), (option, value)
    assert all(option in said or " got " in said for option, said in refusals.items()), refusals


# Largest differences of outputs and of gradients, by type.
HALF = {torch.float16: (0.005, 0.03), torch.bfloat16: (0.03, 0.06)}
# For inputs of deviation 30, float16 lacks the numbers of their gradients, and without autocast of
# their outputs.
BEYOND = {
    "hsm_ssd": "outputs of fifth degree reach 4e6, gradients 8e5",
    "gated_delta": "gradients of decays overflow",
}
# For these inputs, what turns a score or place by little turns their gradients by much: they are
# finite, and outputs may lie five times as far.
STEEP = {
    "differential": "softmax of scores of hundreds",
    "global_window": "softmax of scores of hundreds",
    "mqa2d": "softmax of scores of hundreds",
    "star": "ReLU6 cuts its product off",
    "gr_kan": "steep rational functions",
}
is_cast = pytest.mark.parametrize(
    "is_cast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["autocast", "half"]
)


def compute(mixer, x, dtype, is_cast=False):
    """Return outputs and the gradient of a map, with float32 weights under autocast."""
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=is_cast):
        y = mixer(x)
    (grad,) = torch.autograd.grad(y, x, tokens(*y.shape, seed=2).to(dtype).to(y.dtype))
    return y.detach(), grad


def in_half_precision(mixer, x, dtype, is_cast):
    """Return results in half precision, and in float64 for the same weights and map."""
    kept = torch.float32 if is_cast else dtype
    half, x = copy.deepcopy(mixer).to(kept), x.to(dtype).to(kept)
    exact = compute(copy.deepcopy(half).double(), x.double(), dtype)
    return compute(half, x, dtype, is_cast), exact


@is_cast
@pytest.mark.parametrize("name", list_mixers())
def test_half_precision_is_close_to_float64(name, is_cast):
    """With its first weights, for inputs of deviation 1 and 30, forward and backward."""
    torch.manual_seed(0)
    mixer = create_mixer(name, DIM, grid=(5, 6)).eval()
    for dtype, deviation in itertools.product(HALF, (1, 30)):
        x = deviation * tokens(2, 5, 6, DIM)
        both = zip(*in_half_precision(mixer, x, dtype, is_cast), HALF[dtype], strict=True)
        for is_gradient, (part, right, limit) in enumerate(both):
            if name in BEYOND and (dtype, deviation) == (torch.float16, 30):
                if is_gradient or not is_cast:
                    continue
            # Numbers below the smallest normal one of the type may become zero.
            least = torch.finfo(dtype).tiny * part.numel() ** 0.5
            difference = float((part.double() - right).norm() / right.norm().clamp(min=least))
            if name in STEEP and deviation == 30:
                limit = math.inf if is_gradient else 5 * limit
            assert difference < limit, (dtype, deviation, difference)


@pytest.mark.parametrize("is_cast", [True, False], ids=["autocast", "half"])
@pytest.mark.parametrize("name", ["bi_level", "sparse_moe"])
def test_choices_are_made_in_float32(name, is_cast):
    """A turned choice changes its token as a whole: 0.07 to 0.09 of the output's norm."""
    torch.manual_seed(0)
    mixer = create_mixer(name, DIM, grid=(14, 14)).eval()
    x = tokens(2, 14, 14, DIM, seed=0)
    for part, right in zip(*in_half_precision(mixer, x, torch.bfloat16, is_cast), strict=True):
        assert (part - right).norm() < 0.015 * right.norm()


@pytest.mark.parametrize("name", list_mixers())
def test_mixers_that_ignore_order_declare_it(name):
    """Hosts of variables refuse all others with this reason."""
    order = torch.tensor([7, 2, 0, 11, 5, 9, 1, 10, 3, 8, 4, 6])
    alike = []
    for height, width in ((1, 12), (3, 4)):
        mixer, x = build_mixer(name, DIM, grid=(height, width)), tokens(1, height, width, DIM)
        shuffled = x.flatten(1, 2)[:, order].reshape(x.shape)
        with torch.no_grad():
            expected = mixer(x).flatten(1, 2)[:, order].reshape(x.shape)
            alike.append(torch.allclose(mixer(shuffled), expected, rtol=1e-9, atol=1e-9))
    assert find_mixer(name).ignores_order == all(alike)


class Blur(Mixer):
    def __init__(self, dim: int, *, kernel_size: int = 3) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(kernel_size, stride=1, padding=kernel_size // 2)
        self.linear = nn.Linear(dim, dim)

    def mix(self, x: Tensor) -> Tensor:
        return self.linear(self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


def assert_is_a_mixer_like_all(name):
    assert name in list_mixers()
    for what in CHECKS:
        what(name)
    assert {f"swin_t_{name}", f"poolformer_s12_{name}"} <= set(list_backbones())
    backbone = create_backbone(f"poolformer_s12_{name}").eval()
    assert backbone(torch.zeros(1, 3, 64, 64))[-1].shape == (1, 512, 2, 2)


def test_new_mixers_are_like_all(registering, monkeypatch):
    register_mixer("blur", kind="channel", source="this test")(Blur)
    assert_is_a_mixer_like_all("blur")
    assert mixer_options("blur") == {"kernel_size": 3}


def test_example_of_the_tutorial_is_a_mixer_like_all(registering, monkeypatch):
    if TUTORIAL.stem not in list_mixers():  # while it is unregistered
        module = types.ModuleType("tutorial_example")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # where pickle looks for classes
        exec(compile(TUTORIAL.read_text(), TUTORIAL.name, "exec"), module.__dict__)
    assert_is_a_mixer_like_all(TUTORIAL.stem)


class Wrong(PointwiseMixer):
    def __init__(self, dim: int, *, made: str = "x") -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(dim, dim), made

    def mix(self, x: Tensor) -> Tensor:
        return eval(self.made, {"x": x, "y": self.linear(x)})


@pytest.mark.parametrize(
    ("made", "said"),
    {
        "y.mean(dim=(1, 2), keepdim=True)": r"\(2, 1, 1, 24\)",  # a residual would broadcast it
        "y.flatten(1, 2)": r"\(2, 30, 24\)",
        "y[..., :12]": r"\(2, 5, 6, 12\)",
        "y.transpose(1, 2)": r"\(2, 6, 5, 24\)",
        "None": "NoneType",
        "(x, y)": "tuple",
    }.items(),
)
def test_another_shape_than_the_given_one_is_refused(registering, made, said):
    register_mixer("wrong", kind="channel", source="this test")(Wrong)
    message = rf"^Wrong returned {said} for \(2, 5, 6, 24\); a mixer must"
    refuses(message, create_mixer("wrong", DIM, made=made), tokens(2, 5, 6, DIM).float())


class Linear(Mixer):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)


def declaring(name, prefix_mixing, **methods):
    return type(name, (Linear,), {"prefix_mixing": prefix_mixing, **methods})


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        (declaring("NoMethod", "joint", mix=lambda self, x: x),
         "prefix_mixing='joint' but lacks the method mix_joint"),
        (declaring("Misspelt", "pool", mix=lambda self, x: x),
         "declares prefix_mixing='pool'; it must be one of joint, pooled, none"),
        (declaring("OneOutput", "joint", mix_joint=lambda self, x, prefix: x),
         r"OneOutput\.mix_joint returned Tensor; return .* \(x, prefix\)"),
        (declaring("Missing", "joint", mix_joint=lambda self, x, prefix: (x, prefix[:, :1])),
         r"Missing returned \(2, 1, 24\) for \(2, 2, 24\)"),
        (Linear, "lacks the method mix"),
        (type("Forward", (Linear,), {"forward": lambda self, x, prefix: (x, prefix)}),
         "lacks the method mix: .*instead of forward"),
        (type("Mean", (Linear, PointwiseMixer), {"mix": lambda _, x: x if x.ndim > 3 else x[:, 0]}),
         r"Mean returned \(2, 24\) for \(2, 2, 24\)"),
    ],
)  # fmt: skip
def test_declarations_and_methods_of_mixers_must_agree(registering, mixer, said):
    register_mixer("wrong", kind="token", source="this test")(mixer)
    with pytest.raises(ValueError, match=said):
        create_mixer("wrong", DIM)(tokens(2, 5, 6, DIM).float(), tokens(2, 2, DIM).float())


def test_kinds_and_hidden_widths():
    assert set(list_mixers("channel")) | set(list_mixers("token")) == set(list_mixers())
    assert {"ffn", "glu", "afbo"} <= set(list_mixers("channel"))
    assert create_mixer("glu", 96).w1.out_features == 256
    assert create_mixer("ffn", 96).fc1.out_features == 384
    assert create_mixer("afbo", 96).proj.in_features == 384


COMPILED = (
    "iffn", "affn", "iffn_spatial", "nonlinear_sum", "group_ffn", "convglu", "convnext_v2",
    "scheme_44", "cheby_kan", "afbo", "afbo_c", "afbo_s", "afbo_sc", "scfbo_gc", "scfbo_oc", "full",
    "ffnified", "attention",
)  # fmt: skip


@pytest.mark.parametrize("name", rest_slow(COMPILED, ("afbo", "ffnified", "attention")))
def test_compiles_into_one_graph(name):
    # A compiler sees torch's operations, whose rounding is another than that of our operator.
    x = tokens(2, 5, 6, DIM)
    for form in (plain, lambda mixer: fuse(plain(mixer))) if name == "ffnified" else (plain,):
        mixer = form(build(name))
        torch._dynamo.reset()
        compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
        for training in (True, False):
            mixer.train(training)
            inputs = list(mixer.parameters())
            gradients = (
                torch.autograd.grad(run(x).sin().sum(), inputs, allow_unused=True)
                for run in (mixer, compiled)
            )
            torch.testing.assert_close(*gradients)
        with torch.no_grad():
            traced = torch.jit.trace(mixer, x)
            for run in (compiled, traced):
                torch.testing.assert_close(run(x + 1), mixer(x + 1), rtol=1e-10, atol=1e-12)
