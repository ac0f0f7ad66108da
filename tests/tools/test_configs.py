"""Every config file composes, names our parts with valid options, and lists its tasks."""

import inspect
import itertools
import re

import pytest
import torch
from hydra.core.config_store import ConfigStore
from lightning.pytorch import Trainer

from backbones import create_backbone, list_backbones, list_hosts
from backbones.options import check_arguments
from tasks.engine.callbacks.ema import WeightEMA
from tasks.engine.family import families, imported
from tasks.engine.instantiate import build
from tasks.engine.optimisation.automatic import apply_fixed_schedule
from tasks.engine.optimisation.optimizer import build_optimizer, learning_rate_factor
from tests.families import rest_slow, rest_slow_pairs
from tests.runs import CONFIGS, composed, options
from tools.cli.errors import one_line_errors
from tools.cli.yaml_files import read_yaml

TASKS = tuple(families())


def fitting_options(group, task):
    """Return the options of a group that list a task."""
    found = []
    for name in options(group):
        content = read_yaml(CONFIGS / group / f"{name}.yaml")
        if task in content.get(group, content)["_tasks_"]:
            found.append(name)
    return found


def check_config(config):
    """Check that every part accepts the options of the config."""
    config = apply_fixed_schedule(config)  # data configs of users' own sets use auto
    given = {
        "data": ("seed", "predict_path"),
        "head": ("backbone", "num_classes", "scale", "horizon", "targets", "grid_size"),
        "task": ("model", "class_names", "optimizer", "schedule"),
    }
    for group, names in given.items():
        target = getattr(config, group)["_target_"]
        factory = imported(target)
        nested = [k for k, v in getattr(config, group).items() if isinstance(v, dict)]
        left_out = {"_target_", *nested} - {"mixup", "ema"}
        plain = {k: v for k, v in getattr(config, group).items() if k not in left_out}
        check_arguments(factory, plain, group)
        assert not set(plain) & set(names)
        parameters = inspect.signature(factory).parameters.values()
        needed = {p.name for p in parameters if p.default is p.empty and p.kind < p.VAR_KEYWORD}
        needed -= {p.name for p in parameters if p.kind is p.VAR_POSITIONAL}
        assert needed <= {*plain, *names}, f"{target} needs more than the config gives"
    trainer = dict(config.trainer)
    assert not any(trainer.pop(name) for name in ("channels_last", "compile", "tf32"))
    check_arguments(Trainer, trainer, "trainer")
    check_arguments(build_optimizer, config.optimizer, "optimizer")
    check_arguments(learning_rate_factor, config.schedule, "schedule")
    check_arguments(create_backbone, config.backbone, "backbone")
    learning_rate_factor(10, 10, **config.schedule)
    # Parameter names are only checked for the recipe's own networks, in test_recipes.
    named = {"layer_decay": None, "layers": None, "groups": None}
    build_optimizer(torch.nn.Linear(2, 2), **{**config.optimizer, **named})


def pairs_of(task):
    """Return each head with each dataset of a task, and those in which each is at least once."""
    heads, data = fitting_options("head", task), fitting_options("data", task)
    most = range(max(len(heads), len(data)))
    few = [(heads[index % len(heads)], data[index % len(data)]) for index in most]
    return [(task, *pair) for pair in itertools.product(heads, data)], [(task, *one) for one in few]


PAIRS = {task: pairs_of(task) for task in TASKS}


@pytest.mark.parametrize(
    ("task", "head", "data"),
    rest_slow_pairs(
        [pair for every, _ in PAIRS.values() for pair in every],
        [pair for task in ("classification", "segmentation") for pair in PAIRS[task][1]],
    ),
)
def test_every_head_with_every_dataset_of_a_task(task, head, data):
    """The sample datasets set options of their task's default head; others keep theirs."""
    typed = [f"task={task}", f"head={head}", f"data={data}"]
    only = read_yaml(CONFIGS / "data" / f"{data}.yaml")["data"].get("_evaluates_only_")
    if only and head == "frozen":
        pytest.skip("a solved head is for training data")
    check_config(composed(*typed, *(["mode=test"] if only else [])))


def test_every_head_and_dataset_is_for_some_task():
    for group in ("head", "data"):
        fitting = [fitting_options(group, task) for task in TASKS]
        assert {name for names in fitting for name in names} == set(options(group))
        assert all(fitting)
    assert set(options("task")) == set(TASKS)


TASKS_OF = {"mlm": "glue"}  # of protocols for other tasks than transfer


@pytest.mark.parametrize("protocol", options("protocol"))
def test_every_protocol(protocol):
    config = composed(f"task={TASKS_OF.get(protocol, 'transfer')}", f"protocol={protocol}")
    check_config(config)
    assert config.protocol == protocol


@pytest.mark.parametrize("data", ["sample_transfer", "imagenet"])
def test_linear_probing_scales_its_rate_by_the_batch(data):
    config = composed("task=transfer", "protocol=linear_probe", f"data={data}")
    assert config.head["_target_"] == "heads.linear.LinearProbe"
    optimizer = build_optimizer(torch.nn.Linear(2, 2), None, 64, **config.optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 64 / 256)


def test_the_long_recipe_of_the_sample_data():
    for task in ("detection", "segmentation"):
        longer, plain = composed(f"task={task}", "recipe=sample_long"), composed(f"task={task}")
        check_config(longer)
        assert longer.trainer["max_epochs"] > plain.trainer["max_epochs"]


@pytest.mark.parametrize("data", ["folder", "inaturalist2019"])
def test_recipes_of_imagenet_fit_data_like_it(data):
    config = composed(f"data={data}", "recipe=deit", "backbone=deit_t")
    assert "_like_" not in config.data
    assert config.data["repeated_augmentation"] == 3
    with pytest.raises(ValueError, match=r"made for data=imagenet: .*, or leave recipe=deit out"):
        composed("data=cifar10", "recipe=deit", "backbone=deit_t")


@pytest.mark.parametrize(
    ("experiment", "task"),
    [("afbo_t2_deit_t_afbo", "classification"), ("afbo_t4_swin_t_mask_rcnn", "detection")],
)
def test_an_experiment_keeps_its_recipe_on_other_data(experiment, task):
    config = composed(f"experiment={experiment}", f"data=sample_{task}", "trainer=cpu")
    own = composed(f"experiment={experiment}", "data.root=/data", "trainer=cpu")
    assert config.data["_target_"].startswith("datamodules.sample.")
    for group, key in (("optimizer", "lr"), ("schedule", "name")):
        assert getattr(config, group)[key] == getattr(own, group)[key]


def _is_for_images(recipe):
    tasks = (read_yaml(CONFIGS / "recipe" / f"{recipe}.yaml").get("recipe") or {}).get("_tasks_")
    return all(families()[task].modality == "image" for task in tasks or ())


PAPER_RECIPES = [
    name for name in options("recipe") if name != "sample_long" and _is_for_images(name)
]
# A drop path is passed where neither recipe nor paper gives one for the size.
DROP_PATH = "backbone.drop_path_rate=0.1"


def with_recipe(recipe, backbone, *overrides):
    """Compose the config of a recipe with its own data and task."""
    base, name = {}, recipe
    while not {"_tasks_", "_data_"} <= base.keys():
        content = read_yaml(CONFIGS / "recipe" / f"{name}.yaml")
        base = content.get("recipe", {}) | base
        name = next((n for n in content.get("defaults", []) if n != "_self_"), None)
    choices = [f"task={base['_tasks_'][0]}", f"data={base['_data_']}", f"recipe={recipe}"]
    return composed(*choices, f"backbone={backbone}", *overrides)


@pytest.mark.parametrize("recipe", rest_slow(PAPER_RECIPES, PAPER_RECIPES[::2]))
def test_every_recipe(recipe):
    """With a backbone of its host, or any other if that host is missing."""
    family = re.split("_(?:coco|ade20k|cityscapes|cifar100)", recipe)[0]
    hosts = [name for name in list_hosts() if name.startswith(f"{family}_")]
    name = hosts[min(1, len(hosts) - 1)] if hosts else "deit_t"
    own = [DROP_PATH] if recipe in ("hiremlp", "visionllama") or not hosts else []
    config = with_recipe(recipe, name, *own)
    check_config(config)
    assert "recipe" not in config
    if config.task_name == "classification":
        build(config.data["augmentation"], "data.augmentation").train(224)
        check_arguments(WeightEMA, config.task["ema"] or {}, "task.ema")


def test_posmlps_recipe_has_dropout():
    """test_recipes compares all else that papers and authors state."""
    config = with_recipe("posmlp", "posmlp_t")
    assert config.backbone["drop"] == config.head["drop"] == 0.02333


@pytest.mark.parametrize(("head", "rate"), [("retinanet", 1e-4), ("mask_rcnn", 2e-4)])
def test_a_rate_may_depend_on_the_head(head, rate):
    config = with_recipe("poolformer_coco", "poolformer_s12", f"head={head}")
    assert config.optimizer["lr"] == rate


def test_typed_options_override_a_recipe_and_may_be_needed(capsys):
    config = with_recipe("swin", "deit_t", "backbone.drop_path_rate=0.4", "task.ema={decay: 0.9}")
    assert config.backbone["drop_path_rate"] == 0.4
    assert config.task["ema"] == {"decay": 0.9}
    with pytest.raises(SystemExit), one_line_errors():
        with_recipe("swin", "deit_t")
    assert capsys.readouterr().err == (
        "error: this recipe gives backbone.drop_path_rate for swin_t, swin_s, swin_b, but not for "
        "deit_t; pass backbone.drop_path_rate=<value>\n"
    )


NAMED = list_backbones(modality="image")[::100]


@pytest.mark.parametrize(
    "task", [task for task, family in families().items() if family.modality == "image"]
)
@pytest.mark.parametrize("name", rest_slow(NAMED, NAMED[::3]))
def test_backbones_are_options_of_every_task(name, task):
    config = composed(f"task={task}", f"backbone={name}", "backbone.drop_path_rate=0.1")
    assert config.backbone["name"] == name
    assert config.backbone["dense"] == (task in ("detection", "segmentation"))
    assert config.backbone.keys() >= {"pretrained", "img_size", "mixer", "token_mixer"}


def test_backbones_have_entries_and_take_their_mixers_options():
    for name in list_backbones()[::7]:
        entry = ConfigStore.instance().load(f"backbone/{name}.yaml")
        assert entry.node["name"] == name
    config = composed("backbone=deit_t_afbo", "backbone.mixer.g2=6", "backbone.img_size=64")
    backbone = create_backbone(**config.backbone)
    plain = create_backbone("deit_t_afbo", img_size=64)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (backbone, plain)]
    assert sizes[0] != sizes[1]


def test_config_files_and_private_keys_are_explained():
    """Every yaml begins with a comment about its purpose."""
    for path in CONFIGS.rglob("*.yaml"):
        first = next(line for line in path.read_text().splitlines() if "@package" not in line)
        assert first.startswith("# "), path
    files = [path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "published"]
    lines = [line for path in files for line in path.read_text().splitlines()]
    private = [line for line in lines if re.search(r"(^|[\s{])_(?!target_)[a-z_]+_:", line)]
    assert len(private) > 50
    assert not [line for line in private if " # " not in line]
