"""What would take all memory or never end is refused before it is begun."""

from pathlib import Path

import pytest

from datamodules import (
    ClassFoldersDataModule,
    ImageFolderDataModule,
    SampleClassification,
    SampleTransfer,
    memory,
)
from datamodules.coco import CocoDataModule
from datamodules.files import images_at, list_folders, list_images, refuse_system_folder
from datamodules.memory import in_bytes, machine_memory, refuse_larger
from datamodules.segmentation_folder import SegmentationFolderDataModule


@pytest.fixture
def small(monkeypatch):
    """A machine of 4 GB."""
    monkeypatch.setattr(memory, "machine_memory", lambda: 4 * 10**9)


def test_sizes_in_words(monkeypatch, tmp_path):
    found = [in_bytes(size) for size in (0, 999, 1000, 25_340_000_000, 3.22e14, 10**18)]
    assert found == ["0 bytes", "999 bytes", "1.0 KB", "25.3 GB", "322 TB", "1,000 PB"]
    total = machine_memory()
    assert total > 10**8
    limit = tmp_path / "memory.max"
    for text, expected in (("max\n", total), ("12345678\n", 12345678), (str(2**62), total)):
        limit.write_text(text)
        monkeypatch.setattr(memory, "LIMITS", (limit, tmp_path / "none"))
        machine_memory.cache_clear()
        assert machine_memory() == expected
    machine_memory.cache_clear()


def test_what_is_larger_than_memory_is_refused(small):
    refuse_larger("a batch", 4 * 10**9, "lower it")
    with pytest.raises(
        ValueError, match=r"^a batch takes 5\.0 TB, and this machine has 4\.0 GB .*; lower it$"
    ):
        refuse_larger("a batch", 5 * 10**12, "lower it")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ImageFolderDataModule, {"batch_size": 10**5}, r"100,000 images of 224x224 .*batch_size"),
        (ImageFolderDataModule, {"image_size": 16_384, "batch_size": 2}, "16,384x16,384"),
        (ClassFoldersDataModule, {"eval_batch_size": 10**5}, r"\(data\.eval_batch_size\)"),
        (CocoDataModule, {"scale": 100_000}, r"2 images of 100,000x100,000 .*data\.scale"),
        (CocoDataModule, {"train_sizes": [[99_999, 90_000]]}, "90,000x99,999"),
        (CocoDataModule, {"scale_jitter": [1.0, 100.0]}, "80,000x133,300"),
        (SegmentationFolderDataModule, {"crop_size": 16_384}, "16,384x16,384"),
        (SegmentationFolderDataModule, {"test_scales": [1.0, 50.0]}, "25,600x102,400"),
    ],
)
def test_batches_larger_than_memory(small, kind, options, message):
    with pytest.raises(ValueError, match=f"a batch of .*{message}"):
        kind("/data", **options)
    kind("/data", batch_size=2)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SampleClassification, {"train_copies": 1000}),
        (SampleClassification, {"picture_size": 4096}),
        (SampleTransfer, {"train_per_class": 10**7}),
    ],
)
def test_sample_data_have_a_size(kind, options):
    with pytest.raises(ValueError, match=r"sample pictures of .* and 10\.0 GB are the most"):
        kind(**options)


@pytest.mark.parametrize("place", ["/", "/proc", "/proc/self/fd", "/proc/1/task", "/sys/class"])
def test_folders_of_the_system(place, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(place)
    for call in (refuse_system_folder, list_images, list_folders, images_at):
        for folder in (Path(place), link):
            with pytest.raises(ValueError, match=f"{folder} is a folder of the operating system"):
                call(folder)
    with pytest.raises(ValueError, match="is a folder of the operating system"):
        SampleClassification(place).prepare_data()
    refuse_system_folder(tmp_path)


def test_links_into_the_system_are_not_followed(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "proc").symlink_to("/proc")
    assert list_images(tmp_path) == ["a.png"]
