"""IFFN: half the hidden layer, read by several activations with learned coefficients.

    z = W1 x + b1,  t = BN(concat_i AGeLU_i(z)),  y = BN(W2 GELU(BN(DW(t))) + b2)

Source: Xu et al., "Enhancing Vision Transformer: Amplifying Non-Linearity in Feedforward Network
Module", ICML 2024, https://proceedings.mlr.press/v235/xu24n.html, Eq. 3 to 6, Sec. 4.3 and Fig. 4.
The paper leaves much of this open. The code that its authors released for DeiT ("the release",
https://github.com/AMD-AIG-AIMA/AMD_IFFN, November 2024) decides, and the default is its network.
That is proven for DeiT alone: for Swin, PoolFormer and LVT only the counts of Table 1 are known.

* Norms after the concatenation and after W2 are not in the text. Without them no parameter count of
  Table 1 is met, with them all 11 rows of DeiT, Swin and PoolFormer are, in parameters and in
  multiply-adds. The release has layer norms, each followed by dropout. Batch norms have the same
  counts, and CMT (Guo et al., CVPR 2022), which the paper cites, has them there: ``iffn_bn``.
* Sec. 4.3 says "DW Conv with BN and GeLU". The release adds the input of this block to its output,
  t + GELU(BN(DW(t))): ``dw_residual="outside"``. ``iffn_bn`` has no shortcut. CMT adds the
  convolution's input to its output and puts the batch norm after the GELU, see ``dw_order``.
* The counts are those of a DeiT without class token, pooled by a mean (Table 1: 73.66 M and 14.92 G
  for DeiT-B, 73.67 M and 14.99 G with the token). So these mixers build DeiT that way, and the
  release does, with the final norm before the mean; with ``class_token=true`` the token passes
  everything but the depthwise block.
* "*" in Table 1 is read as a kernel of side 5; the release has 5 in DeiT-B and 3 in DeiT-T and S.
* The parameters of all four LVT are met if the FFNs of its class blocks are replaced too, by IFFN
  without the depthwise block, as they see a single token; its FLOPs are not, see
  configs/published/iffn.yaml.
* Initialisation and weight decay are the release's: ones and zeros in Arb, torch's usual draw for
  the depthwise convolution, and weight decay for alpha and beta, which the release keeps as
  (1, 1, h / N). With batch norms the convolution begins by He's rule and no coefficient decays.

Of the variants, ``affn`` and ``iffn_spatial`` keep batch norms, which Table 2 and the Lipschitz
bound were worked out with. Released checkpoints load into a DeiT with the default options.

In reading order: ``mixer`` (Eq. 5, Fig. 4), ``activations`` (Eq. 3 and 4), ``depthwise``
(Sec. 4.3), ``ablations`` (Table 2) and ``nonlinear_sum`` (Table 5); ``checkpoint_conversion`` reads
the released checkpoints.

Axes: C channels, h = M C hidden channels, N branches of h / N channels each.
"""

from backbones.mixers.iffn.depthwise import DepthwiseBlock
from backbones.mixers.iffn.mixer import IFFN

__all__ = ["IFFN", "DepthwiseBlock"]
