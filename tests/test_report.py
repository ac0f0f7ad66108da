"""What a run says of itself: the closing table and the size that its backbone is counted at."""

import pytest

from tools import report


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
