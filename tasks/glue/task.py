"""Classes and scores of texts, by the metrics of GLUE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from backbones.checkpoints.opening import Checkpoint
from heads.language_model import LanguageModel
from tasks.engine.base import BaseTask
from tasks.engine.batches import Batch, Row, Summed, input_names
from tasks.engine.classes import check_classes
from tasks.glue.answers import Answers
from tasks.glue.family import FAMILY, METRICS
from tasks.glue.submission import submission_name, write_submission
from tasks.glue.words import describe_words, word_answer

WIDTH, LINE, LETTERS = 860, 18, 90  # pixels, pixels, letters of a text that is drawn


class GlueTask(BaseTask):
    """Fine-tuning on a set of GLUE, or pretraining; ``score`` is the mean metric in percent.

    Args:
        model: See ``BaseTask``.
        class_names: Names of the classes; empty for a score.
        measured: Names of the metrics.
        **options: Options of ``BaseTask``.

    Raises:
        ValueError: An unknown metric.
    """

    family = FAMILY
    metric_stores = ("answers",)
    preview_images = 12

    def __init__(
        self,
        model: nn.Module,
        class_names: Sequence[str] = (),
        measured: Sequence[str] = ("accuracy",),
        *,
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        ema: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer=optimizer, schedule=schedule, ema=ema)
        unknown_names = [name for name in measured if name not in METRICS]
        if unknown_names or not measured:
            raise ValueError(f"measured must name some of {', '.join(METRICS)}; got {measured}")
        self.class_names, self.measured = tuple(class_names), tuple(measured)
        self.answers = Answers()

    @property
    def headline(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the names of the score and of the set's metrics."""
        return ("score", *self.measured)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of all metrics."""
        return (*self.headline, "mismatched")

    def update_metrics(self, batch: Batch, predictions: Tensor) -> None:
        """Keep answers and labels."""
        guesses, labels, groups = self.model.answers(batch, predictions)
        self.answers.update(guesses.double(), labels.double(), groups)

    def compute_metrics(self) -> dict[str, Tensor]:
        """Return the metrics in percent; of MNLI those of the matched part, and ``mismatched``."""
        guesses, labels, groups = self.answers.compute()
        first = groups == 0
        figures = {
            name: 100 * measure(name, guesses[first], labels[first]) for name in self.measured
        }
        metrics = {"score": sum(figures.values()) / len(figures), **figures}
        if (~first).any():
            metrics["mismatched"] = 100 * measure(self.measured[0], guesses[~first], labels[~first])
        return {name: torch.tensor(value, dtype=torch.float32) for name, value in metrics.items()}

    @property
    def answers_metric(self) -> str:
        """Return "accuracy", or "loss" where the answers are scores or words."""
        classes = getattr(self.model, "num_classes", 1)
        return "accuracy" if classes > 1 else "loss"

    def sample_values(self, batch: Batch, predictions: Tensor) -> Tensor:
        """Return 1 for each text with the right class, else 0, or the loss of each text (B,)."""
        if self.answers_metric == "accuracy":
            guesses, labels, _ = self.model.answers(batch, predictions)
            return guesses == labels
        if not isinstance(self.model, LanguageModel):
            return self.model.losses(predictions, batch["labels"])
        words = self.model.predicted(batch)[1]
        losses = predictions.new_zeros(words.shape, dtype=torch.float64)
        losses[words] = self.model.losses(predictions, batch).double()
        return losses.sum(1) / words.sum(1)

    def reset_metrics(self) -> None:
        """Forget all answers."""
        self.answers.reset()

    def evaluation_loss(self, batch: Batch, predictions: Tensor) -> Summed:
        """Return the summed loss and the number of texts."""
        language = isinstance(self.model, LanguageModel)
        losses = self.model.losses(predictions, batch if language else batch["labels"]).double()
        return losses.sum(), torch.tensor(len(losses), device=losses.device)

    def target_state(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"class_names": list(self.class_names)}

    @classmethod
    def targets_of(cls, checkpoint: Checkpoint) -> dict[str, Any] | None:
        """Return nothing: the set in the config of a run decides its classes."""
        return {}

    def check_targets(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of other classes."""
        if self.class_names and checkpoint.values.get("class_names"):
            check_classes(checkpoint.values, self.class_names, checkpoint.path, option="data.set")

    def describe(self, batch: Batch, datamodule: Any) -> list[Row]:
        """Return per text ``input``, its name, ``texts``, and an answer.

        The answer is ``class`` with its ``share``, or ``score``; of a language model, see
        ``describe_words``.
        """
        names = input_names(batch, datamodule, "text")
        if isinstance(self.model, LanguageModel):
            return describe_words(self.model, batch, names, datamodule)
        rows = []
        predicted = self.model.predict(batch)
        numbers = batch["sample_id"].tolist()
        for name, number, logits in zip(names, numbers, predicted, strict=True):
            row: Row = {"input": name, "texts": list(datamodule.predicted_texts(number).texts)}
            if self.class_names:
                share, best = logits.float().softmax(0).max(0)
                row |= {"class": self.class_names[int(best)], "share": round(share.item(), 6)}
            else:
                row["score"] = round(logits.item(), 4)
            rows.append(row)
        return rows

    def answer(self, row: Row) -> str:
        """Return the class with its share, the score, or the guessed words."""
        if "words" in row:
            return word_answer(row)
        if "score" in row:
            return f"{row['score']:.3f}"
        return f"{row['class']} ({100 * row['share']:.1f} %)"

    def write_results(self, folder: Path, rows: Sequence[Row]) -> None:
        """Write the answers as a tsv file for GLUE's server, named after the set."""
        if isinstance(self.model, LanguageModel) or not rows:
            return
        first = rows[0]["input"].partition(" ")[0]
        name = submission_name(self.data.kind.folder, first)
        write_submission(folder / name, rows)

    @torch.no_grad()
    def preview(self, batch: Batch, datamodule: Any) -> list[Image.Image]:
        """Draw a table of texts with answers and, if known, labels."""
        lines: list[tuple[str, str]] = []
        labels = batch.get("labels")
        for index, row in enumerate(self.describe(batch, datamodule)):
            text = self.answer(row)
            right = True
            if labels is not None and self.class_names:
                truth = self.class_names[int(labels[index])]
                right = truth == row["class"]
                text += f", labelled {truth}"
            elif "truth" in row:
                right = row["words"] == row["truth"]
            elif labels is not None:
                text += f", labelled {labels[index].item():.2f}"
            colour = "black" if right else "firebrick"
            lines += [(f"{sentence[:LETTERS]}", "dimgray") for sentence in row["texts"]]
            lines.append((f"    {text}", colour))
        canvas = Image.new("RGB", (WIDTH, LINE * len(lines) + LINE), "white")
        draw = ImageDraw.Draw(canvas)
        for number, (line, colour) in enumerate(lines):
            # Pillow's own font ends with Latin-1.
            latin_line = line.encode("latin-1", "replace").decode("latin-1")
            draw.text((10, LINE // 2 + LINE * number), latin_line, fill=colour)
        return [canvas]


def measure(name: str, guesses: Tensor, labels: Tensor) -> float:
    """Return a metric of GLUE from 0 (or -1) to 1; 0 where it is undefined.

    Args:
        name: A key of ``METRICS``.
        guesses: Classes or scores (N,).
        labels: (N,).
    """
    guesses, labels = guesses.double(), labels.double()
    if name in ("accuracy", "words"):
        return (guesses == labels).double().mean().item()
    if name == "f1":
        hits = ((guesses == 1) & (labels == 1)).sum().item()
        return 2 * hits / max(1, int((guesses == 1).sum() + (labels == 1).sum()))
    if guesses.std(correction=0) == 0 or labels.std(correction=0) == 0:
        return 0.0
    if name == "spearman":
        from scipy.stats import spearmanr  # a second, which prediction saves

        return float(spearmanr(guesses.cpu().numpy(), labels.cpu().numpy()).statistic)
    # Of two classes, Pearson's correlation is Matthews'.
    return torch.corrcoef(torch.stack([guesses, labels]))[0, 1].item()
