"""A run that starts from the whole network of another one, with classes of its own."""

import pytest
import torch

from tests.runs import SMALLEST, run_shared, weights

SHORT = ("trainer=cpu", "trainer.max_epochs=1", "schedule.warmup=0", "logger=csv")
FEWER = "data.classes=['5','2','7']"


def finished(words):
    """Run to a successful end; return its status and output with all lines of its log."""
    ended = run_shared(words)
    assert ended.status == 0, ended.err
    return ended


@pytest.mark.slow
def test_a_detector_trains_on_with_more_classes_and_is_resumed(sample_cache, tmp_path):
    words = [*SHORT, f"output_dir={tmp_path}"]
    first = finished(["task=detection", *SMALLEST["detection"], FEWER, *words]).folder()
    ckpt = f"ckpt={first}"
    ended = finished([ckpt, "data.classes=null", "optimizer.lr=1e-9", *words])
    (line,) = [line for line in ended.out.splitlines() if "neck and head of" in line]
    assert "loaded 2, 5, 7; initialised 0, 1, 3, 4, 6, 8, 9" in line
    before, after = weights(first, "best"), weights(ended.folder(), "best")
    name = "model.model.roi_head.bbox_head.fc_cls.weight"
    assert (before[name].shape[0], after[name].shape[0]) == (4, 11)
    torch.testing.assert_close(after[name][[2, 5, 7, 10]], before[name], rtol=0, atol=1e-6)
    neck = "model.model.neck.lateral_convs.0.conv.weight"
    torch.testing.assert_close(after[neck], before[neck], rtol=0, atol=1e-6)
    again = [f"ckpt={ended.folder()}", "data.classes=null", "optimizer.lr=1e-9", *words]
    again = finished([*again, "resume=true", "trainer.max_epochs=2"])
    assert "Going on after step 3" in again.out
    other = run_shared([ckpt, "head=retinanet", *words])
    assert other.status == 2
    assert "holds another model" in other.err


@pytest.mark.slow
def test_a_segmentor_trains_on(sample_cache, tmp_path):
    words = [*SHORT, f"output_dir={tmp_path}"]
    first = finished(["task=segmentation", *SMALLEST["segmentation"], *words]).folder()
    ended = finished([f"ckpt={first}", "optimizer.lr=1e-9", *words])
    assert "classes: loaded " in ended.out
    before, after = weights(first, "best"), weights(ended.folder(), "best")
    heads = [name for name in before if ".decode_head." in name and name.endswith("weight")]
    assert heads
    for name in heads:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)
