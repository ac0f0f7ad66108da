"""Report of a run: the final table, the curves, and the size at which the backbone is counted."""

import pytest

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
