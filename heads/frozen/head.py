"""The head of protocols that solve classifiers from features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from backbones import Backbone
from backbones.options import check_arguments
from heads.frozen.features import Classify, Draw, Features, Method
from heads.frozen.few_shot import FewShot
from heads.frozen.logistic import Logistic
from heads.frozen.neighbours import Neighbours

TARGETS = ("FrozenFeatures",)

# In the order in which one of them stands for all.
METHODS: Mapping[str, Callable[..., Method]] = {
    "logistic": Logistic,
    "knn": Neighbours,
    "few_shot": FewShot,
}


class FrozenFeatures(nn.Module):
    """A backbone as it is, always in evaluation mode, and classifiers solved from its features.

    Each method is left out where its options are None. ``top1`` (and ``top5``) of all is that of
    the first of logistic regression, neighbours and few-shot that is asked for; it also predicts.

    Args:
        backbone: Built with ``dense=False``.
        num_classes: K.
        logistic: Options of ``Logistic``.
        knn: Options of ``Neighbours``.
        few_shot: Options of ``FewShot``.

    Raises:
        ValueError: No method, or an option that a method does not have.
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
        asked = {"logistic": logistic, "knn": knn, "few_shot": few_shot}
        self.methods: list[Method] = []
        for name, method in METHODS.items():
            options = asked[name]
            if options is not None:
                check_arguments(method, options, f"head.{name}")
                self.methods.append(method(**options))
        if not self.methods:
            raise ValueError(f"this head evaluates nothing: give one of {', '.join(METHODS)}")
        self.backbone, self.num_classes = backbone, num_classes
        self.backbone.requires_grad_(False)
        self._classify: Classify | None = None

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        del mode
        return super().train(False)

    def solve(
        self, train: Features, test: Features, draw: Draw
    ) -> tuple[dict[str, float], tuple[str, ...]]:
        """Solve what is asked for.

        Args:
            train: Of the training images.
            test: Of the images that accuracies are of.
            draw: What solving needs of the run.

        Returns:
            The metrics, ``top1`` first, and what may not be meant.
        """
        solved = [method.solve(train, test, self.num_classes, draw) for method in self.methods]
        first = solved[0]
        self._classify = first.classify
        metrics = {name: first.metrics[which] for name, which in first.headline.items()}
        for one in solved:
            metrics |= one.metrics
        return metrics, tuple(remark for one in solved for remark in one.remarks)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """The backbone's features: (B, 3, H, W) -> (B, D)."""
        return self.backbone.embed(images)

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Scores (B, K) of ``batch["image"]``, once classifiers are solved."""
        assert self._classify is not None, "solve() comes first"
        features = self(batch["image"])
        return self._classify(features).to(features.device)
