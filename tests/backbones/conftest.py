import pytest


@pytest.fixture
def no_grad():
    """Run a test without gradients; ``@torch.enable_grad()`` on a test overrides it."""
    import torch

    with torch.no_grad():
        yield
