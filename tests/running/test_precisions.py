"""Every family in every precision, and with edited code: training, evaluation, resuming, export."""

import importlib
import json
import warnings

import pytest
import safetensors.torch
import torch

from backbones.registry import temporary_registrations
from tasks.engine.base import BaseTask
from tasks.engine.family import families
from tests.families import rest_slow
from tests.runs import SCENES, SMALLEST, TINY, completed, run_here, same, summary, weights
from tools import results
from tools.export import export

pytestmark = pytest.mark.usefixtures("sample_cache")

PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")
TYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}  # of the weights; else float32
FEW = ("trainer.limit_train_batches=2", "trainer.limit_val_batches=2")
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
# Cases that predict, leave and resume, too: each family in one precision, in turn.
RESUMED = {
    (name, precisions[turn % len(precisions)])
    for turn, (name, (precisions, _)) in enumerate(RUNS.items())
}


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
    if (name, precision) not in RESUMED:
        return
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [("forecasting", ()), ("super_resolution", ("task.ema={decay: 0.9}",)),
     ("glue", ("backbone.drop=0.1", "backbone.token_mixer=attention"))],
)  # fmt: skip
def test_a_longer_run_continues_a_shorter_one(name, more, tmp_path, capsys):
    """Weights, and their average, after two epochs are those of one epoch that was resumed."""

    def run(folder, epochs, *typed):
        words = [f"task={name}", *SMALLEST[name], *more, "trainer=cpu", "schedule.warmup=0",
                 "schedule.name=constant", f"trainer.max_epochs={epochs}", *typed]  # fmt: skip
        return completed([*words, f"output_dir={tmp_path / folder}"], capsys).folder()

    whole, short = run("a", 2), run("b", 1)
    run("b", 2, "resume=true", f"ckpt={short}")
    parts = ("state_dict", *(["state_dict_ema"] if "task.ema={decay: 0.9}" in more else []))
    for part in parts:
        one, other = (
            torch.load(folder / "checkpoints/last.ckpt", weights_only=True)[part]
            for folder in (whole, short)
        )
        assert same(one, other), part


SINE = """
import torch
from torch import nn
from backbones import PointwiseMixer, register_mixer

@register_mixer("sine", kind="channel", source="-")
class Sine(PointwiseMixer):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc = nn.Linear(dim, dim)

    def mix(self, x):
        hidden = self.fc(x)
        return torch.sin(hidden)
"""
SLOTS = {
    "image": "deit_t", "low_resolution_image": "ffnet_sr_light", "series": "ffnet_1d",
    "point_cloud": "ffnet_3d_tiny", "noisy_image": "dit_tiny", "text": "bert_tiny",
}  # fmt: skip


@pytest.mark.parametrize("name", rest_slow(list(families()), ["classification"]))
def test_an_edited_equation_is_noticed(name, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    words = [word for word in RUNS[name][1] if not word.startswith("backbone=")]
    words += [f"backbone={SLOTS[families()[name].modality]}_sine", "trainer=cpu", "logger=csv"]
    words += [*FEW, "schedule.name=constant", "schedule.warmup=0", f"output_dir={tmp_path}/runs"]

    def run(code, *more, file="sine_mixer"):
        (tmp_path / f"{file}.py").write_text(code)
        importlib.invalidate_caches()
        with temporary_registrations(), monkeypatch.context() as patch:
            patch.delitem(importlib.sys.modules, file, raising=False)
            importlib.import_module(file)
            with warnings.catch_warnings(record=True) as caught:
                ended = run_here([*more], capsys)
        return ended, [str(one.message) for one in caught if "other code" in str(one.message)]

    def fit(code, seed):
        ended, said = run(code, *words, "trainer.max_epochs=1", f"seed={seed}")
        assert (ended.status, ended.err, said) == (0, "", [])
        return ended.folder()

    folder = fit(SINE, 0)
    fit(SINE.replace("hidden", "y"), 1)
    evaluation = ["mode=test", f"ckpt={folder}", "trainer=cpu", f"output_dir={tmp_path}/runs"]
    moved, said = run(SINE.replace("hidden", "y").replace("Sine", "W"), *evaluation, file="moved")
    assert (moved.status, moved.err, said) == (0, "", [])
    assert results.main([f"{tmp_path}/runs", "format=json"]) == 0
    assert [row["runs"] for row in json.loads(capsys.readouterr().out)] == [2]
    cosine = SINE.replace("sin(", "cos(")
    ended, said = run(cosine, *evaluation)
    assert (ended.status, len(said)) == (0, 1)
    assert "sine_mixer.py: 'return torch.sin(hidden)' is 'return torch.cos(hidden)'" in said[0]
    resume = [*words, "trainer.max_epochs=2", "seed=0", "resume=true", f"ckpt={folder}"]
    refused, _ = run(cosine, *resume)
    assert refused.status == 2
    assert " computes another function today (sine_mixer.py: " in refused.err
    assert refused.err.count("\n") == 1
    fit(cosine, 2)
    assert results.main([f"{tmp_path}/runs", "format=json"]) == 0
    out, err = capsys.readouterr()
    rows = [(row["runs"], row["settings"]) for row in json.loads(out)]
    assert rows == [(2, "code=version 1"), (1, "code=version 2")]
    assert "they differ in code" in err
    assert run(SINE, *resume)[0].status == 0
