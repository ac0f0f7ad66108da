"""Sample data: sentences of a grammar, right or wrong, in CoLA's format; right ones as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.base import check_minimum
from datamodules.files.cache import cache_root
from datamodules.sample.base import SampleDataModule
from datamodules.text.corpus import CorpusDataModule
from datamodules.text.glue import GlueDataModule
from datamodules.text.tokenizers import Tokenizer, read_tokenizer
from datamodules.text.wordpiece import VOCABULARY, train_vocabulary

VOCABULARY_SIZE = 400
CORPUS, CORPUS_SENTENCES = "corpus.txt", 20_000
NOUNS = ("dog", "cat", "bird", "girl", "boy", "teacher", "doctor", "singer", "farmer", "painter",
         "student", "writer")  # fmt: skip
VERBS = ("chase", "see", "like", "help", "call", "follow", "greet", "draw", "answer", "know")
ADJECTIVES = ("small", "old", "young", "quiet", "happy", "tall", "brave", "clever")
PLACES = ("near", "behind", "beside", "with")
ADVERBS = ("often", "rarely", "gladly", "today", "slowly")


class SampleGlue(SampleDataModule, GlueDataModule):
    """Sentences, half of them with a wrong verb form or two words exchanged.

    The verb agrees with its subject, from which a phrase of the other number may separate it.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        num_train: Sentences to train with.
        num_val: Sentences to validate with.
        sample_seed: Seed of the generated sentences.
        options: Options of ``GlueDataModule``; ``set`` is "cola".
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_train: int = 4000,
        num_val: int = 500,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(None, **{**options, "set": "cola"})
        self.base = Path(root).expanduser() if root is not None else cache_root()
        self.sentences = {
            "train": check_minimum("num_train", num_train, 2),
            "dev": check_minimum("num_val", num_val, 2),
        }
        self.sample_seed = check_minimum("sample_seed", sample_seed, 0)
        self.set_name = set_name(self.sentences, sample_seed)

    def write(self, folder: Path) -> None:
        """Write the files of ``write_grammar``."""
        write_grammar(folder, self.sentences, self.sample_seed)


class SampleCorpus(SampleDataModule, CorpusDataModule):
    """Right sentences of the grammar to pretrain on, with the tokenizer of ``SampleGlue``.

    Args:
        root: Folder of all sample datasets; None means ``$MIXERLAB_CACHE`` or
            ``~/.cache/mixerlab``.
        num_train: Of ``SampleGlue``, whose files have the same tokenizer.
        num_val: Of ``SampleGlue``.
        sample_seed: Seed of the generated sentences.
        options: Options of ``CorpusDataModule``.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        num_train: int = 4000,
        num_val: int = 500,
        sample_seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(None, **options)
        self.base = Path(root).expanduser() if root is not None else cache_root()
        self.sentences = {
            "train": check_minimum("num_train", num_train, 2),
            "dev": check_minimum("num_val", num_val, 2),
        }
        self.sample_seed = check_minimum("sample_seed", sample_seed, 0)
        self.set_name = set_name(self.sentences, sample_seed)

    def write(self, folder: Path) -> None:
        """Write the files of ``write_grammar``."""
        write_grammar(folder, self.sentences, self.sample_seed)

    def files(self) -> tuple[Path, Path | None]:
        """Return the file of right sentences."""
        return self.folder / CORPUS, None

    def tokenizer(self) -> Tokenizer:
        """Return the sample set's tokenizer, or that of ``data.tokenizer``."""
        if self._tokenizer is None and self.tokenizer_folder is None:
            self.prepare_data()
            self._tokenizer = read_tokenizer(self.folder)
        return super().tokenizer()


def set_name(sentences: Mapping[str, int], seed: int) -> str:
    """Return the name of the folder of ``write_grammar``."""
    return f"grammar3-{sentences['train']}-{sentences['dev']}-seed{seed}"


def write_grammar(folder: Path, sentences: Mapping[str, int], seed: int) -> None:
    """Write train.tsv and dev.tsv, corpus.txt of further right sentences, and vocab.txt.

    Args:
        folder: An empty folder.
        sentences: Number of sentences by file.
        seed: Seed of all of them.
    """
    random = np.random.default_rng(seed)
    texts_seen: set[str] = set()
    texts: dict[str, list[str]] = {}
    for name, count in {**sentences, CORPUS: CORPUS_SENTENCES}.items():
        sentences_made = texts.setdefault(name, [])
        while len(sentences_made) < count:
            text = make_sentence(random, right=name == CORPUS or len(sentences_made) % 2 == 1)
            if text not in texts_seen:
                texts_seen.add(text)
                sentences_made.append(text)
    for name in sentences:
        marks = [(number % 2, text) for number, text in enumerate(texts[name])]
        lines = [f"grammar\t{label}\t{'' if label else '*'}\t{text}" for label, text in marks]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    (folder / CORPUS).write_text("\n".join(texts[CORPUS]) + "\n")
    pieces = train_vocabulary(texts["train"], VOCABULARY_SIZE)
    (folder / VOCABULARY).write_text("\n".join(pieces) + "\n")


def make_sentence(random: np.random.Generator, right: bool) -> str:
    """Return a sentence; a wrong one has another verb form, or two neighbours exchanged."""

    def pick(words: tuple[str, ...]) -> str:
        return str(words[random.integers(len(words))])

    def phrase(plural: bool) -> list[str]:
        adjective = [pick(ADJECTIVES)] if random.random() < 0.4 else []
        return ["the", *adjective, pick(NOUNS) + "s" * plural]

    plural = bool(random.integers(2))
    agrees = right or random.random() < 0.4
    subject = phrase(plural)
    if random.random() < 0.5:
        subject += [pick(PLACES), *phrase(bool(random.integers(2)))]
    verb = pick(VERBS) + "s" * (plural != agrees)
    end = [pick(ADVERBS)] if random.random() < 0.5 else []
    words = [*subject, verb, *phrase(bool(random.integers(2))), *end]
    if not right and agrees:
        # The article moves behind its noun or adjective, which is never right.
        place = int(random.choice([i for i, word in enumerate(words) if word == "the"]))
        words[place], words[place + 1] = words[place + 1], words[place]
    return " ".join(words).capitalize() + "."
