"""AFBO: an asymmetric factorized bilinear operation in place of the feed-forward network.

    a = SM_a(CM_a(x)),  b = SM_b(CM_b(x)),  y = W3 (act(a) * b) + b3

A channel mapping CM takes each token from C to h channels, a spatial model SM mixes neighbouring
tokens channel by channel. In reading order: ``channel_mappings`` (Fig. 2, Eq. 5 to 7),
``spatial_models`` (Tables 8 to 10), ``scfbo`` (Eq. 4, Table 6) and ``variants`` (Tables 1, 5 and
14).

| name                    | CM of a (activated) | CM of b  | SM       | table         |
|-------------------------|---------------------|----------|----------|---------------|
| ``afbo`` or ``afbo_cs`` | OCCM                | GCCM     | after    | 1 to 7, 9     |
| ``afbo_c``              | OCCM                | GCCM     | none     | 5, 9, 13      |
| ``afbo_s``              | dense               | the same | after    | 5             |
| ``afbo_sc``             | OCCM                | GCCM     | before   | 5, 10         |
| ``scfbo_gc``            | GCCM                | GCCM     | after    | 1             |
| ``scfbo_oc``            | OCCM                | OCCM     | after    | 1             |
| ``full``                | dense               | dense    | after    | 14            |

Source: Wu et al., "Asymmetric Factorized Bilinear Operation for Vision Transformer", ICLR 2025,
https://openreview.net/forum?id=MJyqwBVgMs. The authors published no code. Where the paper leaves a
choice or contradicts itself:

* Eq. 7 draws windows of two groups, while Sec. 3.3, Table 1 and Table 7 count G - 1 groups. G - 1
  is taken: with it the parameters of 13 DeiT-T rows and 17 host rows come within 0.16 M (RMSE) of
  the paper, with two groups within 0.73 M, and only then do they grow with G2 as Table 7 does.
* Sec. 4.1 gives (G1, G2) = (2, 3) to all hosts, App. A.1 only to LVT, Swin and the MLPs. (2, 4) can
  only add parameters, and Table 2 reports fewer for DeiT-S, DeiT-B and PVTv2-B1, so these (and the
  other PVT v2) are (2, 3) as well.
* GCCM stores each weight once and applies it ``rounds`` times: sharing saves memory, not
  arithmetic. The FLOPs of SCFBO-GC in Sec. 3.3 and Table 1, 4 M d^2 / G^2, count it once; those of
  AFBO beside them, 2 M d^2 / G1 per branch, count it as it runs.
* The text of Eq. 6 halves the weights (1 / 2G), Sec. 3.3 and Table 1 say 1 / G^2. The two agree at
  G = 2; at G1 = 4 Table 7 prints 5.7 M, where halving gives 5.69 M and 1 / G^2 gives 5.58 M.
* Sec. 3.3 calls OCCM Eq. 5; it is Eq. 7.
* Table 2 reports Swin-S 1.35 M and Swin-B 1.78 M below what any reading of the text gives.
* Table 5's AFBO-S has 6.0 M: one dense mapping shared by both branches, each with its own
  convolution, has 5.90 M; a single convolution would leave 5.81 M.
* Table 9 grows by 0.5 M from k = 3 to 7, two depthwise kernels of h channels by 0.74 M.
* Table 10's full convolution fits C to C channels before the mapping (13.7 M against 13.3 M
  printed); between h and h channels DeiT-T would have 133 M. Its FLOPs (1.7 and 4.6 G) cannot be.
* Table 13 prints 21.7 M for DeiT-S with channel mappings only, the figure of the whole AFBO in
  Table 2; without its convolutions that has 21.5 M.
* Table 14's Swin-T row of FULL repeats the GLU row of Table 11; 36.9 M are two dense mappings
  without convolutions, and its 4.6 G cannot be.
* Table 2 prints a change of -0.3 M for LVT, where (2, 3) gives -0.01 M and no reading comes near.
  The FFNs of its class blocks, which see one token, stay; with them replaced it is -0.01 M too.
* The paper leaves class tokens open: they pass both mappings, the product and W3, and skip the
  spatial models. It also leaves initialisation open, see ``SCFBO.reset_parameters``.

Axes: C = d input channels, h = M d hidden channels; a group is a run of neighbouring channels.
"""

from backbones.mixers.afbo.channel_mappings import (
    BlockDiagonalMapping,
    DenseMapping,
    GroupedCrossMapping,
    OverlappedCycleMapping,
)
from backbones.mixers.afbo.scfbo import SCFBO

__all__ = [
    "SCFBO",
    "BlockDiagonalMapping",
    "DenseMapping",
    "GroupedCrossMapping",
    "OverlappedCycleMapping",
]
