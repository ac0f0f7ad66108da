"""Coefficients of mixers: sparsity, keys of classes, coefficient maps (FFNet Fig. 2, 4 to 7).

The coefficient of a key is the activation of a hidden channel of an FFN. Sparsity is the share of
coefficients above ``threshold``, per layer. The most activated keys of each class are listed for
the mixer ``mixer`` (a name; default: the last one). So is the share of classes that have a key
among their top five. The map of the top key of an image's class is drawn over the image, titled
with its mean. key=N draws another key for all images. More than the usual 16 images make the
ranking of keys more stable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tools.analyses import Findings
from tools.analyses.figures import (
    curves,
    denormalise,
    draw_overlay,
    hide_axes,
    new_figure,
    resize_map,
    wrap_text,
)

if TYPE_CHECKING:
    from tools.analyses.subjects import Subject

OPTIONS = {"threshold": "0", "mixer": "", "key": "", "images": "100"}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "layer": ("module", "{}"),
    "keys": ("keys", "{}"),
    "activated": ("activated", "{:.1%}"),
    "mean": ("mean", "{:.4f}"),
    "first_key": ("key in most top 5", "{}"),
    "share_in_top5": ("of classes", "{:.1%}"),
}
DRAWN = 6  # images


def analyse(subjects: Sequence[Subject], options: Mapping[str, str]) -> Findings:
    """Analyse the sparsity of all mixers, and the keys of one."""
    threshold = _threshold(options["threshold"])
    rows: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    lines: dict[str, list[float]] = {}
    columns = []
    for subject in subjects:
        result = _measure(subject, threshold, options["mixer"])
        lines |= _lines(subject, result.layers)
        summary += result.layers
        rows += [*result.layers, *result.classes()]
        columns.append((subject, result.tiles(subject, options["key"])))
    figures = {
        "sparsity": curves(lines, f"Coefficients above {threshold:g}", "share", "mixer"),
        "coefficients": _draw(columns),
    }
    return Findings(rows, summary, COLUMNS, figures)


def _lines(subject: Subject, layers: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the activated shares over depth: one line per network or per kind of mixer."""
    kinds = {
        "token mixers": subject.backbone.token_mixers(),
        "channel mixers": subject.backbone.channel_mixers(),
    }
    shares = {
        kind: [record["activated"] for record in layers if record["layer"] in names]
        for kind, names in kinds.items()
    }
    shares = {kind: values for kind, values in shares.items() if values}
    if len(shares) < 2:
        return {subject.label: [record["activated"] for record in layers]}
    return {f"{subject.label}, {kind}": values for kind, values in shares.items()}


class _Measured:
    """Measurements of one network."""

    def __init__(self, subject: Subject, mixer: str) -> None:
        self.subject, self.mixer = subject, mixer
        self.layers: list[dict[str, Any]] = []
        self.ranking: Any = None
        self.drawn: list[tuple[Any, Any, int]] = []

    def classes(self) -> list[dict[str, Any]]:
        """Return a row per class: its five most activated keys and their mean activation."""
        if self.ranking is None:
            return []
        means, keys = self.ranking.means(), self.ranking.top_keys(5)
        return [
            {
                "backbone": self.subject.label,
                "layer": self.mixer,
                "class": self.subject.class_name(int(label)),
                "top_keys": " ".join(map(str, top.tolist())),
                "top_means": " ".join(f"{float(values[key]):.5g}" for key in top),
            }
            for label, top, values in zip(self.ranking.seen(), keys, means, strict=True)
        ]

    def tiles(self, subject: Subject, key: str) -> list[tuple[Any, Any, str]]:
        """Return image, coefficient map and title of the drawn images."""
        tiles = []
        first = {}
        if self.ranking is not None:
            keys = self.ranking.top_keys(1).flatten().tolist()
            first = dict(zip(self.ranking.seen().tolist(), keys, strict=True))
        for image, maps, label in self.drawn:
            if key and (not key.isdecimal() or int(key) >= len(maps)):
                raise ValueError(
                    f"key must be from 0 to {len(maps) - 1} of {self.mixer}; got {key!r}"
                )
            # Without a class, the most activated key of this image.
            row = int(key) if key else first.get(label, int(maps.mean((1, 2)).argmax()))
            title = subject.class_name(label) if label >= 0 else ""
            tiles.append((image, maps[row], f"{title} key {row} ({float(maps[row].mean()):.3g})"))
        return tiles


def _measure(subject: Subject, threshold: float, mixer: str) -> _Measured:
    from backbones.analysis.capturing import coefficients
    from backbones.analysis.keys import KeyRanking, activated_share

    totals: dict[str, list[float]] = {}
    result = _Measured(subject, mixer)
    images = 0
    for batch in subject.batches():
        maps = coefficients(subject.backbone, batch.images)
        if not maps:
            raise ValueError(
                f"{subject.label} needs a mixer that sums values by coefficients on its maps"
            )
        result.mixer = mixer or list(maps)[-1]
        if result.mixer not in maps:
            from backbones.options import unknown

            raise ValueError(unknown("mixer with coefficients", result.mixer, list(maps)))
        for name, map_ in maps.items():
            total = totals.setdefault(name, [0.0, 0.0, float(map_.shape[1])])
            total[0] += activated_share(map_, threshold) * len(map_)
            total[1] += float(map_.double().mean()) * len(map_)
        selection = maps[result.mixer]
        is_labelled = batch.labels >= 0
        if subject.class_names and is_labelled.any():
            if result.ranking is None:
                result.ranking = KeyRanking.start(len(subject.class_names), selection.shape[1])
            result.ranking.add(selection[is_labelled], batch.labels[is_labelled])
        # A few of each batch, because datasets are sorted by class.
        space = min(DRAWN - len(result.drawn), max(1, DRAWN * len(batch.images) // subject.count))
        labels = batch.labels[:space].tolist()
        result.drawn += zip(batch.images[:space], selection[:space], labels, strict=True)
        images += len(batch.images)
    for name, (share, mean, keys) in totals.items():
        record: dict[str, Any] = {
            "backbone": subject.label, "layer": name, "keys": int(keys),
            "activated": share / images, "mean": mean / images,
            "first_key": None, "share_in_top5": None,
        }  # fmt: skip
        if result.ranking is not None and name == result.mixer:
            shares = result.ranking.shares_in_top(5)
            record |= {
                "first_key": int(shares.argmax()),
                "share_in_top5": float(shares.max()),
            }
        result.layers.append(record)
    return result


def _threshold(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"threshold must be a number; got {text!r}") from None


def _draw(columns: Sequence[tuple[Subject, Sequence[tuple[Any, Any, str]]]]) -> Any:
    """Draw images in rows, networks in columns; the maps of a row share one scale."""
    count = min(len(tiles) for _, tiles in columns)
    figure, axes = new_figure(count, 1 + len(columns), 2.0, 2.2)
    for row in range(count):
        axes[row, 0].imshow(denormalise(columns[0][1][row][0], columns[0][0]))
        hide_axes(axes[row, 0])
        greatest = max(float(tiles[row][1].max()) for _, tiles in columns)
        for place, (subject, tiles) in enumerate(columns, start=1):
            image, map_, title = tiles[row]
            axis, size = axes[row, place], (image.shape[1], image.shape[2])
            draw_overlay(axis, denormalise(image, subject), resize_map(map_, size), greatest)
            axis.set_xlabel(wrap_text(title, 28), fontsize=7)
            if row == 0:
                axis.set_title(wrap_text(subject.label, 24), fontsize=8)
    return figure
