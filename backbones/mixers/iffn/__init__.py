"""IFFN: half the hidden layer, read by several activations with learned coefficients.

    z = W1 x + b1,  t = BN(concat_i AGeLU_i(z)),  y = BN(W2 GELU(BN(DW(t))) + b2)

Source: Xu et al., "Enhancing Vision Transformer: Amplifying Non-Linearity in Feedforward Network
Module", ICML 2024, https://proceedings.mlr.press/v235/xu24n.html, Eq. 3 to 6, Sec. 4.3 and Fig. 4.
The authors published no code. What the paper leaves open:

* Batch norms after the concatenation and after W2 are not in the text. Without them no parameter
  count of Table 1 is met, with them all 11 rows of DeiT, Swin and PoolFormer are, in parameters
  and in multiply-adds. CMT's inverted residual FFN (Guo et al., CVPR 2022), which the paper cites,
  has them in these places. They make theta and the size of beta redundant in training.
* The counts are those of a DeiT without class token, pooled by a mean (Table 1: 73.66 M and 14.92 G
  for DeiT-B, 73.67 M and 14.99 G with the token). So these mixers build DeiT that way; with
  ``class_token=true`` the token passes everything but the depthwise block.
* The parameters of all four LVT are met if the FFNs of its class blocks are replaced too, by IFFN
  without the depthwise block, as they see a single token; its FLOPs are not, see
  configs/published/iffn.yaml.
* CMT adds the convolution's input to its output and puts the batch norm after the GELU, Sec. 4.3
  says "DW Conv with BN and GeLU"; see ``dw_residual`` and ``dw_order``.
* Nothing is said of initialisation: linear layers begin as in all hosts, the rest is said at
  ``init`` and ``DepthwiseBlock``.

In reading order: ``mixer`` (Eq. 5, Fig. 4), ``activations`` (Eq. 3 and 4), ``depthwise``
(Sec. 4.3), ``ablations`` (Table 2) and ``nonlinear_sum`` (Table 5); ``merged`` is the mixer's form
for inference, ``chunked_sum`` computes the sum of many activations.

Axes: C channels, h = M C hidden channels, N branches of h / N channels each.
"""

from backbones.mixers.iffn import ablations, nonlinear_sum
from backbones.mixers.iffn.depthwise import DepthwiseBlock
from backbones.mixers.iffn.mixer import IFFN

__all__ = ["IFFN", "DepthwiseBlock", "ablations", "nonlinear_sum"]
