"""Sparsity of a mixer's coefficients, and the classes that activate its keys.

With c_j the coefficient of key j (an FFN's hidden channel j after its activation), sparsity is the
share of entries above a threshold, and a[y, j] the mean of c_j over the images of class y and all
positions.

Source: FFNet (Yun et al., https://arxiv.org/abs/2406.02021), Sec. 2, Fig. 2 and 4 to 7. The paper
leaves two points open: the threshold (here c > 0, as its networks have a GELU), and whether the
share of a key among the top five is over classes or images (here classes).

Axes: B images, M keys, (h, w) map, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def activated_share(coefficients: Tensor, threshold: float = 0.0) -> float:
    """Return the share of entries above the threshold, small for a sparse mixer."""
    return float((coefficients > threshold).double().mean())


@dataclass
class KeyRanking:
    """Mean coefficients per class, accumulated over batches.

    Attributes:
        sums: (K, M), sum over images of each image's mean over positions.
        counts: (K,) images per class.
    """

    sums: Tensor
    counts: Tensor

    @classmethod
    def start(cls, classes: int, keys: int) -> KeyRanking:
        """Return a ranking of zero images."""
        return cls(torch.zeros(classes, keys, dtype=torch.float64), torch.zeros(classes))

    def add(self, coefficients: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            coefficients: (B, M, h, w).
            labels: (B,) classes.
        """
        self.sums.index_add_(0, labels.cpu(), coefficients.detach().double().mean((2, 3)).cpu())
        self.counts += torch.bincount(labels.cpu(), minlength=len(self.counts))

    def seen(self) -> Tensor:
        """Return the classes with images."""
        return self.counts.nonzero().flatten()

    def means(self) -> Tensor:
        """Return a[y, j] for the seen classes: (seen, M)."""
        return self.sums[self.seen()] / self.counts[self.seen(), None]

    def top_keys(self, count: int = 1) -> Tensor:
        """Return the most activated keys of the seen classes in order: (seen, count)."""
        return self.means().topk(min(count, self.sums.shape[1]), dim=1).indices

    def shares_in_top(self, count: int = 5) -> Tensor:
        """Return per key the share of seen classes with it among their top keys: (M,)."""
        keys = self.top_keys(count)
        totals = torch.zeros(self.sums.shape[1], dtype=torch.float64)
        totals.index_add_(0, keys.flatten(), torch.ones(keys.numel(), dtype=torch.float64))
        return totals / max(1, len(keys))
