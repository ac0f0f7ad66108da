"""Mistakes of the user or the data end a run in one line."""

import re
import shutil
import sys

import pytest
import torch

from backbones.checkpoints.seal import seal
from tests.families import rest_slow
from tests.runs import TINY, arguments, refused, run_here

pytestmark = pytest.mark.usefixtures("sample_cache")


MISTAKES = {
    # Names.
    "task=clasification": "did you mean classification",
    "backbone=swin_t_afob": "did you mean swin_t_afbo",
    "backbone=deit_t_sbm": "sbm is a token mixer; type backbone=deit_t backbone.token_mixer=sbm",
    "task=detection head=mask_rcn": "did you mean mask_rcnn",
    "data=image_net": "did you mean imagenet",
    "recipe=sample_lon": "did you mean sample_long",
    "trainer=cpus": "did you mean cpu",
    "optimzer.lr=1": "did you mean optimizer",
    "data=imagenet_a data.root=/x": "these data are for evaluation only; pass mode=test ckpt=",
    "optimizer.lrr=1": "adamw has no option",
    "data.batchsize=3": "did you mean batch_size",
    "+data.batchsize=3": "no option of data called 'batchsize'; did you mean batch_size",
    "backbone.drop_pth_rate=0.3": "did you mean backbone.drop_path_rate",
    "backbone=deit_t_afbo backbone.mixer.g22=4": "did you mean backbone.mixer.g2",
    "trainer.max_epoch=3": "did you mean max_epochs",
    "+trainer.max_epoch=3": "no option of trainer called 'max_epoch'; did you mean max_epochs",
    "+schedule.warmups=1": "did you mean warmup",
    "task=detection +head.num_roi=3": "did you mean num_rois",
    "task=detection +head.options.rpn_head.anchor_generator.scale=3": "lacks 'scale'; known here",
    "backbone=swin_t,swin_s": "pass -m backbone=swin_t,swin_s for a run of each",
    "task=classification recipe=sample_long": "this recipe is for task=detection or segmentation; "
    "task=classification takes recipe=cifar100_scratch, recipe=convnext, ",
    "task=segmentation backbone=swin_t recipe=swin": "this recipe is for task=classification; "
    "task=segmentation takes recipe=convnext_ade20k, ",
    "recipe=deit": "this recipe is made for data=imagenet: pass data=imagenet data.root=",
    "data=imagenet recipe=swin backbone=deit_t": "but not for deit_t; pass backbone.drop_path_rate",
    "data=imagenet recipe=deit schedule.warmup=5": "schedule.warmup=5 epochs are the whole",
    "trainer.max_epochs=0": "trainer.max_epochs=0 leaves no training; for the metrics",
    "+schedule.cooldown=1": "schedule.cooldown=1 epochs are the whole of trainer.max_epochs=1",
    "task.ema={decay:1.0}": "task.ema.decay must be from 0 to below 1, got 1.0",
    "task.ema={dekay:0.9}": "no option of task.ema called 'dekay'; did you mean decay?",
    "task.mixup.mixup=0.8": "no option of task.mixup called 'mixup'; did you mean mixup_alpha",
    "backbone=vit_small_patch16_224": "type backbone=timm backbone.model=vit_small_patch16_224",
    "task.mixup={mixup_alpha:0.9} head.label_smoothing=0.1": "would both smooth the labels",
    "schedule.min_lr_ratio=0.1 +schedule.min_lr=1e-6": "exclude each other; set one of them",
    "+optimizer.reference_batch=1024 schedule.min_lr_ratio=null +schedule.min_lr=1e-4": "must be "
    "from 0 to the top rate, which is 3.90625e-06 for this batch",
    "trainer.limit_train_batches=0.01": "=0.01 of 5 train batches rounds down to 0; pass",
    "trainer.limit_val_batches=0.01": "0.01 of 1 val batch rounds down to 0",
    "+trainer.overfit_batches=0.1": "overfit_batches=0.1 of 5 train batches rounds down to 0",
    "+trainer.val_check_interval=6": "trainer.val_check_interval=6, but an epoch has 5 batches",
    "+trainer.val_check_interval=3 trainer.limit_train_batches=0.5": "an epoch has 2 batches; pass",
    "+optimizer.reference_batch=0": "optimizer.reference_batch must be at least 1 or null, got 0",
    # Types and ranges.
    "backbone=deit_t_afbo backbone.mixer.g2=abc": "backbone.mixer.g2=abc is not a whole number",
    "backbone=deit_t_afbo backbone.mixer.g1=7": "g1 must divide 192 and 768",
    "backbone=deit_t_afbo backbone.mixer.drop=2": "afbo refuses backbone.mixer.drop=2: dropout",
    "backbone=deit_t_afbo backbone.mixer.hidden_ratio=-1": "hidden_ratio must give at least one",
    "optimizer.lr=-1": "optimizer.lr must be above 0, got -1",
    "optimizer.lr=fast": "optimizer.lr=fast is not a number",
    "schedule.warmup=9": "are the whole of trainer.max_epochs=1",
    "backbone.drop_path_rate=2": "drop_path_rate must be in",
    "backbone.drop_path_rate=much": "is not a number",
    "backbone.img_size=10": "at least 64",
    "data.batch_size=0": "data.batch_size=0 is too low",
    "data.batch_size=few": "data.batch_size=few is not a whole number",
    "data.num_workers=-1": "too low",
    "callbacks.top_k=": "callbacks.top_k= is not a whole number",
    "callbacks.gradient_norm=null": "callbacks.gradient_norm=None is not a whole number",
    "callbacks.device=x": "callbacks.device=x is not true or false",
    "callbacks.early_stopping=x": "callbacks.early_stopping=x is not ",
    "seed=-1": "seed must be greater than or equal to 0, got -1",
    "resume=maybe": "resume must be a valid boolean, got 'maybe'",
    "trainer.precision=3": "trainer.precision=3 is not one of",
    "trainer.devices=0": "Lightning refuses the options of trainer",
    "trainer.strategy=magic": "Lightning refuses the options of trainer",
    "trainer.accumulate_grad_batches=0": "must be above 0",
    "trainer.limit_train_batches=0": "must be above 0",
    "task=detection head.num_rois=some": "head.num_rois=some is not a whole number",
    "head._target_=os.system": "head._target_=os.system is refused",
    "head._target_=heads.toolkits.toolkit.base_config": "is refused: it must be one of heads",
    "data.augmentation._target_=datamodules.dense.voc.require_package": "is refused: it must",
    "task=detection +head.options.rpn_head.loss_cls.type=os.system": "type=os.system is rejected",
    "task=detection +head.options={rpn_head.type:antigravity}": "type=antigravity is rejected",
    "task=detection ++head.options={roi_head:{_scope_:os}}": "_scope_ is rejected",
    "optimizer.lr=nan": "optimizer.lr=nan is not a number",
    "optimizer=sgd": "optimizer must be a dictionary, got 'sgd'",
    "data=null": "data=null is not allowed: a run needs its data",
    "~trainer": "~trainer is not allowed: a run needs its trainer",
    "backbone=[deit_t,swin_t]": "pass -m backbone=deit_t,swin_t",
    "backbone.name=swin_t": "pass backbone=swin_t",
    "trainer.gradient_clip_val=-1": "trainer.gradient_clip_val must be above 0, got -1",
    "head.label_smoothing=-0.1": "head.label_smoothing must be from 0 to below 1, got -0.1",
    "head.drop=1": "head.drop must be from 0 to below 1",
    "task.mixup={prob:-1}": "task.mixup.prob must be from 0 to 1, got -1",
    "task.mixup={mode:foo}": "task.mixup.mode=foo is not one of batch, pair, elem",
    "task.mixup={mixup_alpha:.inf}": "task.mixup.mixup_alpha=",
    "data.batch_size=inf": "data.batch_size=inf is not a whole number",
    "task=segmentation data.scale_jitter=[0.5,inf]": "data.scale_jitter=[0.5, inf] is not",
    "logger=[1,2]": "logger=[1,2] is not allowed: logger takes a name",
    "+=x": "+=x lacks an option name",
    "trainer.precision=fp16-true": "is not one of 64, 32, 16, transformer-engine, ",
    "task=point_segmentation backbone=ffnet_3d trainer.compile=true": "point cloud has its own",
    "trainer.precision=transformer-engine": "Lightning refuses the options of trainer",
    "trainer.precision=16-true": "AdamW's eps=1e-08 rounds to 0",
    "trainer.devices=[0,a]": "trainer.devices=[0, 'a'] is not a list of whole numbers",
    "trainer.accelerator=tpu": "Lightning refuses the options of trainer",
    "trainer.check_val_every_n_epoch=0": "is too low; the lowest is 1",
    "+trainer.logger=true": "trainer.logger is set by the run itself",
    "data.augmentation={flip:2}": "data.augmentation.flip must be a share or probability",
    "data.augmentation={std:[0,0,0]}": "deviations above 0",
    "task=detection head.options={a:1}": "the toolkit's model config lacks 'a'",
    "task=detection head.options={rpn_head:3}": "mmdet cannot build a model with head.options",
    "task=detection head.num_rois=-1": "head.num_rois must be at least 1, got -1",
    # Keys.
    "+foo=1": "there is no option called 'foo'; known: task_name, mode, ckpt",
    "++sead=1": "did you mean seed",
    "~seed": "~seed is not allowed: a run needs its seed",
    "~trainer.devices": "~trainer.devices is not allowed",
    "~head._target_": "~head._target_ is not allowed: the option defines what is built",
    "~optimizer.lr": "optimizer.lr is missing; pass optimizer.lr=...",
    "+head.num_classes=5": "head.num_classes is set by the run itself",
    "head=3": "head=3 is not allowed: head takes a name",
    "hydra.run.dir=/tmp/x": "pass output_dir=<folder>",
    "+hydra.callbacks={x:{_target_:os.system}}": "because it could run other code",
    "output_dir=${foo}": "output_dir: Interpolation key 'foo' not found",
    # Conflicting options.
    "mode=train": "mode must be 'fit', 'validate', 'test' or 'predict'",
    "mode=test": "pass ckpt=",
    "mode=test ckpt=HERE/nowhere": "HERE/nowhere does not exist; pass a checkpoint or run folder",
    "mode=test ckpt=HERE/nowhere resume=true": "pass ckpt=<run folder> alone",
    "ckpt=HERE/nowhere": "HERE/nowhere does not exist; pass a checkpoint or run folder",
    "keep_head=true": "is for detection and segmentation",
    "task=detection keep_head=true": "needs backbone.pretrained=",
    "backbone.lora={rank:4}": "which would be random; pass backbone.pretrained=",
    "resume=true": "has no run to resume",
    "resume=true ckpt=HERE/nowhere": "HERE/nowhere does not exist; pass a checkpoint or run folder",
    "input=/tmp": "pass mode=predict",
    "backbone.pretrained=HERE/nowhere": "HERE/nowhere does not exist; pass a checkpoint",
    "task=detection head=upernet": "task=detection takes head=cascade_mask_rcnn, ",
    "task=detection data=cifar100": "task=detection takes data=coco",
    "data=coco": "task=classification takes data=cifar10",
    "task=transfer": "backbone.pretrained=",
    # Missing files and devices; HERE is an empty folder.
    "data=imagenet": "data=imagenet data.root=/data/imagenet",
    "data=folder data.root=HERE data.augmentation.x=null": "no option of data.augmentation called",
    "data=imagenet data.root=HERE/nowhere": "data.root HERE/nowhere is not a folder",
    "task=detection data=coco data.root=HERE": "folder HERE/train2017 does not exist",
    "trainer=gpu": "torch sees no GPU",
    "trainer=fsdp trainer.gradient_clip_val=null": "torch sees no GPU",
}  # fmt: skip


@pytest.mark.parametrize("typed", rest_slow(list(MISTAKES), list(MISTAKES)[::6]))
def test_a_mistake_ends_in_one_line(typed, tmp_path, capsys):
    if "no GPU" in MISTAKES[typed] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    here = tmp_path / "here"
    here.mkdir()
    given = typed.replace("HERE", str(here)).split()
    task = next((a[5:] for a in given if a.startswith("task=") and a[5:] in TINY), "classification")
    named = {argument.lstrip("+").partition("=")[0] for argument in given}
    other = tuple(f"{group}." for group in ("data", "head") if group in named)  # other options
    base = [
        argument
        for argument in arguments(task, tmp_path)
        if argument.partition("=")[0] not in named and not argument.lstrip("+").startswith(other)
    ]
    text = refused([*base, *given], tmp_path, capsys)
    assert MISTAKES[typed].replace("HERE", str(here)) in text
    if task != "transfer":
        assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "typed",
    ["backbone.mixer.g2=abc", "backbone.mixer.g1=7", "backbone.mixer.drop=2",
     "trainer.precision=3"],
)  # fmt: skip
def test_a_wrong_option_is_refused_before_the_data_are_read(typed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tools.runs.components._prepare", lambda *_: pytest.fail("came too far"))
    given = arguments("classification", tmp_path, typed, backbone="deit_t_afbo")
    assert typed.partition("=")[0].rpartition(".")[2] in refused(given, tmp_path, capsys)


@pytest.mark.parametrize(("task", "package"), [("detection", "mmdet"), ("segmentation", "mmseg")])
def test_dense_tasks_without_their_toolkit(task, package, tmp_path, capsys, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    text = refused(arguments(task, tmp_path), tmp_path, capsys)
    assert package in text
    assert 'pip install "mixerlab[dense]"' in text


def test_a_blocked_output_folder_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("backbones.create_backbone", lambda **_: pytest.fail("came too far"))
    ended = run_here(arguments("classification", tmp_path / "file"), capsys)
    assert ended.status == 2
    assert "pass output_dir=<a writable folder>" in ended.err


class TestOtherCheckpoints:
    @pytest.fixture
    def best(self, trained):
        return trained("classification").folder() / "checkpoints" / "best.ckpt"

    @pytest.fixture
    def error_of(self, tmp_path, capsys):
        out = tmp_path / "out"
        out.mkdir()

        def evaluate(ckpt, *more, task="classification", backbone="deit_t"):
            typed = arguments(task, out, "mode=validate", f"ckpt={ckpt}", *more, backbone=backbone)
            return refused(typed, out, capsys)

        return evaluate

    def test_other_networks_tasks_and_classes(self, best, error_of, tmp_path):
        run = best.parents[1]
        text = error_of(run, backbone="poolformer_s12")
        assert re.search(r"\d+ keys differ \(missing backbone.stem", text)
        text = error_of(run, task="segmentation")
        assert "is a run of task=classification; its weights fit no other" in text
        shutil.copy(best, tmp_path / "lone.ckpt")
        text = error_of(tmp_path / "lone.ckpt", task="segmentation")
        assert "was trained on 10 classes, and the data have 11 different ones" in text

    def test_another_number_of_classes(self, best, tmp_path, capsys):
        other = ["data=sample_transfer", *TINY["transfer"], f"ckpt={best.parents[1]}"]
        text = refused([*other, "mode=test", f"output_dir={tmp_path}"], tmp_path, capsys)
        assert "10 classes, and the data have 100 different ones" in text
        assert "100 of 100 labels differ, checkpoint against data: 0: '0' there, '00' here" in text

    def test_damaged_files(self, best, error_of, tmp_path):
        whole = best.read_bytes()
        (tmp_path / "half.ckpt").write_bytes(whole[: len(whole) // 2])
        text = error_of(tmp_path / "half.ckpt")
        assert "half.ckpt is truncated or not a checkpoint" in text
        content = torch.load(best, weights_only=True)
        content["state_dict"]["model.classifier.bias"][0] = float("nan")
        torch.save(seal(content), tmp_path / "nan.ckpt")
        assert "model.classifier.bias holds NaN or Inf" in error_of(tmp_path / "nan.ckpt")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_image_in_the_middle_of_training_is_named(
    num_workers, trained, sample_cache, tmp_path, capsys
):
    trained("classification")
    source = next(path for path in sample_cache.glob("classification-4-*"))
    shutil.copytree(source, tmp_path / "data")
    broken = sorted((tmp_path / "data" / "train").rglob("*.jpg"))[17]
    broken.write_bytes(broken.read_bytes()[:500])
    # Another layout of the same files, treated as real data, so that generation is skipped.
    typed = [word for word in arguments("classification", tmp_path) if "data." not in word]
    typed += ["data=imagenet", f"data.root={tmp_path / 'data'}", "data.image_size=64",
              f"data.num_workers={num_workers}", "data.batch_size=8",
              "task.mixup=null"]  # fmt: skip
    ended = run_here(typed, capsys)
    assert (ended.status, len(ended.err.splitlines())) == (2, 1)
    assert str(broken) in ended.err
