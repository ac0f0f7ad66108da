"""Distillation: the student learns from the teacher, which stays outside the student."""

import copy
import functools

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from backbones import create_backbone
from backbones.base import Backbone, FeatureInfo
from heads.distillation import Distillation, TeacherLogits
from heads.linear import LinearClassifier, LinearProbe
from tasks.classification import teacher as teachers
from tasks.classification.task import ClassificationTask
from tasks.engine.optimisation.optimizer import build_optimizer
from tests.running.tiny import ADAMW, train_on_digits
from tests.runs import RECIPE, composed, same, write_run

NAMES = [str(number) for number in range(10)]
IMAGENET = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
SMALL = "test_resnet"  # timm's network of half a million parameters, at 160 pixels


class Toy(Backbone):
    """A single convolution."""

    feature_info = (FeatureInfo(6, 16),)
    num_features = 6

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 16, 16)

    def embed(self, images):
        return self.stem(images).mean((2, 3))


class Recorder(nn.Module):
    """Teacher that records its inputs."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.seen = nn.Linear(3, 10), nn.BatchNorm1d(3), []

    def forward(self, images):
        self.seen.append(images)
        return self.linear(self.norm(images.mean((2, 3))))


def student(head=LinearClassifier, **options):
    torch.manual_seed(0)
    return ClassificationTask(head(Toy(), 10), NAMES, **{**RECIPE, **options})


def taught_task(how, normalisation=IMAGENET, size=None, **options):
    task = student(**options)
    task.model.double()
    torch.manual_seed(1)
    teacher = teachers.Teacher(Recorder().double(), "a", normalisation, size, how)
    task._teacher = teacher, IMAGENET
    return task, teacher


def batch(count=6, side=32):
    torch.manual_seed(2)
    image = torch.randn(count, 3, side, side, dtype=torch.float64)
    return {"image": image, "label": torch.arange(count)}


@pytest.mark.parametrize("type", ["hard", "soft"])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_loss_is_the_papers_formula(type, mixed):
    alpha, temperature = 0.3, 2.5
    options = {"mixup": {"mixup_alpha": 0.8, "label_smoothing": 0.1}} if mixed else {}
    task, teacher = taught_task(Distillation(type, alpha, temperature), **options)
    np.random.seed(0)
    prepared = task.prepare_batch(batch())
    losses = task.model.loss(prepared)
    logits, theirs = task.model(prepared["image"]), teacher.network(prepared["image"])
    labels = prepared["label"] if mixed else F.one_hot(prepared["label"], 10).double()
    own = -(labels * logits.log_softmax(1)).sum(1).mean()
    if type == "hard":
        answers = theirs.argmax(1)
        other = -sum(logits[i].log_softmax(0)[k] for i, k in enumerate(answers)) / len(answers)
    else:
        p, q = (theirs / temperature).softmax(1), (logits / temperature).softmax(1)
        other = temperature**2 * (p * (p.log() - q.log())).sum(1).mean()
    torch.testing.assert_close(losses["loss_cls"], (1 - alpha) * own, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses["loss_teacher"], alpha * other, rtol=1e-6, atol=0)
    assert losses.keys() == {"loss_cls", "loss_teacher"}


def test_teacher_and_student_see_the_same_images_each_as_trained():
    mixup = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}
    task, teacher = taught_task(Distillation("hard"), mixup=mixup, random_erasing=0.5)
    given = batch()
    prepared = task.prepare_batch({**given, "image": given["image"].clone()})
    (seen,) = teacher.network.seen
    assert torch.equal(seen, prepared["image"])
    assert not torch.equal(seen, given["image"])
    own = (0.5, 0.4, 0.3), (0.2, 0.5, 0.1)
    task, teacher = taught_task(Distillation("hard"), own, 48)
    pixels = torch.rand(2, 3, 32, 32, dtype=torch.float64)

    def normalised(images, normalisation):
        mean, std = (images.new_tensor(part)[:, None, None] for part in normalisation)
        return (images - mean) / std

    task.prepare_batch({"image": normalised(pixels, IMAGENET), "label": torch.arange(2)})
    larger = F.interpolate(pixels, (48, 48), mode="bicubic", antialias=True)
    torch.testing.assert_close(teacher.network.seen[0], normalised(larger, own))


def test_a_taught_task_keeps_its_teacher_outside():
    task, teacher = taught_task(Distillation("soft"))
    before = copy.deepcopy(teacher.network.state_dict())
    task.train()
    sum(task.model.loss(task.prepare_batch(batch())).values()).backward()
    assert all(p.grad is None and not p.requires_grad for p in teacher.network.parameters())
    assert all(p.grad is not None for p in task.parameters())
    assert same(teacher.network.state_dict(), before)
    plain = student()
    assert task.state_dict().keys() == plain.state_dict().keys()
    assert len(list(task.modules())) == len(list(plain.modules()))
    optimised = build_optimizer(task.model, None, 8, **RECIPE["optimizer"]).param_groups
    count = sum(len(group["params"]) for group in optimised)
    assert count == len(list(plain.model.parameters()))
    assert not set(map(id, task.parameters())) & set(map(id, teacher.network.parameters()))


def test_the_teacher_follows_the_precision_of_the_images():
    teacher = teachers.Teacher(Recorder(), "a", IMAGENET, None, Distillation("hard"))
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        assert teacher.teacher_logits(batch()["image"].to(dtype), IMAGENET).logits.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        said = teacher.teacher_logits(batch()["image"].float(), IMAGENET)
    assert said.logits.dtype == torch.bfloat16


@pytest.mark.parametrize("head", [LinearClassifier, LinearProbe])
def test_all_classification_heads_learn_from_a_teacher(head):
    model = head(Toy(), 10).train()
    taught = TeacherLogits(torch.randn(6, 10), Distillation("soft", 0.5, 2.0))
    plain = {"image": batch()["image"].float(), "label": batch()["label"]}
    losses = model.loss({**plain, "taught": taught})
    torch.testing.assert_close(2 * losses["loss_cls"], model.loss(plain)["loss_cls"])
    assert losses["loss_teacher"].requires_grad


def saved(model, path):
    torch.save(model.state_dict(), path)
    return str(path)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Save weights of timm's smallest network for the ten classes."""
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("teacher") / "small.pth"
    return saved(timm.create_model(SMALL, num_classes=10), path)


def loaded(names=NAMES, **options):
    options = teachers.TeacherOptions(**{"type": "hard", **options})
    return teachers.load_teacher(options, names, IMAGENET)


@torch.no_grad()
def assert_logits(teacher, model, normalise=True):
    images = torch.randn(2, 3, 64, 64)
    given = teacher.convert_images(images, IMAGENET) if normalise else images
    torch.testing.assert_close(teacher.teacher_logits(images, IMAGENET).logits, model(given))


def test_teachers_from_files_of_timm_and_ours(file, tmp_path):
    state = torch.get_rng_state()
    teacher = loaded(teacher=SMALL, checkpoint=file)
    assert torch.equal(torch.get_rng_state(), state)
    reference = timm.create_model(SMALL, num_classes=10).eval()
    reference.load_state_dict(torch.load(file))
    # timm's default normalisation for it differs.
    theirs = reference.pretrained_cfg
    assert teacher.normalisation == (tuple(theirs["mean"]), tuple(theirs["std"]))
    assert_logits(teacher, reference)
    assert not teacher.network.training
    model = timm.create_model("test_vit", num_classes=10)
    teacher = loaded(teacher="test_vit", checkpoint=saved(model, tmp_path / "vit.pth"))
    assert teacher.image_size == model.pretrained_cfg["input_size"][-1]
    assert teacher.teacher_logits(torch.randn(1, 3, 64, 64), IMAGENET).logits.shape == (1, 10)
    model = LinearClassifier(create_backbone("lvt_r1"), 10).eval()
    teacher = loaded(teacher="lvt_r1", checkpoint=saved(model, tmp_path / "lvt.pth"))
    assert_logits(teacher, model, normalise=False)


@pytest.fixture
def run(tmp_path, sample_cache):
    """Create a finished run folder of the host that builds fastest."""
    config = composed("backbone=lvt_r1", "data.image_size=64", "head.drop=0.1")
    config.data["augmentation"] |= {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    model = LinearClassifier(create_backbone("lvt_r1", img_size=64), 10)
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    content = {"state_dict": tensors, "class_names": NAMES}
    return write_run(tmp_path / "run", config, content), model.eval()


def test_a_teacher_from_our_run_folder(run):
    folder, model = run
    teacher = loaded(checkpoint=str(folder))
    assert teacher.normalisation == ([0.5] * 3, [0.25] * 3)
    assert_logits(teacher, model)
    for names, options, said in (
        (NAMES, {"teacher": "lvt_r2"}, "to a run of lvt_r1, not of lvt_r2; leave"),
        (NAMES[:3], {}, "has 10 classes, the data have 3"),
        (NAMES[::-1], {}, r"teacher .* 10 classes in another order \(.*data: 9, "),
    ):
        with pytest.raises(ValueError, match=said):
            loaded(names, checkpoint=str(folder), **options)


def test_a_teacher_of_a_plain_file_has_timms_statistics(tmp_path):
    """And so have the label maps of ``tools/annotate.py``, which opens teachers likewise."""
    model = LinearClassifier(create_backbone("gmlp_ti"), 10)
    torch.save(model.state_dict(), tmp_path / "gmlp.pth")
    teacher = loaded(teacher="gmlp_ti", checkpoint=str(tmp_path / "gmlp.pth"))
    assert [tuple(part) for part in teacher.normalisation] == [(0.5,) * 3] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"type": "firm", "teacher": SMALL}, r"task\.distillation\.type=firm is not .*hard"),
        ({}, r"type=hard needs a teacher: pass .*checkpoint=<run folder>"),
        ({"type": None, "teacher": SMALL}, r"has a teacher but lacks a type; pass .*hard or soft"),
        ({"teacher": "regnety_16"}, r"'regnety_16' is neither a backbone here nor a network of "
                                    r"timm; did you mean regnety_160"),
        ({"teacher": "regnety_160.deit"}, r"lacks the weights regnety_160\.deit; of regnety_160 it "
                                          r"has: .*deit_in1k"),
        ({"teacher": "swin_t_afbo"}, r"teacher=swin_t_afbo needs weights; pass .*checkpoint=<its"),
        ({"teacher": SMALL, "alpha": 1.5}, r"alpha must be from 0 to 1, got 1\.5"),
        ({"teacher": SMALL, "temperature": 0.0}, r"temperature must be above 0, got 0\.0"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_at_once(options, said):
    with pytest.raises(ValueError, match=said):
        student(distillation={"type": "hard", **options})


@pytest.mark.parametrize(
    ("classes", "teacher", "said"),
    [
        (3, SMALL, r"small\.pth has 10 classes, the data have 3"),
        (10, "test_vit", r"small\.pth contains another network than test_vit"),
        (10, "lvt_r1", r"small\.pth does not fit lvt_r1: \d+ keys differ"),
        (10, None, r"small\.pth lies outside a run folder.*pass .*teacher="),
    ],
)
def test_weights_that_do_not_fit_are_refused(classes, teacher, said, file):
    with pytest.raises(ValueError, match=said):
        loaded(NAMES[:classes], teacher=teacher, checkpoint=file)


class Stop(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise Killed


class Killed(BaseException):
    """Ends a training at once."""


@pytest.mark.usefixtures("one_thread")
def test_a_resumed_run_equals_an_unbroken_one_and_saves_no_teacher(sample_cache, file, tmp_path):
    def train(folder, **options):
        task = functools.partial(
            student, optimizer=ADAMW, mixup={"mixup_alpha": 0.8}, ema={"decay": 0.9},
            distillation={"type": "hard", "teacher": SMALL, "checkpoint": file},
        )  # fmt: skip
        options = {"log_every_n_steps": 1, **options}
        return train_on_digits(tmp_path / folder, sample_cache, task, **options)

    whole = train("whole")
    with pytest.raises(Killed):
        train("broken", first=[Stop(8)])
    again = train("broken", resume=True)
    assert same(again["state_dict"], whole["state_dict"])
    keys = {"model.backbone.stem", "model.classifier"}
    for name in ("state_dict", "state_dict_ema"):
        assert {key.rpartition(".")[0] for key in whole[name]} == keys


def test_the_teacher_counts_in_training(file):
    """A student of random labels approaches its teacher."""
    task = student(optimizer={"name": "sgd", "lr": 1.0})
    teacher = loaded(teacher=SMALL, checkpoint=file)
    task._teacher = teacher, IMAGENET
    images = torch.randn(16, 3, 32, 32)
    teacher.how = Distillation("hard", alpha=1.0)
    given = {"image": images, "label": torch.zeros(16, dtype=torch.int64)}
    optimizer = build_optimizer(task.model, None, 8, name="adamw", lr=0.05)
    for _ in range(60):
        loss = sum(task.model.loss(task.prepare_batch(given)).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    answers = teacher.teacher_logits(images, IMAGENET).logits.argmax(1)
    assert (task.model(images).argmax(1) == answers).float().mean() > 0.9
