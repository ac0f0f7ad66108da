"""State dicts of ours under the names that the authors' checkpoints have."""

import re

import torch


def swin_by_its_authors(state_dict):
    """Downsampling ends a stage there, and two buffers are saved."""
    renamed = {}
    for key, value in state_dict.items():
        if ".downsample." in key:
            _, stage, rest = key.split(".", 2)
            key = f"layers.{int(stage) - 1}.{rest}"
        renamed[key.replace("classifier.", "head.")] = value
    renamed["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49).long()
    renamed["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    return renamed


def poolformer_by_its_authors(state_dict):
    """One list of stages (even) and downsampling (odd)."""
    renamed = {}
    for key, value in state_dict.items():
        parts = key.split(".")
        if parts[0] == "stages":
            stage = int(parts[1])
            if parts[2] == "downsample":
                key = f"network.{2 * stage - 1}.proj.{parts[-1]}"
            else:
                rest = ".".join(parts[3:]).replace("layer_scale1.scale", "layer_scale_1")
                key = f"network.{2 * stage}.{rest.replace('layer_scale2.scale', 'layer_scale_2')}"
        key = key.replace("stem.conv.", "patch_embed.proj.").replace("classifier.", "head.")
        renamed[key] = value
    return renamed


def pvt_v2_by_its_authors(state_dict):
    """Embedding, blocks and norm of a stage are numbered apart, from 1."""
    renamed = {}
    for key, value in state_dict.items():
        key = key.replace("patch_embed.", "patch_embed1.").replace("classifier.", "head.")
        key = key.replace(".dwconv.", ".dwconv.dwconv.")
        key = re.sub(
            r"^stages\.(\d)\.(downsample|blocks|norm)",
            lambda m: (
                {"downsample": "patch_embed", "blocks": "block"}.get(m[2], m[2])
                + str(int(m[1]) + 1)
            ),
            key,
        )
        renamed[key] = value
    return renamed


def convnext_by_its_authors(state_dict):
    """Stem and downsampling are in one list."""
    renamed = {}
    for key, value in state_dict.items():
        key = key.replace("stem.", "downsample_layers.0.").replace("classifier.", "head.")
        key = re.sub(r"^stages\.(\d)\.downsample", r"downsample_layers.\1", key)
        key = key.replace(".blocks.", ".").replace("conv_dw", "dwconv").replace("mlp.fc", "pwconv")
        renamed[key] = value
    return renamed


AUTHORS = {
    "swin_t": swin_by_its_authors, "poolformer_s12": poolformer_by_its_authors,
    "pvt_v2_b1": pvt_v2_by_its_authors, "convnext_t": convnext_by_its_authors,
}  # fmt: skip
