"""The papers' recipes against the authors' settings, which recipes.yaml lists as plain data."""

import fnmatch
import math
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from timm.data import create_transform
from timm.data.random_erasing import RandomErasing
from timm.scheduler import CosineLRScheduler
from torch import nn
from torchvision.transforms import Normalize, Resize, ToTensor

from backbones import create_backbone, list_hosts
from backbones.hosts.lvt.token_classifier import AUX_WEIGHT
from datamodules.dense.toolkit_data import parse_size
from datamodules.files.resizing import BoundedResize
from datamodules.images.token_labels import LabelledTransform
from datamodules.images.transforms import NoiseRectangle, ToBytes
from heads.linear import LinearClassifier
from tasks.engine.family import families
from tasks.engine.instantiate import build
from tasks.engine.optimisation.optimizer import build_optimizer, learning_rate_factor, scaled_lr
from tests.families import rest_slow, rest_slow_pairs
from tests.runs import CONFIGS, composed, options

STATED = yaml.safe_load((Path(__file__).parent / "recipes.yaml").read_text())
USUAL = STATED.pop("usual")
DENSE = ("_coco", "_ade20k", "_cityscapes")
DENSE_STATED = yaml.safe_load((Path(__file__).parent / "dense_recipes.yaml").read_text())
FAMILIES = sorted(STATED)
FIRST = {family: next(iter(STATED[family]["hosts"])) for family in FAMILIES}
CASES = [(family, host) for family in FAMILIES for host in STATED[family]["hosts"]]
# Updates per epoch: as on ImageNet if the scripts differ by one update, a tenth of that if the
# rate changes in each update, few if it changes in each epoch.
UPDATES = {"convnext": 1251, "swin": 125, "gcvit": 125, "deit": 7, "timm": 7}


@cache
def compose_recipe(family, host=None):
    """Return what a family's authors state, and the config of its recipe."""
    said = USUAL | STATED[family]
    chosen = [f"{group}={said[group]}" for group in ("task", "data")]
    typed = [*chosen, f"recipe={family.partition(' ')[0]}", f"backbone={host or FIRST[family]}"]
    return said, composed(*typed, "trainer=ddp")


def script_rates(said, updates):
    """Return the rate of every update, with the loop and the scheduler of the authors' script."""
    length, cooldown, warmup = (said[name] * updates for name in ("epochs", "cooldown", "warmup"))
    top, first, last = said["rate"], said["warmup_rate"], said["lowest_rate"]
    if said["script"] == "convnext":
        rising = [first + (top - first) * i / (warmup - 1) for i in range(warmup)]
        rest = length - warmup
        cosine = (0.5 * (1 + math.cos(math.pi * i / rest)) for i in range(rest))
        return rising + [last + (top - last) * share for share in cosine]
    by_update = said["script"] in ("swin", "gcvit")
    unit = updates if by_update else 1
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=top)
    scheduler = CosineLRScheduler(
        optimizer, t_initial=said["epochs"] * unit, lr_min=last, warmup_t=said["warmup"] * unit,
        warmup_lr_init=first, cycle_limit=1, t_in_epochs=not by_update,
    )  # fmt: skip
    advance = scheduler.step_update if by_update else scheduler.step
    rates, group = [], optimizer.param_groups[0]
    for epoch in range(said["epochs"] + said["cooldown"]):
        for update in range(updates):
            rates.append(group["lr"])
            if by_update:
                advance(epoch * updates + update + 1)
        if not by_update:
            advance(epoch + (said["script"] == "timm"))
    assert len(rates) == length + cooldown
    return rates


# ConvNeXt's script has a rate per update.
QUICK = [f for f in FAMILIES if (USUAL | STATED[f])["script"] != "convnext"] + FAMILIES[::3]


@pytest.mark.parametrize("family", rest_slow(FAMILIES, QUICK))
def test_the_rate_of_every_step_equals_that_of_the_authors_script(family):
    said, config = compose_recipe(family)
    updates = UPDATES[said["script"]]
    optimizer, schedule = config.optimizer, config.schedule
    top = scaled_lr(optimizer["lr"], optimizer["reference_batch"], said["batch"])
    assert top == pytest.approx(said["rate"])
    twice = scaled_lr(optimizer["lr"], optimizer["reference_batch"], 2 * said["batch"])
    assert twice == pytest.approx(said["rate"] * (1 if said["fixed"] else 2))
    epochs = config.trainer["max_epochs"]
    assert epochs == said["epochs"] + said["cooldown"]
    factor = learning_rate_factor(epochs * updates, updates, top, **schedule)
    ours = torch.tensor([top * factor(step) for step in range(epochs * updates)]).double()
    theirs = torch.tensor(script_rates(said, updates)).double()
    # ConvNeXt's warm-up ends one update early.
    tolerance = 2e-4 if said["script"] == "convnext" else 1e-7
    assert (ours - theirs).abs().max() <= tolerance * said["rate"]


@pytest.mark.parametrize("family", FAMILIES)
def test_clipping_averaging_and_sync_equal_the_authors(family):
    said, config = compose_recipe(family)
    assert config.trainer["gradient_clip_val"] == said["clip"]
    assert config.trainer["sync_batchnorm"] is False
    assert config.task["ema"] == said["average"]


@pytest.mark.parametrize("family", rest_slow(FAMILIES, FAMILIES[::2]))
def test_weight_decay_equals_the_authors(family):
    said, config = compose_recipe(family)
    with torch.device("meta"):
        model = LinearClassifier(create_backbone(**config.backbone), 1000)
    optimizer = build_optimizer(model, None, said["batch"], **config.optimizer)
    assert type(optimizer) is torch.optim.AdamW
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    decays = {names[p]: group["weight_decay"] for group in groups for p in group["params"]}
    assert decays.keys() == set(names.values())
    for parameter, name in names.items():
        exempt = any(fnmatch.fnmatchcase(name, pattern) for pattern in said["not_decayed"])
        expected = 0.0 if parameter.ndim <= 1 or exempt else said["weight_decay"]
        assert decays[name] == expected, name
    for pattern in said["not_decayed"]:
        assert fnmatch.filter(decays, pattern), pattern
    for group in groups:
        assert group["betas"] == (0.9, 0.999)
        assert group["eps"] == said["eps"]
        assert group["lr"] == pytest.approx(said["rate"])


@pytest.mark.parametrize(("family", "host"), rest_slow_pairs(CASES, FIRST.items()))
def test_images_are_prepared_and_mixed_as_the_authors_do(family, host):
    said, config = compose_recipe(family, host)
    drop_path, crop_pct = said["hosts"][host]
    assert config.backbone["drop_path_rate"] == drop_path
    data, task = config.data, config.task
    assert data["image_size"] == config.backbone["img_size"] == said["size"]
    assert data["repeated_augmentation"] == said["repeats"]
    after = said["script"] in ("timm", "gcvit") and bool(said["mixup"] or said["cutmix"])
    before = 0.0 if after else said["erasing"]
    assert task["random_erasing"] == (said["erasing"] if after else 0.0)
    augmentation = build(data["augmentation"], "data.augmentation")
    train = create_transform(
        said["size"], is_training=True, scale=tuple(said["scale"]), ratio=tuple(said["ratio"]),
        hflip=0.5, auto_augment=said["policy"], interpolation=said["interpolation"], re_prob=before,
        re_mode="pixel", mean=tuple(said["mean"]), std=tuple(said["std"]),
    )  # fmt: skip
    test = create_transform(
        said["size"], interpolation="bicubic", crop_pct=crop_pct, mean=tuple(said["mean"]),
        std=tuple(said["std"]),
    )  # fmt: skip
    assert describe_transform(augmentation.train(said["size"])) == describe_transform(train)
    assert describe_transform(augmentation.eval(said["size"])) == describe_transform(test)
    (normalise,) = (part for part in test.transforms if isinstance(part, Normalize))
    for ours, theirs in ((augmentation.mean, normalise.mean), (augmentation.std, normalise.std)):
        assert tuple(ours) == pytest.approx(torch.as_tensor(theirs).tolist())
    if said["mixup"] or said["cutmix"]:
        mixed = {"prob": 1.0, "switch_prob": 0.5, "label_smoothing": said["smoothing"]}
        mixed |= {"mixup_alpha": said["mixup"], "cutmix_alpha": said["cutmix"]}
        assert task["mixup"] == mixed
        assert config.head["label_smoothing"] == 0
    else:
        assert task["mixup"] is None
        assert config.head["label_smoothing"] == said["smoothing"]


def test_lvt_learns_from_label_maps_by_its_authors_pipeline():
    """Flip and policy, then the crop, whose rows and columns are swapped in the map."""
    data = compose_recipe("lvt", "lvt_r2")[1].data
    assert (data["token_labels"], data["token_boxes"]) == ("required", "released")
    augmentation = build(data["augmentation"], "data.augmentation")
    made = LabelledTransform(augmentation, 224, "maps", data["token_boxes"])
    assert made.flip == 0.5
    assert [type(part).__name__ for part in made.policy] == ["RandAugment"]
    crop = made.crop
    assert (crop.scale, crop.ratio, crop.size) == ((0.08, 1.0), (0.75, 1.3333), (224, 224))
    assert [mode.name for mode in crop.interpolation] == ["BILINEAR", "BICUBIC"]
    rest = [type(part).__name__ for part in made.rest]
    assert rest == ["ToBytes", "NoiseRectangle"]
    assert create_backbone("lvt_r2").mix_token
    assert AUX_WEIGHT == 0.5


def describe_transform(transform):
    """Format a transform; numbers are rounded, since some are given with more digits than others.

    Ours leave normalisation and erasing to batches: tests/datamodules/test_transforms.py.
    """
    lines = []
    for part in transform.transforms:
        if isinstance(part, ToTensor | ToBytes | Normalize):
            continue
        if isinstance(part, RandomErasing | NoiseRectangle):
            lines.append(("erasing", repr(part.probability)))
            continue
        if isinstance(part, BoundedResize):  # torchvision's, except for thin images
            part = Resize(part.size, part.interpolation)
        values = {key: value for key, value in sorted(vars(part).items()) if key[0] != "_"}
        lines.append((type(part).__name__, repr(_plain(values))))
    return lines


def _plain(value):
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if hasattr(value, "__dict__") and not callable(value):
        return _plain(vars(value))
    return getattr(value, "__name__", None) or repr(value)


def _tasks_of(recipe):
    text = (CONFIGS / "recipe" / f"{recipe}.yaml").read_text()
    return (yaml.safe_load(text).get("recipe") or {}).get("_tasks_", [])


def test_every_recipe_of_images_is_stated():
    images = {name for name, family in families().items() if family.modality == "image"}
    recipes = {name for name in options("recipe") if images.issuperset(_tasks_of(name))}
    dense = {name for name in recipes if name.endswith(DENSE)}
    assert dense == {*DENSE_STATED, "ffnet_seg_cityscapes"}
    tuned = {name for name in recipes if name.endswith(("_cifar100", "_cifar100_sgd"))}
    stated = {family.partition(" ")[0] for family in FAMILIES}
    assert recipes - dense - tuned == {*stated, "sample_long", "vit_finetune"}


def test_fine_tuning_of_vision_transformers_is_that_of_mae():
    """He et al., CVPR 2022, Table 9; mixup, CutMix, smoothing and RandAugment are the base's."""
    recipe = yaml.safe_load((CONFIGS / "recipe/vit_finetune.yaml").read_text())
    assert recipe["defaults"][0] == "base/imagenet"
    optimizer, schedule = recipe["optimizer"], recipe["schedule"]
    assert (optimizer["name"], float(optimizer["lr"]), optimizer["reference_batch"]) == (
        "adamw", 1e-3, 256,
    )  # fmt: skip
    assert (optimizer["weight_decay"], optimizer["layer_decay"]) == (0.05, 0.75)
    assert (schedule["warmup"], schedule["min_lr"], recipe["trainer"]["max_epochs"]) == (5, 0, 100)
    assert recipe["recipe"]["backbone.drop_path_rate"] == {"*": 0.1}


@pytest.mark.parametrize("recipe", options("recipe"))
def test_recipes_give_values_only_for_what_exists(recipe):
    """Their tables have patterns of hosts, heads, tasks or data sets."""
    names = [*list_hosts(), *options("head"), *options("task"), *options("data")]
    text = (CONFIGS / "recipe" / f"{recipe}.yaml").read_text()
    tables = yaml.safe_load(text).get("recipe", {})
    for option, table in tables.items():
        for pattern in table if isinstance(table, dict) else ():
            assert fnmatch.filter(names, pattern), f"{option}: nothing is called {pattern}"


def config_rates(config, updates, batch):
    """Return the rate of every update of a config, and its peak rate."""
    top = scaled_lr(config.optimizer["lr"], config.optimizer["reference_batch"], batch)
    steps = updates * config.trainer["max_epochs"]
    factor = learning_rate_factor(steps, updates, top, **config.schedule)
    return [top * factor(step) for step in range(steps)], top


@pytest.mark.parametrize(
    ("recipe", "top", "lowest"),
    [("deit_cifar100", 5e-6 * 768 / 512, 1e-6), ("deit_cifar100_sgd", 0.01 * 768 / 512, 1e-5)],
)
def test_cifar100_is_tuned_at_the_rates_of_deits_script(recipe, top, lowest):
    config = composed("task=transfer", "data=cifar100", f"recipe={recipe}", "backbone=deit_b")
    assert config.data["batch_size"] * 8 == 768
    rates, ours = config_rates(config, 2, 768)
    assert ours == pytest.approx(top)

    def of_epoch(epoch):
        if epoch < 5:
            return 1e-6 + epoch * (top - 1e-6) / 5
        return lowest + 0.5 * (top - lowest) * (1 + math.cos(math.pi * epoch / 1000))

    # Each epoch uses the rate that the script sets at the end of the previous one.
    expected = [of_epoch(max(epoch - 1, 0)) for epoch in range(1000) for _ in range(2)]
    assert rates == pytest.approx(expected, rel=1e-9)


def test_cifar100_is_probed_as_mae_probes():
    typed = ["task=transfer", "data=cifar100", "protocol=linear_probe", "recipe=probe_cifar100"]
    config = composed(*typed, "backbone=deit_b")
    updates = 48
    rates, top = config_rates(config, updates, 1024)
    assert (top, len(rates)) == (pytest.approx(0.1 * 1024 / 256), 90 * updates)

    def at(epoch):
        if epoch < 10:
            return top * epoch / 10
        return top * 0.5 * (1 + math.cos(math.pi * (epoch - 10) / 80))

    assert rates == pytest.approx([at(i / updates) for i in range(len(rates))], abs=top / 4000)
    augmentation = build(config.data["augmentation"], "data.augmentation")
    crop, flip, jitter, *rest = augmentation.train(224).transforms
    assert (tuple(crop.scale), flip.p) == ((0.08, 1.0), 0.5)
    strengths = (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
    assert strengths == (None, None, None, None)  # crops and flips only
    assert [type(part).__name__ for part in rest] == ["ToBytes"]


STEPS = {"coco": 7330, "ade20k": 1263}


DENSE_CASES = [(name, host) for name, said in DENSE_STATED.items() for host in said["hosts"]]


@pytest.mark.parametrize(("recipe", "host"), rest_slow_pairs(DENSE_CASES, DENSE_CASES[::2]))
def test_dense_recipes_are_what_the_authors_state(recipe, host):
    said, data = DENSE_STATED[recipe], recipe.rpartition("_")[2]
    task = {"coco": "detection", "ade20k": "segmentation"}[data]
    typed = [f"task={task}", f"data={data}", f"recipe={recipe}", f"backbone={host}", "trainer=ddp"]
    typed += [f"head={said['head']}"] if "head" in said else []
    config = composed(*typed, "data.root=/data")
    if said["hosts"][host] is not None:
        assert config.backbone["drop_path_rate"] == said["hosts"][host]
    optimizer, schedule = config.optimizer, config.schedule
    assert (optimizer["lr"], optimizer["reference_batch"]) == (said["rate"], 16)
    assert optimizer["weight_decay"] == said["decay"]
    assert optimizer.get("layer_decay") in (None, 1.0, 0.9, said.get("layer_decay"))
    groups = optimizer.get("groups") or []
    decays_all = bool(groups) and all(g.get("weight_decay") == said["decay"] for g in groups)
    assert decays_all == said.get("decays_all", False)
    rates = {g["match"]: g.get("lr_scale", 1) for g in groups}
    assert max([1, *rates.values()]) == said.get("head_rate", 1)
    if said["warmup"] is not None:
        assert schedule["warmup"] * STEPS[data] == pytest.approx(said["warmup"], rel=0.03)
    epochs = config.trainer["max_epochs"]
    if task == "detection":
        assert epochs == said["epochs"]
        assert schedule["milestones"] == ([8, 11] if epochs == 12 else [27, 33])
        assert config.data["train_crops"] == said["crops"]
        sizes = [(1333, short) for short in range(480, 801, 32)] if said["crops"] else None
        found = config.data["train_sizes"]
        assert (found and [tuple(size) for size in found]) == sizes
    else:
        assert epochs * STEPS[data] == pytest.approx(said["steps"], abs=STEPS[data])
        assert (schedule["name"], schedule["warmup_within"]) == ("poly", True)
        assert config.head["pad_to"] == config.data["crop_size"] == 512


@pytest.mark.parametrize(
    ("typed", "per_epoch"),  # 8 images per batch of 2,975
    [("", 371), ("recipe=ffnet_seg_cityscapes backbone=ffnet_seg head=ffnet_seg", 185)],
)
def test_schedules_have_the_stated_steps(typed, per_epoch):
    own = ["task=segmentation", "data=cityscapes", "data.root=/data"]
    config = composed(*own, *typed.split())
    assert config.trainer["max_epochs"] * per_epoch == pytest.approx(160_000, abs=per_epoch)
    assert config.schedule["warmup"] * per_epoch == pytest.approx(1500, abs=5)


@pytest.mark.parametrize(
    ("data", "base"),
    [("ade20k", "ade20k"), ("cityscapes", "cityscapes"), ("voc", "pascal_voc12")],
)
def test_images_are_prepared_as_mmsegs_own_configs_do(data, base):
    pytest.importorskip("mmseg")
    from mmengine import Config

    from heads.toolkits.toolkit import base_configs

    theirs = Config.fromfile(base_configs("mmseg") / f"datasets/{base}.py")
    steps = {step.pop("type"): step for step in theirs.train_pipeline}
    config = composed("task=segmentation", f"data={data}", "data.root=/data")
    ours = config.data
    assert tuple(ours["scale"]) == steps["RandomResize"]["scale"]
    assert tuple(ours["scale_jitter"]) == steps["RandomResize"]["ratio_range"]
    assert tuple(parse_size("crop_size", ours["crop_size"])) == steps["RandomCrop"]["crop_size"]
    assert ours["cat_max_ratio"] == steps["RandomCrop"]["cat_max_ratio"]
    assert ours["flip"] == steps["RandomFlip"]["prob"]
    assert ours["photometric"] == ("PhotoMetricDistortion" in steps)
    (resize,) = (step for step in theirs.test_pipeline if step["type"] == "Resize")
    assert tuple(ours["scale"]) == resize["scale"]
    # Their models pad training images to the crop.
    assert config.head["pad_to"] == ours["crop_size"]
    larger = composed("task=segmentation", f"data={data}", "data.root=/d", "data.crop_size=640")
    assert larger.head["pad_to"] == 640
