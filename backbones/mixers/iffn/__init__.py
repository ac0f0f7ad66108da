"""IFFN: half the hidden layer, read by several activations with learned coefficients.

    z = W1 x + b1,  t = BN(concat_i AGeLU_i(z)),  y = BN(W2 GELU(BN(DW(t))) + b2)

Source: Xu et al., "Enhancing Vision Transformer: Amplifying Non-Linearity in Feedforward Network
Module", ICML 2024, https://proceedings.mlr.press/v235/xu24n.html, Eq. 3 to 6, Sec. 4.3 and Fig. 4.
What the paper leaves open, and what the code that its authors released for DeiT later says of it
(https://github.com/AMD-AIG-AIMA/AMD_IFFN, November 2024, "the release"):

* Norms after the concatenation and after W2 are not in the text. Without them no parameter count of
  Table 1 is met, with them all 11 rows of DeiT, Swin and PoolFormer are, in parameters and in
  multiply-adds. The default is batch norms, as in CMT's inverted residual FFN (Guo et al., CVPR
  2022), which the paper cites; they make theta and the size of beta redundant in training. The
  release has layer norms there, of the same counts, each followed by dropout: ``norm="layer"``.
* Sec. 4.3 says "DW Conv with BN and GeLU", and no shortcut is the default. CMT adds the
  convolution's input to its output and puts the batch norm after the GELU, see ``dw_residual`` and
  ``dw_order``. The release has t + GELU(BN(DW(t))): ``dw_residual="outside"``.
* The counts are those of a DeiT without class token, pooled by a mean (Table 1: 73.66 M and 14.92 G
  for DeiT-B, 73.67 M and 14.99 G with the token). So these mixers build DeiT that way, and the
  release does, with the final norm before the mean; with ``class_token=true`` the token passes
  everything but the depthwise block.
* "*" in Table 1 is read as a kernel of side 5; the release has 5 in DeiT-B and 3 in DeiT-T and S.
* The parameters of all four LVT are met if the FFNs of its class blocks are replaced too, by IFFN
  without the depthwise block, as they see a single token; its FLOPs are not, see
  configs/published/iffn.yaml.
* The paper leaves initialisation open: linear layers begin as in all hosts; ``init`` and
  ``DepthwiseBlock`` describe the rest. The release begins with ones and zeros in Arb, as
  ``init="ones"`` does, and leaves the depthwise convolution at torch's default, which ours is not.
* The release keeps alpha and beta as (1, 1, h / N), which timm's rule gives weight decay; here they
  are vectors, which timm's rule exempts.

The two options of the release make its network; its checkpoints load with them and are refused
without them, see ``checkpoint_conversion``.

In reading order: ``mixer`` (Eq. 5, Fig. 4), ``activations`` (Eq. 3 and 4), ``depthwise``
(Sec. 4.3), ``ablations`` (Table 2) and ``nonlinear_sum`` (Table 5); ``checkpoint_conversion`` reads
the released checkpoints.

Axes: C channels, h = M C hidden channels, N branches of h / N channels each.
"""

from backbones.mixers.iffn import ablations, nonlinear_sum
from backbones.mixers.iffn.depthwise import DepthwiseBlock
from backbones.mixers.iffn.mixer import IFFN

__all__ = ["IFFN", "DepthwiseBlock", "ablations", "nonlinear_sum"]
