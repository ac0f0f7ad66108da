"""Evidence of dense tasks for class maps: scores of pixels and boxes against plain sums."""

from types import SimpleNamespace

import pytest
import torch

from backbones.analysis.class_activation import class_activation
from tests.families import short
from tests.tensors import images, tokens
from tools.analyses.evidence import _segmentor_evidence

INSIDE = [(6, 8), (4, 5)]  # the second image is padded


def test_the_evidence_of_a_segmentor_by_a_plain_sum():
    """The sum of a class's logit over the pixels where it is the largest, without padding."""
    logits = tokens(2, 3, 6, 8).requires_grad_()
    seen = []

    def encode_decode(pictures, metas):
        seen.extend(metas)
        return logits

    model = SimpleNamespace(encode_decode=encode_decode)
    scores, shares = _segmentor_evidence(model, images(6, 8, batch=2), INSIDE, 3)
    assert [meta["img_shape"] for meta in seen] == INSIDE
    assert all(meta["pad_shape"] == (6, 8) for meta in seen)
    expected, counts = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3)
    for image, (height, width) in enumerate(INSIDE):
        for row in range(height):
            for column in range(width):
                own = logits[image, :, row, column].tolist()
                best = own.index(max(own))
                expected[image, best] += own[best]
                counts[image, best] += 1 / (height * width)
    torch.testing.assert_close(scores.detach(), expected)
    torch.testing.assert_close(shares, counts)
    (slopes,) = torch.autograd.grad(scores[1, 2], logits)
    taken = logits.detach().argmax(1) == 2
    taken[1, 4:], taken[1, :, 5:], taken[0] = False, False, False
    assert torch.equal(slopes[:, 2], taken.double())
    assert not slopes[:, :2].any()
    with pytest.raises(ValueError, match="3 logits per pixel for 2 classes"):
        _segmentor_evidence(model, images(6, 8, batch=2), INSIDE, 2)


def test_class_maps_of_a_segmentor_equal_those_of_pytorch_grad_cam():
    cams = pytest.importorskip("pytorch_grad_cam")
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    pytest.importorskip("mmseg")
    from heads.toolkits.segmentors import build_segmentor

    torch.manual_seed(0)
    backbone = short("resnet18", dense=True)
    model = build_segmentor(backbone, 3, channels=16).model.eval()
    x = images(64, 96).float()
    sizes = [(64, 96)]
    with torch.no_grad():
        logits = model.encode_decode(x, [{"img_shape": (64, 96), "pad_shape": (64, 96)}])
    chosen = logits[0].flatten(1).argmax(0).bincount(minlength=3).argmax()

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, pictures):
            return model.encode_decode(pictures, [{"img_shape": (64, 96), "pad_shape": (64, 96)}])

    mask = (logits[0].argmax(0) == chosen).float().numpy()
    target = targets.SemanticSegmentationTarget(int(chosen), mask)
    layer = backbone.get_submodule(backbone.block_names()[-1])
    seen = []
    # For the class and against it: if one of the two maps is empty, the other is not.
    for sign in (1, -1):
        with cams.GradCAM(model=Logits(), target_layers=[layer]) as cam:
            signed = [lambda output, sign=sign: sign * target(output)]
            theirs = torch.from_numpy(cam(input_tensor=x, targets=signed))
        ours, _ = class_activation(
            lambda pictures, sign=sign: sign * _segmentor_evidence(model, pictures, sizes, 3)[0],
            backbone, x, chosen[None],
        )  # fmt: skip
        seen.append(float(ours.max()))
        assert bool(theirs.any()) == (seen[-1] > 0)
        # Theirs range from 0 to 1.
        ours = (ours - ours.min()) / (ours.max() - ours.min()).clamp(min=1e-12)
        ours = torch.nn.functional.interpolate(ours[:, None].float(), x.shape[2:], mode="bilinear")
        assert (ours[:, 0] - theirs).abs().mean() < 0.02
    assert max(seen) > 0
