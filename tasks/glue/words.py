"""Predicted words of texts, for ``protocol=mlm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from heads.language_model import LanguageModel
from tasks.engine.batches import Row


def describe_words(
    model: LanguageModel, batch: Mapping[str, Tensor], names: Sequence[str], datamodule: Any
) -> list[Row]:
    """Return per text ``input``, its name, ``texts``, the guessed ``words``, and the ``truth``.

    Of BERT, ``texts`` shows the masks, and words that a user masked lack ``truth``. Of GPT,
    ``words`` has a guess after each token.
    """
    tokenizer = datamodule.tokenizer()
    guesses = model.predict(batch).argmax(1).tolist()
    pieces = batch["tokens" if model.backbone.causal else "masked"]
    _, words = model.predicted(batch)
    rows = []
    for index, name in enumerate(names):
        count = int(words[index].sum())
        numbers, guesses = guesses[:count], guesses[count:]
        truth = batch["tokens"][index][words[index]].tolist()
        text = pieces[index][batch["mask"][index]].tolist()[1:-1]
        row: Row = {
            "input": name,
            "texts": [tokenizer.decode(text)],
            "words": [tokenizer.pieces[number] for number in numbers],
        }
        if truth and (model.backbone.causal or tokenizer.mask not in truth):
            row["truth"] = [tokenizer.pieces[number] for number in truth]
        rows.append(row)
    return rows


def word_answer(row: Row) -> str:
    """Return the guessed words as a line."""
    text = " ".join(row["words"])
    if not text:
        return "the text lacks [MASK], a word to predict"
    if "truth" not in row:
        return text
    right = sum(word == truth for word, truth in zip(row["words"], row["truth"], strict=True))
    return f"{right} of {len(row['words'])} right: {text}"
