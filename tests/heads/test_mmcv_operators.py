"""torchvision's operators under mmcv's names equal mmcv's compiled ones and yield to them."""

import pytest
import torch
import torch.nn.functional as F

from heads.toolkits import mmcv_operators
from tests.references import mmcv_operators as reference

pytest.importorskip("mmcv")
import mmcv._ext

# Terms that cancel, summed in another order; other processors differ as much.
LOOSE = {"rtol": 1e-3, "atol": 1e-4}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


only_ours = pytest.mark.skipif(
    not str(mmcv._ext.__file__).endswith("mmcv_operators/__init__.py"),
    reason="this mmcv is compiled",
)


@pytest.fixture(scope="module")
def recorded():
    return reference.recorded()


def check(found, recorded, tolerance):
    """Compare with the recorded values; this torch may order equal scores differently."""
    other_order = {
        name.rpartition("/")[0]
        for name, value in found.items()
        if name.endswith("/order") and not torch.equal(value, recorded[name])
    }
    assert len(other_order) < len(found) / 6, "without ties there is one order only"
    for name, value in found.items():
        if name.rpartition("/")[0] not in other_order:
            near = tolerance(name)
            torch.testing.assert_close(value, recorded[name], **near, msg=f"{name} differs")


def by_precision(name):
    if "float64" in name or "roi_align" in name:
        return {"rtol": 1e-6, "atol": 1e-6} if "float32" in name else EXACT
    return LOOSE if "deform_conv" in name else {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("group", ["nms", "roi", "convolution"])
def test_operators_equal_the_compiled_ones(group, recorded):
    check(reference.flat(group), recorded, by_precision)


def test_every_recorded_value_is_compared(recorded):
    groups = {name.split("/")[0] for name in recorded}
    assert groups == {
        "nms", "soft_nms", "batched_nms", "nms_match", "roi_align", "deform_conv",
        *reference.detectors(),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("head", reference.detectors())
def test_detectors_equal_those_on_compiled_operators(head, recorded):
    found = reference.flat("detector", head)
    assert len(found) > 5
    check(found, recorded, lambda _: LOOSE)


def check_losses(ours, plain, logits):
    torch.testing.assert_close(ours, plain)
    gradients = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, plain)]
    torch.testing.assert_close(*gradients)


@only_ours
@pytest.mark.parametrize("weighted", [False, True])
def test_sigmoid_focal_loss_equals_that_of_mmdet(weighted):
    from mmcv.ops import sigmoid_focal_loss
    from mmdet.models.losses.focal_loss import py_sigmoid_focal_loss

    torch.manual_seed(0)
    logits = (5 * torch.randn(40, 6, dtype=torch.float64)).requires_grad_()
    labels = torch.arange(40) % 7  # the last one is the background
    one_hot = F.one_hot(labels, 7)[:, :6]
    weight = torch.rand(6, dtype=torch.float64) if weighted else None
    ours = sigmoid_focal_loss(logits, labels, 1.5, 0.3, weight, "none")
    plain = py_sigmoid_focal_loss(logits, one_hot, gamma=1.5, alpha=0.3, reduction="none")
    if weighted:
        plain = plain * torch.cat([weight, torch.ones(1)])[labels][:, None]
    check_losses(ours, plain, logits)


@only_ours
@pytest.mark.parametrize("weighted", [False, True])
def test_softmax_focal_loss_is_its_formula(weighted):
    from mmcv.ops import softmax_focal_loss

    torch.manual_seed(0)
    logits = torch.randn(30, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(30) % 6 - 1  # labels below 0 are excluded
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    ours = softmax_focal_loss(logits, labels, 2.0, 0.25, weight, "sum")
    chance = logits.softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    plain = -0.25 * (1 - chance) ** 2 * chance.log() * (labels >= 0)
    if weighted:
        plain = plain * weight[labels.clamp(min=0)]
    check_losses(ours, plain.sum(), logits)


def test_deformable_attention_is_mmcvs_plain_form():
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch as plain

    torch.manual_seed(0)
    shapes = torch.tensor([[6, 7], [3, 4]])
    starts = torch.tensor([0, 42])
    value = torch.randn(2, 54, 2, 4, dtype=torch.float64)
    places = 1.4 * torch.rand(2, 5, 2, 2, 3, 2, dtype=torch.float64) - 0.2  # some lie outside
    weights = torch.rand(2, 5, 2, 2, 3, dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (value, places, weights)]
    expected = plain(value, shapes, places, weights)
    slope = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, inputs, slope)
    with torch.no_grad():
        found = mmcv_operators.ms_deform_attn_forward(value, shapes, starts, places, weights, 64)
        grads = [torch.zeros_like(tensor) for tensor in inputs]
        mmcv_operators.ms_deform_attn_backward(
            value, shapes, starts, places, weights, slope, *grads, im2col_step=64
        )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, list(expected_grads))


@only_ours
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(dtype):
    from mmcv.ops import deform_conv2d, nms, roi_align

    torch.manual_seed(0)
    maps, weight = torch.randn(1, 2, 6, 6).to(dtype), torch.randn(3, 2, 3, 3).to(dtype)
    offset = torch.randn(1, 18, 6, 6).to(dtype)
    regions = torch.tensor([[0, 1.0, 1, 5, 5]]).to(dtype)
    for call, given in (
        (lambda *inputs: deform_conv2d(*inputs, 1, 1), (maps, offset, weight)),
        (lambda *inputs: roi_align(*inputs, (2, 2), 1.0, 0, "avg", True), (maps, regions)),
    ):
        expected = call(*(tensor.float() for tensor in given)).to(dtype)
        torch.testing.assert_close(call(*given), expected)
    boxes = torch.tensor([[0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30]]).to(dtype)
    assert nms(boxes, torch.tensor([0.5, 0.9, 0.1]).to(dtype), 0.5)[1].tolist() == [1, 2]


@only_ours
def test_other_operators_raise_with_their_name():
    from mmcv.ops import RoIAlign, RoIPool

    maps, regions = torch.rand(1, 2, 8, 8), torch.tensor([[0, 1.0, 1, 5, 5]])
    with pytest.raises(ValueError, match=r"roi_pool_forward .* compile mmcv .*pip install"):
        RoIPool(2)(maps, regions)
    with pytest.raises(ValueError, match=r"pool_mode=max .* compile mmcv"):
        RoIAlign(2, pool_mode="max")(maps, regions)
