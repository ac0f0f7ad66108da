"""Image classification."""

from __future__ import annotations

import math
from typing import Any

from tasks.engine.family import ANY, Counted, Family, Metric, Published
from tasks.engine.optimisation.schedule_rule import ScheduleRule, published_schedule, rates_by_start

# ImageNet's robustness sets, and the top-1 accuracies that papers report on them.
ROBUSTNESS = {
    "imagenet_a": "in_a",
    "imagenet_r": "in_r",
    "imagenet_sketch": "in_sketch",
    "imagenet_v2": "in_v2",
}

CALIBRATION = {
    "ece": "expected calibration error, 15 bins",
    "brier": "Brier score",
    "nll": "negative log-likelihood in nats",
}
CALIBRATION |= {f"scaled_{name}": f"{text}, with temperature" for name, text in CALIBRATION.items()}

INATURALIST = {
    "inaturalist2019": ("datamodules.images.inaturalist.INaturalist2019DataModule", 3030)
}


def usual_data(img_size: Any) -> dict[str, Any]:
    """Return the config of a data module that resizes and normalises by the papers' recipe."""
    side = img_size if isinstance(img_size, int) else max(img_size or (224,))
    target = "datamodules.images.class_folders.ClassFoldersDataModule"
    return {"_target_": target, "image_size": side}


FAMILY = Family(
    name="classification",
    task="tasks.classification.task.ClassificationTask",
    modality="image",
    hub_task="image-classification",
    unit="images",
    batch={"image": "(B, 3, H, W)", "label": "(B,)"},
    targets=("classes",),
    metrics=(
        Metric("top1", "top-1 accuracy in %", published="top1", data_set="imagenet"),
        Metric("top5", "top-5 accuracy in %", published="top5"),
        Metric("balanced_accuracy", "balanced accuracy in %"),
        Metric("F1", "macro F1 in %"),
        *(Metric(name, text, direction="min") for name, text in CALIBRATION.items()),
        Metric("temperature", "temperature"),
        Metric("mce", direction="min", published="mce", data_set="imagenet_c"),
        *(Metric(label, published=label, data_set=name) for name, label in ROBUSTNESS.items()),
    ),
    monitor="top1",
    answers="top1",
    rule=ScheduleRule(
        batches=((500, 16), (5_000, 32), (50_000, 64)),
        device_batch=128,
        rates=rates_by_start((1e-3, 64), pretrained=(2e-4, 64), batch_norm=(6e-3, 16)),
        seen=1_200,
        least_epochs=lambda images: min(max(images / 1_000, 15), 100),
        warmup_steps=math.inf,
        fixed=published_schedule(batch=128, rate=1e-3, reference=1024, warmup=5, epochs=100),
        large=50_000,
        large_batch=1_024,  # DeiT, Table 9
    ),
    usual_data=usual_data,
    counted=Counted({"num_classes": 1000}, head="linear", size="224", rows=True),
    pipeline="class_folders",
    exports={ANY: "classifier"},
    whole_graph="tasks.classification.whole.WholeClassifier",
    analyses={
        ANY: "",
        "errors": "find_classifier_errors",
        "evidence": "LOGITS",
        "landscape": "classifier_objective",
    },
    parts_evaluation="measure",
    published=Published(
        "datamodules.images.image_folder.ImageFolderDataModule",
        50_000,
        also=INATURALIST,
        containers=(
            "datamodules.images.class_folders.ClassFoldersDataModule",
            "datamodules.images.image_tars.ImageTarsDataModule",
            "datamodules.images.image_parquet.ImageParquetDataModule",
        ),
        suite="datamodules.images.robustness.RobustnessDataModule",
    ),
)
