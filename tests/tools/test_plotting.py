"""Labels in plots do not overlap."""

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

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
