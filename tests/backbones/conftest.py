import pytest
import torch


@pytest.fixture
def no_grad():
    """Run a test without gradients; ``@torch.enable_grad()`` on a test overrides it."""
    with torch.no_grad():
        yield
