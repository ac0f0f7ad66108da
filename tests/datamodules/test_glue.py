"""GLUE's files, the tokenizer, and the generated grammar."""

import numpy as np
import pytest
import torch

from datamodules.text.glue import SETS, GlueDataModule, named_file, read_examples, read_lines
from datamodules.text.sample import SampleGlue, make_sentence
from datamodules.text.tokenizers import cut_to, read_tokenizer
from datamodules.text.wordpiece import SPECIAL, WordPiece, split_words
from tests.errors import refuses
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
    refuses(r"lacks: \[PAD\]", WordPiece, ["a"])
    with pytest.raises(FileNotFoundError, match=r"pass data\.tokenizer="):
        WordPiece.from_folder(tmp_path / "none")


def test_the_tokenizer_equals_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocabulary(tmp_path)
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    ours = WordPiece.from_folder(tmp_path)
    for text in ("the dogs, unaffable!", "Dógs runs\tthe ##s", "x" * 120, "unaffables's", ""):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


CASES = [
    ({}, None, ["cafe", "dog"]),
    ({"do_lower_case": True}, None, ["cafe", "dog"]),
    ({"do_lower_case": False}, None, ["Café", "Dog"]),
    ({"do_lower_case": True, "strip_accents": False}, None, ["café", "dog"]),
    ({"do_lower_case": False, "strip_accents": True}, None, ["Cafe", "Dog"]),
    ({"do_lower_case": False}, True, ["cafe", "dog"]),
    ({"do_lower_case": True}, False, ["Café", "Dog"]),
]


def test_the_case_is_that_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    pieces = [*SPECIAL, "cafe", "Cafe", "café", "Café", "dog", "Dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    for config, lower, words in CASES:
        if lower is None:
            theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), **config)
            assert theirs.tokenize("Café Dog") == words


MERGES = "#version: 0.2\na b\n"
TOKENIZERS = [
    ({"vocab.json": '{"<unk>": 0, "a": 1', "merges.txt": MERGES}, "vocab.json is not valid JSON"),
    ({"vocab.json": '{"<unk>": 0, "a": "1"}', "merges.txt": MERGES}, "number its pieces from 0"),
    ({"vocab.json": '{"<unk>": 0, "a": 1.0}', "merges.txt": MERGES}, "number its pieces from 0"),
    ({"vocab.json": '{"model": {"<unk>": 0}}', "merges.txt": MERGES}, "number its pieces from 0"),
    ({"vocab.json": '["<unk>"]', "merges.txt": MERGES}, "'list' object"),
    ({"vocab.json": "[" * 100_000, "merges.txt": MERGES}, "nested too deeply|not valid JSON"),
    ({"vocab.json": '{"<unk>": 0}', "merges.txt": "a b c\n"}, "two pieces per line, not"),
    ({"vocab.txt": "a\nb\n"}, r"vocabulary of 2 pieces lacks: \[PAD\]"),
    ({"vocab.txt": "\0\0\0"}, "is not a text file"),
    ({"vocab.txt": "\n".join(SPECIAL), "tokenizer_config.json": "[1]"}, "'list' object"),
    ({"vocab.txt": "\n".join(SPECIAL), "tokenizer_config.json": '{"do_lower_case": "false"}'},
     "do_lower_case and strip_accents must be true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "said"), TOKENIZERS)
def test_a_tokenizer_fails_where_it_is_opened(files, said, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    refuses(rf"^{tmp_path}.*({said})", read_tokenizer, tmp_path)


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
    [("a\t1\n", "has the columns a, 1 and lacks: sentence"),
     ("sentence\tlabel\n\n\nx\u2028y\t7\n", "line 4: label '7' must be 0, 1"),
     ("sentence\tlabel\nx\n", "line 2 has 1 columns"), ("sentence\tlabel\n", "holds no examples")],
    ids=["column", "label", "short", "empty"],
)  # fmt: skip
def test_wrong_files_are_named(content, message, tmp_path):
    (tmp_path / "train.tsv").write_text(content)
    refuses(message, read_examples, tmp_path / "train.tsv", SETS["sst2"])
    with pytest.raises(FileNotFoundError, match=r"pass data\.root=<folder of GLUE's SST-2>"):
        read_examples(tmp_path / "dev.tsv", SETS["sst2"])


@pytest.mark.parametrize("score", ["nan", "inf", "1_000", ""])
def test_scores_are_numbers(score, tmp_path):
    (tmp_path / "a.tsv").write_text(f"sentence1\tsentence2\tscore\na\tb\t{score}\n")
    with pytest.raises(ValueError, match=f"line 2: label '{score}' must be a number"):
        read_examples(tmp_path / "a.tsv", SETS["stsb"])


def test_inputs_are_texts_or_files(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("One\u2028more.\n\nTwo.\n")
    assert named_file(file) == file
    assert read_lines(file) == ["One\u2028more.", "Two."]
    for text in ("Of a few words.", "word", "many words / " * 100):
        assert named_file(text) is None
    for wrong in ("nosuch.txt", str(tmp_path / "nosuch")):
        with pytest.raises(FileNotFoundError, match="is not a file; pass a text"):
            named_file(wrong)


def test_pairs_are_cut_at_the_longer_text():
    assert cut_to([[1, 2, 3, 4, 5], [6, 7]], 5) == [[1, 2, 3], [6, 7]]
    assert cut_to([[1, 2, 3], [4, 5, 6]], 5) == [[1, 2, 3], [4, 5]]
    assert cut_to([[1, 2, 3], [4, 5, 6]], 3) == [[1, 2], [4]]


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
    refuses(r"data\.set must be one of cola", GlueDataModule, tmp_path, set="ax")
    data.set_predict_inputs(["The dog sees the cat."])
    assert data.predicted_texts(0).texts == ("The dog sees the cat.",)
    refuses("text 1 has 2 parts between tabs, but CoLA takes 1", data.set_predict_inputs, "a\tb")
