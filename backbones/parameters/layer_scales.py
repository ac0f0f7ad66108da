"""Layer-wise factors of the learning rate for the parameters of a backbone.

Source: Clark et al., "ELECTRA", ICLR 2020, Sec. 3.1, in the form of BEiT's code: the rate is
multiplied by the decay once for each layer between a parameter and the end of the network.

timm's ``param_groups_layer_decay`` is equal, except that it counts layers differently:

    DeiT, MLP-Mixer, gMLP, Swin   the last norm shares the last block's layer; here it follows it
    Swin                          a downsampling shares the next block's layer; here the previous'
    PVT v2, GC ViT                a layer is a stage; here a block
    PoolFormer                    a layer is a 12th of the parameters; here a block

ConvNeXt and ResNet agree.
"""

from __future__ import annotations

from typing import Any, Literal

Layers = Literal["blocks", "convnext", "ffnet", "ffnet_as_run"]
FFNET_LAST = 12  # layer of stage 4 in FFNet's configs of all sizes


def layer_scales(backbone: Any, decay: float, layers: Layers = "blocks") -> dict[str, float]:
    """Return the factor of the learning rate for each parameter of a backbone.

    Parts after the last block, and the norms of dense maps, learn at full rate.

    Args:
        backbone: A ``Backbone``.
        decay: Factor from a layer to the layer before it, above 0.
        layers: Definition of a layer. "blocks": the stem, then every block; a downsampling belongs
            to the next block, in Swin to the previous one. "convnext": the stem, stages 1 and 2 as
            one layer each, stage 3 in groups of three blocks, stage 4, as in ConvNeXt's code.
            "ffnet": the same with stage 3's downsampling counted as its first block and stage 4 as
            layer 12 in all sizes. "ffnet_as_run": "ffnet" as the authors' code runs, which misses
            the stem and trains it at full rate.

    Raises:
        ValueError: The backbone's stages do not fit ``layers``.
    """
    if layers == "blocks":
        last = backbone.num_layers - 1
        ids = {name: backbone.layer_id(name) for name, _ in backbone.named_parameters()}
    else:
        ids, last = _grouped(backbone, layers)
    return {name: decay ** (last - layer) for name, layer in ids.items()}


def _grouped(backbone: Any, layers: Layers) -> tuple[dict[str, int], int]:
    """Return the layer of each parameter with stage 3 in groups of three, and the last layer."""
    depths = backbone.layer_ids.depths
    shift = 0 if layers == "convnext" else 1
    longest = 3 * (FFNET_LAST - 3) + 2
    if len(depths) != 4 or (shift and depths[2] > longest):
        raise ValueError(
            f"optimizer.layers={layers} needs a backbone of four stages"
            f"{f' with at most {longest} blocks in the third' * shift}, but {backbone.name} has "
            f"{list(depths)} blocks; pass optimizer.layers=blocks"
        )
    fourth = FFNET_LAST if shift else 3 + -(-depths[2] // 3)
    unfound = layers == "ffnet_as_run"

    def place(name: str) -> int:
        layer = backbone.layer_id(name)
        if layer == 0:
            return fourth + 1 if unfound else 0
        if layer == backbone.num_layers - 1:
            return fourth + 1
        stage = backbone.layer_ids.stage_of_layer(layer)
        block = layer - 1 - sum(depths[:stage])
        return (1, 2, 3 + (block + shift) // 3, fourth)[stage]

    return {name: place(name) for name, _ in backbone.named_parameters()}, fourth + 1
