"""GLUE's files, the tokenizer, and the generated grammar."""

import numpy as np
import pytest
import torch

from datamodules.text.glue import SETS, GlueDataModule, named_file, read_examples, read_lines
from datamodules.text.sample import SampleGlue, make_sentence
from datamodules.text.tokenizers import cut_to
from datamodules.text.wordpiece import SPECIAL, WordPiece, split_words, train_vocabulary
from tests.glue_sets import write_sets

OWN = {"batch_size": 2, "num_workers": 0}


def vocabulary(folder):
    pieces = [*SPECIAL, "un", "##aff", "##able", "the", "dog", "##s", ",", "runs", "!"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    return pieces


def test_words_are_cut_into_the_longest_pieces(tmp_path):
    pieces = vocabulary(tmp_path)
    tokenizer = WordPiece.from_folder(tmp_path)
    found = [pieces[number] for number in tokenizer.encode("The dógs, UNAFFABLE!  zebra\u4e2d")]
    assert found == ["the", "dog", "##s", ",", "un", "##aff", "##able", "!", "[UNK]", "[UNK]"]
    assert split_words("a-b c\u00a0d\x00") == ["a", "-", "b", "c", "d"]
    assert split_words("Été", lower=False) == ["Été"]
    with pytest.raises(ValueError, match=r"lacks \[PAD\]"):
        WordPiece(["a"])
    with pytest.raises(FileNotFoundError, match=r"pass data\.tokenizer="):
        WordPiece.from_folder(tmp_path / "none")


def test_the_tokenizer_equals_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocabulary(tmp_path)
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    ours = WordPiece.from_folder(tmp_path)
    for text in ("the dogs, unaffable!", "Dógs runs\tthe ##s", "x" * 120, "unaffables's", ""):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_a_trained_vocabulary_writes_every_word():
    texts = ["the dogs run.", "the dog runs."]
    tokenizer = WordPiece(train_vocabulary(texts, 40))
    assert tokenizer.numbers["[PAD]"] == 0
    assert tokenizer.numbers["[UNK]"] not in tokenizer.encode("the nerd runs. uh")
    assert len(tokenizer.encode("the")) == 1


@pytest.mark.parametrize("name", sorted(SETS))
def test_every_set_is_read_in_its_columns(name, tmp_path):
    write_sets(tmp_path)
    vocabulary(tmp_path)
    data = GlueDataModule(tmp_path, set=name, tokenizer=tmp_path, **OWN)
    data.setup()
    kind = SETS[name]
    assert data.sizes() == {"train": 2, "val": 2, "test": 2 * len(kind.dev)}
    batch = next(iter(data.val_dataloader()))
    assert batch["tokens"].shape == batch["segments"].shape == batch["mask"].shape
    assert (batch["segments"].max() == 1) == (len(kind.columns) == 2)
    assert set(batch["labels"].tolist()) <= {0, 1, 2, 4.5}
    assert data.head_arguments == {"num_classes": max(1, len(kind.classes))}
    if name == "mnli":
        groups = torch.cat([one["group"] for one in data.test_dataloader()])
        assert groups.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [("a\t1\n", "lacks the column sentence; it has a, 1"),
     ("sentence\tlabel\nx\t7\n", "line 2: label '7' must be 0, 1"),
     ("sentence\tlabel\nx\n", "line 2 has 1 columns"), ("sentence\tlabel\n", "holds no examples")],
    ids=["column", "label", "short", "empty"],
)  # fmt: skip
def test_wrong_files_are_named(content, message, tmp_path):
    (tmp_path / "train.tsv").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_examples(tmp_path / "train.tsv", SETS["sst2"])
    with pytest.raises(FileNotFoundError, match=r"pass data\.root=<folder of GLUE's SST-2>"):
        read_examples(tmp_path / "dev.tsv", SETS["sst2"])


def test_inputs_are_texts_or_files(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("One.\n\nTwo.\n")
    assert named_file(file) == file
    assert read_lines(file) == ["One.", "Two."]
    for text in ("Of a few words.", "word", "many words / " * 100):
        assert named_file(text) is None
    for wrong in ("nosuch.txt", str(tmp_path / "nosuch")):
        with pytest.raises(FileNotFoundError, match="is not a file; pass a text"):
            named_file(wrong)


def test_pairs_are_cut_at_the_longer_text():
    assert cut_to([[1, 2, 3, 4, 5], [6, 7]], 5) == [[1, 2, 3], [6, 7]]


def test_the_grammar(tmp_path):
    data = SampleGlue(tmp_path, num_train=40, num_val=10, max_tokens=32, **OWN)
    data.setup()
    labels = [int(data.dataset("train")[0, index]["labels"]) for index in range(40)]
    assert sum(labels) == 20
    unknown = data.tokenizer().numbers["[UNK]"]
    assert all((data.dataset("val")[0, i]["tokens"] != unknown).all() for i in range(10))
    random = np.random.default_rng(0)
    for _ in range(50):
        words = make_sentence(random, right=True).lower().rstrip(".").split()
        assert words[0] == "the"
    with pytest.raises(ValueError, match=r"data\.set must be one of cola"):
        GlueDataModule(tmp_path, set="wnli")
    data.set_predict_inputs(["The dog sees the cat."])
    assert data.predicted_texts(0).texts == ("The dog sees the cat.",)
    with pytest.raises(ValueError, match="text 1 has 2 parts between tabs, but CoLA takes 1"):
        data.set_predict_inputs("a\tb")
