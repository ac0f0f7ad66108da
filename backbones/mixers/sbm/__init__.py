"""SBM: star with bilinear mapping, a token mixer whose cost is linear in the number of tokens.

    p_u, p_v = DWConv(x W_i),  U = W_s p_u W_c,  V = p_v W_v
    h(x) = SiLU(x W_G) * LayerNorm(SiLU(U) * V),  W_s = write^T read of rank m

Source: Peng et al., "Star with Bilinear Mapping", CVPR 2025, Eq. 2, Sec. 4.2. The authors published
no code. Where the paper leaves a choice:

* The kind and size of the convolution and the shapes of W_i are not given. Tables 1 and 5 fit only
  if each branch has its own d x d part of W_i, so W_i is d -> 2d; the convolution is depthwise 3x3.
* Eq. 2 ends with the last product; ``out_proj`` adds one, ``pre_proj`` and ``x_width``
  move the split into branches behind the convolution.
* W_s belongs to a fixed number of tokens. At another map size its factors are resampled as images
  (bicubic, antialiased), and the reads are scaled so that a sum over tokens keeps its size.
* Where LayerNorm stands is taken from Sec. 4.2.2 (after the star); initialisation is ours.

Axes: C = d channels, m rank, (h, w) map, n = h * w tokens, (gh, gw) the stored map.

In reading order: ``mixer`` (Eq. 2), ``bilinear_mapping`` (Sec. 4.2.1).

https://openaccess.thecvf.com/content/CVPR2025/html/Peng_Star_with_Bilinear_Mapping_CVPR_2025_paper.html
"""

from backbones.mixers.sbm.bilinear_mapping import (
    BilinearMapping,
    Resample,
    Size,
    resample_factors,
)
from backbones.mixers.sbm.mixer import StarBilinearMapping

__all__ = ["BilinearMapping", "Resample", "Size", "StarBilinearMapping", "resample_factors"]
