"""An evaluation takes its config from the run folder; typed options override it and are logged."""

import functools
import shutil

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig

from tests.families import rest_slow
from tests.runs import composed, write_run
from tools.cli.errors import one_line_errors
from tools.config import overrides
from tools.config import run_config as run_config
from tools.config.config_checks import resolve_config
from tools.runs.components import check_config


@functools.cache
def config_text(*overrides):
    plain = composed(*overrides).plain()
    if plain["data"].get("scale") == "auto":  # a run saves what it chose for its images
        plain["data"]["scale"] = [1333, 800]
    return yaml.safe_dump(plain, sort_keys=False)


@pytest.fixture
def run_folder(tmp_path):
    """Run folder of a command, with a dummy checkpoint."""

    return lambda *typed, name="run": write_run(tmp_path / name, config_text(*typed))


def evaluated(folder, *typed, mode="test"):
    """Compose the config of an evaluation."""
    return resolve_config(run_config.job_config([f"mode={mode}", f"ckpt={folder}", *typed]))


def saved(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


def save(folder, config):
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def differences_from_run(folder, *typed):
    """Return the differences between an evaluation and its run, by name."""
    before, now = (run_config.flatten({g: config[g] for g in run_config.IDENTITY})
                   for config in (saved(folder), evaluated(folder, *typed).plain()))  # fmt: skip
    return {key: now.get(key) for key in {**before, **now}
            if before.get(key) != now.get(key) and key != "backbone.pretrained"}  # fmt: skip


RUNS = {
    "plain": (),
    "detection": ("task=detection", "backbone=swin_t_afbo", "head=retinanet", "head.anchor_scale=4",
                  "data=coco", "data.root=/data/coco", "backbone.mixer.g2=6"),
    "segmentation": ("task=segmentation", "backbone=deit_t", "head.channels=64",
                     "head.dropout=0.3"),
    "transfer": ("task=transfer", "protocol=linear_probe", "++data.sample_seed=3"),
    "recipe": ("recipe=ffnet", "backbone=ffnet_3", "data=imagenet", "data.root=/data/imagenet",
               "data.image_size=288"),
    "experiment": ("experiment=iffn_t1_swin_t_iffn", "data.root=/data/imagenet"),
}  # fmt: skip


@pytest.mark.parametrize("name", rest_slow(list(RUNS), ("plain", "detection", "experiment")))
def test_the_folder_alone_gives_the_config_of_the_run(name, run_folder):
    folder = run_folder(*RUNS[name])
    assert differences_from_run(folder) == {}
    assert differences_from_run(folder, *RUNS[name]) == {}  # the same command again


def test_a_checkpoint_and_latest_find_their_folder(run_folder, tmp_path):
    folder = run_folder(*RUNS["detection"])
    best = folder / "checkpoints" / "best.ckpt"
    assert evaluated(best).head["anchor_scale"] == 4
    (tmp_path / "latest").symlink_to(folder.name)
    config = evaluated(tmp_path / "latest")
    assert (config.head["anchor_scale"], config.ckpt) == (4, str(best))


def test_the_folder_decides_when_defaults_have_changed_since(run_folder):
    folder = run_folder("backbone=swin_t")
    config = saved(folder)
    config["data"]["augmentation"]["mean"] = [0.5, 0.5, 0.5]
    config["data"]["image_size"] = 96
    del config["data"]["train_copies"]
    save(folder, config)
    assert differences_from_run(folder) == {}
    assert differences_from_run(folder, "data.train_copies=2") == {"data.train_copies": 2}


def test_the_devices_equal_those_of_the_command(run_folder):
    folder = run_folder("trainer=cpu", "trainer.precision=bf16-mixed", "trainer.max_epochs=7")
    assert evaluated(folder).trainer["precision"] == "32-true"
    assert evaluated(folder, "trainer=ddp").trainer["strategy"] == "ddp"


@pytest.mark.parametrize(
    ("run", "typed", "expected"),
    [
        # Values that follow another one in training also follow it here.
        (("data.image_size=96",), ["data.image_size=64"],
         {"data.image_size": 64, "backbone.img_size": 64}),
        # A typed default overrides the run's other value.
        (("data.image_size=96",), ["++data.image_size=64"],
         {"data.image_size": 64, "backbone.img_size": 64}),
        # A value that the run had set is kept.
        (("data.image_size=96", "backbone.img_size=128"), ["data.image_size=64"],
         {"data.image_size": 64}),
        (("recipe=posmlp", "backbone=posmlp_t", "data=imagenet"), ["backbone.drop=0.5"],
         {"backbone.drop": 0.5}),
        (RUNS["detection"], ["head.anchor_scale=8", "data.root=/x"],
         {"head.anchor_scale": 8, "data.root": "/x"}),
        (RUNS["detection"], ["head=mask_rcnn"],
         {"head.name": "mask_rcnn", "head.anchor_scale": None}),
        (("task=segmentation",), ["+head.options.decode_head.dropout_ratio=0.1"],
         {"head.options.decode_head.dropout_ratio": 0.1}),
        (("data=imagenet", "data.root=/a", "recipe=deit"), ["data=cifar100", "data.root=/b"],
         {"data._target_": "datamodules.images.cifar100.CIFAR100DataModule", "data.root": "/b"}),
        (("data=imagenet", "data.root=/a"), ["recipe=ffnet", "backbone.drop_path_rate=0.1"],
         {"data.image_size": 256, "backbone.img_size": 256, "task.mixup.mixup_alpha": 0.2,
          "task.ema.decay": 0.9995}),
        (("backbone=swin_t_afbo", "backbone.mixer.g2=6"), ["backbone=swin_t_afbo"], {}),
        (("backbone=swin_t_afbo",), ["backbone=swin_t_iffn"], {"backbone.name": "swin_t_iffn"}),
        (("task=transfer",), ["protocol=linear_probe"],
         {"head._target_": "heads.linear.LinearProbe"}),
    ],
)  # fmt: skip
def test_typed_options_win(run, typed, expected, run_folder):
    if "recipe=ffnet" in typed:
        run = (*run, "backbone=ffnet_1", "backbone.drop_path_rate=0.1")
    found = differences_from_run(run_folder(*run), *typed)
    assert expected.items() <= found.items(), found
    if typed[0].partition("=")[0].lstrip("+") not in ("data", "backbone", "protocol", "recipe",
                                                      "head"):  # fmt: skip
        assert found == expected


def test_initial_weights_are_not_read_again(run_folder):
    folder = run_folder("task=transfer")
    config = saved(folder)
    config["backbone"]["pretrained"] = "/gone"
    save(folder, config)
    assert evaluated(folder).backbone["pretrained"] is None
    assert evaluated(folder, "backbone.pretrained=/gone").backbone["pretrained"] is None


def logged_text(config, caplog):
    caplog.clear()
    caplog.set_level("INFO")
    run_config.log_differences(config)
    return caplog.text


def test_differences_are_named_in_one_line(run_folder, caplog):
    folder = run_folder("backbone=swin_t", "data.image_size=224")
    text = logged_text(
        evaluated(folder, "data.image_size=64", "data.band_mean=[0.5,0.5,0.5]"), caplog
    )
    assert text.count("\n") == 1
    assert "differs from the run: " in text
    for part in ("backbone.img_size 64 (run: 224)", "data.image_size 64 (run: 224)",
                 "data.band_mean [0.5, 0.5, 0.5] (run: not set)"):  # fmt: skip
        assert part in text
    assert logged_text(evaluated(folder), caplog) == ""


def test_a_checkpoint_outside_of_run_folders_needs_typed_options(tmp_path, caplog):
    (tmp_path / "config.yaml").write_text("of: something else")
    (tmp_path / "weights").mkdir()
    lone = tmp_path / "weights" / "best.ckpt"
    lone.write_bytes(b"")
    config = evaluated(lone, "backbone=swin_t")
    assert config.backbone["name"] == "swin_t"
    assert config.data["_target_"] == "datamodules.sample.datamodules.SampleClassification"
    assert f"{lone} is not in a run folder" in logged_text(config, caplog)


def error_text(capsys, folder, *typed, mode="test"):
    given = [f"mode={mode}", f"ckpt={folder}", *typed]

    def read():
        command = overrides.read_command(given)
        check_config(resolve_config(run_config.job_config(command.words, command.config)))

    with pytest.raises(SystemExit), one_line_errors():
        read()
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize(
    ("typed", "message"),
    [("head.anchor_scal=4", "no option of head called 'anchor_scal'; did you mean anchor_scale"),
     ("data.batchsize=4", "did you mean batch_size"), ("heads.anchor_scale=4", "did you mean head"),
     ("head=mask_rcn", "did you mean mask_rcnn"), ("head=linear", "task=detection takes head="),
     ("data=imagenet", "task=detection takes data=coco"),
     ("backbone=swin_t_afob", "did you mean swin_t_afbo"),
     ("task=segmentation", "is a run of task=detection; its weights fit no other task"),
     ("trainer.device=1", "did you mean devices"),
     ("resume=true", "for mode=test pass ckpt=<run folder> alone"),
     ("input=x", "pass mode=predict"),
     ("~head.option", "no option to remove of head called 'option'; did you mean options")],
)  # fmt: skip
def test_mistakes_are_found_in_the_runs_config(typed, message, run_folder, capsys):
    assert message in error_text(capsys, run_folder(*RUNS["detection"]), typed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the content must be a dictionary, got None"),
        ("[1, 2]", "the content must be a dictionary, got list"),
        ("a: [1", "expected ',' or ']'"),
        ("task: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("_target_: os.system", "the entry backbone is missing"),
        ("{task_name: detection, backbone: {name: deit_t}}", "the entry head is missing"),
        ("{task_name: detection, backbone: deit_t}", "backbone must be a dictionary, got 'deit_t'"),
        ("{task_name: classification, backbone: {name: deit_t, img_size: '${oc.env:HOME}'}, head: "
         "{_target_: heads.linear.LinearClassifier}, data: {_target_: x}, task: {_target_: y}}",
         "refers in backbone to other values"),
        (b"\xff\xfe\x00", "byte 0 is not UTF-8"),
    ],
)  # fmt: skip
def test_a_foreign_config_is_rejected(content, message, run_folder, capsys):
    folder = run_folder()
    content = content if isinstance(content, bytes) else content.encode()
    (folder / "config.yaml").write_bytes(content)
    text = error_text(capsys, folder)
    assert f"{folder / 'config.yaml'} " in text
    assert "restore it, or copy the checkpoint to another folder" in text
    assert message in text


@pytest.mark.slow
def test_a_config_of_an_unknown_task_or_backbone(run_folder, capsys):
    folder = run_folder()
    config = saved(folder)
    save(folder, {**config, "task_name": "depth"})
    assert "unknown task 'depth'; known: classification" in error_text(capsys, folder)
    config["backbone"]["name"] = "deit_tt"
    for choices in ({**config["choices"], "backbone": "deit_tt"}, None):  # None: an older run
        save(folder, {**config, "choices": choices})
        assert "did you mean deit_t" in error_text(capsys, folder)


def test_the_folder_of_an_evaluation_has_no_weights(run_folder, tmp_path, capsys):
    folder = run_folder()
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    save(evaluation, evaluated(folder).plain())
    assert not HydraConfig.initialized()  # composing leaves none behind
    text = error_text(capsys, evaluation)
    assert "belongs to an evaluation (mode=test), which saves no weights" in text
    assert f"ckpt={folder / 'checkpoints' / 'best.ckpt'}" in text
    shutil.rmtree(folder / "checkpoints")
    assert "is not a run folder with a checkpoint" in error_text(capsys, folder)


def test_each_job_of_a_sweep_has_the_config_of_its_folder(run_folder):
    first, second = run_folder("backbone=swin_t"), run_folder(*RUNS["detection"], name="other")
    typed = ["-m", "mode=test", f"ckpt={first},{second}", "data.num_workers=0,1"]
    jobs = [run_config.job_config(job) for job in overrides.read_command(typed).jobs]
    names = [(job["backbone"]["name"], job["data"]["num_workers"]) for job in jobs]
    assert names == [("swin_t", 0), ("swin_t", 1), ("swin_t_afbo", 0), ("swin_t_afbo", 1)]


def test_a_run_stores_its_choices_and_an_older_one_is_guessed(run_folder):
    folder = run_folder(*RUNS["detection"])
    config = saved(folder)
    assert config["choices"]["head"] == "retinanet"
    del config["choices"]
    save(folder, config)
    assert differences_from_run(folder) == {}
    assert evaluated(folder).choices["head"] == "retinanet"


def training_from(folder, *typed):
    """Compose the config of a training that starts from the whole network of a run."""
    return resolve_config(run_config.job_config([f"ckpt={folder}", *typed]))


def test_a_training_takes_network_and_head_from_a_run_and_the_rest_from_its_data(run_folder):
    folder = run_folder(*RUNS["detection"], "optimizer.lr=1e-5", "trainer.max_epochs=3")
    best = folder / "checkpoints" / "best.ckpt"
    run, config = saved(folder), training_from(folder, "data=coco", "data.root=/data/own")
    assert (config.task_name, config.keep_head, config.ckpt) == ("detection", True, None)
    assert config.backbone == run["backbone"] | {"pretrained": str(best)}
    assert config.head == run["head"]
    assert (config.optimizer["lr"], config.trainer["max_epochs"]) == ("auto", "auto")
    assert (config.data["root"], config.data["scale"]) == ("/data/own", "auto")
    assert config.paper is None
    same = training_from(folder, "data.root=/data/own", "head.anchor_scale=8")
    assert same.data == run["data"] | {"root": "/data/own"}
    assert same.head["anchor_scale"] == 8
    # The run that it starts is resumed by its own folder and the same words.
    save(folder, config.plain())
    again = training_from(folder, "data=coco", "data.root=/data/own", "resume=true")
    assert (again.ckpt, again.head, again.keep_head) == (str(folder), run["head"], True)


@pytest.mark.parametrize(
    ("run", "typed", "message"),
    [
        ((), (), "start a new run from its backbone with backbone.pretrained="),
        (("task=detection",), ("start=host",), "leave start=host out"),
        (("task=detection",), ("task=segmentation",), "is a run of task=detection"),
    ],
)
def test_other_trainings_from_a_run_are_refused(run_folder, run, typed, message):
    folder = run_folder(*run)
    with pytest.raises(ValueError, match=message):
        training_from(folder, *typed)
