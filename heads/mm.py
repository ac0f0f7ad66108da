"""Our decode heads in MMSegmentation, for configs that name them.

    custom_imports = dict(imports=["backbones.mm", "heads.mm"])
    model = dict(backbone=dict(type="ffnet_seg"), decode_head=dict(type="FFNetSegHead", ...))

``backbones.mm`` does the same for backbones.
"""

from heads.toolkits.segmentors import register_decode_heads

register_decode_heads()
