"""The sets of GLUE in their tsv files, tokenised for BERT or GPT.

Source: Wang et al., "GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language
Understanding", ICLR 2019, https://arxiv.org/abs/1804.07461.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.base import BaseDataModule, Split
from datamodules.files.console import log
from datamodules.files.folders import require_names
from datamodules.files.text_files import finite_number, read_plain_lines
from datamodules.files.values import check_option, refuse
from datamodules.loading.sampling import NamedDataset, SeededDataset, TolerantDataset
from datamodules.text.tokenizers import (
    Tokenizer,
    cut_to,
    join_texts,
    pad_texts,
    read_tokenizer,
)

MOST_TOKENS = 512
TAB = "\t"


@dataclass(frozen=True)
class GlueSet:
    """Format of a set.

    Attributes:
        folder: Its folder in GLUE's archive.
        columns: Names of the sentences' columns; positions in a file without a header.
        label: Name, or position, of the labels' column.
        classes: Values of the labels, in label order; empty for a score.
        metrics: Names of its metrics; see ``tasks.glue.metrics``.
        dev: Endings of the files to validate with.
        header: True if the first line names the columns.
        symmetric: True if the order of the two texts is meaningless.
    """

    folder: str
    columns: tuple[str | int, ...]
    label: str | int
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    dev: tuple[str, ...] = ("dev",)
    header: bool = True
    symmetric: bool = False


BINARY = ("0", "1")
PAIR = ("sentence1", "sentence2")
ENTAILS = ("entailment", "not_entailment")
SETS = {
    "cola": GlueSet("CoLA", (3,), 1, BINARY, ("matthews",), header=False),
    "sst2": GlueSet("SST-2", ("sentence",), "label", BINARY, ("accuracy",)),
    "mrpc": GlueSet("MRPC", ("#1 String", "#2 String"), "Quality", BINARY, ("accuracy", "f1"),
                    symmetric=True),
    "stsb": GlueSet("STS-B", PAIR, "score", (), ("pearson", "spearman"), symmetric=True),
    "qqp": GlueSet(
        "QQP", ("question1", "question2"), "is_duplicate", BINARY, ("accuracy", "f1"),
        symmetric=True,
    ),
    "mnli": GlueSet(
        "MNLI", PAIR, "gold_label", ("contradiction", "entailment", "neutral"), ("accuracy",),
        ("dev_matched", "dev_mismatched"),
    ),
    "qnli": GlueSet("QNLI", ("question", "sentence"), "label", ENTAILS, ("accuracy",)),
    "rte": GlueSet("RTE", PAIR, "label", ENTAILS, ("accuracy",)),
    "wnli": GlueSet("WNLI", PAIR, "label", BINARY, ("accuracy",)),
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A text or a pair of texts with its label, if known."""

    texts: tuple[str, ...]
    label: float | None = None


def read_examples(file: Path, kind: GlueSet, *, labelled: bool = True) -> list[Example]:
    """Read a tsv file; quotes are letters, as in GLUE.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: A column, value or label is missing; names file and line.
    """
    remedy = f"pass data.root=<folder of GLUE's {kind.folder}>"
    require_names([] if file.is_file() else [str(file)], "file is missing", remedy)
    lines = _read_rows(file)
    header = lines.pop(0)[1] if kind.header and lines else []
    places, label = _places(file, kind, header, labelled)
    least = max(*places, -1 if label is None else label) + 1
    examples, broken = [], []
    for number, row in lines:
        if len(row) < least and labelled and kind.folder in ("QQP", "MRPC"):
            # Published files have lines with too few columns; tests must keep their places.
            broken.append(number)
            continue
        columns = f"has {len(row)} columns, fewer than the header"
        refuse(f"{file} line {number}", {columns: len(row) < least})
        value = None if label is None else _label(file, number, kind, row[label])
        if label is None or value is not None:
            examples.append(Example(tuple(row[place] for place in places), value))
    if broken:
        log(f"{file}: {len(broken)} lines have too few columns and are left out, as {broken[0]}")
    refuse(file, {"holds no examples": not examples})
    return examples


def _read_rows(file: Path) -> list[tuple[int, list[str]]]:
    """Return the number and the cells of each line that holds text."""
    lines = enumerate(read_plain_lines(file), 1)
    return [(number, line.split(TAB)) for number, line in lines if line.strip()]


def read_tests(file: Path, kind: GlueSet) -> list[Example]:
    """Read a test file of GLUE, which has a header with ``index`` and the texts' columns.

    Returns:
        Its examples; empty for a file of another form.
    """
    header = read_plain_lines(file)[0].split(TAB)
    columns = ("sentence",) if not kind.header else kind.columns
    if not {"index", "id"} & set(header) or not set(columns) <= set(header):
        return []
    return read_examples(file, replace(kind, columns=columns, header=True), labelled=False)


def named_file(path_or_text: str | Path) -> Path | None:
    """Return the file that an input names; None if it is a text.

    Raises:
        FileNotFoundError: It looks like the path of a missing file.
    """
    path = Path(path_or_text)
    try:
        if path.is_file():
            return path
    except OSError:  # longer than the name of any file
        return None
    words = str(path_or_text).split()
    if len(words) == 1 and (path.suffix in (".txt", ".tsv") or path.is_absolute()):
        raise FileNotFoundError(
            f"input={path_or_text} is not a file; pass a text, or a file of texts"
        )
    return None


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file that hold text.

    Raises:
        ValueError: Texts are missing, or the file is not text.
    """
    lines = [line for line in read_plain_lines(file) if line.strip()]
    refuse(file, {"has no texts; write one per line": not lines})
    return lines


def _places(
    file: Path, kind: GlueSet, header: Sequence[str], labelled: bool
) -> tuple[list[int], int | None]:
    if not kind.header:
        return [int(place) for place in kind.columns], int(kind.label) if labelled else None
    names = [*kind.columns, *([kind.label] if labelled else [])]
    missing = [str(name) for name in names if name not in header]
    refuse(file, {f"has the columns {', '.join(header)} and lacks": missing})
    places = [header.index(str(name)) for name in names]
    return places[: len(kind.columns)], places[-1] if labelled else None


def _label(file: Path, number: int, kind: GlueSet, text: str) -> float | None:
    """Return a label; None for one that annotators did not agree on."""
    if text == "-":
        return None
    try:
        return float(kind.classes.index(text) if kind.classes else finite_number(text))
    except ValueError:
        expected = ", ".join(kind.classes) or "a number"
        raise ValueError(f"{file} line {number}: label {text!r} must be {expected}") from None


def check_tokens(count: int) -> int:
    """Return ``data.max_tokens`` after a check."""
    return check_option("max_tokens", count, 8 <= count <= MOST_TOKENS, f"from 8 to {MOST_TOKENS}")


def given_lines(inputs: Any) -> list[str]:
    """Return texts to predict: of a file, one per line, or given as a text or a list.

    Raises:
        ValueError: The file or list is empty.
    """
    if isinstance(inputs, list | tuple):
        refuse("the list of texts", {"is empty": not inputs})
        return [str(text) for text in inputs]
    file = named_file(inputs)
    return [str(inputs)] if file is None else read_lines(file)


class GlueDataModule(BaseDataModule):
    """One set of GLUE. Its test labels are private, so tests use the validation file.

    MNLI is tested on both validation files; the second is reported as ``mismatched``.

    Args:
        root: Folder of the set, or of GLUE with the set's folder in it.
        set: Name of the set: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli.
        tokenizer: Folder with BERT's vocab.txt, or GPT-1's vocab.json and merges.txt; None for
            ``root``.
        lower: Lower the case and drop accents, as BERT's uncased models do; GPT-1's always do. None
            for ``do_lower_case`` of the tokenizer's folder, or else True.
        both_orders: For pairs without an order (MRPC, QQP, STS-B), also encode the second text
            first, as GPT-1 does; the head adds the embeddings of both.
        max_tokens: Most tokens of a text or pair; longer ones are cut, the longer text first.
        batch_size: Texts per training batch and process.
        **options: Of ``BaseDataModule``.

    Raises:
        ValueError: An unknown set.
    """

    unit = "texts"
    layout = "train.tsv and dev.tsv of a set of GLUE"
    example = "data=cola data.root=/data/glue data.tokenizer=/data/bert-base-uncased"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        set: str = "cola",
        tokenizer: str | Path | None = None,
        lower: bool | None = None,
        both_orders: bool = False,
        max_tokens: int = 128,
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        check_option("set", set, set in SETS, f"one of {', '.join(SETS)}")
        self.kind = SETS[set]
        self.max_tokens = check_tokens(max_tokens)
        self.tokenizer_folder = None if tokenizer is None else Path(tokenizer).expanduser()
        self.lower = lower
        self.swaps = both_orders and self.kind.symmetric
        self._tokenizer: Tokenizer | None = None
        self.class_names = self.kind.classes

    @property
    def set_folder(self) -> Path:
        """Folder of the tsv files."""
        inner = self.folder / self.kind.folder
        return inner if inner.is_dir() else self.folder

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, read once."""
        if self._tokenizer is None:
            if self.tokenizer_folder is None:
                self.prepare_data()
            folder = self.tokenizer_folder or self.set_folder
            self._tokenizer = read_tokenizer(folder, self.lower)
        return self._tokenizer

    @property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape (L,) of the longest input."""
        return (self.max_tokens,)

    @property
    def backbone_arguments(self) -> dict[str, Any]:
        """Size of the vocabulary."""
        return {"vocabulary": len(self.tokenizer())}

    @property
    def head_arguments(self) -> dict[str, Any]:
        """Number of classes; 1 for a score."""
        return {"num_classes": max(1, len(self.kind.classes))}

    @property
    def task_arguments(self) -> dict[str, Any]:
        """Names of the classes and of the metrics."""
        return {"class_names": self.kind.classes, "measured": self.kind.metrics}

    def target_facts(self) -> dict[str, Any]:
        """Return the number of classes; 0 for a score."""
        return {"classes": len(self.kind.classes)}

    def target_identity(self) -> dict[str, Any]:
        """Return the set and its classes."""
        return {"classes": [self.kind.folder, *self.kind.classes]}

    def predict_only(self, **facts: Any) -> None:
        """Serve prediction alone; the tokenizer is that of the options or of the sample set."""
        super().predict_only()

    def build(self) -> dict[Split, SeededDataset]:
        """Read the files."""
        folder = self.set_folder
        train = read_examples(folder / "train.tsv", self.kind)
        dev = [read_examples(folder / f"{name}.tsv", self.kind) for name in self.kind.dev]
        parts = {"train": [train], "val": dev[:1], "test": dev}
        built: dict[Split, SeededDataset] = {}
        splits: tuple[Split, ...] = ("train", "val", "test")
        for split in splits:
            texts = Texts(self, parts[split], f"{folder}, {split}")
            built[split] = self.seeded(texts, texts.name)
        return built

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return texts: of GLUE's test.tsv, of a file with a text per line, or given as text.

        Args:
            inputs: A file, a text, or a list of texts; a tab separates the texts of a pair.
        """
        file = None if isinstance(inputs, list | tuple) else named_file(inputs)
        tests = [] if file is None else read_tests(file, self.kind)
        if file is not None and tests:
            texts_ = Texts(self, [tests], file.name)
            return TolerantDataset(texts_, texts_.name)
        lines = given_lines(inputs)
        count = len(self.kind.columns)
        examples = []
        for number, line in enumerate(lines, 1):
            texts = tuple(line.split("\t"))
            rule = (
                f"has {len(texts)} parts between tabs, but {self.kind.folder} takes {count}, such "
                f"as {TAB.join(['a text', 'another text'][:count])!r}"
            )
            refuse(f"text {number}", {rule: len(texts) != count})
            examples.append(Example(texts))
        texts_ = Texts(self, [examples], "input")
        return TolerantDataset(texts_, texts_.name)

    def predicted_texts(self, index: int) -> Example:
        """Return the texts of a sample of ``predict_dataloader``."""
        texts: Any = self._to_predict().dataset
        return texts.examples[index]

    def test_dataloader(self) -> Any:
        """Return the validation texts, of MNLI both kinds."""
        return self._eval_loader("test")

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that fills texts up to one length."""
        return pad_texts


class Texts:
    """Tokenised examples: ``tokens``, ``segments``, ``mask``, ``labels``, ``group``, ``sample_id``.

    Args:
        data: Its datamodule.
        groups: Examples by group, such as MNLI's matched and mismatched ones.
        source: Name for messages.
    """

    def __init__(
        self, data: GlueDataModule, groups: Sequence[Sequence[Example]], source: str
    ) -> None:
        self.data, self.source = data, source
        self.examples = [example for group in groups for example in group]
        self.groups = [number for number, group in enumerate(groups) for _ in group]
        self.tokenizer = data.tokenizer()

    def __len__(self) -> int:
        return len(self.examples)

    def name(self, index: int) -> str:
        """Return the beginning of a text."""
        return f"{self.source} {index}: {self.examples[index].texts[0][:60]}"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of an example."""
        example = self.examples[index]
        room = self.data.max_tokens - len(example.texts) - 1
        parts = cut_to([self.tokenizer.encode(text) for text in example.texts], room)
        sample = join_texts(self.tokenizer, parts)
        if self.data.swaps:
            swapped = join_texts(self.tokenizer, parts[::-1])
            sample |= {f"{name}_swapped": value for name, value in swapped.items()}
        if example.label is not None:
            sample["labels"] = torch.tensor(example.label)
        return sample | {
            "group": torch.tensor(self.groups[index]), "sample_id": torch.tensor(index),
        }  # fmt: skip
