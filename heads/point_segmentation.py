"""Classes of points: a linear layer, cross entropy with Lovasz-softmax, and votes of views.

Axes: B clouds, N points, F features, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backbones import Backbone
from backbones.hosts.scaffolds.points import PointBackbone, present
from backbones.layers.bounds import check_range
from backbones.layers.precision import at_least_float32
from backbones.options import Remembering
from heads.global_mean import global_mean
from heads.host_check import check_host

TARGETS = ("PointSegmenter",)
IGNORED = -1
# Scale and quarter turns of the views in evaluation, by their number. A half turn mirrors both
# horizontal axes, as Pointcept's flip with p = 1.
VIEWS = {
    10: [(scale, turns) for turns in (0, 2) for scale in (0.9, 0.95, 1.0, 1.05, 1.1)],
    13: [*((scale, turns) for scale in (1.0, 0.95, 1.05) for turns in range(4)), (1.0, 2)],
}


class PointSegmenter(Remembering, nn.Module):
    """Backbone for point clouds with a linear classifier of its points.

    Args:
        backbone: A host for point clouds.
        num_classes: K.
        grid_size: Side of a voxel in metres.
        features: Names of the points' features, three columns each.
        ce_weight: Weight of the cross entropy.
        lovasz_weight: Weight of the Lovasz-softmax; 0 omits it.
        votes: Views in tests and prediction: 1 takes one point per voxel, 10 averages five scales,
            each also mirrored, 13 four rotations at three scales and one mirrored view, over all
            points.

    Shape: points (B, N, 3 + F) in metres -> logits (B, N, K).

    Raises:
        ValueError: Another backbone, or another number of votes.

    Source: FFNet, App. F.3; Pointcept's tests of 10 views (S3DIS) and 13 (ScanNet).
    """

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        grid_size: float,
        features: Sequence[str] = ("color", "normal"),
        *,
        ce_weight: float = 1.0,
        lovasz_weight: float = 1.0,
        votes: int = 1,
    ) -> None:
        super().__init__()
        check_host(backbone, PointBackbone, "read point clouds", "ffnet_3d_tiny")
        if votes != 1 and votes not in VIEWS:
            raise ValueError(f"head.votes must be 1, {' or '.join(map(str, VIEWS))}, got {votes}")
        for name, value in (("ce_weight", ce_weight), ("lovasz_weight", lovasz_weight)):
            check_range(f"head.{name}", value, 0)
        self.backbone = backbone
        self.grid_size, self.features, self.votes = grid_size, tuple(features), votes
        self.ce_weight, self.lovasz_weight = ce_weight, lovasz_weight
        self.classifier = nn.Linear(backbone.num_features, num_classes)

    def forward(self, points: Tensor) -> Tensor:
        """Classify all points, each by its voxel: (B, N, 3 + F) -> (B, N, K)."""
        scaled = torch.cat([points[..., :3] / self.grid_size, points[..., 3:]], dim=2)
        return at_least_float32(self.classifier(self.backbone(scaled)[0].transpose(1, 2)))

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return cross entropy and Lovasz-softmax of ``points`` with ``labels`` (B, N).

        Both are 0 without labelled points. Each process sorts its own points for the second, which
        is therefore averaged over the processes that have labelled points.
        """
        labels = batch["labels"]
        counted = labels != IGNORED
        logits, labels = self(batch["points"])[counted], labels[counted]
        count = logits.new_full((), len(labels))
        total = F.cross_entropy(logits, labels, reduction="sum")
        losses = {"loss_ce": self.ce_weight * global_mean(total, count)}
        if self.lovasz_weight:  # a mean over the processes with labelled points
            lovasz = lovasz_softmax(logits.softmax(-1), labels)
            losses["loss_lovasz"] = self.lovasz_weight * global_mean(lovasz, count.clamp(max=1))
        return losses

    def predict(self, batch: Mapping[str, Tensor], *, one_view: bool = False) -> Tensor:
        """Return log-probabilities of all points: (B, N, K); padding has those of no evidence.

        Args:
            batch: ``points`` (B, N, 3 + F).
            one_view: Leave out the votes.
        """
        vote = self.votes != 1 and not one_view
        return torch.stack([self._predict_cloud(cloud, vote) for cloud in batch["points"]])

    def _predict_cloud(self, points: Tensor, vote: bool) -> Tensor:
        is_present = present(points[None])[0]
        cloud = points[is_present]
        if not vote:
            first, inverse = first_points(cloud, self.grid_size)
            logs = self(cloud[first][None])[0].log_softmax(-1)[inverse]
        else:
            total = points.new_zeros(len(cloud), self.classifier.out_features)
            for view in self.views(cloud):
                for fragment in fragments(view, self.grid_size):
                    total[fragment] += self(view[fragment][None])[0].softmax(-1)
            logs = (total / total.sum(-1, keepdim=True)).log()  # fragments repeat points
        filled = logs.new_full((len(points), logs.shape[1]), -math.log(logs.shape[1]))
        filled[is_present] = logs
        return filled

    def views(self, cloud: Tensor) -> Iterator[Tensor]:
        """Yield the rotated, scaled and mirrored views of a cloud: (N, 3 + F) each."""
        for scale, turns in VIEWS[self.votes]:
            angle = turns * math.pi / 2
            cos, sin = round(math.cos(angle)), round(math.sin(angle))
            turn = cloud.new_tensor([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
            yield self._transformed(cloud, turn, scale)

    def _transformed(self, cloud: Tensor, matrix: Tensor, scale: float) -> Tensor:
        parts = [scale * cloud[:, :3] @ matrix.T]
        for name, values in zip(self.features, cloud[:, 3:].split(3, dim=1), strict=True):
            if name == "coord":
                values = scale * values
            parts.append(values if name == "color" else values @ matrix.T)
        return torch.cat(parts, dim=1)


def _voxel_order(cloud: Tensor, grid_size: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return voxel of each point, points by voxel, their rank within it, and points per voxel."""
    voxels = (cloud[:, :3] / grid_size).floor().long()
    _, inverse, counts = torch.unique(voxels, dim=0, return_inverse=True, return_counts=True)
    order = inverse.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    rank = torch.arange(len(order), device=cloud.device) - starts[inverse[order]]
    return inverse, order, rank, counts


def first_points(cloud: Tensor, grid_size: float) -> tuple[Tensor, Tensor]:
    """Return the first point of each voxel, and the voxel of each point (N,)."""
    inverse, order, rank, _ = _voxel_order(cloud, grid_size)
    return order[rank == 0], inverse


def fragments(cloud: Tensor, grid_size: float) -> Iterator[Tensor]:
    """Yield index sets with one point per voxel that together hold every point.

    Voxels with fewer points repeat theirs, as in Pointcept.
    """
    _, order, _, counts = _voxel_order(cloud, grid_size)
    starts = counts.cumsum(0) - counts
    for number in range(int(counts.max())):
        yield order[starts + number % counts]


def lovasz_softmax(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the Lovasz extension of the Jaccard loss, averaged over the classes that occur; or 0.

    Args:
        probabilities: (P, K).
        labels: (P,).

    Source: Berman et al., "The Lovasz-Softmax loss", CVPR 2018, https://arxiv.org/abs/1705.08790,
    Algorithm 1 and Eq. 12.
    """
    losses = []
    for label in labels.unique():
        truth = (labels == label).to(probabilities.dtype)
        errors, order = (truth - probabilities[:, label]).abs().sort(descending=True)
        hits = truth[order]
        union = hits.sum() + (1 - hits).cumsum(0)
        jaccard = 1 - (hits.sum() - hits.cumsum(0)) / union
        steps = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
        losses.append(errors @ steps)
    return torch.stack(losses).mean() if losses else probabilities.sum()
