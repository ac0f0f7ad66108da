"""Losses that mixers add to their task's, of several processes, and of batches without targets."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from backbones import create_backbone
from heads.language_model import LanguageModel
from heads.linear import LinearClassifier
from heads.point_segmentation import IGNORED, PointSegmenter
from heads.text import TextClassifier
from tasks.engine.losses import loss_problem, total_loss
from tests.families import build_short
from tests.joined import run_joined


def test_losses_of_mixers_are_added_with_their_gradients():
    """Blocks that are recomputed in the backward pass give the same."""
    backbone = build_short("deit_t_sparse_moe", img_size=64).train()
    model = LinearClassifier(backbone, 3)
    batch = {"image": torch.randn(2, 3, 64, 64), "label": torch.tensor([0, 2])}
    found = []
    for recomputes in (False, True):
        backbone.set_grad_checkpointing(recomputes)
        model.zero_grad()
        torch.manual_seed(0)  # of the routers' noise
        losses, total = total_loss(model, batch)
        auxiliary = losses["auxiliary_loss"]
        own = [loss for name, loss in losses.items() if name != "auxiliary_loss"]
        assert auxiliary > 0
        torch.testing.assert_close(total, sum(own) + auxiliary)
        total.backward()
        found.append([p.grad for name, p in model.named_parameters() if "router" in name])
    torch.testing.assert_close(*found)
    routers = [p for name, p in model.named_parameters() if "router" in name]
    without = torch.autograd.grad(sum(model.loss(batch).values()), routers)
    assert not torch.allclose(without[0], found[0][0])


def words(head, name, *options, **more):
    """Two rows of 7 words of which 2 and 0 are predicted by BERT, 6 and 2 by GPT."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 30, (2, 7), generator=generator)
    mask, chosen = torch.ones(2, 7, dtype=torch.bool), torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 3:], chosen[0, [1, 4]] = False, True
    batch = {"tokens": tokens, "segments": tokens * 0, "mask": mask, "masked": tokens,
             "chosen": chosen, "labels": torch.tensor([1.0, 0.0])}  # fmt: skip
    host = create_backbone(name, img_size=16, vocabulary=30, drop=0.0, drop_path_rate=0.0)
    empty = {"chosen": chosen & False, "mask": mask & (torch.arange(7) < 1)}
    return head(host, *options, **more), batch, empty


def points(**options):
    """Three clouds of 80 points of which 80, 20 and 0 have a label."""
    generator = torch.Generator().manual_seed(1)
    cloud = torch.rand(3, 80, 9, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (3, 80), generator=generator)
    labels[1, 20:] = labels[2] = IGNORED
    host = create_backbone("ffnet_3d_tiny", fast=False, drop_path_rate=0.0)
    model = PointSegmenter(host, 3, 0.2, **options).double()
    return model, {"points": cloud, "labels": labels}, {"labels": torch.full((3, 80), IGNORED)}


# Models of our heads, batches with other numbers of terms in each input, and what has none.
MODELS = {
    "masked words": partial(words, LanguageModel, "bert_tiny"),
    "next words": partial(words, LanguageModel, "gpt_tiny"),
    "texts": partial(words, TextClassifier, "gpt_tiny", 2, drop=0.0, words_weight=0.5),
    "points": partial(points, lovasz_weight=0.0),
}


def losses_and_gradients(model, batch):
    losses, trained = model.loss(batch), [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(sum(losses.values()), trained, materialize_grads=True)
    return [torch.stack(list(losses.values())).detach(), *gradients]


@pytest.mark.parametrize("name", MODELS)
def test_processes_with_one_input_each_train_as_one_with_all(name, monkeypatch):
    torch.manual_seed(0)
    model, batch, _ = MODELS[name]()
    model.double().eval()  # running statistics are each process's own
    inputs = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(3)]
    inputs = [one for one in inputs if len(next(iter(one.values())))]
    whole = losses_and_gradients(model, batch)
    calls = [partial(losses_and_gradients, copy.deepcopy(model), one) for one in inputs]
    for own, parts in zip(whole, zip(*run_joined(calls, monkeypatch), strict=True), strict=True):
        torch.testing.assert_close(torch.stack(parts).mean(0), own, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [*MODELS, "lovasz"])
def test_a_batch_without_targets_has_the_losses_of_others(name):
    model, batch, empty = points() if name == "lovasz" else MODELS[name]()
    found = model.loss(batch | empty)
    assert list(found) == list(model.loss(batch))
    assert all(loss.isfinite() for loss in found.values())
    if name != "texts":  # its texts have labels
        assert [loss.item() for loss in found.values()] == [0.0] * len(found)
    sum(found.values()).backward()
    assert {loss.dtype for loss in model.bfloat16().loss(batch).values()} == {torch.float32}


def test_lovasz_is_averaged_over_the_processes_with_labels(monkeypatch):
    model, batch, _ = points()
    model.eval()
    clouds = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(3)]
    alone = [float(model.loss(one)["loss_lovasz"]) for one in clouds]
    found = run_joined([partial(model.loss, one) for one in clouds], monkeypatch)
    assert alone[2] == 0
    mean = sum(float(losses["loss_lovasz"]) for losses in found) / 3
    assert mean == pytest.approx(sum(alone) / 2)


def test_a_loss_of_a_broken_input_names_its_file():
    data = SimpleNamespace(dataset=lambda split: SimpleNamespace(describe="{}.npy".format))
    trainer = SimpleNamespace(datamodule=data, default_root_dir="/nowhere")
    images = torch.ones(3, 2, 4)
    images[1, 0, 2] = torch.nan
    batch = {"image": images, "label": torch.arange(3), "sample_id": torch.tensor([7, 8, 9])}
    said = loss_problem(torch.tensor(torch.nan), trainer, 5, batch)
    assert said.endswith("Correct the inputs, which hold NaN or infinite values: 8.npy")
    assert "Lower optimizer.lr" in loss_problem(torch.tensor(torch.inf), trainer, 5, {})
    assert loss_problem(torch.tensor(1.0), trainer, 5, batch) is None
