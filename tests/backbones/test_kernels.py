"""The compiled operators equal torch's own, forward and backward, and know their place."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

from backbones import create_backbone
from backbones.fast import (
    build,
    compiled_trial,
    fast,
    fingerprint,
    is_available,
    library,
    switched_off,
)
from backbones.fast.cpu.afbo import operands
from backbones.mixers.afbo.variants import afbo, full, scfbo_gc
from tests.forms import compiled

ROOT = Path(__file__).resolve().parents[2]
# (P, H, W): class tokens or none, lines and columns without neighbours, a map in many pieces.
SIZES = [(0, 1, 1), (0, 1, 7), (2, 9, 1), (1, 5, 6), (0, 7, 4), (1, 70, 61)]


def mixer_of(factory, dim=40, dtype=torch.float64, **options):
    """A fast mixer with random weights everywhere, biases among them."""
    torch.manual_seed(0)
    mixer = fast(factory(dim, **options)).to(dtype)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return mixer


def mixed(mixer, tokens, size):
    """Tokens (B, P + H W, C) through the mixer, as a host with class tokens calls it."""
    prefix, height, width = size
    x = tokens[:, prefix:].unflatten(1, (height, width))
    if not prefix:
        return mixer(x).flatten(1, 2)
    x, rest = mixer(x, tokens[:, :prefix])
    return torch.cat([rest, x.flatten(1, 2)], dim=1)


def both_ways(mixer, tokens, size):
    """Outputs and all gradients, by the operators and without them."""
    results = []
    for is_off in (False, True):
        leaves = [tokens.detach().clone().requires_grad_(), *mixer.parameters()]
        assert mixer.is_fast(leaves[0][:, :1, None])
        if is_off:
            with switched_off():
                assert not mixer.is_fast(leaves[0][:, :1, None])
                y = mixed(mixer, leaves[0], size)
        else:
            y = mixed(mixer, leaves[0], size)
            assert "gated" in _graph(y).lower()
        probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        results.append((y, *torch.autograd.grad(y, leaves, probe)))
    return results


def _graph(y):
    """Names of all nodes of the graph that made y."""
    names, open_nodes = "", [y.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        names += f"{node.name()} "
        open_nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return names


@compiled
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (afbo, {}),
        (afbo, {"g2": 3, "bias": False}),
        (scfbo_gc, {"g1": 4}),
        (full, {"hidden_ratio": 2.9}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_operator_equals_torch(factory, options, size):
    tokens = torch.randn(3, size[0] + size[1] * size[2], 40, dtype=torch.float64)
    mine, plain = both_ways(mixer_of(factory, **options), tokens, size)
    torch.testing.assert_close(mine, plain, rtol=1e-11, atol=1e-11)
    with torch.inference_mode():
        again = mixed(mixer_of(factory, **options), tokens, size)
    torch.testing.assert_close(again, plain[0], rtol=1e-11, atol=1e-11)


@compiled
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_and_threads_change_nothing(threads):
    """Images by the dozen in one piece, and float32 to its rounding."""
    size, before = (1, 6, 6), torch.get_num_threads()
    mixer = mixer_of(afbo, dim=64, dtype=torch.float32)
    tokens = torch.randn(150, 37, 64)
    torch.set_num_threads(threads)
    try:
        mine, plain = both_ways(mixer, tokens, size)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(mine, plain, strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=2e-5)


@compiled
@pytest.mark.parametrize("dim", [7, 25, 140])
def test_products_of_all_widths_equal_torch(dim):
    """Widths with remainders of memory lines, and rows longer than one pass."""
    size = (0, 18, 19)
    tokens = torch.randn(1, 18 * 19, dim, dtype=torch.float64)
    mine, plain = both_ways(mixer_of(full, dim=dim, hidden_ratio=3.1), tokens, size)
    torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10)


@compiled
def test_numbers_that_are_none_stay_none():
    mixer = mixer_of(afbo, dim=16, dtype=torch.float32)
    tokens = torch.randn(1, 25, 16)
    tokens[0, 12, 3] = torch.nan
    with torch.no_grad():
        y = mixed(mixer, tokens, (0, 5, 5))
        with switched_off():
            plain = mixed(mixer, tokens, (0, 5, 5))
    assert torch.equal(y.isnan(), plain.isnan())
    assert y.isnan().any()
    assert not y.isnan().all()


@compiled
def test_a_backbone_without_images_runs():
    network = create_backbone("deit_t_afbo", img_size=64)
    assert network.embed(torch.empty(0, 3, 64, 64)).shape == (0, 192)


@compiled
def test_who_looks_inside_sees_the_parts():
    mixer = mixer_of(afbo)
    x = torch.randn(1, 4, 4, 40, dtype=torch.float64)
    seen = []
    handle = mixer.sm_a.register_forward_hook(lambda *_: seen.append(1))
    mixer(x)
    assert seen
    handle.remove()
    assert mixer.is_fast(x)
    parts = []
    with nn.modules.module.register_module_forward_hook(lambda part, *_: parts.append(part)):
        mixer(x)
    assert mixer.sm_a in parts
    assert mixer.is_fast(x)


class Turned(nn.Module):
    """Computes a weight that lies in memory by columns."""

    def forward(self, weight):
        return weight.transpose(0, -1).contiguous().transpose(0, -1)


@compiled
def test_computed_weights_keep_to_torch():
    mixer = mixer_of(full, dim=8)
    register_parametrization(mixer.cm_a, "weight", Turned())
    x = torch.randn(1, 4, 4, 8, dtype=torch.float64)
    assert not mixer.is_fast(x)
    remove_parametrizations(mixer.cm_a, "weight", leave_parametrized=False)
    assert mixer.is_fast(x)


@compiled
def test_weights_that_were_computed_once_keep_their_order():
    mixer, x = mixer_of(afbo), torch.randn(1, 4, 4, 40, dtype=torch.float64)
    lists = [part for part in mixer.modules() if isinstance(part, nn.ParameterList)]
    assert lists
    for weights in lists:
        register_parametrization(weights, "0", nn.Identity())
        remove_parametrizations(weights, "0")
        assert next(iter(weights._parameters)) != "0"
    assert mixer.is_fast(x)
    with switched_off():
        expected = mixer(x)
    torch.testing.assert_close(mixer(x), expected, rtol=1e-11, atol=1e-11)


@compiled
def test_a_map_without_tokens_is_torchs():
    assert not mixer_of(afbo).is_fast(torch.empty(2, 0, 7, 40, dtype=torch.float64))


@compiled
def test_each_thread_switches_off_for_itself():
    entered, left = threading.Event(), threading.Event()

    def other():
        with switched_off():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with switched_off():
        thread.start()
        assert entered.wait(10)
    assert is_available()
    left.set()
    thread.join()
    assert is_available()


@compiled
@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 5}, {"sm": "max"}, {"act": "gelu"}, {"act_on": "post"}, {"order": "sc"},
     {"cm_b": "shared"}, {"drop": 0.1}],
    ids=str,
)  # fmt: skip
def test_other_forms_keep_to_torch(options):
    mixer = mixer_of(afbo, **options)
    assert not mixer.is_fast(torch.randn(1, 4, 4, 40, dtype=torch.float64))


@compiled
def test_autocast_and_compilers_keep_to_torch():
    mixer = mixer_of(afbo, dtype=torch.float32)
    x = torch.randn(1, 4, 4, 40)
    with torch.autocast("cpu", torch.bfloat16):
        assert not mixer.is_fast(x)
    assert not mixer.bfloat16().is_fast(x.bfloat16())
    exported = torch.export.export(mixer.float(), (x,))
    assert "gated_mixer" not in str(exported.graph)


@compiled
def test_operator_is_whole_for_torch():
    """Its schema and its gradients agree: torch's own check."""
    mixer = mixer_of(afbo, dim=16)
    x = torch.randn(2, 17, 16, dtype=torch.float64, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration")
    operator = torch.ops.mixerlab.gated_mixer.default
    torch.library.opcheck(operator, (x, 1, 4, 4, *operands(mixer), True), test_utils=checks)


@compiled
def test_gradients_of_gradients_say_what_to_do():
    mixer = mixer_of(afbo, dim=16)
    x = torch.randn(1, 3, 3, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"switched_off\(\)"):
        torch.autograd.grad(mixer(x).square().sum(), x, create_graph=True)
    with switched_off():
        (gradient,) = torch.autograd.grad(mixer(x).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), x)[0].abs().sum() > 0


def test_without_compiler_torch_serves(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "COMPILED", tmp_path)
    monkeypatch.setattr(build, "compiled_file", lambda portable: tmp_path / "operators.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler (CXX is 'no-such-compiler')" in build.build()
    monkeypatch.setenv("CXX", "false --always")
    assert "false --always says" in build.build()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(build, "COMPILED", tmp_path / "is missing" / "compiled")
    monkeypatch.setattr(build, "compiled_file", lambda portable: tmp_path / "operators.so")
    monkeypatch.setattr(build, "find_compiler", lambda: ["true"])
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main() == 1
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert f"torch's own serve: {build.COMPILED}: No such file" in text


@pytest.mark.parametrize("words", ["ccache g++", "g++ -m64"])
def test_a_compiler_may_take_words(monkeypatch, words):
    monkeypatch.setenv("CXX", words)
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/bin/{name}")
    command = build.compilation(build.find_compiler(), Path("a.cpp"), Path("a.o"), portable=True)
    assert command[:2] == words.split()
    assert f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}" in command


def compile_nothing(monkeypatch, folder, target, **outcome):
    """Make the compiler write an empty library, and the trial return the given outcome."""
    monkeypatch.setattr(build, "COMPILED", folder)
    monkeypatch.setattr(build, "compiled_file", lambda portable: target)
    monkeypatch.setattr(build, "find_compiler", lambda: ["true"])
    monkeypatch.setattr(build, "_run", lambda command: "")
    monkeypatch.setattr(build, "SOURCES", folder)

    def tried(command, **options):
        Path(command[-1]).touch()
        return subprocess.CompletedProcess(command, **{"returncode": 0, "stdout": "\n"} | outcome)

    build.find_torch()
    monkeypatch.setattr(build.subprocess, "run", tried)


def test_only_what_older_sources_gave_is_removed(monkeypatch, tmp_path):
    kept = [tmp_path / name for name in ("torch-9-x-y-old.so", "torch-1-x-other-old.so")]
    old, target = tmp_path / "torch-1-x-y-old.so", tmp_path / "torch-1-x-y-new.so"
    for path in (*kept, old):
        path.touch()
    compile_nothing(monkeypatch, tmp_path, target)
    assert build.build() == ""
    assert sorted(tmp_path.iterdir()) == sorted([*kept, target])


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ({"stdout": "act differs from torch's by 1e-01\n"}, "made wrong code .* act differs"),
        ({"returncode": 1, "stderr": "...\nOSError: no symbol"}, "cannot be used: OSError: no sym"),
        ({"returncode": -11, "stderr": ""}, "cannot be used: status -11"),
    ],
)
def test_a_library_that_fails_its_trial_is_not_kept(monkeypatch, tmp_path, outcome, message):
    old = tmp_path / "torch-1-x-y-old.so"
    old.touch()
    compile_nothing(monkeypatch, tmp_path, tmp_path / "torch-1-x-y-new.so", **outcome)
    assert re.search(message, build.build())
    assert list(tmp_path.iterdir()) == [old]


@compiled
@pytest.mark.parametrize(
    "dtype", compiled_trial.LIMITS, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_the_trial_sees_what_is_wrong(monkeypatch, dtype):
    results = list(compiled_trial._differences(dtype))
    assert len(results) == 7
    assert all(found < compiled_trial.LIMITS[dtype] / 4 for _, found in results)
    for name, arguments, expected in compiled_trial._cases(torch.Generator().manual_seed(0)):
        others = [one.clone() for one in compiled_trial._tensors(expected)]
        for other in others:
            other[(-1,) * other.ndim] += 1e-3  # one number of many
        case = (name, arguments, others)
        monkeypatch.setattr(compiled_trial, "_cases", lambda generator, case=case: [case])
        (_, _), *wrong = compiled_trial._differences(dtype)
        assert all(found > compiled_trial.LIMITS[dtype] for _, found in wrong), name


def test_another_processor_needs_another_file(monkeypatch):
    here = fingerprint.compiled_file(portable=False)
    monkeypatch.setattr(fingerprint, "_processor", lambda: b"flags : none")
    assert fingerprint.compiled_file(portable=False) != here
    assert fingerprint.compiled_file(portable=True).name.count("portable") == 1


def put_in_place(kind, path):
    """Make something else where the operators would lie."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "text":
        path.write_text("no library")
    elif kind == "empty":
        path.touch()
    elif kind == "torch's library":
        path.symlink_to(Path(torch.__file__).parent / "lib" / "libc10.so")
    elif kind == "half":
        whole = fingerprint.compiled_file(portable=False).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nothing", "not compiled for this torch"), ("FIFO", "is not a file"),
        ("folder", "is not a file"), ("dangling link", "is not a file"),
        ("text", "is not a library"), ("empty", "is not a library"),
        ("torch's library", "is another library"),
        pytest.param("half", "is incomplete", marks=compiled),
    ],
)  # fmt: skip
def test_what_is_not_our_library_is_named_and_not_loaded(kind, said, monkeypatch, tmp_path):
    path = tmp_path / "operators.so"
    put_in_place(kind, path)
    monkeypatch.setattr(library, "compiled_file", lambda portable: path)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded"))
    reason = library._load_once.__wrapped__()
    assert said in reason
    assert reason.endswith("; type: make install")


@compiled
def test_our_library_is_ours_and_defines_every_operator(monkeypatch):
    assert fingerprint.find_fault(fingerprint.compiled_file(portable=False)) == ""
    names = fingerprint.operator_names()
    assert {"has_tiles", "instructions", "gated_mixer", "star_mixer", "batched"} <= set(names)
    assert all(hasattr(torch.ops.mixerlab, name) for name in names)
    monkeypatch.setattr(library, "operator_names", lambda: [*names, "further"])
    assert "lacks the operator further; type" in library._load_once.__wrapped__()


@pytest.mark.parametrize("kind", ["FIFO", "text", "torch's library"])
def test_building_replaces_what_is_not_ours_and_says_how_long_it_takes(
    kind, monkeypatch, tmp_path, capsys
):
    target = tmp_path / "torch-1-x-y-new.so"
    put_in_place(kind, target)
    compile_nothing(monkeypatch, tmp_path, target)
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main() == 0
    out, err = capsys.readouterr()
    assert out == f"operators are compiled: {target.name}\n"
    assert "and is replaced" in err
    assert "takes a minute or two" in err
    assert target.is_file()
    assert not target.is_symlink()


@pytest.mark.slow
def test_environment_switches_off():
    code = "from backbones.fast import is_available, status; print(is_available(), status())"
    environment = {**os.environ, "MIXERLAB_KERNELS": "off"}
    command = [sys.executable, "-c", code]
    text = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    assert "False torch's own operations (switched off by MIXERLAB_KERNELS=off)" in text


@pytest.mark.slow
@pytest.mark.skipif(not build.find_compiler(), reason="no C++ compiler")
def test_portable_build_equals_torch(monkeypatch, tmp_path):
    target = tmp_path / "operators.so"
    monkeypatch.setattr(build, "COMPILED", tmp_path)
    monkeypatch.setattr(build, "compiled_file", lambda portable: target)
    assert build.build(portable=True) == ""
    code = f"""
from pathlib import Path
from backbones.fast import library
library.compiled_file = lambda portable: Path({str(target)!r} if portable else "none")
from tests.backbones import test_kernels, test_kernels_iffn
print(library.status())
test_kernels.test_products_of_all_widths_equal_torch(25)
test_kernels_iffn.test_operator_equals_torch({{}}, (5, 6), True)
"""
    text = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert "compiled operators, for any processor, with the BLAS" in text
