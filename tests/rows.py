"""Parameters and MACs of every pair of host and mixer, written down or worked out by hand.

Hosts and AFBO come from the published rows; GLU from the widths, depths and maps of the hosts.
"""

from tools.papers.published import load_rows

# Widths, depths, tokens per stage at 224 pixels (DeiT's with the class token).
SWIN_MAPS = (56 * 56, 28 * 28, 14 * 14, 7 * 7)
SHAPES = {
    "deit_t": ((192,), (12,), (197,)),
    "deit_s": ((384,), (12,), (197,)),
    "deit_b": ((768,), (12,), (197,)),
    "swin_t": ((96, 192, 384, 768), (2, 2, 6, 2), SWIN_MAPS),
    "swin_s": ((96, 192, 384, 768), (2, 2, 18, 2), SWIN_MAPS),
    "swin_b": ((128, 256, 512, 1024), (2, 2, 18, 2), SWIN_MAPS),
    "poolformer_s12": ((64, 128, 320, 512), (2, 2, 6, 2), SWIN_MAPS),
    "poolformer_s24": ((64, 128, 320, 512), (4, 4, 12, 4), SWIN_MAPS),
    "poolformer_s36": ((64, 128, 320, 512), (6, 6, 18, 6), SWIN_MAPS),
    "poolformer_m36": ((96, 192, 384, 768), (6, 6, 18, 6), SWIN_MAPS),
    "poolformer_m48": ((96, 192, 384, 768), (8, 8, 24, 8), SWIN_MAPS),
}


def published_rows():
    """Backbone name -> (params, MACs in G) of every published network with default options."""
    rows = load_rows("afbo", task="classification")
    return {row.backbone: (row.params, row.macs) for row in rows if not row.options}


def glu_row(host):
    """The host's row with every FFN of 4 C replaced by a GLU of floor(8 C / 3)."""
    params, macs = published_rows()[host]
    for dim, depth, tokens in zip(*SHAPES[host], strict=True):
        ffn, glu = 4 * dim, 8 * dim // 3
        params += depth * ((3 * glu * dim + 2 * glu + dim) - (2 * ffn * dim + ffn + dim))
        macs += depth * tokens * (3 * glu * dim - 2 * ffn * dim) / 1e9
    return params, macs


def all_rows():
    """Backbone name -> (params, MACs in G) of all pairs of the hosts and mixers above."""
    return published_rows() | {f"{host}_glu": glu_row(host) for host in SHAPES}
