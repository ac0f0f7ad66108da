"""Super-resolution: enlargement of images by a whole factor."""

from tasks.engine.family import Counted, Family, Metric, Published

# The benchmarks' sets, on which papers report PSNR and SSIM of the Y channel.
SETS = ("set5", "set14", "b100", "urban100", "manga109")
FIGURES = {"psnr": "PSNR of Y in dB", "ssim": "SSIM of Y"}

FAMILY = Family(
    name="super_resolution",
    task="tasks.super_resolution.task.SuperResolutionTask",
    modality="low_resolution_image",
    hub_task="image-to-image",
    unit="images",
    batch={"low": "(B, 3, H, W)", "high": "(B, 3, r H, r W)"},
    exact_inputs=True,
    targets=("scale",),
    metrics=(
        *(Metric(name, title) for name, title in FIGURES.items()),
        *(
            Metric(f"{name}_{data}", f"{title}, {data}", published=f"{name}_{data}", data_set=data)
            for data in SETS
            for name, title in FIGURES.items()
        ),
    ),
    monitor="psnr",
    answers="psnr",
    # 1280x720 pixels after enlargement by 4, as in FFNet's Table 4.
    counted=Counted({"scale": 4}, head="super_resolution", shape=(3, 180, 320)),
    exports={"onnx": "model", "torch_export": "model"},
    whole_graph="tasks.super_resolution.whole.WholeSuperResolution",
    analyses={
        "report": "",
        "erf": "",
        "similarity": "",
        "entropy": "",
        "mappings": "",
        "landscape": "task_objective",
    },
    parts_evaluation="tasks.super_resolution.benchmarks.measure",
    published=Published(
        "datamodules.super_resolution.folders.DIV2KDataModule",
        100,
        also={"df2k": ("datamodules.super_resolution.folders.DF2KDataModule", 100)},
        suite="datamodules.super_resolution.folders.BenchmarkDataModule",
        whole_cost=True,
    ),
)
