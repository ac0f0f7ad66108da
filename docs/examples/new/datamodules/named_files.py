"""Images in one folder a split whose names begin with their class, as Oxford-IIIT Pet's do."""

from pathlib import Path

from datamodules.base import Split
from datamodules.files import list_images, require_folder
from datamodules.images.classification import ClassificationDataModule
from datamodules.images.transforms import Transform
from datamodules.loading.sampling import SeededDataset


class NamedFilesDataModule(ClassificationDataModule):
    """train/beagle_12.jpg has the class beagle; the classes are those of the training images."""

    layout = "train/<class>_<number>.jpg and val/<class>_<number>.jpg"
    example = "data=named_files data.root=/data/pets"

    def build(self) -> dict[Split, SeededDataset]:
        """List both folders; the classes are those of the training images."""
        train, val = self._images("train"), self._images("val")
        self.class_names = tuple(sorted({class_of(name) for name in train}))
        extras = {class_of(name) for name in val} - set(self.class_names)
        if extras:
            raise ValueError(f"{self.folder}/val has classes that train lacks: {sorted(extras)}")
        return {
            "train": self._split("train", train, self.augmentation.train(self.image_size)),
            "val": self._split("val", val, self.augmentation.eval(self.image_size)),
        }

    def _images(self, split: str) -> list[str]:
        folder = self.folder / split
        require_folder(folder, f"the set has {self.layout}")
        names = list_images(folder)
        if not names:
            raise ValueError(f"{folder} holds no images; the set has {self.layout}")
        return names

    def _split(self, split: str, names: list[str], transform: Transform) -> SeededDataset:
        labels = [self.class_names.index(class_of(name)) for name in names]
        return self.files(self.folder / split, names, labels, transform)


def class_of(name: str) -> str:
    """Return the text before the last underscore."""
    return Path(name).stem.rpartition("_")[0]
