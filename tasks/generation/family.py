"""Class-conditional generation of images by diffusion models and flows."""

from tasks.engine.family import Counted, Family, Metric, Published

FAMILY = Family(
    name="generation",
    task="tasks.generation.task.GenerationTask",
    modality="noisy_image",
    prompt="a class per line, by its name",
    hub_task="unconditional-image-generation",
    unit="images",
    batch={"images": "(B, C, H, W)", "labels": "(B,)"},
    exact_inputs=True,
    targets=("classes",),
    metrics=(
        Metric("mse", "mean squared error of the predicted noise or velocity", direction="min"),
        Metric("kid", "KID of small pixels", direction="min"),
        Metric("recognised", "samples that the classifier recognises in %"),
        Metric("fid", "FID", direction="min", published="fid"),
        Metric("is", "Inception score", published="is"),
    ),
    monitor="mse",
    answers="mse",
    uses={"diffusers": "head.vae", "torch-fidelity": "task.inception"},
    counted=Counted({}, head="generator", shape=(4, 32, 32)),
    exports={"onnx": "model", "torch_export": "model"},
    graph="tasks.generation.graph.describe_graph",
    analyses={
        "report": "",
        "mappings": "",
        "landscape": "task_objective",
    },
    published=Published(
        "datamodules.generation.images.GenerationDataModule", 50_000, whole_cost=True
    ),
)
