# %% [markdown]
# # An own mixer
#
# A channel mixer is a class with one method. As soon as it is registered, one name exists for
# each host that it fits.

# %%
from torch import Tensor, nn

import mixerlab
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


names = mixerlab.list_backbones("*_tanh_ffn")
print(len(names), "networks, among them", mixerlab.list_backbones("swin_*_tanh_ffn"))

# %% [markdown]
# ## Check it
#
# A mixer equals its equation, written plainly, and its gradient reaches every weight.

# %%
import torch

mixer = mixerlab.create_mixer("tanh_ffn", dim=16)
x = torch.rand(2, 7, 7, 16)
y = mixer(x)
hidden = torch.tanh(x @ mixer.fc1.weight.T + mixer.fc1.bias)
torch.testing.assert_close(y, hidden @ mixer.fc2.weight.T + mixer.fc2.bias)
y.square().sum().backward()
print({name: round(weight.grad.norm().item(), 1) for name, weight in mixer.named_parameters()})

# %% [markdown]
# ## Count it

# %%
from tools import complexity

status = complexity.main(["backbone=deit_t,deit_t_tanh_ffn,swin_t,swin_t_tanh_ffn"])

# %% [markdown]
# ## Train it beside the host's own
#
# Commands of this notebook know the mixer as well.

# %%
from tools import results, run

for backbone in ("deit_t", "deit_t_tanh_ffn"):
    run.main([f"backbone={backbone}", "data.train_copies=1", "start=host"])
status = results.main(["outputs"])

# %% [markdown]
# One run each says little: seeds alone differ by points. The notebook on comparisons goes on from
# here.
#
# For commands outside of this notebook the cell becomes a file: `backbones/mixers/tanh_ffn.py` of
# a checkout, or a module of a package of yours with the entry point `mixerlab.mixers`.
