"""Sample data: sentences of a small grammar, right or wrong, in CoLA's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from datamodules.base import check_minimum
from datamodules.files.cache import cache_root
from datamodules.sample.datamodules import SampleDataModule
from datamodules.text.glue import GlueDataModule
from datamodules.text.wordpiece import VOCABULARY, train_vocabulary

VOCABULARY_SIZE = 400
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
        self.set_name = f"grammar2-{num_train}-{num_val}-seed{sample_seed}"

    def write(self, folder: Path) -> None:
        """Write both tsv files, corpus.txt of right sentences, and the tokenizer's vocab.txt."""
        random = np.random.default_rng(self.sample_seed)
        seen: set[str] = set()
        texts: list[str] = []
        for name, count in self.sentences.items():
            lines: list[str] = []
            while len(lines) < count:
                label = len(lines) % 2
                text = make_sentence(random, right=bool(label))
                if text in seen:
                    continue
                seen.add(text)
                lines.append(f"grammar\t{label}\t{'' if label else '*'}\t{text}")
                if name == "train":
                    texts.append(text)
            (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
        (folder / "corpus.txt").write_text("\n".join(texts[1::2]) + "\n")
        pieces = train_vocabulary(texts, VOCABULARY_SIZE)
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
