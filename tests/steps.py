"""Training steps of full networks."""

import torch


def assert_a_step_lowers_the_loss(model, batch, lr=1e-2):
    """Take two steps on one batch, with the same noise, and check that all parameters train."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr), []
    for _ in range(2):
        torch.manual_seed(1)
        loss = sum(model.loss(batch).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    assert all(p.grad is not None for p in model.parameters())
