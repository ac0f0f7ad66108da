"""PosMLP and gMLP as whole networks: equations, published counts, checkpoints, the contract."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F

from backbones import create_backbone, create_mixer
from backbones.analysis.counting import count_macs, count_parameters
from backbones.hosts.posmlp.host import PosMLP
from backbones.mixers.posmlp.posgu import ggqpe, lrpe
from backbones.slots import HostConfig
from heads.linear import LinearClassifier
from tests.families import load, meta_backbone, meta_classifier
from tests.references import posmlp as reference
from tests.tensors import images, randomise, tokens

pytestmark = pytest.mark.usefixtures("no_grad")

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def narrow(unit=ggqpe, dense=False, norm_eval=None, **options):
    def mixer(slot):
        groups = {} if unit is lrpe else {"groups": (2, 4, 8, 16)}
        return unit(slot.dim, hidden_ratio=slot.hidden_ratio, window=4, slot=slot, **groups)

    config = HostConfig((64, 64), dense=dense, token_mixer=mixer)
    model = PosMLP(config, width=16, **options)
    model.norm_eval = model.norm_eval if norm_eval is None else norm_eval
    return randomise(model.train())


def channel_norm(x, norm):
    y = F.layer_norm(x.permute(0, 2, 3, 1), norm.weight.shape, norm.weight, norm.bias, 1e-6)
    return y.permute(0, 3, 1, 2)


def batch_norm(x, norm):
    running = (norm.running_mean, norm.running_var)
    return F.batch_norm(x, *running, norm.weight, norm.bias, training=False, eps=1e-6)


def maps_by_equations(model, x, shifted):
    """Stem, stages and blocks, NCHW between the blocks."""
    for i, (conv, norm) in enumerate(
        zip(model.patch_embed.projs, model.patch_embed.norms, strict=True)
    ):
        stride, padding = ((2, 1), (2, 1), (1, 0))[i]
        x = batch_norm(F.conv2d(x, conv.weight, conv.bias, stride, padding), norm)
        x = reference.gelu(x) if i < 2 else x
    maps = []
    for i, stage in enumerate(model.stages):
        if i:
            conv = stage.downsample.conv
            assert conv.weight.shape == (2 * x.shape[1], 1, 3, 3)
            x = F.conv2d(x, conv.weight, conv.bias, 2, 1, groups=x.shape[1])
            x = channel_norm(x, stage.downsample.norm)
        for j, block in enumerate(stage.blocks):
            mixer = block.mixer

            def mixed(u, mixer=mixer, j=j):
                return reference.relation(mixer.gate.relation, u, shifted=shifted and j % 2 == 1)

            y = channel_norm(x, block.norm).permute(0, 2, 3, 1)
            x = x + reference.branch(y, mixer, mixed, "gate").permute(0, 3, 1, 2)
        maps.append(x)
    return maps


def test_networks_equal_their_equations():
    model = narrow()
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(tokens(*buffer.shape, seed=3).square() + 0.5)
    x = images(64, 72)
    expected = maps_by_equations(model, x, shifted=False)
    torch.testing.assert_close(model(x), expected, **EXACT)
    wanted = channel_norm(expected[-1], model.norm).mean(dim=(2, 3))
    torch.testing.assert_close(model.embed(x), wanted, **EXACT)
    model = narrow(lrpe, dense=True)
    x = images(70, 64)
    expected = maps_by_equations(model, x, shifted=True)
    for i, (found, wanted) in enumerate(zip(model(x), expected, strict=True)):
        wanted = channel_norm(wanted, model.get_submodule(f"norm{i}"))
        torch.testing.assert_close(found, wanted, **EXACT)


def test_merging_dropout_and_positions():
    model = narrow(embed="linear", merge="linear")
    x = tokens(1, 16, 5, 6)
    merge = model.stages[1].downsample
    padded = F.pad(x, (0, 0, 0, 1)).permute(0, 2, 3, 1)
    corners = [padded[:, 0::2, 0::2], padded[:, 1::2, 0::2], padded[:, 0::2, 1::2]]
    y = torch.cat([*corners, padded[:, 1::2, 1::2]], dim=-1)
    y = F.layer_norm(y, (64,), merge.norm.weight, merge.norm.bias, 1e-5)
    expected = y @ merge.conv.weight[:, :, 0, 0].T
    torch.testing.assert_close(merge(x).permute(0, 2, 3, 1), expected, **EXACT)
    assert [m.shape[2:] for m in model(images(65, 70))] == [(17, 18), (9, 9), (5, 5), (3, 3)]
    model, other = narrow(norm_eval=True), narrow(drop=0.5, norm_eval=True)
    other.load_state_dict(model.state_dict())
    x = images(64, 72)
    assert not torch.allclose(other.train()(x)[-1], model(x)[-1])
    torch.testing.assert_close(other.eval()(x)[-1], model.train()(x)[-1], rtol=0, atol=0)
    model = narrow(position=True)
    assert model.pos_embed.shape == (1, 16, 16, 16)
    seen = []
    model.stages[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model.patch_embed.register_forward_hook(lambda *a: torch.zeros_like(a[-1]))
    model(images(96, 64))
    table = F.interpolate(model.pos_embed, (24, 16), mode="bicubic", antialias=True)
    torch.testing.assert_close(seen[0], table, **EXACT)


OPTIONS = [
    {"embed": "linear"}, {"merge": "full_conv"}, {"embed_norm": "ln"}, {"merge_norm": "bn"},
    {"position": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_the_host_change_the_network(options):
    model, other = narrow(), narrow(**options)
    theirs, own = model.state_dict(), other.state_dict()
    shared = {k: v for k, v in theirs.items() if k in own and own[k].shape == v.shape}
    other.load_state_dict(shared, strict=False)
    x = images(64, 72)
    assert not torch.allclose(other(x)[-1], model(x)[-1])


@pytest.mark.parametrize(("dense", "norm_eval"), [(True, None), (False, None), (True, False)])
def test_batch_norm_keeps_its_statistics_in_dense_prediction(dense, norm_eval):
    model = create_backbone("posmlp_t", dense=dense, norm_eval=norm_eval)
    assert model.training
    before = model.patch_embed.norms[0].running_mean.clone()
    model(torch.randn(2, 3, 64, 64))
    kept = dense and norm_eval is None
    assert torch.equal(before, model.patch_embed.norms[0].running_mean) == kept


def test_gmlp_equals_timm():
    assert count_parameters(meta_classifier("gmlp_ti")) == 5_867_328
    theirs = randomise(timm.create_model("gmlp_ti16_224", num_classes=7))
    model = LinearClassifier(create_backbone("gmlp_ti"), 7).double().eval()
    report = load(model.backbone, theirs.state_dict(), "timm")
    assert not report.initialised
    assert report.loaded == len(model.backbone.state_dict())
    model.classifier.load_state_dict(theirs.head.state_dict())
    x = images(224, 224, batch=2)
    torch.testing.assert_close(model(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_gmlp_shifts_its_windows_and_norms_its_stem():
    dense = randomise(create_backbone("gmlp_ti", dense=True))
    u = tokens(1, 15, 5, 12)
    for index, shifted in ((0, False), (1, True)):
        gate = dense.blocks[index].mlp_channels.gate
        weight, bias = gate.proj.weight, gate.proj.bias
        gate.norm = torch.nn.Identity()
        v = reference.mix(u[0, ..., 6:], 14, reference.free(weight, 14), 1, bias, shifted=shifted)
        torch.testing.assert_close(gate(u)[0], u[0, ..., :6] * v, **EXACT)
    own, other = meta_backbone("gmlp_ti"), meta_backbone("gmlp_ti_lrpe")
    bare = meta_backbone("gmlp_ti_lrpe", stem_norm=False)
    assert [hasattr(m.stem.norm, "weight") for m in (own, other, bare)] == [False, True, False]


def block_parameters(unit, d, gamma, n, s):
    """App. 4, without the norms; for GLRPE it prints 3 s too many."""
    side = math.isqrt(n)
    token = {"sgu": n * n + n, "glrpe": (4 * s + 1) * n - 4 * s * side + s, "ggqpe": n + 6 * s}
    return 3 * gamma * d * d // 2 + (gamma + 1) * d + token[unit]


@pytest.mark.parametrize("unit", ["sgu", "glrpe", "ggqpe"])
@pytest.mark.parametrize(("d", "gamma", "window", "s"), [(96, 4, 14, 8), (64, 2, 7, 16)])
def test_parameters_of_a_block_equal_those_of_the_appendix(unit, d, gamma, window, s):
    groups = {} if unit == "sgu" else {"groups": s}
    options = {"hidden_ratio": gamma, "window": window, "norm": False}
    mixer = create_mixer(unit, d, **groups, **options)
    assert count_parameters(mixer) == block_parameters(unit, d, gamma, window**2, s)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flops"), [("posmlp_t", 5.193), ("gmlp_s_ggqpe", 4.446)])
def test_flops_of_fvcore_are_the_papers(name, flops):
    pytest.importorskip("fvcore")
    model = LinearClassifier(create_backbone(name), 1000)
    assert count_macs(model, rule="fvcore") / 1e9 == pytest.approx(flops, abs=6e-4)
