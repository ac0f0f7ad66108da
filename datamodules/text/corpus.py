"""Texts to pretrain on: files of plain text, cut into rows of tokens, some of them masked.

Source: Devlin et al., "BERT", NAACL 2019, Sec. 3.1 and App. A.1 for the masks; rows of whole lines
within a document are those of Liu et al., "RoBERTa", 2019, https://arxiv.org/abs/1907.11692,
Sec. 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.base import BaseDataModule, Split, check_share
from datamodules.files.folders import require_names
from datamodules.files.text_files import read_plain_lines
from datamodules.files.values import refuse
from datamodules.loading.sampling import NamedDataset, SeededDataset, TolerantDataset
from datamodules.text.glue import Example, check_tokens, given_lines
from datamodules.text.tokenizers import (
    Tokenizer,
    encode_masked,
    join_texts,
    pad_texts,
    read_tokenizer,
)

TRAIN, VALIDATION = "train.txt", "dev.txt"
MASKED, OTHER = 0.8, 0.1  # shares of the chosen tokens that become [MASK], or a random one


class CorpusDataModule(BaseDataModule):
    """Plain text, a sentence or paragraph per line, with empty lines between documents.

    Masks are drawn anew in each epoch, and once for validation.

    Args:
        root: A text file, or a folder with train.txt and maybe dev.txt.
        tokenizer: Folder with BERT's vocab.txt, or GPT-1's vocab.json and merges.txt.
        lower: Lower the case and drop accents, as BERT's uncased models do; GPT-1's always do. None
            for ``do_lower_case`` of the tokenizer's folder, or else True.
        max_tokens: Most tokens of a row.
        pack: Fill rows with consecutive lines of a document; else a line is a row. Longer lines are
            cut into several rows.
        mask_share: Share of the tokens that BERT predicts.
        val_share: Last share of the rows, to validate with if dev.txt is missing.
        batch_size: Rows per training batch and process.
        **options: Of ``BaseDataModule``.

    Raises:
        ValueError: An option is out of its range.
    """

    unit = "texts"
    layout = "a text file, or train.txt and dev.txt"
    example = "data=text_file data.root=/data/wiki.txt data.tokenizer=/data/bert-base-uncased"

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        lower: bool | None = None,
        max_tokens: int = 128,
        pack: bool = True,
        mask_share: float = 0.15,
        val_share: float = 0.05,
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        self.max_tokens = check_tokens(max_tokens)
        self.tokenizer_folder = None if tokenizer is None else Path(tokenizer).expanduser()
        self.lower, self.pack = lower, pack
        self.mask_share = check_share("mask_share", mask_share)
        self.val_share = check_share("val_share", val_share)
        self._tokenizer: Tokenizer | None = None

    def files(self) -> tuple[Path, Path | None]:
        """Return the files to train and to validate with; None to share one."""
        if self.root is not None and self.root.is_file():
            return self.root, None
        train, validation = self.folder / TRAIN, self.folder / VALIDATION
        lost = [] if train.is_file() else [str(train)]
        require_names(lost, "file of texts is missing", "pass data.root=<a text file>")
        return train, validation if validation.is_file() else None

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, read once.

        Raises:
            ValueError: Its folder is unknown.
        """
        if self._tokenizer is None:
            needs = "pass data.tokenizer=<folder with BERT's vocab.txt, or GPT's vocab.json and"
            missing = self.tokenizer_folder is None
            refuse("text", {f"needs a tokenizer: {needs} merges.txt>": missing})
            assert self.tokenizer_folder is not None
            self._tokenizer = read_tokenizer(self.tokenizer_folder, self.lower)
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
        """Return zero classes for plain text."""
        return {"num_classes": 0}

    @property
    def task_arguments(self) -> dict[str, Any]:
        """Return the metric of masked words."""
        return {"measured": ("words",)}

    def target_facts(self) -> dict[str, Any]:
        """Return zero classes for plain text."""
        return {"classes": 0}

    def target_identity(self) -> dict[str, Any]:
        """Return what is predicted."""
        return {"classes": ["words"]}

    def predict_only(self, **facts: Any) -> None:
        """Serve prediction alone; the tokenizer is that of the options or of the sample set."""
        super().predict_only()

    def build(self) -> dict[Split, SeededDataset]:
        """Read and tokenise the files."""
        first, second = self.files()
        train = self._rows(first)
        if second is None:
            count = max(1, round(self.val_share * len(train)))
            rule = (
                f"holds {len(train)} rows of data.max_tokens={self.max_tokens} tokens, too few to "
                f"validate with data.val_share={self.val_share}"
            )
            refuse(first, {rule: count >= len(train)})
            train, validation = train[:-count], train[-count:]
        else:
            validation = self._rows(second)
        built: dict[Split, SeededDataset] = {}
        parts: dict[Split, tuple[list[list[int]], Path]] = {
            "train": (train, first), "val": (validation, second or first),
        }  # fmt: skip
        for split, (rows, file) in parts.items():
            texts = Rows(self, rows, f"{file}, {split}")
            built[split] = self.seeded(texts, texts.name)
        return built

    def _rows(self, file: Path) -> list[list[int]]:
        lines = map(self.tokenizer().encode, read_plain_lines(file))
        rows = list(cut_rows(lines, self.max_tokens - 2, self.pack))
        refuse(file, {"holds no text": not rows})
        return rows

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return texts: of a file, one per line, or given as text; BERT fills [MASK] in.

        Args:
            inputs: A file, a text, or a list of texts.
        """
        lines = given_lines(inputs)
        tokenizer = self.tokenizer()
        rows = [encode_masked(tokenizer, line)[: self.max_tokens - 2] for line in lines]
        texts = Rows(self, rows, "input", content=lines)
        return TolerantDataset(texts, texts.name)

    def predicted_texts(self, index: int) -> Example:
        """Return the text of a sample of ``predict_dataloader``."""
        texts: Any = self._to_predict().dataset
        return texts.example(index)

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that fills rows up to one length."""
        return pad_texts


class Rows:
    """Rows of tokens: ``tokens``, ``segments``, ``mask``, ``masked``, ``chosen``, ``sample_id``.

    ``masked`` is what BERT reads, and ``chosen`` (L,) is True for the tokens to predict.

    Args:
        data: Its datamodule.
        rows: Tokens without the special ones at both ends.
        source: Name for messages.
        given: The texts, if a user gave them; then their [MASK] are chosen.
    """

    def __init__(
        self,
        data: CorpusDataModule,
        rows: Sequence[Sequence[int]],
        source: str,
        content: Sequence[str] | None = None,
    ) -> None:
        self.rows, self.source, self.given = rows, source, content
        self.tokenizer, self.share = data.tokenizer(), data.mask_share

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """Return the beginning of a row."""
        return f"{self.source} {index}: {self.example(index).texts[0][:60]}"

    def example(self, index: int) -> Example:
        """Return a row as text."""
        if self.given is not None:
            return Example((self.given[index],))
        return Example((self.tokenizer.decode(self.rows[index]),))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the tensors of a row; masks are drawn from torch's generator."""
        sample = join_texts(self.tokenizer, [self.rows[index]])
        tokens, mask = sample["tokens"], self.tokenizer.mask
        if mask is None or self.given is None:
            masked, is_target = draw_masks(tokens, self.tokenizer, self.share)
        else:
            masked, is_target = tokens, tokens == mask
        return {**sample, "masked": masked, "chosen": is_target, "sample_id": torch.tensor(index)}


def draw_masks(tokens: Tensor, tokenizer: Tokenizer, share: float) -> tuple[Tensor, Tensor]:
    """Choose tokens to predict, and replace most of them.

    At least one is chosen. Of those chosen, 80 % become [MASK], 10 % a random piece, 10 % stay.

    Args:
        tokens: A row with special tokens at both ends (L,).
        tokenizer: Its tokenizer.
        share: Share of the tokens to choose.

    Returns:
        Tokens for BERT to read, and True for the chosen ones, two of (L,).
    """
    inner = len(tokens) - 2
    count = max(1, round(share * inner)) if inner else 0
    is_target = torch.zeros(len(tokens), dtype=torch.bool)
    is_target[1 + torch.randperm(inner)[:count]] = True
    dice = torch.rand(len(tokens))
    masked = tokens.clone()
    if tokenizer.mask is not None:
        masked[is_target & (dice < MASKED)] = tokenizer.mask
    random = torch.randint(len(tokenizer), tokens.shape)
    replaced = is_target & (dice >= MASKED) & (dice < MASKED + OTHER)
    masked[replaced] = random[replaced]
    return masked, is_target


def cut_rows(lines: Iterator[list[int]], most: int, pack: bool) -> Iterator[list[int]]:
    """Yield rows of at most ``most`` tokens.

    Args:
        lines: Tokens of each line; an empty one ends a document.
        most: Tokens of a row.
        pack: Join consecutive lines of a document.
    """
    row: list[int] = []
    for line in lines:
        if row and (not pack or not line or len(row) + len(line) > most):
            yield row
            row = []
        row = row + line
        while len(row) > most:
            yield row[:most]
            row = row[most:]
    if row:
        yield row
