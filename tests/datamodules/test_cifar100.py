"""The pickles of CIFAR-100 and CIFAR-10, read without executing code."""

import os
import pickle

import numpy as np
import pytest
import torch

from datamodules import CIFAR10DataModule, CIFAR100DataModule, LightAugmentation
from datamodules.images.cifar100 import read_pickle
from tests.datamodules import loading


def content(count=200, **changes):
    generator = np.random.default_rng(0)
    entry = {
        "filenames": [f"{i}.png".encode() for i in range(count)],
        "batch_label": b"test",
        "fine_labels": [i % 100 for i in range(count)],
        "coarse_labels": [0] * count,
        "data": generator.integers(0, 256, (count, 3072), dtype=np.uint8),
    }
    return {key.encode(): value for key, value in (entry | changes).items()}


def write(path, entry):
    path.write_bytes(pickle.dumps(entry, protocol=2))


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    write(folder / "train", content())
    write(folder / "test", content(100))
    write(folder / "meta", {b"fine_label_names": [f"class{i}".encode() for i in range(100)]})
    return tmp_path


module, ready, rejected, not_found = loading.bound(
    CIFAR100DataModule, image_size=40, batch_size=50, num_workers=0
)


@pytest.mark.parametrize("inner", ["", "cifar-100-python"])
def test_batches(root, inner):
    data = ready(root / inner)
    assert data.num_classes == 100
    assert data.class_names[7] == "class7"
    assert len(list(data.train_dataloader())) == 4
    batch = next(iter(data.val_dataloader()))
    assert batch["image"].shape == (50, 3, 40, 40)
    assert batch["label"].tolist() == batch["sample_id"].tolist() == list(range(50))


def test_pixels_are_read_channel_by_channel(root):
    pixels = np.zeros((100, 3, 32, 32), dtype=np.uint8)
    pixels[:, 0] = 255
    pixels[:, 1, 16:] = 255
    write(root / "cifar-100-python/test", content(100, data=pixels.reshape(100, -1)))
    plain = LightAugmentation(mean=(0, 0, 0), std=(1, 1, 1))
    data = CIFAR100DataModule(root, image_size=32, augmentation=plain, num_workers=0)
    data.setup()
    batch = next(iter(data.val_dataloader()))
    assert torch.equal(batch["image"][0], torch.from_numpy(pixels[0]))
    assert torch.equal(data.normalise(batch)["image"][0], torch.from_numpy(pixels[0]) / 255)


def test_python_2_pickles(tmp_path):
    # Python 2's pickle.dumps({"data": "ab", "fine_labels": [7]}, 2), with byte strings.
    (tmp_path / "train").write_bytes(
        b"\x80\x02}q\x00(U\x0bfine_labelsq\x01]q\x02K\x07aU\x04dataq\x03U\x02abq\x04u."
    )
    assert read_pickle(tmp_path / "train") == {"fine_labels": [7], "data": "ab"}


class Reduced:
    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


def array(*state):
    """Return pickled data that rebuild an array by a state."""
    return {"data": Reduced(*np.zeros(0, np.uint8).__reduce__()[:2], state)}


def dtype(*state):
    return {"data": Reduced(np.dtype, ("u1",), (3, "|", *state))}


ATTACK = Reduced(os.system, ("touch /tmp/should_not_exist",))
HARMFUL = [
    (ATTACK, "posix.system"),
    ({"data": [ATTACK]}, "posix.system"),
    # numpy would read these bytes as the addresses of two objects.
    (array(1, (2,), np.dtype("O"), False, b"\x01" * 16), "dtype O8 found"),
    (dtype(("u1", 8), None, None, -1, -1, 0), "structured dtype"),
    (dtype(None, ("a",), {"a": 1}, 8, 1, 16), "structured dtype"),
    (array(1, (9, 9), np.dtype("u1"), False, b"short"), "cannot reshape"),
    (array(1, (3,), "u1", False, b"abc"), "other data than bytes"),
]


@pytest.mark.parametrize(("payload", "message"), HARMFUL)
def test_code_and_arrays_that_would_crash_numpy_are_rejected(root, payload, message):
    write(root / "cifar-100-python/train", payload)
    rejected(root, f"train cannot be read .*{message}")


class Reduced:
    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


def test_huge_memo_indices_are_rejected(root):
    (root / "cifar-100-python/train").write_bytes(b"\x80\x02}r\xff\xff\xff\xff.")
    rejected(root, "memo index 4294967295 exceeds")


def test_missing_files(root):
    (root / "cifar-100-python/meta").unlink()
    not_found(root, "lacks cifar-100-python/train, test and meta")
    (root / "cifar-100-python.tar.gz").touch()
    not_found(root, r"tar -xzf .*cifar-100-python\.tar\.gz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": np.zeros((200, 3071), np.uint8)}, r"must be a uint8 array \(N, 3072\)"),
        ({"data": np.zeros((200, 3072), np.float32)}, "dtype f4 found; CIFAR arrays must be uint8"),
        ({"data": b"text"}, "found bytes"),
        ({"fine_labels": [0] * 199}, "must be 200 integers"),
        ({"fine_labels": [0.0] * 199 + [0.5]}, r"fine_labels\[199\] must be an integer, got 0\.5"),
        ({"fine_labels": [0] * 150 + [100, -1] + [0] * 48}, "2 labels .* the first 100 in row 150"),
    ],
)
def test_wrong_content(root, changes, message):
    write(root / "cifar-100-python/train", content(**changes))
    rejected(root, message)


def test_wrong_files(root):
    folder = root / "cifar-100-python"
    cifar10 = content()
    cifar10[b"labels"] = cifar10.pop(b"fine_labels")
    for entry, message in ((cifar10, "CIFAR-10's keys"), ([1, 2], "got a list")):
        write(folder / "train", entry)
        rejected(root, message)
    (folder / "train").write_bytes(pickle.dumps(content(), protocol=2)[:1000])
    rejected(root, "unpack the archive again")
    write(folder / "meta", {b"fine_label_names": [b"cat"]})
    rejected(root, "has 1 fine classes")


def test_classes_without_test_images_are_logged(root, caplog):
    write(root / "cifar-100-python/test", content(100, fine_labels=[*range(98), 0, 0]))
    data = ready(root)
    with caplog.at_level("INFO"):
        data.check_files()
    assert caplog.messages == ["2 of 100 classes do not occur in validation: class98, class99"]


def write_cifar10(folder):
    folder.mkdir(exist_ok=True)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        labels = [(i + number) % 10 for i in range(20)]
        write(folder / name, {b"data": content(20)[b"data"], b"labels": labels})
    write(folder / "batches.meta", {b"label_names": [f"kind{i}".encode() for i in range(10)]})


_, ready_10, rejected_10, not_found_10 = loading.bound(
    CIFAR10DataModule, image_size=32, batch_size=10, num_workers=0
)


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-py"])
def test_cifar10(tmp_path, inner):
    write_cifar10(tmp_path / "cifar-10-batches-py")
    data = ready_10(tmp_path / inner)
    assert data.class_names == tuple(f"kind{i}" for i in range(10))
    assert data.sizes() == {"train": 100, "val": 20}
    labels = [int(data.dataset("train")[0, i]["label"]) for i in (0, 19, 20, 99)]
    assert labels == [0, 9, 1, 3]
    assert data.dataset("train").describe(20).endswith("data_batch_2, row 0")
    assert data.dataset("train").describe(19).endswith("data_batch_1, row 19")


def test_wrong_cifar10(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    write_cifar10(folder)
    (folder / "data_batch_3").unlink()
    not_found_10(tmp_path, "lacks cifar-10-batches-py/data_batch_1 to")
    write(folder / "data_batch_3", content(20))
    rejected_10(tmp_path, r"data_batch_3 lacks 'labels', .*CIFAR-100's keys")
    write_cifar10(folder)
    write(folder / "batches.meta", {b"label_names": [b"cat"]})
    rejected_10(tmp_path, "has 1 classes; CIFAR-10 has 10")


ODD = [None, 0, 1.5, True, "x", b"x", {}, {"a": 1}, [], [None], [[1]], [[1], [2, 3]], (),
       np.zeros((2, 2), np.uint8), [10**30] * 200, [10**6000] * 200, [float("nan")] * 200,
       [True] * 200]  # fmt: skip


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(type(value)))
@pytest.mark.parametrize(
    ("file", "key"), [("train", "data"), ("test", "fine_labels"), ("meta", "fine_label_names")]
)
def test_other_types_than_expected(root, file, key, value):
    path = root / "cifar-100-python" / file
    for entry in (read_pickle(path) | {key: value}, value):
        write(path, entry)
        said = rejected(root, str(path))
        assert "\n" not in said
        assert len(said) < 400


def test_arrays_may_hold_labels(root):
    labels = np.arange(200, dtype=np.uint8) % 100
    write(root / "cifar-100-python/train", content(fine_labels=labels))
    ready(root)
