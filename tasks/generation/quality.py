"""Distances between sets of images: KID of small pixels, FID and Inception score.

Source: Binkowski et al., "Demystifying MMD GANs", ICLR 2018, https://arxiv.org/abs/1801.01401
(KID); Heusel et al., "GANs Trained by a Two Time-Scale Update Rule", NeurIPS 2017,
https://arxiv.org/abs/1706.08500 (FID); Salimans et al., "Improved Techniques for Training GANs",
NeurIPS 2016, https://arxiv.org/abs/1606.03498 (Inception score).
"""

from __future__ import annotations

import importlib.util
import itertools
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

SIDE = 8  # pixels of the images that the KID of small pixels compares
BATCH = 50  # images of a pass of the extractor
ROWS = 1000  # of a kernel's matrix at a time
SPLITS = 10  # parts of the Inception score


def pixel_kid(first: Iterable[Tensor], second: Iterable[Tensor]) -> float:
    """Return the unbiased KID of images, with their pixels at 8 x 8 as features.

    It serves tests and small data; it does not compare with published KID.

    Args:
        first: Images of uint8 (C, H, W), at least 2.
        second: Further ones.
    """
    return kid(_small(first), _small(second))


def _small(images: Iterable[Tensor]) -> Tensor:
    """Return pixels from 0 to 1 at 8 x 8, in colours: uint8 (C, H, W) -> (N, 192)."""
    small = (
        F.interpolate(image[None].double() / 255, (SIDE, SIDE), mode="area") for image in images
    )
    return torch.cat([image.expand(-1, 3, -1, -1).flatten(1) for image in small])


def kid(first: Tensor, second: Tensor) -> float:
    """Return the unbiased squared maximum mean discrepancy with the kernel (x y / d + 1)^3.

    Args:
        first: (N, d), N at least 2.
        second: (M, d), M at least 2.
    """

    def total(x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the kernel over all pairs."""
        parts = [((part @ y.T / x.shape[1] + 1) ** 3).sum() for part in x.split(ROWS)]
        return torch.stack(parts).sum()

    def within(x: Tensor) -> Tensor:
        diagonal = ((x.square().sum(1) / x.shape[1] + 1) ** 3).sum()
        return (total(x, x) - diagonal) / (len(x) * (len(x) - 1))

    between = total(first, second) / (len(first) * len(second))
    return (within(first) + within(second) - 2 * between).item()


class Statistics(NamedTuple):
    """Mean (d,) and covariance (d, d) of features."""

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]


def statistics(features: Tensor) -> Statistics:
    """Return mean and covariance of features (N, d)."""
    values = features.double().cpu().numpy()
    return Statistics(values.mean(0), np.cov(values, rowvar=False))


def read_statistics(path: Path) -> Statistics:
    """Read the mean and covariance of a reference npz of ADM's evaluator.

    Raises:
        ValueError: The file lacks ``mu`` and ``sigma``.
    """
    with np.load(path, allow_pickle=False) as content:
        if not {"mu", "sigma"} <= set(content.files):
            raise ValueError(
                f"{path} lacks mu and sigma; pass a reference of ADM's evaluator, such as "
                "VIRTUAL_imagenet256_labeled.npz"
            )
        return Statistics(content["mu"], content["sigma"])


def fid(first: Statistics, second: Statistics) -> float:
    """Return the Frechet distance of two normal distributions."""
    difference = first.mean - second.mean
    # The trace of the root of a product is the sum of the roots of its eigenvalues.
    values = np.linalg.eigvals(first.covariance @ second.covariance)
    root = np.sqrt(values.astype(complex)).real.sum()
    traces = np.trace(first.covariance) + np.trace(second.covariance)
    return float(difference @ difference + traces - 2 * root)


def inception_score(logits: Tensor) -> float:
    """Return the mean over parts of exp(KL(p(y | x) || p(y))): logits (N, K)."""
    scores = []
    for part in logits.double().tensor_split(min(SPLITS, len(logits))):
        log_p = part.log_softmax(1)
        p = log_p.exp()
        divergence = (p * (log_p - p.mean(0).log())).sum(1).mean()
        scores.append(divergence.exp())
    return torch.stack(scores).mean().item()


def check_extractor(weights: str | Path | None) -> None:
    """Check that torch-fidelity and the weights of its Inception network are there.

    Args:
        weights: The option ``task.inception``.

    Raises:
        ValueError: One of them is missing.
    """
    if importlib.util.find_spec("torch_fidelity") is None:
        raise ValueError("FID needs torch-fidelity: pip install torch-fidelity")
    if weights is None or not Path(weights).is_file():
        raise ValueError(
            f"task.inception={weights} is not a file; download torch-fidelity's "
            "weights-inception-2015-12-05-6726825d.pth and pass its path"
        )


def load_extractor(weights: Path) -> Any:
    """Load torch-fidelity's Inception network.

    Raises:
        ValueError: torch-fidelity or the weights are missing, or the file holds other weights.
    """
    check_extractor(weights)
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    try:
        torch.load(weights, map_location="cpu", weights_only=True)  # theirs would run its code
        return FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048", "logits_unbiased"],
            feature_extractor_weights_path=str(weights),
        ).eval()  # fmt: skip
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"task.inception={weights} lacks the tensors of torch-fidelity's "
            "weights-inception-2015-12-05-6726825d.pth; download it again"
        ) from error


@torch.no_grad()
def extract(
    extractor: Any, images: Iterable[Tensor], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return features (N, 2048) and logits (N, 1008) of images of one size, on the CPU.

    Args:
        extractor: See ``load_extractor``.
        images: Images of uint8 (1 or 3, H, W).
        device: Device of the extractor.

    Raises:
        ValueError: The images differ in size.
    """
    features, logits, rest = [], [], iter(images)
    while batch := [image.expand(3, -1, -1) for image in itertools.islice(rest, BATCH)]:
        sizes = {tuple(image.shape[1:]) for image in batch}
        if len(sizes) > 1:
            text = " and ".join(f"{height} x {width}" for height, width in sorted(sizes)[:2])
            raise ValueError(f"FID compares images of one size; found images of {text} pixels")
        batch_features, batch_logits = extractor(torch.stack(batch).to(device))
        features.append(batch_features.cpu())
        logits.append(batch_logits.cpu())
    return torch.cat(features), torch.cat(logits)
