"""Point clouds on disk, their augmentation, and the generated rooms."""

import math

import numpy as np
import pytest
import torch
from scipy.interpolate import RegularGridInterpolator
from scipy.ndimage import uniform_filter1d

from datamodules.points.augmentation import (
    Crop,
    augment,
    centred,
    distorted,
    flipped,
    grid_sample,
    rotated,
)  # fmt: skip
from datamodules.points.clouds import Cloud, read_cloud
from datamodules.points.folders import (
    S3DIS,
    SCANNET,
    CloudFolderDataModule,
    S3DISDataModule,
    ScanNet200DataModule,
    ScanNetDataModule,
)  # fmt: skip
from datamodules.points.sample import SamplePoints
from tasks.point_segmentation.ply import write_ply
from tests.errors import refuses

SMALL = {"grid_size": 0.1, "batch_size": 2, "num_workers": 0, "elastic": False}


def cloud(count=200, classes=3):
    random = np.random.default_rng(0)
    normal = random.normal(size=(count, 3))
    return Cloud(
        random.uniform(0, 2, (count, 3)).astype(np.float32),
        random.integers(0, 256, (count, 3)).astype(np.float32),
        (normal / np.linalg.norm(normal, axis=1, keepdims=True)).astype(np.float32),
        random.integers(0, classes, count),
    )


def write_folder(folder, label="segment", one=None):
    one = one or cloud()
    folder.mkdir(parents=True)
    for name in ("coord", "color", "normal"):
        np.save(folder / f"{name}.npy", getattr(one, name))
    np.save(folder / f"{label}.npy", one.labels)


def write_text_ply(path, rows, fields):
    header = ["ply", "format ascii 1.0", f"element vertex {len(rows)}",
              *(f"property float {name}" for name in fields), "end_header"]  # fmt: skip
    path.write_text("\n".join([*header, *(" ".join(map(str, row)) for row in rows)]) + "\n")


def test_a_ply_file_comes_back(tmp_path):
    one = cloud()
    with (tmp_path / "a.ply").open("wb") as file:
        write_ply(file, one.coord, one.color, one.labels, ["class 0 wall"])
    again = read_cloud(tmp_path / "a.ply")
    np.testing.assert_array_equal(again.coord, one.coord)
    np.testing.assert_array_equal(again.color, one.color)
    np.testing.assert_array_equal(again.labels, one.labels)
    rows = [[0, 1, 2.5, 0, 0, 1, 4], [1, 1, 2, 0, 1, 0, 2]]
    write_text_ply(tmp_path / "b.ply", rows, ("x", "y", "z", "nx", "ny", "nz", "scalar_Label"))
    text = read_cloud(tmp_path / "b.ply")
    assert text.coord.tolist() == [[0, 1, 2.5], [1, 1, 2]]
    assert text.normal.tolist() == [[0, 0, 1], [0, 1, 0]]
    assert text.labels.tolist() == [4, 2]


def test_arrays_and_pth_files(tmp_path):
    one = cloud()
    values = np.column_stack([one.coord, one.color, one.normal, one.labels])
    np.save(tmp_path / "a.npy", values)
    again = read_cloud(tmp_path / "a.npy")
    np.testing.assert_allclose(again.normal, one.normal)
    np.testing.assert_array_equal(again.labels, one.labels)
    content = {"coord": one.coord, "color": one.color, "normal": one.normal,
               "semantic_gt20": one.labels, "scene_id": "scene0000_00"}  # fmt: skip
    torch.save(content, tmp_path / "a.pth")
    np.testing.assert_array_equal(read_cloud(tmp_path / "a.pth", "segment20").labels, one.labels)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("a.ply", b"plx\n", "its first line differs from 'ply'"),
     ("b.ply", b"ply\nformat ascii 1.0\n", "ends without end_header"),
     ("c.ply", b"ply\nformat binary_little_endian 1.0\nelement vertex 3\nproperty float x\n"
      b"property float y\nproperty float z\nend_header\n1234", "ends after 0 of 3 vertices"),
     ("g.ply", b"ply\nformat ascii 1.0\nelement vertex 0\nproperty float x\nproperty float y\n"
      b"property float z\nend_header\n", r"must be \(N, 3\) with points, got \(0, 3\)"),
     ("j.ply", b"ply\nformat binary_little_endian 1.0\nelement vertex 1000000000000\nproperty float"
      b" x\nproperty float y\nproperty float z\nend_header\n0123456789ab", "ends after 1 of 1000"),
     ("k.ply", b"ply\nformat binary 1.0\n", "KeyError 'binary'"),
     ("l.ply", b"ply\nformat ascii 1.0\nelement vertex\n", "IndexError"),
     ("d.npy", b"no array", "is not a readable cloud"),
     ("e.pth", b"no file", "is not a readable cloud"),
     ("f.xyz", b"", r"must be a \.ply, \.npy or \.pth file")],
)  # fmt: skip
def test_broken_files_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    refuses(rf"{name} .*{message}.*", read_cloud, tmp_path / name)


def test_properties_of_other_tools_are_read(tmp_path):
    for fields in (("x", "y", "z", "r", "g", "b", "classification"),
                   ("X", "Y", "Z", "Red", "Green", "Blue", "scalar_Classification")):  # fmt: skip
        write_text_ply(tmp_path / "a.ply", [[1, 2, 3, 10, 20, 30, 4]], fields)
        read = read_cloud(tmp_path / "a.ply")
        assert (read.coord.tolist(), read.color.tolist()) == ([[1, 2, 3]], [[10, 20, 30]])
        assert read.labels.tolist() == [4]
    write_text_ply(tmp_path / "a.ply", [[1, 2, 3]], ("x", "y", "height"))
    refuses(r"a\.ply .* lacks coordinates \(x, y, z", read_cloud, tmp_path / "a.ply")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [("labels", 0.7, r"labels must be whole numbers \(in an array of 4, 7 .*, got: 0.7"),
     ("labels", np.nan, "labels must be whole numbers .* got: nan"),
     ("color", -1, "colours must be from 0 to 255, to 1 or to 65535, got -1 to 255"),
     ("color", 300.5, "colours must be from 0 to 255, to 1 or to 65535, got 0 to 300.5"),
     ("normal", np.nan, "numbers are not finite at some .*: normal"),
     ("coord", np.nan, "numbers are not finite .*: coord")],
)  # fmt: skip
def test_numbers_that_are_no_labels_colours_or_normals_are_refused(part, value, message, tmp_path):
    parts = {name: getattr(cloud(), name).astype(float)
             for name in ("coord", "color", "normal", "labels")}  # fmt: skip
    parts[part][7] = value
    np.save(tmp_path / "a.npy", np.column_stack(list(parts.values())))
    refuses(rf"a\.npy is not a readable cloud: {message}", read_cloud, tmp_path / "a.npy")


@pytest.mark.parametrize("offset", [0, 9_999, 99_000, 5_000_000])
def test_far_origins_change_neither_voxels_nor_the_file(offset, tmp_path, caplog):
    near = cloud(5000).coord.astype(np.float64)
    far = near + np.array([offset, -offset, offset / 10])
    np.save(tmp_path / "a.npy", far)
    read = read_cloud(tmp_path / "a.npy")
    moved, still = (np.floor(centred(one).coord / 0.02) for one in (read, Cloud(near)))
    np.testing.assert_array_equal(moved, still)
    with (tmp_path / "a.ply").open("wb") as file:
        write_ply(file, read.coord, np.zeros((5000, 3)), np.zeros(5000), [])
    np.testing.assert_array_equal(read_cloud(tmp_path / "a.ply").coord, far)
    # Only a file of 32-bit floats is coarse.
    assert read.step() < 1e-5
    np.save(tmp_path / "a.npy", far.astype(np.float32))
    data = CloudFolderDataModule(tmp_path, features=["coord"], **SMALL | {"grid_size": 0.02})
    data.predict_only(["a", "b"])
    data.set_predict_inputs(tmp_path / "a.npy")
    next(iter(data.predict_dataloader()))
    step = {0: "", 9_999: "0.000976562", 99_000: "0.0078125", 5_000_000: "0.5"}[offset]
    assert (f"a.npy: its coordinates have steps of {step} m" in caplog.text) == bool(step)


@pytest.mark.parametrize(
    ("scale", "remark"),
    [(1, ""), (1 / 255, "are from 0 to 1 and are multiplied by 255"), (257, "count as 16 bits")],
)
def test_colours_of_other_ranges_are_taken_right(scale, remark, tmp_path, caplog):
    one = cloud()
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for name in "ab":
            columns = (one.coord, one.color * (scale if split == "val" else 1), one.labels)
            np.save(tmp_path / split / f"{name}.npy", np.column_stack(columns))
    data = CloudFolderDataModule(tmp_path, features=["color"], **SMALL)
    data.setup()
    points = [data.dataset("val")[0, index]["points"][:, 3:] for index in range(2)]
    wanted = torch.from_numpy(one.color / 127.5 - 1)
    torch.testing.assert_close(torch.stack(points), torch.stack([wanted] * 2))
    assert [remark in line for line in caplog.messages] == [True] * bool(remark)


def test_scannet_and_s3dis_folders(tmp_path):
    for split in ("train", "val"):
        write_folder(tmp_path / "scannet" / split / "scene0000_00", "segment20")
    many = cloud(classes=200).labels
    np.save(tmp_path / "scannet/train/scene0000_00/segment200.npy", many)
    data = ScanNetDataModule(tmp_path / "scannet", **SMALL)
    data.setup()
    assert data.head_arguments["num_classes"] == len(SCANNET) == 20
    batch = next(iter(data.val_dataloader()))
    assert batch["points"].shape == (1, 200, 9)
    assert batch["labels"].shape == (1, 200)
    assert batch["points"][0, :, 2].min() == 0
    more = ScanNet200DataModule(tmp_path / "scannet", **SMALL)
    assert len(more.class_names) == 200
    refuses(r"val.* lacks labels \(segment200\), which training needs", more.setup)
    np.save(tmp_path / "scannet/val/scene0000_00/segment200.npy", many)
    more.setup()
    assert more.dataset("train")[0, 0]["labels"].max() > 20
    with pytest.raises(FileNotFoundError, match=r"areas are missing in .*: Area_1, Area_2"):
        S3DISDataModule(tmp_path / "scannet", **SMALL).setup()
    for area in range(1, 7):
        write_folder(tmp_path / f"s3dis/Area_{area}/office_1")
    rooms = S3DISDataModule(tmp_path / "s3dis", **SMALL)
    rooms.setup()
    assert rooms.sizes() == {"train": 5, "val": 1, "test": 1}
    assert len(S3DIS) == 13


def test_a_folder_of_labelled_clouds(tmp_path):
    for split in ("train", "valid"):
        (tmp_path / split).mkdir()
        one = cloud()
        with (tmp_path / split / "a.ply").open("wb") as file:
            write_ply(file, one.coord, one.color, one.labels, [])
    data = CloudFolderDataModule(tmp_path, features=["color"], **SMALL)
    with pytest.raises(FileNotFoundError, match=r"list of classes is missing: .*classes\.txt"):
        data.setup()
    (tmp_path / "classes.txt").write_text("wall\nfloor\n")
    refuses(r"has the label 2, but there are 2 classes", data.setup)
    (tmp_path / "classes.txt").write_text("wall\nfloor\nchair\n", encoding="utf-8-sig")
    data = CloudFolderDataModule(tmp_path, features=["color"], **SMALL)
    assert data.backbone_arguments == {"channels": 3}
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert batch["points"].shape[2] == 6
    assert data.class_names == ("wall", "floor", "chair")
    with pytest.raises(ValueError, match=r"data\.features must be some of color, normal, coord"):
        CloudFolderDataModule(tmp_path, features=["colour"], **SMALL)


def test_missing_colours_and_normals_are_named(tmp_path, caplog):
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    one = cloud()
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        np.save(tmp_path / split / "a.npy", np.column_stack([one.coord, one.labels]))
    for features, advice in ((["color", "normal"], "coord"), (["color", "coord"], "coord")):
        data = CloudFolderDataModule(tmp_path, features=features, **SMALL)
        refuses(rf"train.* lacks color, .*data\.features=\[{advice}\]", data.setup)
    for split in ("train", "val"):
        columns = np.column_stack([one.coord, one.color, one.labels])
        np.save(tmp_path / split / "a.npy", columns)
    CloudFolderDataModule(tmp_path, **SMALL).setup()
    assert "a.npy lacks normals, which count as zeros; pass data.features=[color]" in caplog.text
    assert len(caplog.records) == 1
    # Prediction advises to train anew, as the features of a network are fixed.
    data = CloudFolderDataModule(tmp_path, **SMALL)
    data.predict_only(["a", "b", "c"])
    np.save(tmp_path / "b.npy", one.coord)
    data.set_predict_inputs(tmp_path / "b.npy")
    (broken,) = next(iter(data.predict_dataloader()))["unreadable"]
    assert "add it to the cloud, or train with data.features=[coord]" in broken.reason


def test_training_clouds_keep_the_voxels_of_the_grid_sample(tmp_path):
    data = SamplePoints(
        tmp_path, num_train=1, num_val=1, density=60, crop_points=300,
        features=["color", "coord"], **SMALL,
    )  # fmt: skip
    data.setup()
    points = data.dataset("train")[0, 0]["points"]
    assert len(points) == 300
    assert len((points[:, :3] / data.grid_size).floor().unique(dim=0)) == 300
    # The feature keeps the coordinates, which differ by one shift and by the place in the voxel.
    away = points[:, 6:] - points[:, :3]
    assert (away - away.mean(0)).abs().max() < data.grid_size
    data.crop_points, data.crop_share = 10**6, 1.0
    whole = len(data.dataset("train")[0, 0]["points"])
    data.crop_share = 0.6
    assert len(data.dataset("train")[0, 0]["points"]) == math.ceil(0.6 * whole)
    middle = points[:, 6:8].amin(0) + points[:, 6:8].amax(0)
    torch.testing.assert_close(middle, torch.zeros(2), rtol=0, atol=1e-5)


def test_augmentation_keeps_the_form():
    one = centred(cloud())
    turned = rotated(one, 2, np.pi / 2)
    np.testing.assert_allclose(turned.coord[:, 0], -one.coord[:, 1], atol=1e-5)
    np.testing.assert_allclose(turned.normal[:, 1], one.normal[:, 0], atol=1e-5)
    mirrored = flipped(one, 0)
    np.testing.assert_array_equal(mirrored.normal[:, 0], -one.normal[:, 0])
    np.random.seed(0)
    changed = augment(one)
    assert 0.7 * len(one) < len(changed) <= len(one)
    assert changed.color.min() >= 0
    assert changed.color.max() <= 255
    moved = distorted(one.coord, 0.2, 0.4) - one.coord
    assert 0 < np.abs(moved).max() < 1
    sampled = grid_sample(one, 0.5)
    voxels = np.floor(sampled.coord / 0.5)
    assert len(np.unique(voxels, axis=0)) == len(sampled)
    assert len(np.unique(np.floor(one.coord / 0.5), axis=0)) == len(sampled)
    assert len(Crop(50)(one)) == 50


def dense_distortion(coord, granularity, magnitude):
    """Noise on the whole box, smoothed and interpolated by scipy."""
    low = coord.min(0)
    counts = ((coord - low).max(0) // granularity).astype(int) + 3
    noise = np.random.normal(size=(*counts, 3))
    for axis in (0, 1, 2) * 2:
        noise = uniform_filter1d(noise, 3, axis=axis, mode="constant")
    nodes = [low[axis] + granularity * np.arange(-1, counts[axis] - 1) for axis in range(3)]
    shift = RegularGridInterpolator(nodes, noise, bounds_error=False, fill_value=0)
    return coord + shift(coord) * magnitude


def test_distortion_equals_that_of_the_whole_box():
    coord = np.random.default_rng(0).uniform(0, 2, (4000, 3))  # fills the box
    np.random.seed(0)
    wanted = dense_distortion(coord, 0.5, 1.6)
    np.random.seed(0)
    np.testing.assert_allclose(distorted(coord, 0.5, 1.6), wanted, rtol=0, atol=1e-12)
