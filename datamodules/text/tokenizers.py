"""The tokenizer of a local folder, and texts as rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from datamodules.files.values import file_errors
from datamodules.text.byte_pairs import MERGES, NUMBERS, BytePairs
from datamodules.text.wordpiece import MASK, VOCABULARY, WordPiece

Tokenizer = WordPiece | BytePairs


def read_tokenizer(folder: Path, lower: bool | None = None) -> Tokenizer:
    """Read BERT's tokenizer (vocab.txt), or GPT-1's (vocab.json and merges.txt).

    Args:
        folder: Folder of the files.
        lower: Lower the case and drop accents; None for the folder's ``do_lower_case``.

    Raises:
        FileNotFoundError: The folder holds neither.
        ValueError: A file is malformed.
    """
    is_gpt = (folder / NUMBERS).is_file() and (folder / MERGES).is_file()
    with file_errors(folder, " holds no tokenizer of BERT or GPT-1:"):
        if is_gpt and not (folder / VOCABULARY).is_file():
            return BytePairs.from_folder(folder)
        return WordPiece.from_folder(folder, lower)


def join_texts(tokenizer: Tokenizer, parts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return ``tokens``, ``segments`` and ``mask`` (L,) of encoded texts with special tokens."""
    tokens, segments = [tokenizer.start], [0]
    for segment, part in enumerate(parts):
        last = segment == len(parts) - 1
        tokens += [*part, tokenizer.end if last else tokenizer.separator]
        segments += [segment] * (len(part) + 1)
    return {
        "tokens": torch.tensor(tokens), "segments": torch.tensor(segments),
        "mask": torch.ones(len(tokens), dtype=torch.bool),
    }  # fmt: skip


def encode_masked(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the numbers of a text's pieces, in which [MASK] is a token of its own."""
    if tokenizer.mask is None or MASK not in text:
        return tokenizer.encode(text)
    first, *rest = (tokenizer.encode(part) for part in text.split(MASK))
    return [*first, *(number for part in rest for number in (tokenizer.mask, *part))]


def cut_to(parts: list[list[int]], most: int) -> list[list[int]]:
    """Cut the ends of texts, the longer one first, until both have ``most`` tokens together.

    Of two that are equally long the second is cut, as by BERT's authors and by the tokenizers in
    Python of transformers; those in Rust cut the first one.
    """
    parts = [list(part) for part in parts]
    while sum(map(len, parts)) > most:
        max(reversed(parts), key=len).pop()
    return parts


def pad_texts(samples: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch: shorter texts end with padding, token 0, whose mask is False."""
    length = max(len(sample["tokens"]) for sample in samples)
    batch = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if values[0].ndim:
            values = [torch.nn.functional.pad(value, (0, length - len(value))) for value in values]
        batch[name] = torch.stack(values)
    return batch
