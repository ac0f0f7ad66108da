"""Names of FFNet's tensors in the authors' checkpoints, in the training and the fused form.

Each module with tensors is listed once. The fused form lacks the level of branches (``c`` and
``bn`` below). Two traps of the authors' names: ``conv1`` is the key inside a token mixer and a
branch inside a branched convolution; in stages 2 to 4 the downsampling is entry 0, so blocks start
at 1.

Source: the authors' code (github.com/ysj9909/FFNet), models/ffnet.py and, for FFNet_seg,
segmentation/mmseg_custom/models/backbones/ffnet_sys.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from torch import Tensor

from backbones.hosts.ffnet.blocks import VARIANTS, Variant
from backbones.layers.reparam import Kernel, kernel_name

Form = Literal["train", "fused"]
FORMS = ("train", "fused")
# Tensors of a part in the training form: the authors' names and ours.
Parts = tuple[tuple[str, str], ...]
CONV_BN: Parts = ((".c", ".conv"), (".bn", ".norm"))
SKIP: Parts = ((".conv.c", ".conv"), (".conv.bn", ".norm"))
PLAIN: Parts = (("", ""),)
Part = tuple[str, str, Parts]


def convert_official_state_dict(
    state_dict: Mapping[str, Tensor], variant: str, form: Form
) -> dict[str, Tensor]:
    """Rename the authors' tensors to ours; the classifier becomes ``classifier.*``.

    Args:
        state_dict: Tensors under the authors' names; others pass unchanged.
        variant: "ffnet_1" to "ffnet_4" or "ffnet_seg".
        form: "train" with branches and BatchNorm, or "fused".

    Raises:
        ValueError: An unknown variant or form.
    """
    return _rename(state_dict, official_names(variant, form))


def official_form(state_dict: Mapping[str, Tensor]) -> Form | None:
    """Return the form of a state dict under the authors' names; None for other names."""
    if "patch_embed.0.c.weight" in state_dict:
        return "train"
    return "fused" if "patch_embed.0.weight" in state_dict else None


def official_names(variant: str, form: Form) -> dict[str, str]:
    """Return the authors' prefixes -> ours, of modules with tensors and of LayerScale.

    Raises:
        ValueError: An unknown variant or form.
    """
    for option, value, valid in (("variant", variant, VARIANTS), ("form", form, FORMS)):
        if value not in valid:
            raise ValueError(f"{option} must be one of {', '.join(valid)}; got {value!r}")
    sizes = VARIANTS[variant]
    names = dict(_ends(sizes))
    for official, ours, parts in _parts(sizes):
        if form == "fused":
            names[official] = ours
        else:
            names |= {f"{official}{part}": f"{ours}{inner}" for part, inner in parts}
    return names


def _ends(variant: Variant) -> Iterator[tuple[str, str]]:
    """Yield the parts outside the stages, which both forms have."""
    if variant.seg:
        yield from (("head2.0", "head.fc"), ("head2.1", "head.norm"), ("head2.3", "classifier"))
    else:
        yield from (("norm", "norm"), ("head", "classifier"))


def _parts(variant: Variant) -> Iterator[Part]:
    """Yield the authors' prefix, ours, and the tensors below it in the training form."""
    for index in (0, 2, 4, 5) if variant.seg else (0, 2):
        yield f"patch_embed.{index}", f"stem.{index}", CONV_BN
    for stage, depth in enumerate(variant.depths):
        if stage:
            official, ours = f"stages.{stage}.0.proj", f"stages.{stage}.downsample"
            branched = _branched((7, 7), ((3, 3),), seg=False)
            yield f"{official}.0", f"{ours}.0", CONV_BN if variant.seg else branched
            last = 2 if variant.seg else 1
            yield f"{official}.{last}", f"{ours}.{last}", CONV_BN if variant.seg else SKIP
        for block in range(depth):
            official = f"stages.{stage}.{block + bool(stage)}"
            yield from _block(official, f"stages.{stage}.blocks.{block}", variant, stage)
    if variant.seg:
        yield "head1.0", "head.conv", CONV_BN


def _block(prefix: str, ours: str, variant: Variant, stage: int) -> Iterator[Part]:
    token, channel = f"{prefix}.token_mixer.0", f"{prefix}.channel_mixer"
    side = variant.token_kernels[stage]
    kernels = variant.token_branches(stage)
    spatial = _branched((side, side), kernels, variant.seg) if kernels else PLAIN
    yield f"{token}.main.fc", f"{ours}.token_mixer.query", CONV_BN
    yield f"{token}.main.conv1", f"{ours}.token_mixer.memory.key", spatial
    yield f"{token}.main.conv2", f"{ours}.token_mixer.memory.value", spatial
    yield f"{token}.layer_scale", f"{ours}.token_scale", PLAIN
    side = variant.channel_kernel
    kernels = variant.channel_branches()
    query = _branched((side, side), kernels, seg=False) if kernels else CONV_BN
    yield f"{channel}.main.conv", f"{ours}.channel_mixer.query", query
    yield f"{channel}.main.fc1", f"{ours}.channel_mixer.memory.key", PLAIN
    yield f"{channel}.main.fc2", f"{ours}.channel_mixer.memory.value", PLAIN
    yield f"{channel}.layer_scale", f"{ours}.channel_scale", PLAIN


def _branched(first: Kernel, more_kernels: tuple[Kernel, ...], seg: bool) -> Parts:
    """Return branches by kernel; square ones are conv1, conv2 in FFNet_seg, else conv, conv1."""
    squares = ("conv1", "conv2") if seg else ("conv", "conv1")
    parts = []
    for kernel in (first, *more_kernels):
        height, width = kernel
        if height == width:
            official = squares[kernel != first]
        else:
            official = "strip_conv1" if height == 1 else "strip_conv2"
        branch = f".branches.{kernel_name(kernel)}"
        parts += [(f".{official}{part}", f"{branch}{ours}") for part, ours in CONV_BN]
    return tuple(parts)


def _rename(state_dict: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    renamed = {}
    for key, value in state_dict.items():
        prefix, _, tensor = key.rpartition(".")
        if key in names:
            key = names[key]
        elif prefix in names:
            key = f"{names[prefix]}.{tensor}"
        renamed[key] = value
    return renamed
