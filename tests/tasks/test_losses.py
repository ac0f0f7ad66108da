"""Losses that mixers add to their task's."""

import torch

from heads.linear import LinearClassifier
from tasks.engine.losses import total_loss
from tests.families import build_short


def test_losses_of_mixers_are_added_with_their_gradients():
    """Blocks that are recomputed in the backward pass give the same."""
    backbone = build_short("deit_t_sparse_moe", img_size=64).train()
    model = LinearClassifier(backbone, 3)
    batch = {"image": torch.randn(2, 3, 64, 64), "label": torch.tensor([0, 2])}
    found = []
    for recomputes in (False, True):
        backbone.set_grad_checkpointing(recomputes)
        model.zero_grad()
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
