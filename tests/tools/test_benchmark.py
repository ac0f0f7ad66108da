"""Arguments and output of benchmark.py; no test depends on speed."""

import csv
import io
import json

import pytest
import torch
from PIL import Image

from backbones import create_backbone
from tasks.engine.family import find_family
from tools import benchmark
from tools.bench import peak_memory as memory
from tools.bench import roofline, timing, token_mixers, whole_networks
from tools.bench import timed_networks as networks

TINY = ("batch=1", "rounds=2", "image_size=64", "keep_memory=false")
RATIOS = ["batch", "ms", "ratio", "ratio_p10", "ratio_p90"]
TOKEN_KEYS = ["mixer", "step", "grid", *RATIOS, "us_per_token", "growth", "exponent"]
TOKEN_KEYS += ["peak_mb", "macs_m", "moved_mb", "roofline_ms", "over_roofline"]
TINY_MAPS = ("rounds=2", "dim=8", "keep_memory=false")


def run_benchmark(capsys, *arguments):
    assert benchmark.main(arguments) == 0
    return capsys.readouterr().out


def records_of(capsys, *arguments):
    return json.loads(run_benchmark(capsys, *arguments, "format=json"))


def error_line(capsys, *arguments):
    """Return the one line that a command prints before it fails."""
    assert benchmark.main(arguments) == 2
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if "freed memory" not in line)
    assert out == ""
    assert line.startswith("benchmark.py: ")
    return line


@pytest.fixture
def stub_networks(monkeypatch):
    """Replace networks by single layers, and record which were built."""
    built = []

    def build(network, options):
        built.append(networks.network_label(network))
        return torch.nn.Conv2d(3, 2, 3)

    monkeypatch.setattr(networks, "build_network", build)
    return built


def test_a_network_has_a_ratio_with_itself(capsys):
    arguments = ("backbone=deit_t_glu backbone.mixer.act=gelu,deit_t_glu", "format=csv", *TINY)
    rows = list(csv.DictReader(io.StringIO(run_benchmark(capsys, "backbones", *arguments))))
    assert [row["backbone"] for row in rows] == ["deit_t_glu backbone.mixer.act=gelu", "deit_t_glu"]
    assert all(float(row["ratio"]) > 0 and row["paper_ratio"] == "" for row in rows)


def test_growth_is_time_per_pixel_over_the_first_size(capsys, tmp_path, stub_networks, monkeypatch):
    """Step number i of a round takes i seconds; sizes are adjacent."""
    monkeypatch.setattr(
        timing, "interleave", lambda steps, *_: [[i + 1.0] * 2 for i in range(len(steps))]
    )
    picture = tmp_path / "growth.png"
    words = ("backbone=deit_t,swin_t", "image_size=64,128", f"out={picture}", *TINY[:2], TINY[3])
    records = records_of(capsys, "backbones", *words)
    found = [(one["backbone"], one["image_size"], one["ms"], one["growth"]) for one in records]
    assert found == [
        ("deit_t", "64x64", 2000, 1.0), ("swin_t", "64x64", 3000, 1.0),
        ("deit_t", "128x128", 5000, pytest.approx(5 / 2 / 4)),
        ("swin_t", "128x128", 6000, pytest.approx(6 / 3 / 4)),
    ]  # fmt: skip
    assert Image.open(picture).size[0] > 1000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forward_and_training_steps(dtype):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    images = torch.randn(2, 3, 8, 8)
    seen = []
    model.register_forward_hook(
        lambda module, _, out: seen.append((module.training, out.requires_grad, out.dtype))
    )
    precision = getattr(torch, dtype)
    timing.make_step(model, images, "training", precision)()
    first = {key: p.grad.clone() for key, p in model.named_parameters()}
    timing.make_step(model, images, "forward", precision)()
    timing.make_step(model, images, "training", precision)()
    assert [step[:2] for step in seen] == [(True, True), (False, False), (True, True)]
    assert seen[1][2] == precision
    for key, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        if dtype == "float32":  # gradients of one step, not accumulated
            torch.testing.assert_close(parameter.grad, first[key], rtol=1e-4, atol=1e-5)


def test_memory_is_the_peak():
    there = torch.ones(1000)

    def step():
        one, two = torch.empty(1000), torch.empty(500)
        del one
        three = there[:100] + there[:100]
        return two, three

    assert memory.measure_peak(step, "cpu") == 6000
    assert memory.measure_peak(lambda: there.add_(there), "cpu") == 0
    # A convolution's copies would depend on the number of threads.
    model, images = torch.nn.Linear(3, 4, bias=False), torch.randn(10_000, 3)
    step = timing.make_step(model, images, "training", torch.float32)
    peak = memory.measure_peak(step, "cpu")
    # The layer's output and, backward, the results of its square and mean.
    assert 2 * 160_000 <= peak <= 5 * 160_000 + 1000
    model.zero_grad()
    assert memory.measure_peak(step, "cpu") == peak
    # Gradients are removed in between.
    assert memory.measure_peaks([step, step], [model], "cpu") == [peak, peak]


def test_ratios_and_costs_are_taken_round_by_round():
    seconds = [[1.0, 10.0, 2.0], [2.0, 20.0, 5.0]]
    runs = [("swin_t", {}), ("deit_t", {"mixer": {"drop": 0.5}})]
    found = whole_networks.make_record(runs, 1, seconds, "training", "64x96", 4)
    expected = {
        "backbone": "deit_t backbone.mixer.drop=0.5", "step": "training", "batch": 4,
        "paper_ratio": None, "image_size": "64x96", "ms": 5000, "ratio": 2, "ratio_p10": 2,
        "ratio_p90": pytest.approx(2.4),
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    grids = [(2, 2), (4, 4)]
    baseline = [[1.0, 1.0, 1.0], [16.0, 16.0, 16.0]]
    linear = [[2.0, 4.0, 8.0], [8.0, 16.0, 32.0]]
    table = [[base, own] for base, own in zip(baseline, linear, strict=True)]
    mixers = [("attention", {}), ("sbm", {})]
    small, large = token_mixers.summarise(mixers, grids, table, "forward", batch=2)
    assert (small["ratio"], large["ratio"]) == (4, 1)
    assert (small["growth"], large["growth"]) == (1, 1)
    assert small["us_per_token"] == large["us_per_token"] == pytest.approx(4 / 4 / 2 * 1e6)
    quadratic = [[base, base] for base in baseline]
    *_, large = token_mixers.summarise(mixers, grids, quadratic, "forward", batch=1)
    assert large["growth"] == 4


def test_mixers_are_chosen_by_patterns_for_each_host(capsys, stub_networks):
    run_benchmark(capsys, "mixers", "host=deit_t,swin_t", "mixer=scheme_*,ffn", *TINY)
    swin = ["swin_t", "swin_t", "swin_t_scheme_12", "swin_t_scheme_44"]
    assert stub_networks == ["deit_t", "deit_t", *swin]


def test_options_and_baseline_of_backbones(capsys, stub_networks):
    records = records_of(
        capsys, "backbones", "backbone=deit_t_afbo backbone.mixer.g2=6,deit_t",
        "backbone.drop_path_rate=0.1", "baseline=deit_t_glu", "batch=1,2", *TINY[1:],
    )  # fmt: skip
    assert stub_networks == [
        *["deit_t_glu"] * 2,  # repeated, so its ratio shows the noise
        "deit_t_afbo backbone.drop_path_rate=0.1 backbone.mixer.g2=6",
        "deit_t backbone.drop_path_rate=0.1",
    ]
    assert [record["batch"] for record in records] == [1, 1, 1, 2, 2, 2]


# Table 1 writes G = 2 for today's default; Table 7 has other groups.
@pytest.mark.parametrize(
    ("network", "ms"),
    [(("deit_t_group_ffn", {}), 13.1), (("deit_t_group_ffn", {"mixer": {"groups": 4}}), 15.5),
     (("deit_t_afbo", {"mixer": {"g2": 6}}), 13.7), (("deit_t_afbo", {"mixer": {"g2": 4}}), 13.2),
     (("swin_t_afbo", {}), 15.5 * 11.4 / 12.6), (("deit_t_afbo", {"mixer": {"g2": 5}}), None),
     (("deit_t_convglu", {}), None), (("deit_t", {}), None)],
    ids=str,
)  # fmt: skip
def test_papers_ratios_are_matched_by_what_differs_from_the_defaults(network, ms):
    found = networks.find_paper_ratio(network, (network[0][:6].rstrip("_"), {}))
    assert found == (ms and pytest.approx(ms / 11.4))


def test_token_mixers_over_maps(capsys):
    mixers = "mixer=sbm backbone.token_mixer.rank=2,attention,pooling"
    typed = ("grid=4,4x6", mixers, "batch=1,2", "train=true", *TINY_MAPS)
    records = records_of(capsys, "tokens", *typed)
    assert [list(record) for record in records] == [TOKEN_KEYS] * 24
    names = ["sbm backbone.token_mixer.rank=2", "attention", "pooling"]
    shown = [(record["mixer"], record["grid"]) for record in records[:6]]
    assert shown == [(name, grid) for name in names for grid in ("4x4", "4x6")]
    assert {(record["batch"], record["step"]) for record in records} == {
        (batch, step) for batch in (1, 2) for step in ("forward", "training")
    }
    assert all(record["growth"] == 1 for record in records if record["grid"] == "4x4")
    work = {
        (record["step"], record["batch"]): (record["macs_m"] * 1e6, record["moved_mb"] * 1e6)
        for record in records
        if (record["mixer"], record["grid"]) == ("attention", "4x6")
    }
    macs, parameters = 24 * (4 * 64 + 2 * 24 * 8), 4 * 8 * 8 + 4 * 8
    for batch in (1, 2):
        maps = batch * 24 * 8
        assert work["forward", batch] == pytest.approx((batch * macs, 4 * (2 * maps + parameters)))
        moved = 4 * (5 * maps + 3 * parameters)
        assert work["training", batch] == pytest.approx((3 * batch * macs, moved))
    assert all(record["over_roofline"] > 0 for record in records)


def test_the_longer_of_operations_and_bytes_bounds_a_step():
    device = roofline.Work(macs=1e9, bytes=1e6)
    assert roofline.least_seconds(roofline.Work(2e9, 1e6), device) == 2
    assert roofline.least_seconds(roofline.Work(2e9, 3e6), device) == 3


@pytest.mark.parametrize(
    ("typed", "baseline"),
    [
        ({"mixer": "sbm,attention", "baseline": ""}, ("attention", {})),
        ({"mixer": "sbm,pooling", "baseline": ""}, ("sbm", {})),
        ({"mixer": "sbm", "baseline": "attention backbone.token_mixer.num_heads=1"},
         ("attention", {"num_heads": 1})),
    ],
)  # fmt: skip
def test_baseline_of_token_mixers(typed, baseline):
    first, *others = token_mixers.read_mixers(typed)
    assert first == baseline
    assert baseline in others  # its ratio shows the noise
    names = [name for name, options in others if (name, options) != baseline or not options]
    assert names == typed["mixer"].split(",")


NO_INTEGER = "backbones|backbone=deit_t_afbo backbone.mixer.g2="


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("mixer", "the first argument must be one of mixers, backbones, tokens"),
     ("mixers|hosts=deit_t", "did you mean host=?"),
     ("backbones|backbone=deit_t|host=deit_t", "with the keys backbone, baseline, "),
     ("mixers|host=deit_x", "no host called 'deit_x'; did you mean "),
     ("mixers|mixer=afob", "no channel mixer called 'afob'; did you mean afbo"),
     ("mixers|host=deit_t|mixer=scheme_12", "scheme_12 does not serve deit_t, because"),
     ("backbones", "is missing: pass backbone=NAME,NAME or compare=ffnet|posmlp|sbm"),
     ("backbones|compare=ffnet|backbone=swin_t", "no option of swin_t called 'backbone.fused"),
     ("backbones|backbone=deit_t|image_size=224,", "image_size must be 224 or 800x1280"),
     ("tokens|host=deit_t", "with the keys mixer, baseline, dim, grid, "),
     ("tokens|mixer=sbmm", "did you mean sbm"), ("tokens|mixer=afbo", "afbo"),
     ("tokens|mixer=sbm backbone.token_mixer.rnk=3", "did you mean backbone.token_mixer.rank"),
     ("tokens|grid=14,x", "several separated by commas; got 'x'"),
     ("backbones|backbone=deit_t mixer", "cannot use 'mixer'; arguments are key=value"),
     ("backbones|backbone=deit_t_afbo|mixer.g2=1", "did you mean backbone.mixer.g2=1?"),
     (f"{NO_INTEGER}x", "mixer.g2=x is not a whole number"),
     ("backbones|backbone=deit_t|out=growth", "out must end in .png, .pdf, .svg; got 'growth'"),
     ("backbones|backbone=deit_t|out=no/g.png", "the folder no is missing; create it"),
     ("backbones|backbone=deit_t|out=g.png", "pass two or more: image_size=224,448"),
     ("mixers|rounds=1", "rounds must be a whole number from 2 up; got '1'"),
     ("mixers|device=tpu", "device must be one of cpu, cuda; got 'tpu'"),
     ("tokens|cuda_graphs=true", "needs a GPU; pass device=cuda too"),
     ("mixers|device=cuda", "device=cuda needs a GPU"),
     ("runtimes", "backbone= is missing: pass backbone=NAME,NAME"),
     ("runtimes|backbone=deit_t|runtime=onnxruntim", "did you mean onnxruntime"),
     ("runtimes|backbone=deit_t|device=cuda", "device must be one of cpu; got 'cuda'"),
     ("runtimes|backbone=deit_t|int8=yes", "int8 must be one of false, true; got 'yes'"),
     ("loop|task=detektion", "no task called"), ("loop|roundz=3", "roundz")],
)  # fmt: skip
def test_wrong_arguments_end_with_one_line(capsys, arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert message in error_line(capsys, *arguments.split("|"), "keep_memory=false")


def test_runtimes_take_turns_with_torch(capsys, stub_networks):
    pytest.importorskip("onnxruntime")
    words = ("backbone=deit_t", "runtime=onnxruntime", "batch=1,2", "threads=1")
    rows = records_of(capsys, "runtimes", *words, *TINY[1:])
    names = ["torch", "onnxruntime", "onnxruntime INT8"]
    assert [(row["batch"], row["runtime"]) for row in rows] == [
        (batch, name) for batch in (1, 2) for name in (names[:2])
    ]
    assert rows[0]["ratio"] == 1
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segmentation", "detection"])
def test_runtimes_time_whole_networks_in_int8(task, capsys):
    pytest.importorskip("onnxruntime")
    words = ("backbone=resnet18", f"task={task}", "runtime=onnxruntime,compiled", "batch=1")
    rows = records_of(capsys, "runtimes", *words, "threads=1", *TINY[1:])
    names = ["torch", "compiled torch", "onnxruntime", "onnxruntime INT8"]
    assert [row["runtime"] for row in rows] == names


def test_words_and_clouds_are_timed_by_networks_that_read_them():
    texts = networks.example_input(find_family("glue"), 2, (7,))
    assert create_backbone("gpt_tiny", img_size=8, vocabulary=5)(texts)[0].shape == (2, 64, 7)
    clouds = networks.example_input(find_family("point_segmentation"), 2, (90, 9))
    voxels = (clouds[..., :3] / 0.02).floor()
    assert all(len(cloud.unique(dim=0)) == 90 for cloud in voxels)  # one point per voxel
    assert not voxels[..., 2].any()
    assert networks.example_input(find_family("classification"), 2, (3, 4, 4)).std() > 0.5
