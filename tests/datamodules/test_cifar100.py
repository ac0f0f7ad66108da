"""The pickles of CIFAR-100 and CIFAR-10, read without executing code."""

import os
import pickle

import numpy as np
import pytest
import torch

from datamodules import CIFAR10DataModule, CIFAR100DataModule, LightAugmentation
from datamodules.images.cifar100 import read_pickle
from tests.datamodules import loading
from tests.stand_ins import write_cifar10


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
def test_pixels_are_read_channel_by_channel(root, inner):
    pixels = np.zeros((100, 3, 32, 32), dtype=np.uint8)
    pixels[:, 0] = 255
    pixels[:, 1, 16:] = 255
    write(root / "cifar-100-python/test", content(100, data=pixels.reshape(100, -1)))
    labels = np.arange(200, dtype=np.uint8) % 98
    write(root / "cifar-100-python/train", content(fine_labels=labels))  # numpy's labels
    plain = LightAugmentation(mean=(0, 0, 0), std=(1, 1, 1))
    data = ready(root / inner, image_size=32, augmentation=plain)
    batch = next(iter(data.val_dataloader()))
    assert torch.equal(batch["image"][0], torch.from_numpy(pixels[0]))
    assert torch.equal(data.normalise(batch)["image"][0], torch.from_numpy(pixels[0]) / 255)
    assert batch["label"].tolist() == batch["sample_id"].tolist() == list(range(50))
    assert data.class_names[7] == "class7"
    assert data.notices({}) == []
    write(root / "cifar-100-python/test", content(100, fine_labels=[*range(98), 0, 0]))
    (line,) = ready(root).notices({})
    assert line == "2 of 100 classes do not occur in validation: class98, class99"


def test_the_batches_of_cifar10_follow_each_other(tmp_path):
    write_cifar10(tmp_path, rows=20)
    data = CIFAR10DataModule(tmp_path, num_workers=0)
    data.setup()
    labels = [int(data.dataset("train")[0, i]["label"]) for i in (0, 19, 20, 99)]
    assert labels == [0, 9, 0, 9]
    assert data.dataset("train").describe(20).endswith("data_batch_2, row 0")
    assert data.dataset("train").describe(19).endswith("data_batch_1, row 19")
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match="lacks cifar-10-batches-py/data_batch_1 to"):
        CIFAR10DataModule(tmp_path).setup()
    write(tmp_path / "data_batch_3", content(20))
    with pytest.raises(ValueError, match=r"data_batch_3 lacks 'labels', .*CIFAR-100's keys"):
        CIFAR10DataModule(tmp_path).setup()


def test_missing_files_name_the_archive_beside_them(root):
    (root / "cifar-100-python/meta").unlink()
    not_found(root, "lacks cifar-100-python/train, test and meta")
    (root / "cifar-100-python.tar.gz").touch()
    not_found(root, r"tar -xzf .*cifar-100-python\.tar\.gz")


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
# Written content or bytes of the training file, and the message.
FAULTS = [
    (ATTACK, "posix.system"),
    ({"data": [ATTACK]}, "posix.system"),
    # numpy would read these bytes as the addresses of two objects.
    (array(1, (2,), np.dtype("O"), False, b"\x01" * 16), "other data than plain uint8"),
    (dtype(("u1", 8), None, None, -1, -1, 0), "'data' must be a uint8 array|lacks"),
    (array(1, (9, 9), np.dtype("u1"), False, b"short"), "cannot reshape"),
    (array(1, (3,), "u1", False, b"abc"), "other data than plain uint8"),
    (b"\x80\x02}r\xff\xff\xff\xff.", "'data' must be a uint8 array"),  # an endless memo
    (pickle.dumps(content(), protocol=2)[:1000], "unpack the archive again"),
    ([1, 2], "'list' object"),
    (content(data=np.zeros((200, 3071), np.uint8)), r"must be a uint8 array \(N, 3072\)"),
    (content(data=np.zeros((200, 3072), np.float32)), "other data than plain uint8"),
    (content(fine_labels=[0] * 199), "must be 200 integers"),
    (content(fine_labels=[0.0] * 199 + [0.5]), r"fine_labels\[199\] must be an int.* got 0\.5"),
    (content(fine_labels=[0] * 150 + [100, -1] + [0] * 48), "got 2 others, the first in row 150"),
]


@pytest.mark.parametrize(("payload", "message"), FAULTS)
def test_wrong_files_are_named_and_run_nothing(root, payload, message):
    file = root / "cifar-100-python/train"
    file.write_bytes(payload) if isinstance(payload, bytes) else write(file, payload)
    assert str(file) in rejected(root, message)
    write(root / "cifar-100-python/meta", {b"fine_label_names": [b"cat"]})
    rejected(root, "'fine_label_names' must be a list of 100 different texts")
