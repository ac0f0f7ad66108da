"""What a config may build, and what is said of the rest."""

from typing import Literal

import pytest

from backbones.options import check_arguments
from tasks.instantiate import build


class TestBuild:
    """What a config may name, and what is said of the rest."""

    LINEAR = "datamodules.transforms.PaperAugmentation"

    def test_only_our_packages_are_called(self):
        for target in ("os.system", "heads_of_others.x", "torch.load", "tools.run.main"):
            with pytest.raises(ValueError, match=r"data\._target_=.* is refused"):
                build({"data": {"_target_": target}}, "data")
        nested = {"_target_": self.LINEAR, "flip": {"_target_": "os.system", "command": "true"}}
        with pytest.raises(ValueError, match=r"data\.flip\._target_=os\.system is refused"):
            build({"data": nested}, "data")

    def test_nested_targets_are_built_first(self):
        config = {"data": {
            "_target_": "datamodules.image_folder.ImageFolderDataModule",
            "augmentation": {"_target_": self.LINEAR, "flip": 0.25},
        }}  # fmt: skip
        assert build(config, "data", seed=3).augmentation.flip == 0.25

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"flipp": 0.5}, r"no option data\.flipp; did you mean flip\?"),
            ({"zzz": 0.5}, r"no option data\.zzz; known: auto_augment, random_erasing"),
            ({"flip": "often"}, r"data\.flip=often is not a number"),
            ({"flip": True}, r"data\.flip=True is not a number"),
            ({"crop_scale": 0.5}, r"data\.crop_scale=0\.5 is not a list"),
            ({"crop_scale": ["a", "b"]}, r"data\.crop_scale=.* is not a list"),
            ({"auto_augment": 3}, r"data\.auto_augment=3 is not a text or null"),
        ],
    )
    def test_wrong_options(self, given, message):
        with pytest.raises(ValueError, match=message):
            build({"data": {"_target_": self.LINEAR, **given}}, "data")

    def test_options_of_parent_classes_are_known_where_they_are_passed_on(self):
        target = "datamodules.sample.SampleDetection"
        build({"data": {"_target_": target, "flip": 0.5, "num_train": 3}}, "data")
        with pytest.raises(ValueError, match="did you mean flip"):
            build({"data": {"_target_": target, "flipp": 0.5}}, "data")

    def test_closed_choices(self):
        def paint(colour: Literal["red", "blue"], size: int | None = None): ...

        check_arguments(paint, {"colour": "red", "size": None}, "x")
        with pytest.raises(ValueError, match=r"x\.colour=green is not one of red, blue"):
            check_arguments(paint, {"colour": "green"}, "x")
        with pytest.raises(ValueError, match=r"x\.size=1\.5 is not a whole number or null"):
            check_arguments(paint, {"size": 1.5}, "x")
