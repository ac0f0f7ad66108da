"""Targets that a config may build, and messages about others."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import pytest
import yaml

from backbones.options import check_arguments, whole_arguments
from tasks.engine.family import imported
from tasks.engine.instantiate import allowed_targets, build, check_group
from tests.runs import CONFIGS

GROUPS = ("data", "data.augmentation", "head", "task")
FOLDER = "datamodules.images.image_folder.ImageFolderDataModule"


class TestBuild:
    """Targets that a config may name, and messages about others."""

    LINEAR = "datamodules.images.transforms.PaperAugmentation"

    @pytest.mark.parametrize(
        "target",
        ["os.system", "heads_of_others.x", "torch.load", "tools.run.main", "", None, 3, ["x"], {},
         "datamodules.dense.toolkit_data.require_package", "heads.toolkits.toolkit.base_config",
         "heads.linear.LinearClassifier", LINEAR],
    )  # fmt: skip
    def test_only_listed_targets_of_a_group_are_called(self, target):
        with pytest.raises(ValueError, match=r"data\._target_=.* is refused: it must be one of"):
            build({"_target_": target, "name": "antigravity"}, "data")
        nested = {"_target_": FOLDER, "augmentation": {"_target_": target}}
        if target != self.LINEAR:
            with pytest.raises(ValueError, match=r"data\.augmentation\._target_=.* is refused"):
                build(nested, "data")
        nested = {"_target_": FOLDER, "root": {"_target_": target}}
        with pytest.raises(ValueError, match=r"data\.root\._target_=.* must be left out"):
            build(nested, "data")

    def test_all_targets_of_configs_are_listed(self):
        """The list has exactly the targets of each group, and all of them exist."""
        named = defaultdict(set)

        def collect(group, content):
            if isinstance(content, dict):
                if "_target_" in content:
                    named[group].add(content["_target_"])
                for key, value in content.items():
                    collect(f"{group}.{key}" if group else key, value)

        for path in CONFIGS.rglob("*.yaml"):
            content = yaml.safe_load(path.read_text())
            content.pop("hydra", None)  # Hydra builds its own callbacks
            own = path.parent.name if "_target_" in content else ""  # of group head
            collect(own, content)
        allowed = {group: set(allowed_targets(group)) for group in GROUPS}
        assert named == allowed
        for target in {target for targets in allowed.values() for target in targets}:
            assert callable(imported(target)), target

    def test_nested_targets_are_built_first(self):
        nested = {"_target_": self.LINEAR, "flip": 0.25}
        config = {"data": {"_target_": FOLDER, "augmentation": nested}}
        assert build(config["data"], "data", seed=3).augmentation.flip == 0.25

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"flipp": 0.5}, "no option of data.augmentation called 'flipp'; did you mean flip"),
            (
                {"zzz": 0.5},
                "no option of data.augmentation called 'zzz'; known: auto_augment, random_er",
            ),
            ({"flip": "often"}, r"data\.augmentation\.flip=often is not a number"),
            ({"flip": True}, r"data\.augmentation\.flip=True is not a number"),
            ({"crop_scale": 0.5}, r"data\.augmentation\.crop_scale=0\.5 is not a list"),
            ({"crop_scale": ["a", "b"]}, r"data\.augmentation\.crop_scale=.* is not a list"),
            ({"auto_augment": 3}, r"data\.augmentation\.auto_augment=3 is not a text or null"),
        ],
    )
    def test_wrong_options(self, given, message):
        nested = {"_target_": self.LINEAR, **given}
        with pytest.raises(ValueError, match=message):
            check_group({"_target_": FOLDER, "augmentation": nested}, "data")

    def test_options_passed_on_to_parent_classes_are_known(self):
        target = "datamodules.sample.dense.SampleDetection"
        build({"_target_": target, "flip": 0.5, "num_train": 3}, "data")
        with pytest.raises(ValueError, match="did you mean flip"):
            check_group({"_target_": target, "flipp": 0.5}, "data")

    def test_integers_may_be_given_as_floats(self):
        """For parameters of integer type; 1.0 stays a float where 1 has another meaning."""

        def paint(*, size: int, values: Sequence[int] | None = None,
                  sizes: Sequence[Sequence[int]] = (), share: float = 1.0,
                  limit: int | float = 1.0, flag: bool = True): ...  # fmt: skip

        kept = {"share": 1.0, "limit": 1.0, "flag": True}
        given = {"size": 8.0, "values": [10.0, 20], "sizes": [[2.0, 3.0]], **kept}
        found = whole_arguments(paint, given)
        expected = {"size": 8, "values": [10, 20], "sizes": [[2, 3]], **kept}
        assert repr(found) == repr(expected)
        check_arguments(paint, found, "x")
        for wrong, message in (
            ({"size": 8.5}, r"x\.size=8\.5 is not a whole number"),
            ({"size": True}, r"x\.size=True is not a whole number"),
            ({"values": [1.0, 2.5]}, r"x\.values=.* is not a list of whole"),
            ({"sizes": [192, 256]}, "not a list of lists of whole numbers"),
            ({"values": [False, 1]}, r"x\.values=.* is not a list of whole"),
        ):
            with pytest.raises(ValueError, match=message):
                check_arguments(paint, whole_arguments(paint, given | wrong), "x")

    def test_built_data_has_integers(self):
        target = "datamodules.dense.segmentation_folder.SegmentationFolderDataModule"
        config = {"data": {
            "_target_": target, "root": "/x", "values": [10.0, 20.0], "ignored": [0.0],
            "batch_size": 2.0, "scale": [64.0, 32.0], "crop_size": 32.0,
        }}  # fmt: skip
        whole = check_group(config["data"], "data")
        data = build(whole, "data")
        assert repr((data.values, data.ignored, data.batch_size)) == "((10, 20), (0,), 2)"
        assert repr((data.scale, data.crop_size)) == "((64, 32), (32, 32))"
        assert repr((whole["values"], whole["batch_size"])) == "([10, 20], 2)"

    def test_closed_choices(self):
        def paint(colour: Literal["red", "blue"], size: int | None = None): ...

        check_arguments(paint, {"colour": "red", "size": None}, "x")
        with pytest.raises(ValueError, match=r"x\.colour=green is not one of red, blue"):
            check_arguments(paint, {"colour": "green"}, "x")
        with pytest.raises(ValueError, match=r"x\.size=1\.5 is not a whole number or null"):
            check_arguments(paint, {"size": 1.5}, "x")
