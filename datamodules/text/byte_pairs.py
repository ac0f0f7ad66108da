"""GPT-1's tokenizer: words are merged from letters, the most frequent pairs first.

Source: Radford et al., "Improving Language Understanding by Generative Pre-Training", 2018, Sec.
4.1; Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", ACL 2016, for
the merges. Words are split by BERT's rules, as in transformers.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datamodules.files.text_files import read_json, read_plain_lines
from datamodules.files.values import refuse
from datamodules.text.wordpiece import split_words

NUMBERS, MERGES = "vocab.json", "merges.txt"
UNKNOWN = "<unk>"
VERSION = "#version: 0.2"  # first line of the merges
WORD_END = "</w>"
# Tokens that fine-tuning adds behind the vocabulary, in the names of the authors' code.
ADDED = ("_start_", "_delimiter_", "_classify_")


class BytePairs:
    """GPT-1's tokenizer by its vocabulary and merges; three tokens of fine-tuning come last.

    Args:
        numbers: Numbers of the pieces; those that end a word end with ``</w>``.
        merges: Pairs of pieces, the first to merge first.

    Raises:
        ValueError: The numbers are not 0 to N - 1, or lack ``<unk>``.
    """

    mask = None  # GPT predicts the next token instead
    lower = True

    def __init__(self, numbers: Mapping[str, int], merges: Iterable[tuple[str, str]]) -> None:
        is_integral = all(type(place) is int for place in numbers.values())
        numbered = is_integral and sorted(numbers.values()) == list(range(len(numbers)))
        rule = f"must number its pieces from 0 without gaps and hold {UNKNOWN}"
        refuse(NUMBERS, {rule: not numbered or UNKNOWN not in numbers})
        self.numbers = dict(numbers)
        ordered = sorted(self.numbers, key=lambda piece: self.numbers[piece])
        self.pieces = (*ordered, *ADDED)
        self.start, self.separator, self.end = (len(ordered) + index for index in range(3))
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._cut = functools.lru_cache(maxsize=100_000)(self._cut_word)

    def __reduce__(self) -> tuple[Any, ...]:
        return BytePairs, (self.numbers, [*self.ranks])

    @classmethod
    def from_folder(cls, folder: Path) -> BytePairs:
        """Read vocab.json and merges.txt, with a pair per line after the first."""
        lines = read_plain_lines(folder / MERGES)
        if lines[0].startswith("#version"):
            lines = lines[1:]
        pairs = [line.split() for line in lines if line.strip()]
        strays = [pair for pair in pairs if len(pair) != 2]
        refuse(folder / MERGES, {"must hold two pieces per line, not": strays[:1]})
        return cls(read_json(folder / NUMBERS), [(first, second) for first, second in pairs])

    def write(self, folder: Path) -> list[Path]:
        """Write vocab.json and merges.txt to a folder and return them."""
        files = [folder / NUMBERS, folder / MERGES]
        files[0].write_text(json.dumps(self.numbers, ensure_ascii=False), encoding="utf-8")
        lines = [VERSION, *(" ".join(pair) for pair in self.ranks)]
        files[1].write_text("\n".join(lines) + "\n", encoding="utf-8")
        return files

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text's pieces, without special tokens."""
        return [number for word in split_words(text) for number in self._cut(word)]

    def decode(self, numbers: Iterable[int]) -> str:
        """Return pieces as text in lower case."""
        return "".join(self.pieces[number] for number in numbers).replace(WORD_END, " ").strip()

    def _cut_word(self, word: str) -> tuple[int, ...]:
        parts = [*word[:-1], word[-1] + WORD_END]
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            parts = _merged(parts, best)
        unknown_number = self.numbers[UNKNOWN]
        return tuple(self.numbers.get(part, unknown_number) for part in parts)


def _merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """Join every occurrence of a pair, from left to right."""
    joined: list[str] = []
    place = 0
    while place < len(parts):
        two = tuple(parts[place : place + 2]) == pair
        joined.append("".join(pair) if two else parts[place])
        place += 1 + two
    return joined
