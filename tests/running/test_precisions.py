"""Every family in every precision: training, evaluation, pictures, prediction, resuming, export."""

import pytest
import safetensors.torch
import torch

from tasks.engine.base import BaseTask
from tasks.engine.family import families
from tests.runs import SCENES, TINY, run_here, summary, weights
from tools.export import export

pytestmark = pytest.mark.usefixtures("sample_cache")

PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # of the weights; else float32
FEW = ("trainer.limit_train_batches=2", "trainer.limit_val_batches=2")
# Words of the smallest run of each family, with all that it computes.
SMALLEST = {
    "classification": ("backbone=resnet18", *TINY["classification"]),
    "transfer": ("backbone=resnet18", "backbone.pretrained=false", *TINY["transfer"]),
    "detection": ("backbone=resnet18", *TINY["detection"]),
    "segmentation": ("backbone=resnet18", *TINY["segmentation"]),
    "super_resolution": (
        "backbone=edsr_baseline", "data.scale=2", "data.patch_size=8", "data.patches_per_image=1",
        "data.batch_size=4",
    ),
    "forecasting": (
        "backbone=ffnet_1d", "backbone.dim=8", "backbone.expansion=2", "data.hours=600",
        "data.lookback=24", "data.horizon=12", "data.batch_size=64",
        "head.quantiles=[0.1,0.5,0.9]",
    ),
    "point_segmentation": (
        "backbone=ffnet_3d_tiny", "data.num_train=3", "data.num_val=2", "data.density=30",
        "data.grid_size=0.15", "data.crop_points=1500",
    ),
    "generation": (
        "backbone=dit_tiny", "head.steps=2", "task.num_samples=4", "data.eval_batch_size=8",
    ),
    "glue": ("backbone=bert_tiny", "data.num_train=64", "data.num_val=21"),
    "multi_label": ("backbone=resnet18", "data.num_train=32", "data.num_val=16"),
}  # fmt: skip
# Other losses and heads of a family, and the precisions in which they compute other things.
OTHERS = {
    "dino": (
        ("64-true", "bf16-true", "bf16-mixed"),
        ("task=detection", "backbone=resnet18", "head=dino", *SCENES, "head.num_proposals=20"),
    ),
    "mask2former": (
        ("64-true", "bf16-true", "bf16-mixed"),
        ("task=segmentation", "backbone=resnet18", "head=mask2former", *SCENES),
    ),
    "retinanet": (
        ("64-true", "bf16-true", "bf16-mixed"),
        # In bfloat16 on a CPU, torch leaves gradients of a stride over one pixel unwritten.
        ("task=detection", "backbone=resnet18", "head=retinanet", *SCENES, "data.scene_size=96"),
    ),
    "mlm": (
        ("64-true", "bf16-true"),
        ("task=glue", "protocol=mlm", "backbone=bert_tiny", "data.num_train=64", "data.num_val=21"),
    ),
    "flow": (
        ("64-true", "bf16-true"),
        ("task=generation", *SMALLEST["generation"], "head.objective=flow", "head.sampler=euler"),
    ),
    "mixed": (
        ("64-true", "bf16-true"),
        ("task=classification", "backbone=deit_t", *TINY["classification"],
         "task.mixup={mixup_alpha: 0.8}"),
    ),
    "average": (
        ("64-true", "bf16-true"),
        ("task=classification", "backbone=resnet18", *TINY["classification"],
         "task.ema={decay: 0.5}"),
    ),
}  # fmt: skip
RUNS = {name: (PRECISIONS, (f"task={name}", *words)) for name, words in SMALLEST.items()} | OTHERS
CASES = [
    pytest.param(name, precision, marks=pytest.mark.slow)
    for name, (precisions, _) in RUNS.items()
    for precision in precisions
]


def float_types(state):
    return {value.dtype for value in state.values() if value.is_floating_point()}


def test_every_family_has_a_smallest_run():
    assert SMALLEST.keys() == families().keys()


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_family_runs_in_a_precision(name, precision, tmp_path, capsys, monkeypatch):
    def run(*more):
        typed = ["logger=csv", f"trainer.precision={precision}", *FEW, "trainer=cpu", *more]
        ended = run_here([*typed, f"output_dir={tmp_path}"], capsys)
        assert (ended.status, ended.err) == (0, "")
        return ended.folder()

    _, words = RUNS[name]
    family, types = families()[words[0].removeprefix("task=")], set()
    if family.exact_inputs:
        record = lambda task, batch, _: types.update(float_types(batch))  # noqa: E731
        monkeypatch.setattr(BaseTask, "on_train_batch_start", record)
    short = ("schedule.name=constant", "schedule.warmup=0")
    folder = run(*words, *short, "trainer.max_epochs=1")
    assert types == ({torch.float32} if family.exact_inputs and name != "mlm" else set())
    metrics = summary(folder)["metrics"]
    assert all(value == value for value in metrics.values())
    assert list((folder / "preview").glob("*.png"))
    assert float_types(weights(folder)) == {TYPES.get(precision, torch.float32)}
    assert summary(run("mode=test", f"ckpt={folder}"))["metrics"] == metrics
    run("mode=predict", f"ckpt={folder}")
    targets = [name for name in ("timm", "torch_export") if family.export_of(name)]
    assert bool(targets) == (family.name != "point_segmentation")  # which has no export
    for to in targets[:1]:  # outputs are compared with the run's network
        assert export([f"ckpt={folder}", f"to={to}", f"out={tmp_path / 'export'}"])
        files = {path.suffix: path for path in (tmp_path / "export").iterdir()}
        if to == "timm":
            state = safetensors.torch.load_file(files[".safetensors"])
        else:
            state = torch.export.load(files[".pt2"]).state_dict
        assert float_types(state) == {torch.float32}
    resumed = run(*words, *short, "trainer.max_epochs=2", "resume=true", f"ckpt={folder}")
    assert summary(resumed)["metrics"].keys() == metrics.keys()
