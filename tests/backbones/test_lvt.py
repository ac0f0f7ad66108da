"""LVT against plain equations under the authors' names, its two classifiers, and MixToken."""

import pytest
import torch
import torch.nn.functional as F

from backbones import create_backbone, list_mixers
from backbones.analysis.counting import count_macs, count_parameters
from backbones.hosts.lvt.blocks import ClassBlock
from backbones.hosts.lvt.mix_token import Box, draw_box, own_share, swap
from backbones.mixers.ffn import FFN
from heads.linear import LinearClassifier, LinearProbe
from tests.families import load, meta_backbone, meta_classifier, rest_slow
from tests.references import lvt as reference
from tests.references.checkpoints import fill, in_float64
from tests.tensors import images

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SWAPPED = [name for name in list_mixers("channel") if name != "ffn"]


@pytest.fixture(scope="module")
def released():
    return fill(reference.shapes())


@pytest.fixture(scope="module")
def path(released, tmp_path_factory):
    path = tmp_path_factory.mktemp("lvt") / "lvt.pth"
    torch.save({"state_dict": released}, path)
    return path


def network(path, steps=2, **options):
    return LinearClassifier.from_pretrained(f"lvt_r{steps}", path, **options).double().eval()


@pytest.mark.parametrize("steps", rest_slow([1, 2, 3, 4], [3]))
@torch.no_grad()
def test_released_checkpoint_gives_the_logits_of_the_equations(steps, released, path):
    theirs, model = reference.Network(in_float64(released), steps), network(path, steps)
    for size in [(64, 64), (65, 97)]:
        torch.testing.assert_close(model(images(*size)), theirs.logits(images(*size)), **CLOSE)
    other = reference.Network(in_float64(released), steps % 4 + 1).logits(images(64, 64))
    assert not torch.allclose(model(images(64, 64)), other, rtol=1e-3)


@torch.no_grad()
def test_plain_heads_and_dense_maps_equal_the_equations(tmp_path, released):
    tensors = fill(reference.shapes(plain=True))
    torch.save(tensors, tmp_path / "plain.pth")
    model = network(tmp_path / "plain.pth", class_blocks=False)
    expected = reference.Network(in_float64(tensors), 2).plain_logits(images(65, 97))
    torch.testing.assert_close(model(images(65, 97)), expected, **CLOSE)
    with pytest.raises(ValueError, match=r"does not fit lvt_r2: 25 keys differ \(missing cls_tok"):
        network(tmp_path / "plain.pth")
    norms = {f"downsample_norms.{s}": reference.DIMS[s] for s in range(4)}
    shapes = {f"{k}.{part}": (dim,) for k, dim in norms.items() for part in ("weight", "bias")}
    tensors = {k: v for k, v in released.items() if k.startswith("backbone.")} | fill(shapes)
    model = create_backbone("lvt_r3", dense=True)
    assert not load(model, tensors, "dense").initialised
    theirs = reference.Network(in_float64(tensors), 3)
    for stage, (ours, plain) in enumerate(
        zip(model.double().eval()(images(65, 97)), theirs.maps(images(65, 97)), strict=True)
    ):
        normed = theirs.at_tokens(theirs.norm, plain, f"downsample_norms.{stage}")
        torch.testing.assert_close(ours, normed, **CLOSE)


def test_checkpoint_inside_wrappers_and_for_dense_prediction(released, path, tmp_path):
    wrapped = {
        "module": {f"module.{key}": value for key, value in released.items()},
        "detector": {
            f"backbone.{k}": v for k, v in released.items() if k.startswith("backbone.")
        } | {"neck.weight": torch.ones(1)},
    }  # fmt: skip
    plain = create_backbone("lvt_r2", pretrained=path).state_dict()
    for name, tensors in wrapped.items():
        torch.save(tensors, tmp_path / f"{name}.pth")
        dense = name == "detector"
        model = create_backbone("lvt_r2", pretrained=tmp_path / f"{name}.pth", dense=dense)
        found = {k: v for k, v in model.state_dict().items() if not k.startswith(model.map_keys)}
        assert len(found) == sum(not key.startswith(("norm", "c")) or not dense for key in plain)
        assert all(torch.equal(value, plain[key]) for key, value in found.items())


@pytest.mark.parametrize(
    ("steps", "options", "parameters", "macs"),
    [
        (1, {}, 5_521_844, 0.7844), (2, {}, 5_521_844, 0.8888), (3, {}, 5_521_844, 0.9932),
        (4, {}, 5_521_844, 1.0976), (2, {"class_blocks": False}, 3_686_604, 0.8618),
    ],
)  # fmt: skip
def test_parameters_and_macs(steps, options, parameters, macs):
    model = meta_classifier(f"lvt_r{steps}", **options)
    assert count_parameters(model) == parameters
    assert count_macs(model) / 1e9 == pytest.approx(macs, abs=5e-5)


def test_classes_and_probes(tmp_path, path):
    model = LinearClassifier(create_backbone("lvt_r1"), 7, drop=0.1)
    torch.save({f"model.{k}": v for k, v in model.state_dict().items()}, tmp_path / "own.ckpt")
    again = LinearClassifier.from_pretrained("lvt_r1", tmp_path / "own.ckpt")
    assert again.classifier.aux.out_features == again.classifier.out_features == 7
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    headless = {k: v for k, v in model.state_dict().items() if ".aux." not in k}
    torch.save(headless, tmp_path / "headless.pth")
    with pytest.raises(ValueError, match=r"holds the classifier tensors weight \(7, 256\), bias"):
        model.load_weights(tmp_path / "headless.pth")
    backbone = create_backbone("lvt_r2", pretrained=path)
    model = LinearProbe(backbone, 5).train()
    assert set(model.classifier.state_dict()) == {"weight", "bias"}
    model.loss({"image": images(64, 64, batch=2).float(), "label": torch.tensor([0, 4])})
    assert backbone.embed(images(64, 64).float()).shape == (1, 256)


def test_training_loss_and_gradients_equal_the_equations(released, path):
    model = network(path, 2).train()
    x, labels, smoothing = images(97, 128, batch=3), torch.tensor([4, 700, 31]), 0.1
    model.label_smoothing = smoothing
    for seed in range(9):
        torch.manual_seed(seed)
        box = draw_box((4, 4))
        if own_share(box, (4, 4)) < 1:
            break
    torch.manual_seed(seed)
    losses = model.loss({"image": x, "label": labels})

    tensors = {k: v.requires_grad_() for k, v in in_float64(released).items()}
    logits, aux = reference.Network(tensors, 2).heads_of_class_and_tokens(x, box)
    truth = (1 - smoothing) * F.one_hot(labels, 1000).double() + smoothing / 1000
    share = own_share(box, (4, 4))
    mixed = share * truth + (1 - share) * truth.flip(0)
    expected = -(mixed * logits.log_softmax(1)).sum(1).mean()
    each = -(truth[..., None, None] * aux.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(losses["class_token"], expected, **CLOSE)
    torch.testing.assert_close(losses["tokens"], each, **CLOSE)
    torch.testing.assert_close(losses["loss_cls"], expected + 0.5 * each, **CLOSE)

    losses["loss_cls"].backward()
    gradients = torch.autograd.grad(expected + 0.5 * each, list(tensors.values()))
    theirs = dict(zip(tensors, gradients, strict=True))
    converted = model.backbone.convert_state_dict(theirs)
    own = {key.removeprefix("backbone."): p.grad for key, p in model.named_parameters()}
    assert own.keys() == converted.keys()
    for key, gradient in own.items():
        torch.testing.assert_close(gradient, converted[key], **CLOSE)
    # Shares of classes are labels too.
    torch.manual_seed(seed)
    again = model.loss({"image": x, "label": F.one_hot(labels, 1000).double()})
    torch.testing.assert_close(again, losses, **CLOSE)


@pytest.mark.slow
def test_only_training_with_mixtoken_is_random(path):
    model, x = network(path), images(128, 128, batch=2)
    batch = {"image": x, "label": torch.tensor([1, 2])}
    assert model.loss(batch).keys() == {"loss_cls"}
    expected = F.cross_entropy(model(x), batch["label"])
    torch.testing.assert_close(model.loss(batch)["loss_cls"], expected)
    plain = network(path, mix_token=False).train()
    losses = [{k: v.item() for k, v in plain.loss(batch).items()} for _ in range(2)]
    assert losses[0] == losses[1]
    assert losses[0].keys() == {"loss_cls", "class_token", "tokens"}
    torch.manual_seed(0)
    mixed = {model.train().loss(batch)["loss_cls"].item() for _ in range(3)}
    assert len(mixed) > 1


def test_boxes_and_their_exchange():
    torch.manual_seed(0)
    shares = []
    for _ in range(300):
        box = draw_box((7, 9))
        assert 0 <= box.top <= box.bottom <= 7
        assert 0 <= box.left <= box.right <= 9
        shares.append(own_share(box, (7, 9)))
    assert min(shares) == pytest.approx(1 - 6 * 8 / 63)  # no side is odd but at a border
    assert max(shares) == 1
    assert own_share(Box(0, 7, 0, 9), (7, 9)) == 0
    x = torch.randn(3, 4, 5, 2)
    box = Box(1, 2, 0, 2)
    once = swap(x, box, unit=2)
    torch.testing.assert_close(swap(once, box, unit=2), x, rtol=0, atol=0)
    assert torch.equal(once[:, 2:4, 0:4], x.flip(0)[:, 2:4, 0:4])
    assert torch.equal(once[:, :2], x[:, :2])
    assert torch.equal(once[:, 2:, 4:], x[:, 2:, 4:])


@pytest.mark.parametrize("name", rest_slow(SWAPPED, ("afbo", "iffn", "glu")))
@torch.no_grad()
def test_every_channel_mixer_fits_class_blocks_too(name):
    x = torch.empty(2, 3, 65, 97, device="meta")
    with torch.device("meta"):
        model = LinearClassifier(create_backbone(f"lvt_r1_{name}", swap_class_ffn=True), 5).eval()
    assert model(x).shape == (2, 5)
    inside = [key for key in model.backbone.mixers() if key.startswith("class_blocks.")]
    assert inside == ["class_blocks.0.mlp.", "class_blocks.1.mlp."]
    assert len(model.backbone.mixers()) == 8 + 2


def class_ffns(name, **options):
    backbone = meta_backbone(name, **options)
    return [block.mlp for block in backbone.modules() if isinstance(block, ClassBlock)]


def test_class_blocks_follow_the_papers():
    for name in ("lvt_r2_afbo", "lvt_r2_scfbo_gc", "lvt_r2_full"):
        assert all(isinstance(ffn, FFN) for ffn in class_ffns(name))
    for name in ("lvt_r2_iffn", "lvt_r2_iffn_spatial"):
        assert [ffn.dw for ffn in class_ffns(name)] == [None, None]
    assert all(ffn.dw is not None for ffn in class_ffns("lvt_r2_iffn", mixer={"spatial": True}))
    assert all(isinstance(ffn, FFN) for ffn in class_ffns("lvt_r2_iffn", swap_class_ffn=False))
