"""The output of ``--cfg job``."""

import pytest
import yaml

from tests.runs import composed, write_run
from tools.run import main


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["-c", "job"], ["--cfg=job", "--resolve"]])
def test_cfg_shows_the_config_of_the_run(tmp_path, capsys, flags):
    config = composed("task=detection", "backbone=swin_t_afbo", "head=retinanet")
    folder = write_run(tmp_path, config)
    assert main(["mode=test", f"ckpt={folder}", "head.anchor_scale=8", *flags]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["task_name"], shown["head"]["name"]) == ("detection", "retinanet")
    assert shown["head"]["anchor_scale"] == 8
    assert shown["backbone"]["name"] == "swin_t_afbo"


def test_cfg_of_a_training_shows_its_references(capsys):
    assert main(["--cfg", "job", "backbone=swin_t"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["backbone"]["img_size"] == "${oc.select:data.image_size}"
    assert main(["--help", "config", "backbone=swin_t"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == shown
