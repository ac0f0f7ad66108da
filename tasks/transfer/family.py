"""Transfer of a trained backbone to another set of classes."""

from dataclasses import replace

from tasks.classification.family import FAMILY as CLASSIFICATION
from tasks.classification.family import INATURALIST
from tasks.engine.family import Published

FAMILY = replace(
    CLASSIFICATION,
    name="transfer",
    started_by="classification",
    counted=None,
    pipeline="",
    published=Published(
        "datamodules.images.cifar100.CIFAR100DataModule",
        10_000,
        also=INATURALIST,
        suite="datamodules.images.robustness.RobustnessDataModule",
        fixed_parameters=False,
    ),
)
