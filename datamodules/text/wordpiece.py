"""BERT's tokenizer: words and punctuation, cut into the longest known pieces.

Source: Devlin et al., "BERT", NAACL 2019, with the rules of the authors' code; Wu et al., "Google's
Neural Machine Translation System", 2016 (WordPiece). The package tokenizers, which has it too, is
outside the base install.
"""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datamodules.files.folders import require_names
from datamodules.files.text_files import read_json, read_plain_lines
from datamodules.files.values import refuse

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, CLASS, SEPARATOR, MASK)
LONGEST = 100  # letters of a word; longer ones are unknown
VOCABULARY, CONFIG = "vocab.txt", "tokenizer_config.json"
# Chinese, Japanese and Korean ideographs, each a word of its own.
IDEOGRAPHS = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


def split_words(text: str, lower: bool = True, strip_accents: bool | None = None) -> list[str]:
    """Return words, punctuation marks and ideographs.

    Args:
        text: The text.
        lower: Lower the case.
        strip_accents: Drop accents; None for the value of ``lower``.
    """
    text = text.lower() if lower else text
    if lower if strip_accents is None else strip_accents:
        decomposed = unicodedata.normalize("NFD", text)
        text = "".join(letter for letter in decomposed if unicodedata.category(letter) != "Mn")
    spaced = []
    for letter in text:
        kind = unicodedata.category(letter)
        if letter in "\t\n\r" or kind == "Zs":
            spaced.append(" ")
        elif letter in "\x00\ufffd" or kind.startswith("C"):
            continue
        elif _stands_alone(letter, kind):
            spaced.append(f" {letter} ")
        else:
            spaced.append(letter)
    return "".join(spaced).split()


def _stands_alone(letter: str, kind: str) -> bool:
    code = ord(letter)
    ascii_mark = 33 <= code <= 126 and not letter.isalnum()
    return ascii_mark or kind.startswith("P") or any(a <= code <= b for a, b in IDEOGRAPHS)


class WordPiece:
    """BERT's tokenizer by a vocabulary, whose pieces inside a word begin with ##.

    Args:
        pieces: The vocabulary in order.
        lower: Lower the case.
        strip_accents: Drop accents; None for the value of ``lower``.

    Raises:
        ValueError: A special token is missing.
    """

    def __init__(
        self, pieces: Iterable[str], lower: bool = True, strip_accents: bool | None = None
    ) -> None:
        self.pieces = tuple(pieces)
        self.numbers = {piece: number for number, piece in enumerate(self.pieces)}
        self.lower, self.strip_accents = lower, strip_accents
        missing = [token for token in SPECIAL if token not in self.numbers]
        refuse(f"the vocabulary of {len(self)} pieces", {"lacks": missing})
        self.start, self.separator, self.end, self.mask = (
            self.numbers[token] for token in (CLASS, SEPARATOR, SEPARATOR, MASK)
        )
        self._cut = functools.lru_cache(maxsize=100_000)(self._cut_word)

    def __reduce__(self) -> tuple[Any, ...]:
        return WordPiece, (self.pieces, self.lower, self.strip_accents)

    @classmethod
    def from_folder(cls, folder: Path, lower: bool | None = None) -> WordPiece:
        """Read vocab.txt, with a piece per line, and the case of tokenizer_config.json.

        Args:
            folder: The folder.
            lower: Overrides the folder's case and accents; without either, the case is lowered.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: A file is malformed.
        """
        file = folder / VOCABULARY
        needs = f"pass data.tokenizer=<folder with BERT's {VOCABULARY}, or GPT's vocab.json and"
        lost = [] if file.is_file() else [str(file)]
        require_names(lost, "vocabulary is missing", f"{needs} merges.txt>")
        config = folder / CONFIG
        options = read_json(config) if lower is None and config.is_file() else {}
        case = options.get("do_lower_case", True) if lower is None else lower
        accents = options.get("strip_accents")
        valid = {case, accents} <= {True, False, None}
        refuse(config, {"do_lower_case and strip_accents must be true or false": not valid})
        return cls(read_plain_lines(file), case, accents)

    def write(self, folder: Path) -> list[Path]:
        """Write vocab.txt to a folder and return it."""
        file = folder / VOCABULARY
        file.write_text("\n".join(self.pieces) + "\n", encoding="utf-8")
        return [file]

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of a text's pieces, without special tokens."""
        words = split_words(text, self.lower, self.strip_accents)
        return [number for word in words for number in self._cut(word)]

    def decode(self, numbers: Iterable[int]) -> str:
        """Return pieces as text, in lower case if the tokenizer lowers it."""
        return " ".join(self.pieces[number] for number in numbers).replace(" ##", "")

    def _cut_word(self, word: str) -> tuple[int, ...]:
        numbers: list[int] = []
        start = 0
        while start < len(word):
            if len(word) > LONGEST:
                return (self.numbers[UNKNOWN],)
            mark = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if mark + word[start:end] in self.numbers), None)
            if end is None:
                return (self.numbers[UNKNOWN],)
            numbers.append(self.numbers[mark + word[start:end]])
            start = end
        return tuple(numbers)


def train_vocabulary(texts: Iterable[str], size: int) -> list[str]:
    """Return special tokens, letters inside and at the start of words, and the most frequent words.

    A word that is another one and a last letter, such as a plural, is left to two pieces.

    Args:
        texts: Texts to count words in.
        size: Most pieces.
    """
    counts = Counter(word for text in texts for word in split_words(text))
    letters = sorted({letter for word in counts for letter in word})
    pieces = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters)])
    for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(pieces) >= size:
            break
        if word[:-1] not in counts:
            pieces.setdefault(word)
    return list(pieces)
