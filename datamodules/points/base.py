"""Base of datamodules of labelled point clouds."""

from __future__ import annotations

import itertools
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from datamodules.base import BaseDataModule, Split, check_minimum
from datamodules.files.values import check_option, refuse
from datamodules.loading.sampling import NamedDataset, SeededDataset, TolerantDataset
from datamodules.points.augmentation import Crop, augment, centred, grid_sample
from datamodules.points.clouds import IGNORED, PROPERTIES, Cloud, is_cloud, read_cloud

logger = logging.getLogger(__name__)

Feature = Literal["color", "normal", "coord"]
OTHER_IGNORED = 255  # label of ignored points in some files
KEPT = 64  # clouds kept in memory by default
COARSE = 0.01  # steps of coordinates, in voxels, from which on they are logged


class PointDataModule(BaseDataModule):
    """Point clouds with a class per point.

    Training clouds are augmented, one point per voxel is kept, and large ones are cropped to the
    nearest points of a random one. Points then lie in the middle of their voxels, so that the
    network reads the sampled voxels. Evaluation uses whole clouds, and every point counts.

    Args:
        root: Folder of the dataset.
        grid_size: Side of a voxel in metres.
        features: What a point has besides its place: "color", "normal", "coord".
        crop_share: Share of a training cloud's points that a first crop keeps.
        crop_points: Most points of a training cloud, by a second crop.
        repeats: How often each training cloud occurs in an epoch.
        elastic: Distort training clouds smoothly.
        drop_points: Share of points that are left out of every fifth training cloud.
        cached: Number of clouds that are kept in memory.
        batch_size: Clouds per training batch and process.
        **options: Of ``BaseDataModule``.

    Attributes:
        class_names: Names of the classes, in label order.
        label: Name of the labels in folders and .pth files.
        category_ids: Label in the files per class; empty if equal.
        other_orders: Empty: the order of classes is fixed.
    """

    unit = "clouds"
    class_names: tuple[str, ...] = ()
    label = "segment"
    category_ids: tuple[int, ...] = ()
    other_orders: Mapping[str, tuple[str, ...]] = {}

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        grid_size: float = 0.02,
        features: Sequence[Feature] = ("color", "normal"),
        crop_share: float = 1.0,
        crop_points: int = 102_400,
        repeats: int = 1,
        elastic: bool = True,
        drop_points: float = 0.2,
        cached: int = KEPT,
        batch_size: int = 12,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size=batch_size, **options)
        check_option("grid_size", grid_size, grid_size > 0, "above 0 metres")
        check_option("crop_share", crop_share, 0 < crop_share <= 1, "above 0 and up to 1")
        check_option("drop_points", drop_points, 0 <= drop_points < 1, "from 0 to below 1")
        valid = features and set(features) <= set(get_args(Feature))
        rule = f"some of {', '.join(get_args(Feature))}"
        check_option("features", [*features], valid, rule)
        self.grid_size, self.features = grid_size, tuple(features)
        self.crop_share = crop_share
        self.crop_points = check_minimum("crop_points", crop_points, 2)
        self.repeats = check_minimum("repeats", repeats, 1)
        self.elastic, self.drop_points, self.cached = elastic, drop_points, cached

    @abstractmethod
    def find_clouds(self, split: Split) -> list[Path]:
        """Return the clouds of "train", "val" or "test" in a fixed order."""

    @property
    def input_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape (N, 3 + F) of a cropped cloud."""
        return (self.crop_points, 3 + 3 * len(self.features))

    @property
    def backbone_arguments(self) -> dict[str, Any]:
        """Number of features of a point."""
        return {"channels": 3 * len(self.features)}

    @property
    def head_arguments(self) -> dict[str, Any]:
        """Number of classes, side of a voxel, and names of the features."""
        return {
            "num_classes": len(self.class_names), "grid_size": self.grid_size,
            "features": self.features,
        }  # fmt: skip

    @property
    def task_arguments(self) -> dict[str, Any]:
        """Names of the classes."""
        return {"class_names": self.class_names}

    def target_facts(self) -> dict[str, Any]:
        """Return the number of classes."""
        return {"classes": len(self.class_names)}

    def target_identity(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"classes": list(self.class_names)}

    def predict_only(self, class_names: Sequence[str], category_ids: Sequence[int] = ()) -> None:
        """Serve prediction alone, with the classes of a checkpoint."""
        self.class_names, self.category_ids = tuple(class_names), tuple(category_ids)
        super().predict_only()

    def build(self) -> dict[Split, SeededDataset]:
        """List the clouds of all splits; a missing test split is that of validation."""
        splits: tuple[Split, ...] = ("train", "val", "test")
        files_of = {split: self.find_clouds(split) for split in splits}
        missing = [split for split in ("train", "val") if not files_of[split]]
        refuse(self.folder, {f"must hold {self.layout}, but lacks clouds of": missing})
        built: dict[Split, SeededDataset] = {}
        for split, files in files_of.items():
            if not files:
                continue
            repeated = files * self.repeats if split == "train" else files
            clouds = Clouds(self, repeated, training=split == "train")
            clouds.check_first()
            built[split] = self.seeded(clouds, clouds.name)
        built.setdefault("test", built["val"])
        return built

    def unlabelled_dataset(self, inputs: Any) -> NamedDataset:
        """Return the clouds of a file or folder, without labels.

        Raises:
            ValueError: The folder lacks clouds.
        """
        path = Path(inputs)
        is_single = is_cloud(path) or path.is_file()
        files = (
            [path] if is_single else sorted(entry for entry in path.rglob("*") if _is_input(entry))
        )
        forms = "holds no clouds (.ply, .npy, .pth, folders with coord.npy)"
        refuse(path, {forms: not files})
        clouds = Clouds(self, files, training=False, labelled=False)
        return TolerantDataset(clouds, clouds.name)

    def predicted_cloud(self, index: int) -> Cloud:
        """Return the cloud of a sample of ``predict_dataloader``, as it is in its file."""
        clouds: Any = self._to_predict().dataset
        return clouds.cloud(index)

    def collate(self) -> Callable[[list[Any]], Any]:
        """Return the function that fills clouds up to one length."""
        return pad_clouds

    def test_dataloader(self) -> Any:
        """Return the clouds of the test split."""
        return self._eval_loader("test")


def _is_input(path: Path) -> bool:
    return is_cloud(path) and not is_cloud(path.parent)


class Clouds:
    """Prepared clouds: ``points`` (N, 3 + F), ``labels`` (N,) and ``sample_id``."""

    def __init__(
        self, data: PointDataModule, files: Sequence[Path], *, training: bool, labelled: bool = True
    ) -> None:
        self.data, self.files, self.training, self.labelled = data, files, training, labelled
        self._kept: dict[Path, Cloud] = {}
        self._logged: set[str] = set()

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        """Return the file of a cloud."""
        return str(self.files[index])

    def cloud(self, index: int) -> Cloud:
        """Read a cloud, and check its labels."""
        file = self.files[index]
        if file not in self._kept:
            cloud = read_cloud(file, self.data.label)
            self._log_once(file, cloud)
            if self.labelled:
                cloud = self._labelled(file, cloud)
            if len(self._kept) >= self.data.cached:
                return cloud
            self._kept[file] = cloud
        return self._kept[file]

    def _log_once(self, file: Path, cloud: Cloud) -> None:
        """Log the remark on a file, and coarse coordinates, unless another file had the same."""
        step, remarks = cloud.step(), [cloud.remark]
        if step > COARSE * self.data.grid_size:
            remarks.append(
                f"its coordinates have steps of {step:g} m, as 32-bit floats at this distance from "
                f"their origin, and voxels have {self.data.grid_size:g} m; save doubles, or "
                "subtract an origin before saving"
            )
        for remark in remarks:
            if remark and remark not in self._logged:
                self._logged.add(remark)
                logger.warning(f"{file}: {remark}")

    def check_first(self) -> None:
        """Check that the first cloud has what the network reads, and that any cloud has a label.

        Further clouds are read only while all before them lack labelled points.
        """
        cloud = self.cloud(0)
        self._tensor(cloud, 0)
        clouds = itertools.chain([cloud], map(self.cloud, range(1, len(self))))
        rule = (
            "and all other clouds of its split have ignored labels alone (-1 or 255); pass labels "
            f"from 0 to {len(self.data.class_names) - 1}"
        )
        ignored = all((np.asarray(item.labels) == IGNORED).all() for item in clouds)
        refuse(self.name(0), {rule: ignored})
        if self.training and cloud.normal is None and "normal" in self.data.features:
            advice = ",".join(name for name in self.data.features if name != "normal") or "coord"
            logger.warning(
                f"{self.name(0)} lacks normals, which count as zeros; pass "
                f"data.features=[{advice}] to train without them"
            )

    def _labelled(self, file: Path, cloud: Cloud) -> Cloud:
        names, count = (
            ", ".join(name for (name,) in PROPERTIES["labels"]),
            len(self.data.class_names),
        )
        lack = f"lacks labels ({self.data.label}), which training needs; in ply files they are"
        refuse(file, {f"{lack} named {names}": cloud.labels is None})
        assert cloud.labels is not None
        highest = int(cloud.labels[cloud.labels != OTHER_IGNORED].max(initial=IGNORED))
        rule = (
            f"has the label {highest}, but there are {count} classes; the highest label is "
            f"{count - 1}, and -1 or 255 is ignored"
        )
        refuse(file, {rule: highest >= count})
        labels = np.where((cloud.labels < 0) | (cloud.labels >= count), IGNORED, cloud.labels)
        return Cloud(cloud.coord, cloud.color, cloud.normal, labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the tensors of a cloud."""
        cloud = centred(self.cloud(index))
        if self.training:
            cloud = augment(cloud, elastic=self.data.elastic, drop=self.data.drop_points)
            cloud = grid_sample(cloud, self.data.grid_size)
            for most in (math.ceil(self.data.crop_share * len(cloud)), self.data.crop_points):
                cloud = Crop(most)(cloud)
            cloud = centred(cloud, floor=False)
        sample: dict[str, Any] = {"points": self._tensor(cloud, index)}
        if cloud.labels is not None and self.labelled:
            sample["labels"] = torch.from_numpy(cloud.labels)
        return sample | {"sample_id": torch.tensor(index)}

    def _tensor(self, cloud: Cloud, index: int) -> Tensor:
        # The shift behind a crop moves the feature "coord", but no point into another voxel.
        parts: list[Any] = [cloud.coord]
        if cloud.voxels is not None:
            parts = [(cloud.voxels + 0.5) * self.data.grid_size]
        for name in self.data.features:
            values = getattr(cloud, name)
            if values is None and name == "normal":
                values = np.zeros_like(cloud.coord)  # as Pointcept does
            if values is None:
                features = [item for item in self.data.features if getattr(cloud, item) is not None]
                rule = (
                    f"lacks {name}, which the network reads; add it to the cloud, or train with "
                    f"data.features=[{','.join(features) or 'coord'}]"
                )
                raise ValueError(f"{self.name(index)} {rule}")
            parts.append(values / 127.5 - 1 if name == "color" else values)
        return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))


def pad_clouds(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch: missing points have NaN as coordinates, and the ignored label."""
    fill = {"points": float("nan"), "labels": IGNORED}
    batch = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        if name in fill:
            batch[name] = pad_sequence(values, batch_first=True, padding_value=fill[name])
        else:
            batch[name] = torch.stack(values)
    return batch
