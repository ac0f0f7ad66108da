"""Object detection and instance segmentation."""

from __future__ import annotations

from typing import Any

from tasks.engine.family import ANY, Counted, Family, Metric, Published
from tasks.engine.optimisation.schedule_rule import ScheduleRule, published_schedule, rates_by_start

ENDS = ("", "50", "75", "_small", "_medium", "_large")
TITLES = {"AP": "box AP", "mask_AP": "mask AP"}


def usual_data(img_size: Any) -> dict[str, Any]:
    """Return the config of a data module that resizes images to fit into the network's size."""
    side = img_size if isinstance(img_size, int) else max(img_size or (224,))
    target = "datamodules.dense.coco.CocoDataModule"
    return {"_target_": target, "scale": [side, side], "with_mask": False}


FAMILY = Family(
    name="detection",
    task="tasks.detection.task.DetectionTask",
    modality="image",
    hub_task="object-detection",
    unit="images",
    batch={"inputs": "list of (3, H, W)", "data_samples": "list of DetDataSample"},
    targets=("classes",),
    keeps_head=True,
    metrics=tuple(
        Metric(ours, TITLES.get(ours, ""), published=paper_name, scale=100)
        for ours, paper_name in (
            *((f"mask_AP{end}", f"ap{end}_mask" if end else "ap_mask") for end in ENDS[:3]),
            *((f"AP{end}", f"ap{end}") for end in ENDS),
        )
    ),
    monitor="AP50",
    headline="AP",
    answers="AP",
    needs=("onedl-mmdetection", "pycocotools", "faster-coco-eval"),
    # Swin's Mask R-CNN in MMDetection: 1e-4 for 16 images, 12 epochs, 500 steps of warm-up.
    rule=ScheduleRule(
        batches=(),
        device_batch=2,
        rates=rates_by_start((6e-4, 16), pretrained=(1e-4, 16)),
        seen=400,
        least_epochs=lambda _: 12,
        warmup_steps=500,
        fixed=published_schedule(
            batch=2, rate=1e-4, reference=16, warmup=0.07, epochs=12, milestones=(8, 11),
            scale=(1333, 800),
        ),
    ),
    usual_data=usual_data,
    counted=Counted(
        {"num_classes": 80},  # COCO's
        head="mask_rcnn",
        size="800x1280",
        parts="parts_of",
    ),
    pipeline="coco",
    exports={ANY: "backbone", "mmdet": "model"},
    whole_graph="tasks.detection.whole.WholeDetector",
    analyses={
        ANY: "",
        "errors": "find_detector_errors",
        "evidence": "BOXES",
        "landscape": "detector_objective",
    },
    published=Published("datamodules.dense.coco.CocoDataModule", 5000, whole_cost=True),
)  # fmt: skip
