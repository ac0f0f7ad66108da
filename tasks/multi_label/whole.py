"""A classifier of several labels as one graph: bytes of images to probabilities and logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tasks.classification.whole import WholeClassifier


class WholeLabels(WholeClassifier):
    """Normalisation, network and a sigmoid per label."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each label (B, K)."""
        return logits.sigmoid()

    def facts(self, task: Any) -> dict[str, Any]:
        """Return the classes and the threshold from which a label is given."""
        return {"classes": list(task.class_names), "threshold": task.threshold}
