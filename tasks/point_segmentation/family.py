"""Semantic segmentation of point clouds."""

from tasks.engine.family import Counted, Family, Metric, Published

FAMILY = Family(
    name="point_segmentation",
    task="tasks.point_segmentation.task.PointSegmentationTask",
    modality="point_cloud",
    unit="clouds",
    batch={"points": "(B, N, 3 + F)", "labels": "(B, N)"},
    exact_inputs=True,
    compiles=False,
    targets=("classes",),
    uses={"spconv-cu121": "on a GPU"},
    metrics=(
        Metric("mIoU", "mIoU in %", published="miou"),
        Metric("mAcc", published="macc"),
        Metric("allAcc"),
    ),
    monitor="mIoU",
    answers="mIoU",
    # A flat square of 100,000 voxels, as counting runs without coordinates.
    counted=Counted(
        {"num_classes": 20, "grid_size": 0.02},
        head="point_segmenter",
        shape=(100_000, 9),
        inputs="tasks.point_segmentation.inputs.clouds",
    ),
    analyses={"report": "", "mappings": ""},
    channels_first=False,
    averaged="data.val_area",  # folds of S3DIS
    pooled="tasks.point_segmentation.scores.pooled",
    published=Published(
        "datamodules.points.folders.ScanNetDataModule",
        312,
        also={
            "scannet200": ("datamodules.points.folders.ScanNet200DataModule", 312),
            "s3dis": ("datamodules.points.folders.S3DISDataModule", 68),
        },
    ),
)
