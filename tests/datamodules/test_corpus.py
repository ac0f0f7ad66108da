"""Plain text to pretrain on, its masks, and GPT-1's tokenizer."""

import json

import pytest
import torch

from datamodules.text.byte_pairs import BytePairs
from datamodules.text.corpus import CorpusDataModule, cut_rows, draw_masks
from datamodules.text.glue import GlueDataModule
from datamodules.text.tokenizers import read_tokenizer
from datamodules.text.wordpiece import SPECIAL, WordPiece
from tests.errors import refuses

OWN = {"batch_size": 2, "num_workers": 0}
MERGES = [("t", "h"), ("th", "e</w>"), ("d", "o"), ("do", "g</w>"), ("do", "g"), ("r", "u"),
          ("ru", "n"), ("s", "</w>")]  # fmt: skip


def write_gpt(folder):
    letters = sorted("abcdefghijklmnopqrstuvwxyz.,!'")
    pieces = ["<unk>", *letters, *(f"{letter}</w>" for letter in letters)]
    pieces += ["".join(pair) for pair in MERGES if pair != ("s", "</w>")]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in MERGES[:-1]), ""]
    (folder / "merges.txt").write_text("\n".join(lines))
    return pieces


def test_byte_pairs_are_merged_in_their_order(tmp_path):
    pieces = write_gpt(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    assert isinstance(tokenizer, BytePairs)
    found = [tokenizer.pieces[number] for number in tokenizer.encode("The dogs, RUN \u4e2d")]
    assert found == ["the</w>", "dog", "s</w>", ",</w>", "ru", "n</w>", "<unk>"]
    assert tokenizer.decode(tokenizer.encode("the dogs run")) == "the dogs run"
    assert len(tokenizer) == len(pieces) + 3
    assert (tokenizer.start, tokenizer.separator, tokenizer.end) == tuple(
        range(len(pieces), len(pieces) + 3)
    )
    (tmp_path / "merges.txt").write_text("a b c\n")
    refuses(r"merges\.txt must hold two pieces per line, not", read_tokenizer, tmp_path)
    refuses("from 0 without gaps", BytePairs, {"<unk>": 0, "a": 2}, [])
    with pytest.raises(FileNotFoundError, match=r"or GPT's vocab\.json and merges\.txt"):
        read_tokenizer(tmp_path / "none")


def test_byte_pairs_equal_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    write_gpt(tmp_path)
    theirs = transformers.OpenAIGPTTokenizer.from_pretrained(str(tmp_path))
    ours = read_tokenizer(tmp_path)
    for text in ("the dogs, run!", "D\u00f3gs runners\tthe th e", "isn't thedog", "", "x\u4e2dy"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_pairs_are_joined_for_gpt_and_in_both_orders(tmp_path):
    pieces = write_gpt(tmp_path)
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text(f"{header}1\t1\t2\tthe dog\tthe\n" * 1)
    data = GlueDataModule(tmp_path, set="mrpc", both_orders=True, **OWN)
    data.setup()
    start, middle, end = (len(pieces) + index for index in range(3))
    the, dog = data.tokenizer().encode("the dog")
    sample = data.dataset("train")[0, 0]
    assert sample["tokens"].tolist() == [start, the, dog, middle, the, end]
    assert sample["tokens_swapped"].tolist() == [start, the, middle, the, dog, end]
    assert data.backbone_arguments == {"vocabulary": len(pieces) + 3}


def test_rows_are_filled_within_documents():
    lines = [[1, 2], [3], [], [4], [5, 6, 7, 8, 9, 10], [11]]
    packed = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10, 11]]
    assert list(cut_rows(iter(lines), 4, pack=True)) == packed
    alone = [[1, 2], [3], [4], [5, 6, 7, 8], [9, 10], [11]]
    assert list(cut_rows(iter(lines), 4, pack=False)) == alone


def test_masks_have_their_shares():
    tokenizer = WordPiece([*SPECIAL, *map(str, range(995))])
    tokens = torch.full((10_002,), 500)
    tokens[0], tokens[-1] = tokenizer.start, tokenizer.end
    torch.manual_seed(0)
    masked, chosen = draw_masks(tokens, tokenizer, 0.15)
    assert chosen.sum() == 1500
    assert torch.equal(masked[~chosen], tokens[~chosen])
    assert not chosen[[0, -1]].any()
    own = masked[chosen]
    assert (own == tokenizer.mask).float().mean() == pytest.approx(0.8, abs=0.03)
    assert (own == 500).float().mean() == pytest.approx(0.1, abs=0.03)
    assert draw_masks(tokens[:4], tokenizer, 0.15)[1].sum() == 1


def test_text_files_are_read_and_shared(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "a", "b", "c"]) + "\n")
    file = tmp_path / "train.txt"
    file.write_text("a b c\nb b\n\n" * 20)
    options = {"tokenizer": tmp_path, "max_tokens": 8, **OWN}
    data = CorpusDataModule(file, val_share=0.1, **options)
    data.setup()
    assert data.sizes() == {"train": 18, "val": 2}
    assert CorpusDataModule(tmp_path, pack=False, **options).files() == (file, None)
    batch = next(iter(data.train_dataloader()))
    assert batch["masked"].shape == batch["chosen"].shape == (2, 7)
    train = data.dataset("train")
    fields = ("masked", "chosen")
    one, other, again = (train[key] for key in ((0, 3), (1, 3), (0, 3)))
    assert all(torch.equal(one[name], again[name]) for name in fields)
    draws = {tuple(train[epoch, 3]["chosen"].tolist()) for epoch in range(20)}
    assert len(draws) > 1
    assert torch.equal(one["tokens"], other["tokens"])
    (tmp_path / "dev.txt").write_text("c c c\n")
    data = CorpusDataModule(tmp_path, **options)
    data.setup()
    assert data.sizes() == {"train": 20, "val": 1}
    data.set_predict_inputs(["a [MASK] c", "a b"])
    sample = data._to_predict()[0, 0]
    assert sample["chosen"].tolist() == [False, False, True, False, False]
    assert not data._to_predict()[0, 1]["chosen"].any()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [(b"", {}, "holds no text"), (b"\xff\xfe\x00", {}, "is not a text file: byte 2 of 3"),
     (b"a\n", {}, "too few to validate with"), (b"a\n", {"tokenizer": None}, "needs a tokenizer")],
    ids=["empty", "bytes", "short", "tokenizer"],
)  # fmt: skip
def test_wrong_texts_are_named(content, options, message, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "a"]) + "\n")
    file = tmp_path / "own.txt"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        CorpusDataModule(file, **{"tokenizer": tmp_path, **OWN, **options}).setup()
    with pytest.raises(FileNotFoundError, match=r"1 file of texts is missing: .*train\.txt"):
        CorpusDataModule(tmp_path, tokenizer=tmp_path, **OWN).setup()
