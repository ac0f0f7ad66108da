"""Knowledge distillation: a loss on a teacher's logits beside the labels.

Axes: B images, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from backbones.layers.bounds import check_positive, check_range
from backbones.layers.precision import at_least_float32
from backbones.options import check_value


@dataclass(frozen=True)
class Distillation:
    """A loss (1 - alpha) * L(labels) + alpha * L(teacher).

    Hard distillation: L(teacher) is the cross entropy with the teacher's likeliest class.

    Soft distillation: L(teacher) is temperature^2 times the KL divergence of the student's from
    the teacher's probabilities, both at that temperature, summed over classes and averaged over
    images.

    Args:
        type: "hard" or "soft".
        alpha: Share of the teacher, from 0 to 1.
        temperature: Divisor of the logits, if soft.

    Raises:
        ValueError: A value is out of range.

    Source: Touvron et al., "Training data-efficient image transformers", ICML 2021,
    https://arxiv.org/abs/2012.12877, Eq. 2 and 3; unlike the authors' script, which also divides
    the soft loss by K. Hinton et al., 2015, https://arxiv.org/abs/1503.02531.
    """

    type: Literal["hard", "soft"]
    alpha: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_value("task.distillation.type", self.type, Literal["hard", "soft"])
        check_value("task.distillation.alpha", self.alpha, float)
        check_value("task.distillation.temperature", self.temperature, float)
        check_range("task.distillation.alpha", self.alpha, 0, 1)
        check_positive("task.distillation.temperature", self.temperature)

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return L(teacher), a scalar, for logits (B, K) of both."""
        student, teacher = at_least_float32(student), at_least_float32(teacher)
        if self.type == "hard":
            return F.cross_entropy(student, teacher.argmax(dim=1))
        student_logs, teacher_logs = (
            F.log_softmax(x / self.temperature, dim=1) for x in (student, teacher)
        )
        divergence = F.kl_div(student_logs, teacher_logs, reduction="batchmean", log_target=True)
        return self.temperature**2 * divergence


class TeacherLogits(NamedTuple):
    """A teacher's output for the images of a batch.

    Attributes:
        logits: (B, K), without gradient.
        how: Loss of the student on them.
    """

    logits: Tensor
    how: Distillation


def add_teacher_loss(
    labels: Tensor, student: Tensor, taught: TeacherLogits | None
) -> dict[str, Tensor]:
    """Return the weighted losses of labels and teacher by their logged names.

    Args:
        labels: Loss on the labels alone, a scalar.
        student: Logits (B, K) that learn from the teacher.
        taught: The teacher's logits; None without a teacher.
    """
    if taught is None:
        return {"loss_cls": labels}
    alpha = taught.how.alpha
    return {
        "loss_cls": (1 - alpha) * labels,
        "loss_teacher": alpha * taught.how.loss(student, taught.logits),
    }
