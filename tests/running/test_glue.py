"""Runs of task=glue: every set, pretraining, predictions for GLUE, resuming, processes, exports."""

import json

import numpy as np
import pytest

from datamodules.text.glue import SETS
from datamodules.text.wordpiece import SPECIAL
from tasks.engine.answers import FILE
from tests.glue_sets import write_sets
from tests.runs import run_here, summary
from tools.export import export

pytestmark = pytest.mark.slow
SAMPLE = ("data.num_train=64", "data.num_val=21")


def words(folder, *more, backbone="bert_tiny_afbo", epochs=1):
    usual = ("trainer=cpu", "logger=csv", "schedule.warmup=0", f"trainer.max_epochs={epochs}")
    return ["task=glue", f"backbone={backbone}", *usual, f"output_dir={folder}", *more]


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    write_sets(folder, 12)
    letters = 'abcdefghijklmnopqrstuvwxyz,"'
    pieces = [*SPECIAL, "the", "dog", "cat", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    return folder


FIGURES = {
    "cola": {"matthews"}, "sst2": {"accuracy"}, "mrpc": {"accuracy", "f1"},
    "stsb": {"pearson", "spearman"}, "qqp": {"accuracy", "f1"}, "qnli": {"accuracy"},
    "mnli": {"accuracy", "mismatched"}, "rte": {"accuracy"}, "wnli": {"accuracy"},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SETS))
def test_every_set_is_trained_tested_and_predicted(name, sets, tmp_path, capsys):
    data = (f"data={name}", f"data.root={sets}", f"data.tokenizer={sets}", "data.batch_size=4",
            "data.num_workers=0", "data.max_tokens=32")  # fmt: skip
    ended = run_here(words(tmp_path, *data), capsys)
    assert ended.status == 0, ended.err
    folder = ended.folder()
    assert summary(folder)["metrics"].keys() == FIGURES[name] | {"score", "loss"}
    tested = run_here(["mode=test", f"ckpt={folder}", f"output_dir={tmp_path / 'test'}"], capsys)
    assert tested.status == 0, tested.err
    found = summary(tested.folder())["metrics"]
    assert ("mismatched" in found) == (name == "mnli")
    kind = SETS[name]
    with np.load(tested.folder() / FILE) as answers:
        mean = float(answers["value"].mean())
        assert str(answers["metric"]) == ("accuracy" if kind.classes else "loss")
    if name not in ("cola", "mnli"):  # one has no accuracy, one has two
        assert mean == pytest.approx(found["loss"] if not kind.classes else found["accuracy"] / 100)
    for dev in (*kind.dev, *(("diagnostic",) if name == "mnli" else ())):
        tests = sets / kind.folder / f"{dev.replace('dev', 'test')}.tsv"
        typed = ["mode=predict", f"ckpt={folder}", f"input={tests}"]
        ended = run_here([*typed, f"output_dir={tmp_path / dev}"], capsys)
        assert ended.status == 0, ended.err
        (file,) = ended.folder().glob("*.tsv")
        ending = {"dev_matched": "-m", "dev_mismatched": "-mm"}.get(dev, "")
        wanted = "AX.tsv" if dev == "diagnostic" else f"{kind.folder}{ending}.tsv"
        assert file.name == wanted
        lines = [line.split("\t") for line in file.read_text().splitlines()]
        assert [line[0] for line in lines] == ["index", "0", "1", "2"]
        answers = {line[1] for line in lines[1:]}
        if kind.classes:
            assert answers <= set(kind.classes)
        else:
            assert all(0 <= float(answer) <= 5 for answer in answers)


@pytest.mark.parametrize("backbone", ["bert_tiny_afbo", "gpt_tiny"])
def test_pretraining_fine_tuning_and_filling_in(backbone, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    few = ("trainer.limit_train_batches=3", "trainer.limit_val_batches=2")
    ended = run_here(words(tmp_path, "protocol=mlm", *few, *SAMPLE, backbone=backbone), capsys)
    assert ended.status == 0, ended.err
    folder = ended.folder()
    assert {"score", "words", "loss"} == summary(folder)["metrics"].keys()
    assert list((folder / "preview").glob("*.png"))
    typed = ["mode=predict", f"ckpt={folder}", "input=The [MASK] sees the cat."]
    ended = run_here([*typed, f"output_dir={tmp_path / 'filled'}"], capsys)
    (row,) = json.loads((ended.folder() / "predictions.json").read_text())
    if backbone == "gpt_tiny":
        assert len(row["words"]) == len(row["truth"]) > 5
    else:
        assert len(row["words"]) == 1
        assert "truth" not in row
    tuned = run_here(
        words(tmp_path / "tuned", f"backbone.pretrained={folder}", *SAMPLE, backbone=backbone),
        capsys,
    )
    assert tuned.status == 0, tuned.err
    assert "0 left at their initialisation, 0 in the file not used" in caplog.text


def test_gpts_recipe(tmp_path, capsys):
    more = ("head.words_weight=0.5", "trainer.log_every_n_steps=1", *SAMPLE)
    typed = words(tmp_path, *more, backbone="gpt_tiny_glu")
    ended = run_here(typed, capsys)
    assert ended.status == 0, ended.err
    header, first = (ended.folder() / "metrics.csv").read_text().splitlines()[:2]
    assert "train/loss_words" in header
    assert first


@pytest.mark.parametrize("to", ["onnx", "torch_export"])
@pytest.mark.parametrize(
    ("backbone", "more"), [("bert_tiny_afbo", ()), ("gpt_tiny_afbo", ("protocol=mlm",))],
    ids=["bert", "gpt"],
)  # fmt: skip
def test_whole_networks_are_exported(backbone, more, to, tmp_path, capsys):
    few = ("trainer.limit_train_batches=1", "trainer.limit_val_batches=1")
    ended = run_here(words(tmp_path, *SAMPLE, *few, *more, backbone=backbone), capsys)
    files = export(
        [f"to={to}", "what=both", f"ckpt={ended.folder()}", f"out={tmp_path / 'exported'}"]
    )
    assert {"README.md", "vocab.txt"} < {file.name for file in files}


def test_mixers_that_read_padding_are_not_exported(tmp_path, capsys):
    few = ("trainer.limit_train_batches=1", "backbone.token_mixer=attention")
    ended = run_here(words(tmp_path, *SAMPLE, *few), capsys)
    with pytest.raises(ValueError, match="mixes the texts of each length apart"):
        export(["to=onnx", f"ckpt={ended.folder()}", f"out={tmp_path / 'exported'}"])
