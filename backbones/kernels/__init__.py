"""Compiled operators: what mixers compute, in fewer passes over memory than torch's own would take.

Each operator is registered with ``torch.library`` as ``torch.ops.mixerlab.<name>``, with forms for
the meta device and, unless it serves passes without gradients alone, autograd, and has a file here
that says what it computes. `make install` compiles ``csrc`` where it finds a compiler (``build``);
``library`` loads the result. Without it every mixer computes the same in operations of torch's, to
rounding, and a test holds the two together. So does whoever asks for it: ``MIXERLAB_KERNELS=off``
in the environment, or in a program ``with kernels.switched_off():``. On a GPU those of AFBO and
IFFN are Triton kernels (``triton_*``), where Triton is installed and a first trial gives torch's
numbers; these were proven in Triton's interpreter and have not run on a GPU yet. A compiler or
exporter always sees torch's operations.
"""

from backbones.kernels import batched, conv_pos_enc, linear
from backbones.kernels.autocast import weight_dtype
from backbones.kernels.library import (
    activates,
    encodes,
    is_available,
    multiplies,
    multiplies_without_gradient,
    serves,
    status,
)
from backbones.layers import activations, batched_products
from backbones.layers import conv_pos_enc as conv_pos_enc_layer
from backbones.layers import linear as linear_layer
from backbones.layers.eager import switched_off

activations.FASTER.append((activates, linear.act))
linear_layer.FASTER.append((multiplies, linear.linear))
linear_layer.FASTER_ACT.append((multiplies_without_gradient, linear.linear_act))
batched_products.FASTER.append((multiplies_without_gradient, batched.batched))
conv_pos_enc_layer.FASTER.append((encodes, conv_pos_enc.conv_pos_enc))

__all__ = [
    "activates",
    "encodes",
    "is_available",
    "multiplies",
    "multiplies_without_gradient",
    "serves",
    "status",
    "switched_off",
    "weight_dtype",
]
