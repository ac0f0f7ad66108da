"""The head of protocols that solve classifiers from features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from backbones import Backbone
from backbones.options import check_arguments
from heads.frozen.features import Classify, Features, Method, SolveOptions
from heads.frozen.few_shot import FewShot
from heads.frozen.logistic import Logistic
from heads.frozen.neighbours import Neighbours

TARGETS = ("FrozenFeatures",)

# Ordered: the first method in use gives the headline metrics.
METHODS: Mapping[str, Callable[..., Method]] = {
    "logistic": Logistic,
    "knn": Neighbours,
    "few_shot": FewShot,
}


class FrozenFeatures(nn.Module):
    """A frozen backbone in evaluation mode, with classifiers solved from its features.

    Methods with options None are skipped. The first method in use, of logistic regression,
    neighbours and few-shot, gives ``top1`` (and ``top5``) and predicts.

    Args:
        backbone: Backbone built with ``dense=False``.
        num_classes: Number of classes K.
        logistic: Options of ``Logistic``.
        knn: Options of ``Neighbours``.
        few_shot: Options of ``FewShot``.

    Raises:
        ValueError: All methods are None, or an option is unknown.
    """

    solves = True  # from features, without training

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        *,
        logistic: Mapping[str, Any] | None = None,
        knn: Mapping[str, Any] | None = None,
        few_shot: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        options_by_name = {"logistic": logistic, "knn": knn, "few_shot": few_shot}
        self.methods: list[Method] = []
        for name, method in METHODS.items():
            options = options_by_name[name]
            if options is not None:
                check_arguments(method, options, f"head.{name}")
                self.methods.append(method(**options))
        if not self.methods:
            raise ValueError(f"this head needs a method; pass one of {', '.join(METHODS)}")
        self.backbone, self.num_classes = backbone, num_classes
        self.backbone.requires_grad_(False)
        self._classify: Classify | None = None

    def train(self, mode: bool = True) -> Self:
        """Keep the network in evaluation mode."""
        del mode
        return super().train(False)

    def solve(
        self, train: Features, test: Features, draw: SolveOptions
    ) -> tuple[dict[str, float], tuple[str, ...]]:
        """Solve all methods in use.

        Args:
            train: Features of the training images.
            test: Features of the images that accuracies refer to.
            draw: Options of the run.

        Returns:
            The metrics, ``top1`` first, and remarks on findings that may be unintended.
        """
        solved = [method.solve(train, test, self.num_classes, draw) for method in self.methods]
        first = solved[0]
        self._classify = first.classify
        metrics = {name: first.metrics[key] for name, key in first.headline.items()}
        for solution in solved:
            metrics |= solution.metrics
        return metrics, tuple(remark for solution in solved for remark in solution.remarks)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return the backbone's features: (B, 3, H, W) -> (B, D)."""
        return self.backbone.embed(images)

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the scores (B, K) of ``batch["image"]``, once classifiers are solved."""
        assert self._classify is not None, "solve() comes first"
        features = self(batch["image"])
        return self._classify(features).to(features.device)
