from torch import Tensor, nn

from backbones.base import PointwiseMixer, hidden_width
from backbones.registry import register_mixer


@register_mixer("tanh_ffn", kind="channel", source="an example")
class TanhFFN(PointwiseMixer):
    """W2 tanh(W1 x), each token by itself."""

    def __init__(self, dim: int, *, hidden_ratio: float = 4.0) -> None:
        super().__init__()
        hidden = hidden_width(dim, hidden_ratio)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def mix(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)."""
        return self.fc2(self.fc1(x).tanh())
