"""Similarity of layers and tokens: CKA within and between networks, oversmoothing, rank.

CKA (linear, on flattened maps) compares the outputs of all blocks for the same images. It compares
each network with itself, and the first network with each other one. Token similarity is the mean
cosine between the tokens of an image (1: all equal); the effective rank is the number of directions
used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tools.analyses import Findings
from tools.analyses.figures import curves, new_figure, wrap_text

if TYPE_CHECKING:
    from torch import Tensor

    from tools.analyses.subjects import Subject

OPTIONS = {"images": "32"}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "block": ("block", "{}"),
    "layer": ("module", "{}"),
    "similarity": ("token similarity", "{:.3f}"),
    "rank": ("effective rank", "{:.1f}"),
    "rank_share": ("of the possible", "{:.1%}"),
    "to_last": ("CKA to last block", "{:.3f}"),
}


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Measure the similarities within each network, and between the first and the others."""
    from backbones.analysis.similarity import alignments

    rows: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    similarity: dict[str, list[float]] = {}
    rank: dict[str, list[float]] = {}
    all_grams = []
    for subject in subjects:
        layers, grams = _measure(subject)
        all_grams.append(grams)
        alignment = alignments(grams, grams)
        for record, to_last in zip(layers, alignment[:, -1].tolist(), strict=True):
            record["to_last"] = to_last
        summary += layers
        similarity[subject.label] = [record["similarity"] for record in layers]
        rank[subject.label] = [record["rank_share"] for record in layers]
    pairs = [(index, index) for index in range(len(subjects))]
    pairs += [(0, index) for index in range(1, len(subjects))]
    panels = []
    for first, second in pairs:
        matrix = alignments(all_grams[first], all_grams[second])
        labels = subjects[first].label, subjects[second].label
        panels.append((*labels, matrix))
        rows += [
            {"backbone": labels[0], "block": a + 1, "other": labels[1], "other_block": b + 1,
             "cka": float(value)}
            for a, line in enumerate(matrix) for b, value in enumerate(line)
        ]  # fmt: skip
    figures = {
        "cka": _draw(panels),
        "token_similarity": curves(similarity, "Similarity of tokens", "mean cosine"),
        "rank": curves(rank, "Effective rank of the tokens", "share of the possible"),
    }
    return Findings([*summary, *rows], summary, COLUMNS, figures)


def _measure(subject: Subject) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    import torch

    from backbones.analysis.capturing import block_maps
    from backbones.analysis.similarity import centred_gram, effective_rank, token_similarity

    features: dict[str, list[Tensor]] = {}
    similarities: dict[str, list[Tensor]] = {}
    ranks: dict[str, list[Tensor]] = {}
    possible: dict[str, int] = {}
    for batch in subject.batches():
        for name, maps in block_maps(subject.backbone, batch.images).items():
            features.setdefault(name, []).append(maps.flatten(1).float())
            similarities.setdefault(name, []).append(token_similarity(maps))
            ranks.setdefault(name, []).append(effective_rank(maps))
            possible[name] = min(maps.shape[1], maps.shape[2] * maps.shape[3])
    layers = []
    for block, name in enumerate(features, start=1):
        mean_rank = float(torch.cat(ranks[name]).mean())
        layers.append({
            "backbone": subject.label, "block": block, "layer": name,
            "similarity": float(torch.cat(similarities[name]).mean()), "rank": mean_rank,
            "rank_share": mean_rank / possible[name],
        })  # fmt: skip
    return layers, {name: centred_gram(torch.cat(parts)) for name, parts in features.items()}


def _draw(panels: Sequence[tuple[str, str, Tensor]]) -> Any:
    figure, axes = new_figure(1, len(panels), 3.4, 3.4)
    for axis, (first, second, matrix) in zip(axes[0], panels, strict=True):
        rows, columns = (side + 0.5 for side in matrix.shape)
        image = axis.imshow(
            matrix, cmap="magma", vmin=0, vmax=1, origin="lower", extent=(0.5, columns, 0.5, rows)
        )
        axis.set_xlabel(f"block of {wrap_text(second, 30)}", fontsize=7)
        axis.set_ylabel(f"block of {wrap_text(first, 30)}", fontsize=7)
    figure.colorbar(image, ax=axes[0, -1], label="linear CKA", shrink=0.8)
    return figure
