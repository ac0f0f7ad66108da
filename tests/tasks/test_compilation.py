"""trainer.compile: equal numbers and checkpoints, and mixers without graph breaks."""

import copy
import functools

import pytest
import torch

from backbones import create_mixer
from backbones.checkpoints.opening import open_checkpoint
from backbones.fast import fast
from tasks.engine.loops import compilation
from tasks.engine.loops.compilation import check_compiler, compile_blocks
from tests.families import SMALLEST, rest_slow, rest_slow_pairs, short
from tests.forms import FORMS
from tests.runs import arguments, completed, composed

TRACED = {"fullgraph": True, "backend": "aot_eager"}  # everything except inductor's code generation


def gradients(network, images):
    """Return the gradients of the outputs' sum of squares, by parameter."""
    network.zero_grad()
    torch.manual_seed(0)
    found = network(images)
    maps = found if isinstance(found, tuple) else (found,)
    torch.stack([one.square().mean() for one in maps]).sum().backward()
    grads = {key: p.grad for key, p in network.named_parameters() if p.grad is not None}
    return {"output": maps[-1].detach(), **grads}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", rest_slow(SMALLEST, ["deit_t"]))
def test_every_block_of_a_host_is_one_graph(name):
    """Training and evaluation are compiled; fullgraph raises on a graph break."""
    torch._dynamo.reset()
    plain = short(name).double()
    compiled, images = copy.deepcopy(plain), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert compile_blocks(compiled, **TRACED) == len(plain.block_names())
    assert_same(gradients(compiled.train(), images), gradients(plain.train(), images))
    with torch.no_grad():
        outputs = [network.eval()(images)[-1] for network in (compiled, plain)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    for block in map(compiled.get_submodule, compiled.block_names()):
        assert block._compiled_call_impl.shapes.keys() == {(True, True), (False, False)}
    inside = tuple(f"{block}." for block in compiled.block_names())
    mixers = (*compiled.token_mixers(), *compiled.channel_mixers())
    assert all(mixer.startswith(inside) for mixer in mixers)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    first = copy.deepcopy(compiled).get_submodule(compiled.block_names()[0])
    assert first._compiled_call_impl is None


@pytest.mark.parametrize(("name", "form"), rest_slow_pairs(FORMS, [("afbo", fast)]))
def test_every_mixer_is_one_graph(name, form):
    torch._dynamo.reset()
    mixer = form(create_mixer(name, 64, grid=(8, 8))).double()
    # Pooling has no parameters.
    x = torch.randn(2, 8, 8, 64, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(mixer, dynamic=False, **TRACED)
    found = gradients(compiled, x)
    expected = gradients(mixer, x)
    assert_same({key.removeprefix("_orig_mod."): value for key, value in found.items()}, expected)


def test_recomputed_blocks_are_not_compiled():
    network = short("deit_t")
    network.set_grad_checkpointing()
    with pytest.raises(ValueError, match=r"cannot trace blocks .*grad_checkpointing=true.*one of"):
        compile_blocks(network)
    network.set_grad_checkpointing(False)
    assert compile_blocks(network, **TRACED) > 0


@pytest.fixture
def train(outputs, sample_cache, capsys, monkeypatch):
    """Train shortly with traced blocks; return the run folder."""
    monkeypatch.setattr(compilation, "compile_blocks", functools.partial(compile_blocks, **TRACED))
    monkeypatch.setattr(compilation, "check_compiler", lambda device: None)
    torch._dynamo.reset()

    def run(folder, *more, **options):
        typed = ("trainer.limit_train_batches=2", *more)
        ended = completed(arguments("classification", outputs / folder, *typed, **options), capsys)
        return ended.folder()

    return run


def assert_same_checkpoints(folders, *keys):
    contents = [open_checkpoint(path / "checkpoints" / "last.ckpt").content for path in folders]
    for key in keys:
        assert_same(*(content[key] for content in contents))


@pytest.mark.slow
def test_a_compiled_run_equals_an_eager_one(train, outputs, capsys):
    """Keys lack a prefix; tests, resuming, averages and weights equal those of an eager run."""
    average = "++task.ema.decay=0.5"
    folders = [train(f"compile_{word}", f"trainer.compile={word}", average)
               for word in ("true", "false")]  # fmt: skip
    assert_same_checkpoints(folders, "state_dict", "state_dict_ema")
    again = ["mode=test", f"ckpt={folders[0]}", f"output_dir={outputs}/compile_again"]
    completed(again, capsys)
    train("compile_true", "resume=true", "trainer.compile=true", average, epochs=2)


def test_a_missing_compiler_is_named_and_runs_need_none(monkeypatch):
    def broken(function):
        raise RuntimeError("No working C++ compiler found in config.cpp.cxx\nstack")

    monkeypatch.setattr(compilation.torch, "compile", broken)
    with pytest.raises(ValueError, match=r"No working C\+\+ compiler found.*trainer.compile=false"):
        check_compiler(torch.device("cpu"))
    assert composed().trainer["compile"] is False
