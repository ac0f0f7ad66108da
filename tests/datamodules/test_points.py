"""Point clouds on disk, their augmentation, and the generated rooms."""

import numpy as np
import pytest
import torch

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
from datamodules.points.sample import SamplePoints, make_room
from tasks.point_segmentation.ply import write_ply

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
    [("a.ply", b"plx\n", "is not a ply file"),
     ("b.ply", b"ply\nformat ascii 1.0\n", "ends without end_header"),
     ("c.ply", b"ply\nformat binary_little_endian 1.0\nelement vertex 3\nproperty float x\n"
      b"property float y\nproperty float z\nend_header\n1234", "ends after 0 of 3 vertices"),
     ("g.ply", b"ply\nformat ascii 1.0\nelement vertex 0\nproperty float x\nproperty float y\n"
      b"property float z\nend_header\n", "has no vertices"),
     ("h.ply", b"ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\nproperty float y\n"
      b"property float z\nend_header\n1 2 3\n4\n", "vertex 1 has fewer than 3 numbers"),
     ("d.npy", b"no array", "is not a readable npy array"),
     ("e.pth", b"no file", r"is not a \.pth file of arrays"),
     ("f.xyz", b"", r"must be a \.ply, \.npy or \.pth file")],
)  # fmt: skip
def test_broken_files_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_cloud(tmp_path / name)


def test_columns_and_coordinates_are_checked(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 5)))
    with pytest.raises(ValueError, match=r"is \(4, 5\); an array of points has 3, 4, 6"):
        read_cloud(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.full((4, 3), np.nan))
    with pytest.raises(ValueError, match="coordinates that are not finite"):
        read_cloud(tmp_path / "b.npy")
    far = np.arange(12).reshape(4, 3) + 5e6 + 0.25
    np.save(tmp_path / "c.npy", far)
    np.testing.assert_allclose(np.diff(read_cloud(tmp_path / "c.npy").coord, axis=0), 3)


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
    with pytest.raises(
        ValueError, match=r"val.* lacks labels \(segment200\), which training needs"
    ):
        more.setup()
    np.save(tmp_path / "scannet/val/scene0000_00/segment200.npy", many)
    more.setup()
    assert more.dataset("train")[0, 0]["labels"].max() > 20
    with pytest.raises(FileNotFoundError, match="lacks Area_1; it must hold"):
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
    with pytest.raises(FileNotFoundError, match=r"classes\.txt is missing"):
        data.setup()
    (tmp_path / "classes.txt").write_text("wall\nfloor\n")
    with pytest.raises(ValueError, match=r"has the label 2, but there are 2 classes"):
        data.setup()
    (tmp_path / "classes.txt").write_text("wall\nfloor\nchair\n", encoding="utf-8-sig")
    data = CloudFolderDataModule(tmp_path, features=["color"], **SMALL)
    assert data.backbone_arguments == {"channels": 3}
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert batch["points"].shape[2] == 6
    assert data.class_names == ("wall", "floor", "chair")
    with pytest.raises(ValueError, match=r"data\.features must name some of color, normal, coord"):
        CloudFolderDataModule(tmp_path, features=["colour"], **SMALL)


def test_missing_colours_and_normals_are_named(tmp_path, caplog):
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    one = cloud()
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        np.save(tmp_path / split / "a.npy", np.column_stack([one.coord, one.labels]))
    for features, advice in ((["color", "normal"], "coord"), (["color", "coord"], "coord")):
        data = CloudFolderDataModule(tmp_path, features=features, **SMALL)
        with pytest.raises(
            ValueError, match=rf"train.* lacks color, .*data\.features=\[{advice}\]"
        ):
            data.setup()
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


def test_samples_depend_on_seed_epoch_and_index_alone(tmp_path):
    data = SamplePoints(tmp_path, num_train=2, num_val=1, density=20, **SMALL)
    data.setup()
    one, again = (data.dataset("train")[3, 1]["points"] for _ in range(2))
    assert torch.equal(one, again)
    assert not torch.equal(one[:50], data.dataset("train")[4, 1]["points"][:50])


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


def test_a_room_has_its_kinds_of_points():
    room = make_room((0, 0, 0), 100)
    found = {SCANNET[label] for label in np.unique(room["segment20"])}
    assert {"wall", "floor", "door", "window"} <= found
    assert len(found) >= 7
    np.testing.assert_allclose(np.linalg.norm(room["normal"], axis=1), 1)
    floor = room["coord"][room["segment20"] == SCANNET.index("floor")]
    assert np.abs(floor[:, 2]).max() < 0.05
