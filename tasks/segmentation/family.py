"""Semantic segmentation."""

from __future__ import annotations

from typing import Any

from tasks.engine.family import ANY, Counted, Family, Metric, Published
from tasks.engine.optimisation.schedule_rule import ScheduleRule, published_schedule, rates_by_start


def usual_data(img_size: Any) -> dict[str, Any]:
    """Return the config of a data module that resizes images to fit into the network's size."""
    side = img_size if isinstance(img_size, int) else max(img_size or (224,))
    target = "datamodules.dense.segmentation_folder.SegmentationFolderDataModule"
    return {"_target_": target, "scale": [side, side], "crop_size": side}


FAMILY = Family(
    name="segmentation",
    task="tasks.segmentation.task.SegmentationTask",
    modality="image",
    hub_task="image-segmentation",
    unit="images",
    batch={"inputs": "list of (3, H, W)", "data_samples": "list of SegDataSample"},
    targets=("classes",),
    keeps_head=True,
    metrics=(
        Metric("mIoU", "mIoU in %", published="miou"),
        Metric("mAcc", published="macc"),
        Metric("aAcc"),
        Metric("mIoU_ms", published="miou_ms"),
    ),
    monitor="mIoU",
    answers="mIoU",
    needs=("onedl-mmsegmentation",),
    # Swin's UperNet in MMSegmentation: 6e-5 for 16 images, 1,500 steps of warm-up.
    rule=ScheduleRule(
        batches=(),
        device_batch=2,
        rates=rates_by_start((6e-4, 16), pretrained=(1e-4, 16)),
        seen=800,
        least_epochs=lambda _: 30,
        warmup_steps=1_500,
        fixed=published_schedule(
            batch=2, rate=6e-5, reference=16, warmup=1.2, epochs=100, scale=(2048, 512)
        ),
    ),
    usual_data=usual_data,
    counted=Counted(
        {"num_classes": 150},  # ADE20K's
        head="upernet",
        size="512x2048",
        parts="parts_of",
    ),
    pipeline="ade20k",
    exports={ANY: "backbone", "mmseg": "model"},
    whole_graph="tasks.segmentation.whole.WholeSegmentor",
    analyses={
        ANY: "",
        "errors": "find_segmentor_errors",
        "evidence": "PIXELS",
        "landscape": "segmentor_objective",
    },
    published=Published(
        "datamodules.dense.ade20k.ADE20KDataModule",
        2000,
        also={"cityscapes": ("datamodules.dense.cityscapes.CityscapesDataModule", 500)},
        whole_cost=True,
    ),
)
