"""Report of a run: the final table, the curves, and the size at which the backbone is counted."""

import numpy as np
import pytest
from PIL import Image

from tools.plotting import labels
from tools.runs import curves, report


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"image_size": 224}, (224, 224)),
        ({"image_size": [1333, 800]}, (800, 1333)),  # longest and shortest edge
        ({"image_size": [2048, 512], "crop_size": 512}, (512, 512)),
        ({"image_size": [2048, 512], "crop_size": [512, 1024]}, (512, 1024)),  # height and width
        ({"scene_size": 128}, (128, 128)),
        ({"scene_size": 128, "image_size": [256, 192]}, (192, 256)),
    ],
)
def test_the_backbone_is_counted_at_the_training_size(data, expected):
    assert report.training_size(data) == expected


def test_table_is_readable_in_a_pipe(tmp_path, capsys):
    report.print_table("title", {"AP50": "0.1", "backbone MACs": "1.2 G"}, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"Run folder: {tmp_path}"
    assert "\x1b" not in "".join(lines)
    assert max(map(len, lines[:-1])) < 60


@pytest.fixture
def figure_of(tmp_path, monkeypatch):
    """Draw curves.png and return matplotlib's figure."""
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)

    def draw(rows, why=""):
        curves.plot_curves(tmp_path, rows, why)
        return plt.gcf()

    yield draw
    monkeypatch.undo()
    plt.close("all")


def curves_of(axis):
    """Return the values and the style of each line by its label."""
    return {
        line.get_label(): (
            line.get_ydata().tolist(), (line.get_linestyle(), line.get_marker(), line.get_lw())
        )
        for line in axis.lines
    }  # fmt: skip


TRAINED = [{"step": step, "train/loss": 3.0 - step, "train/lr": 0.1} for step in range(3)]


def test_losses_and_equal_curves(figure_of):
    rows = [*TRAINED, *({"step": s, "val/loss": 2.0, "val/top1": 9.0} for s in (1, 2))]
    left, right = map(curves_of, figure_of(rows).axes)
    assert list(left) == ["train/loss", "val/loss"]
    assert list(right) == ["top1"]
    assert left["val/loss"][0] == [2.0, 2.0]
    rows = [row | {"train/loss_cls": row["train/loss"]} for row in TRAINED]
    assert list(curves_of(figure_of(rows).axes[0])) == ["train/loss"]
    rows[0]["train/loss_cls"] = 9.0
    assert list(curves_of(figure_of(rows).axes[0])) == ["train/loss", "loss_cls"]
    names = ("a", "b", "c", "d", "e")
    rows = [{"step": s, **{f"val/{name}": float(s) for name in names}} for s in (1, 2, 3)]
    styles = {style for _, style in curves_of(figure_of(rows).axes[1]).values()}
    assert len(styles) == len(names)


def test_measurements_are_drawn_as_they_are(figure_of):
    """Only a training loss may have a running mean, next to it and named as such."""
    figures = np.random.default_rng(0).random((40, 4)).round(3).tolist()
    names = ("train/loss", "train/loss_box", "val/loss", "val/top1")
    rows = [{"step": i, **dict(zip(names, row, strict=True))} for i, row in enumerate(figures)]
    left, right = map(curves_of, figure_of(rows).axes)
    lines = {label: values for label, (values, _) in (left | right).items()}
    for name, values in zip(names, zip(*figures, strict=True), strict=True):
        label = name if name in curves.LOSSES else name.partition("/")[2]
        assert lines.pop(label) == list(values)
    assert list(lines) == ["train/loss, mean of 5 points", "loss_box, mean of 5 points"]
    expected = np.convolve([row[0] for row in figures], np.full(5, 1 / 5), "valid")
    assert np.allclose(lines["train/loss, mean of 5 points"][4:], expected)


def test_the_plot_is_a_picture(tmp_path):
    curves.plot_curves(tmp_path, [*TRAINED, {"step": 2, "val/top1": 9.0}])
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 1000
    curves.plot_curves(tmp_path, [])


def test_bars_numbers_and_legends(figure_of):
    left, right = figure_of([*TRAINED, {"step": 2, "val/AP": 0.2, "val/AP50": 0.5}], "why").axes
    assert [bar.get_height() for bar in right.patches] == [0.2, 0.5]
    assert not right.lines
    assert [text.get_text() for text in left.texts] == ["no loss of validation: why"]
    assert [text.get_text() for text in right.texts] == ["0.2", "0.5"]
    _, axis = figure_of([*TRAINED, {"step": 2, **{f"val/{name}": 0.01234 for name in MANY}}]).axes
    assert len(axis.texts) == len(MANY)
    assert not labels.texts_overlap(axis.texts)
    top = axis.get_window_extent().y1
    assert all(text.get_window_extent().y1 <= top for text in axis.texts)
    rows = [{"step": s, **{f"val/{name}": s for name in MANY}} for s in (1, 2)]
    _, axis = figure_of(rows).axes
    assert axis.get_legend().get_window_extent().x0 >= axis.get_window_extent().x1


MANY = [f"{kind}AP{end}" for kind in ("", "mask_") for end in ("", "50", "75", "_small", "_large")]
