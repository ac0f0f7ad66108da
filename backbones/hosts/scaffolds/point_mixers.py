"""Mixers on voxels: k x k kernels become submanifold kernels of k x k x k.

Voxels (P, C) are a map of one row. Mixers of single tokens take them as they are. Kernels read the
neighbours of a level, so all clouds of a batch run together. Mixers without kernels that ignore
order, such as attention, run cloud by cloud.

Axes: P voxels, C channels, k side of a kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from backbones.layers.sparse import SubmanifoldConv3d, VoxelLevel
from backbones.mixer import Mixer, PointwiseMixer, class_name
from backbones.replace import replace

LEVEL: ContextVar[VoxelLevel | None] = ContextVar("LEVEL", default=None)
ADVICE = "voxels meet in kernels alone, so use a mixer such as glu, mix_ffn or afbo"
TRIED, APART = 6, 100  # voxels of a trial, and voxels between them
CHANGE = 0.1  # deviation of the change of weights in a trial


@contextmanager
def on_level(level: VoxelLevel) -> Iterator[None]:
    """Give the kernels within the context the neighbours of a level."""
    token = LEVEL.set(level)
    try:
        yield
    finally:
        LEVEL.reset(token)


class VoxelKernel(SubmanifoldConv3d):
    """Submanifold form of a k x k convolution, dense or depthwise.

    The centre taps are the convolution's. The others are drawn with the deviation of its other
    taps over sqrt(k), so that outputs keep their variance.

    Args:
        conv: Convolution of stride 1 with k // 2 zeros around the map.

    Shape: (1, C, 1, P) or (1, 1, P, C) -> the same with O channels.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        side = conv.kernel_size[0]
        super().__init__(
            conv.in_channels, conv.out_channels, side, bias=conv.bias is not None,
            groups=conv.groups,
        )  # fmt: skip
        self.to(conv.weight)
        with torch.no_grad():
            if self.bias is not None and conv.bias is not None:
                self.bias.copy_(conv.bias)
            flat = conv.weight.flatten(2)  # (O, C / groups, k * k)
            middle = side * side // 2
            neighbours = torch.cat([flat[..., :middle], flat[..., middle + 1 :]], dim=2)
            self.weight.normal_().mul_(neighbours.std() * side**-0.5)
            self.weight[:, side // 2, side // 2, side // 2] = flat[..., middle]

    def forward(self, x: Tensor, level: VoxelLevel | None = None) -> Tensor:
        """Convolve the voxels of a level, by default the current one."""
        level = LEVEL.get() if level is None else level
        if level is None:
            raise RuntimeError("a kernel on voxels runs within on_level alone")
        if x.shape[1] == 1:
            return super().forward(x[0, 0], level)[None, None]
        return super().forward(x[0, :, 0].T, level).T[None, :, None]


def fit_to_voxels(mixer: Mixer, dim: int, *, check: bool) -> None:
    """Replace the kernels of a mixer by their submanifold forms, in place.

    Args:
        mixer: A mixer of C channels.
        dim: C.
        check: Try the mixer on voxels.

    Raises:
        ValueError: A kernel lacks one, or the mixer reads other voxels than their neighbours.
    """
    kernels = [
        (name, part)
        for name, part in mixer.named_modules()
        if isinstance(part, nn.Conv2d | nn.ConvTranspose2d | nn.AvgPool2d | nn.MaxPool2d)
        and part.kernel_size not in (1, (1, 1))
    ]
    for name, part in kernels:
        if not _has_form(part):
            raise ValueError(
                f"{class_name(mixer)} has a {type(part).__name__} of {part.kernel_size} ({name}) "
                "without a form on voxels; " + ADVICE
            )
        replace(mixer, name, VoxelKernel(part))  # type: ignore[arg-type]
    if check and not _takes_clouds(mixer):
        check_neighbours(mixer, dim)


def _takes_clouds(mixer: nn.Module) -> bool:
    """Return True for a mixer without kernels that reads a whole cloud in any order."""
    if not isinstance(mixer, Mixer) or isinstance(mixer, PointwiseMixer):
        return False
    kernels = any(isinstance(part, VoxelKernel) for part in mixer.modules())
    return mixer.ignores_order and not kernels


def _has_form(part: nn.Module) -> bool:
    if not isinstance(part, nn.Conv2d):
        return False
    height, width = part.kernel_size
    return (
        height == width
        and height % 2 == 1
        and part.stride == (1, 1)
        and part.dilation == (1, 1)
        and part.padding in ((height // 2,) * 2, "same")
        and part.padding_mode == "zeros"
        and part.groups in (1, part.in_channels)
        and (part.groups == 1 or part.in_channels == part.out_channels)
    )


def check_neighbours(mixer: Mixer, dim: int) -> None:
    """Refuse a mixer in which voxels without neighbours depend on each other.

    A copy with changed weights is tried, as some mixers start without the parts that would show it.

    Raises:
        ValueError: They do, or the mixer cannot run on voxels.
    """
    if any(parameter.is_meta for parameter in mixer.parameters()):
        return
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        # In double precision, as the dependence may be weak.
        tried = copy.deepcopy(mixer).eval().double()
        for parameter in tried.parameters():
            parameter.add_(CHANGE * torch.randn_like(parameter))
        places = torch.arange(TRIED)
        level = VoxelLevel(torch.stack([places % 2, *[APART * places] * 3], dim=1))
        device = next(tried.parameters(), torch.empty(0)).device
        features = torch.randn(TRIED, dim, device=device, dtype=torch.double)
        output, independent = mix_voxels(tried, features, level), True
        for place in range(TRIED):  # a mixer that selects tokens may leave some out
            changed_features = features.clone()
            changed_features[place] = 3 * torch.randn(dim)
            changed_output, elsewhere = mix_voxels(tried, changed_features, level), places != place
            independent &= torch.allclose(
                output[elsewhere], changed_output[elsewhere], rtol=1e-7, atol=1e-8
            )
    if not independent:
        raise ValueError(
            f"{class_name(mixer)} reads more voxels than neighbours, or their order; {ADVICE}"
        )


def mix_voxels(mixer: nn.Module, x: Tensor, level: VoxelLevel) -> Tensor:
    """Apply a mixer to the voxels of a level: (P, C) -> (P, C)."""
    if isinstance(mixer, PointwiseMixer):
        return mixer(x)
    if _takes_clouds(mixer):
        clouds = x.split(level.coords[:, 0].bincount().tolist())
        return torch.cat([mixer(cloud[None, None])[0, 0] for cloud in clouds if len(cloud)])
    with on_level(level):
        return mixer(x[None, None])[0, 0]
