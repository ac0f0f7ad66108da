"""Predict sets of classes that hold the right one with a chosen probability."""

import torch
from torch.utils.data import DataLoader, default_collate
from torch_uncertainty.metrics.classification import CoverageRate, SetSize
from torch_uncertainty.post_processing import ConformalClsAPS

from datamodules import SampleClassification
from tasks import load

task = load("outputs/classification/deit_t/latest")  # a run of classification or transfer
data = SampleClassification(digits_per_class=40, num_workers=0)  # or the run's: task.data
data.setup()


def pairs(samples):
    """Collate samples into images and labels."""
    batch = data.normalise(default_collate(samples))
    return batch["image"], batch["label"]


# One half of the validation images calibrates the sets, the other half tests them.
images = data.dataset("val")
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
halves = order[::2], order[1::2]
samples = [[images[0, index] for index in half] for half in halves]
calibration, test = (DataLoader(half, batch_size=64, collate_fn=pairs) for half in samples)

sets = ConformalClsAPS(alpha=0.1, model=task.model, enable_ts=False)  # 90 % hold the right class
sets.fit(calibration)
coverage, size = CoverageRate(), SetSize()
for batch, labels in test:
    found = sets(batch)  # (B, K), above 0 for the classes of the set
    coverage.update(found, labels)
    size.update(found)
print(
    f"{coverage.compute():.1%} of the sets hold the right class, {size.compute():.1f} classes each"
)
