"""Runs of every family, and what is made of them, for tests/house/test_devices.py.

Run by ``python -m pytest -p tests.pretended.device tests/pretended/runs.py``.
"""

import functools
from itertools import cycle

import pytest

import tasks
from backbones.hosts.ffnet_sr import FFNetSR
from tests.families import rest_slow_pairs
from tests.pretended.device import DEVICE
from tests.pretended.trainer import WORDS, use_device
from tests.runs import SCENES, TINY, run_shared
from tests.served_inputs import input_of
from tools import analyse
from tools.analyses import analyses
from tools.runs import report
from tools.serving.answers import Question, answer, can_explain

PRECISIONS = {"float32": "32-true", "autocast": "bf16-mixed"}
SHORT = ("trainer.max_steps=1", "trainer.limit_val_batches=1", "schedule.warmup=0")
POINTS = ("data.num_train=4", "data.num_val=1", "data.density=20")
SERIES = ("data.hours=600", "data.lookback=24", "data.horizon=12", "data.batch_size=64",
          "backbone.dim=8", "backbone.expansion=2")  # fmt: skip
# Words of each family's run.
FAMILIES = {
    "classification": ("backbone=resnet18", *TINY["classification"], "task.calibrate=true"),
    "multi_label": ("backbone=resnet18", "data.num_train=16", "data.num_val=16"),
    "transfer": ("backbone=resnet18", "backbone.pretrained=false", *TINY["transfer"]),
    "forecasting": ("backbone=ffnet_1d", *SERIES),
    "glue": ("backbone=bert_tiny_afbo", "data.num_train=64", "data.num_val=21"),
    "point_segmentation": ("backbone=ffnet_3d_tiny", *POINTS, "task.mix=0.5"),
    "super_resolution": (
        "backbone=ffnet_sr_light", "data.patch_size=8", "data.patches_per_image=1",
        "backbone.img_size=8",
    ),
    "generation": (
        "backbone=u_ffnet_tiny", "head.steps=1", "task.num_samples=4", "data.eval_batch_size=8",
    ),
    "segmentation": ("backbone=resnet18", *TINY["segmentation"]),
    "detection": ("backbone=poolformer_s12", *TINY["detection"]),
}  # fmt: skip
TOOLKITS = {"segmentation": "mmseg", "detection": "mmdet"}


@pytest.fixture(scope="module", autouse=True)
def _on_the_device(sample_cache):
    with pytest.MonkeyPatch.context() as patch:
        use_device(patch)
        patch.setattr(report, "plot_curves", lambda *_: None)  # reads files only
        build = FFNetSR.__init__  # of 36 equal blocks
        patch.setattr(FFNetSR, "__init__", lambda self, config, depth: build(self, config, 2))
        yield


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """family, precision -> the folder of its run with an average of the weights."""

    @functools.cache
    def trained(family, precision):
        pytest.importorskip(TOOLKITS.get(family, "torch"))
        return done(tmp_path_factory.mktemp(family), *typed(family, precision))

    return trained


def typed(family, precision):
    more = ("task.ema={decay: 0.9}", f"trainer.precision={PRECISIONS[precision]}")
    return (f"task={family}", *SHORT, *FAMILIES[family], *more)


def done(folder, *words):
    """Run to a successful end, and return the folder."""
    ended = run_shared([*words, *WORDS, f"output_dir={folder}"])
    assert ended.status == 0, ended.err
    return ended.folder()


# Of images, points and words.
QUICK = ("classification", "point_segmentation", "glue", "segmentation")
CASES = [(family, precision) for family in FAMILIES for precision in PRECISIONS]


@pytest.mark.parametrize(
    ("family", "precision"),
    rest_slow_pairs(CASES, [(family, "autocast") for family in QUICK]),
)
def test_a_run_trains_validates_tests_and_draws(family, precision, train):
    folder = train(family, precision)
    assert any((folder / "preview").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), list(zip(FAMILIES, cycle(PRECISIONS))))
def test_a_run_is_evaluated_applied_and_resumed(family, precision, train, tmp_path):
    folder = train(family, precision)
    for mode in ("validate", "test", "predict"):
        done(tmp_path, f"mode={mode}", f"ckpt={folder}", "trainer.limit_val_batches=1")
    task = tasks.load(folder, device=DEVICE)
    content, name = input_of(family, task, folder)
    if task.family.prompt:
        assert len(list(task.stream(content.decode().splitlines()))) >= 1
    else:
        (tmp_path / name).write_bytes(content)
        assert len(list(task.stream(tmp_path / name))) == 1
    answers = answer(task, Question(content, name, explains=True), most_pixels=10**6)
    assert answers["pictures"]
    assert ("looked" in answers) == can_explain(task)
    more = (f"ckpt={folder}", "resume=true", "trainer.max_steps=2")
    done(tmp_path, *typed(family, precision), *more)


SMALL = ("task=classification", "backbone=resnet18", *TINY["classification"])
PAPER = ("~data.augmentation", "+data.augmentation={_target_: datamodules.images.transforms."
         "PaperAugmentation, auto_augment: null, random_erasing: 1.0}")  # fmt: skip
LIGHT = ("data.augmentation.shift=0.1", "data.augmentation.degrees=10",
         "data.augmentation.color_jitter=0.4", "+data.augmentation.random_erasing=1.0")  # fmt: skip
FROZEN = ("task=transfer", "backbone=resnet18", "backbone.pretrained=false", *TINY["transfer"],
          "data.eval_batch_size=100")  # fmt: skip
NEAREST = "head.knn.neighbours=[10]"
# Options with tensors of their own.
OPTIONS = {
    "class_weights": (*SMALL, "task.loss={name: focal, class_weights: balanced}"),
    "mixup": (*SMALL, "task.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}"),
    "erased": (*SMALL, *PAPER),
    "resident": (*SMALL, *PAPER, "data.resident=true", "data.repeated_augmentation=2"),
    "resident_light": (*SMALL, *LIGHT, "data.resident=true"),
    "resident_files": ("task=multi_label", *FAMILIES["multi_label"], "data.resident=true"),
    "better_of_two": (*SMALL, "task.ema={decay: 0.9, report: best}"),
    "linear_probe": (*FROZEN, "protocol=linear_probe"),
    "linear_probe_lbfgs": (*FROZEN, "protocol=linear_probe_lbfgs", "head.logistic.c=1"),
    "knn": (*FROZEN, "protocol=knn", NEAREST),
    "few_shot": (*FROZEN, "protocol=few_shot", "head.few_shot.shots=[1]"),
    "frozen": (*FROZEN, "protocol=frozen", "head.logistic.c=1", "head.few_shot.shots=[1]",
               NEAREST),
    "quantiles": ("task=forecasting", *FAMILIES["forecasting"], "head.quantiles=[0.1,0.5,0.9]"),
    "masked_words": ("task=glue", *FAMILIES["glue"][:1], "protocol=mlm", "data.num_train=64"),
    "next_words": ("task=glue", "backbone=gpt_tiny", "protocol=mlm", "data.num_train=64"),
    "votes": ("task=point_segmentation", *FAMILIES["point_segmentation"], "head.votes=13",
              "data.density=5"),
    "flow": ("task=generation", *FAMILIES["generation"], "head.objective=flow",
             "head.sampler=euler", "backbone.learn_sigma=false"),
    "ancestral": ("task=generation", *FAMILIES["generation"], "head.sampler=ddpm",
                  "backbone.learn_sigma=true"),
    **{
        name: ("task=detection", *FAMILIES["detection"][:1], *SCENES, f"head={name}")
        for name in ("retinanet", "cascade_mask_rcnn")
    },
    "dino": ("task=detection", *FAMILIES["detection"][:1], *SCENES, "head=dino",
             "head.num_proposals=20"),
    **{
        name: ("task=segmentation", *FAMILIES["segmentation"], f"head={name}")
        for name in ("mask2former", "segformer", "semantic_fpn")
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_with_tensors_of_their_own(name, tmp_path):
    family = OPTIONS[name][0].removeprefix("task=")
    pytest.importorskip(TOOLKITS.get(family, "torch"))
    done(tmp_path, *SHORT, *OPTIONS[name], "trainer.precision=bf16-mixed")


@pytest.mark.slow
def test_adapters_learn_beside_frozen_weights(tmp_path):
    pytest.importorskip("peft")
    words = (*SHORT, *SMALL, "backbone=deit_t", "trainer.precision=bf16-mixed")
    trained = done(tmp_path / "whole", *words)
    adapters = "+backbone.lora={rank: 4, targets: [qkv, mlp]}"
    done(tmp_path / "adapted", *words, f"backbone.pretrained='{trained}'", adapters)


@pytest.mark.slow
@pytest.mark.parametrize("family", TOOLKITS)
def test_a_run_is_trained_on(family, train, tmp_path):
    pytest.importorskip(TOOLKITS[family])
    more = ("data.augmentation=own",) if family == "detection" else ()
    ckpt = f"ckpt={train(family, 'autocast')}"
    done(tmp_path, *SHORT, ckpt, *FAMILIES[family][1:], *more, "trainer.precision=bf16-mixed")


@pytest.mark.slow
def test_a_student_learns_from_a_teacher(train, tmp_path):
    teacher = train("classification", "float32")
    options = f"{{type: soft, teacher: resnet18, checkpoint: '{teacher}'}}"
    done(tmp_path, *SHORT, *SMALL, f"task.distillation={options}", "trainer.precision=bf16-mixed")


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory):
    """A run of a network with something for each analysis."""
    mixers = ("backbone.mixer=[afbo,iffn,ffn,ffn]",
              "backbone.token_mixer=[attention,random,pooling,pooling]")  # fmt: skip
    words = (*SHORT, *SMALL, "backbone=poolformer_s12", *mixers, "trainer.precision=bf16-mixed")
    return done(tmp_path_factory.mktemp("mixed"), *words)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(analyses()) - {"report"}))
def test_analyses_of_a_run(name, mixed_run, tmp_path):
    few = {"erf": ("image_size=64",), "landscape": ("points=3", "iterations=2")}
    words = [f"ckpt={mixed_run}", f"out={tmp_path}", "images=3", *few.get(name, ())]
    analyse.run_named([name, *words])
    assert any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "torch_export", "timm"])
def test_exports_of_a_run(to, train, tmp_path):
    task = tasks.load(train("classification", "autocast"), device=DEVICE)
    assert task.export(to, out=str(tmp_path / "exported"))
