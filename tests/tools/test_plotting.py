"""Labels in plots do not overlap."""

import itertools

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

from tools.bench import growth
from tools.comparing import plot
from tools.plotting import labels


@pytest.fixture
def axis():
    figure, axis = plt.subplots(figsize=(7.5, 5), layout="constrained")
    yield axis
    plt.close(figure)


def are_apart(texts):
    """Return True if the anchors of rotated labels are at least a line apart."""
    shown = [text for text in texts if text.get_visible() and text.get_text()]
    if all(text.get_rotation() == 0 for text in shown):
        return not labels.texts_overlap(shown)
    ends = sorted(text.get_window_extent().x1 for text in shown)
    return bool(np.all(np.diff(ends) >= shown[0].get_fontsize()))


@pytest.mark.parametrize("count", [2, 9, 40, 120])
@pytest.mark.parametrize("name", ["c{}", "a class of a very long name indeed {}"])
def test_names_of_an_axis_do_not_overlap(axis, name, count):
    axis.bar(range(count), range(count))
    labels.name_ticks(axis, [name.format(place) for place in range(count)])
    axis.figure.draw_without_rendering()
    ticks = axis.get_xticklabels()
    assert are_apart(ticks)
    assert all(len(tick.get_text()) <= labels.MAX_LENGTH for tick in ticks)
    assert ticks[0].get_text() == labels.cut(name.format(0))
    axis.imshow(np.zeros((count, count)))
    labels.name_ticks(axis, [name.format(place) for place in range(count)], vertical=True)
    axis.figure.draw_without_rendering()
    assert not labels.texts_overlap(axis.get_yticklabels())


@pytest.mark.parametrize("places", [[1, 1.1, 1.2, 5], list(range(60)), [1, 5]])
def test_ticks_are_spread(axis, places):
    axis.plot(places, places)
    axis.set_xticks(places, [f"{place}x{place}00" for place in places])
    labels.spread_ticks(axis)
    axis.figure.draw_without_rendering()
    assert are_apart(axis.get_xticklabels())
    assert axis.get_xticklabels()[0].get_visible()


def test_heights_move_apart_and_keep_their_order():
    assert labels.spread_heights([0.1, 0.5, 0.9], 0.1, 1.0) == [0.1, 0.5, 0.9]
    for heights in ([0.5, 0.5, 0.51], [0.98, 0.99, 1.2], [0.0, 0.96, 0.97]):
        moved = labels.spread_heights(heights, 0.1, 1.0)
        assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(moved))
        assert moved[-1] <= 1.0


def test_names_at_the_ends_of_equal_lines_stand_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(plt, "close", lambda figure: None)
    records = [
        {"backbone": f"net{n}", "step": "forward", "batch": 1, "image_size": f"{s}x{s}",
         "ms": s + n / 1000, "growth": 1.0}
        for n in range(8) for s in (224, 240, 256, 448)
    ]  # fmt: skip
    growth.draw_growth(records, str(tmp_path / "growth.png"))
    figure = plt.gcf()
    monkeypatch.undo()
    for axis in figure.axes:
        assert len(axis.texts) == 8
        assert not labels.texts_overlap(axis.texts)
        assert are_apart(axis.get_xticklabels())
    plt.close(figure)


@pytest.mark.parametrize("count", [3, 24, 80])
def test_names_of_points_do_not_overlap_or_are_dropped(axis, count):
    generator = np.random.default_rng(0)
    points = [
        (f"swin_t backbone.mixer.g2={n}", *generator.random(2) * (1, 1)) for n in range(count)
    ]
    axis.scatter([x for _, x, _ in points], [y for _, _, y in points])
    axis.margins(x=0.14, y=0.12)
    left_out = plot._place_labels(axis.figure, axis, points, [])
    assert not labels.texts_overlap(axis.texts)
    assert len(axis.texts) + len(left_out) == count
    assert len(left_out) <= {3: 0, 24: 2, 80: 79}[count]
