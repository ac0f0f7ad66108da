"""Numbered class folders, and a network that knows them: what it scores tells their order."""

import numpy as np
import torch
from PIL import Image
from torch.utils.data import default_collate

from backbones.checkpoints.seal import seal
from datamodules import ClassFoldersDataModule, LightAugmentation
from datamodules.loading.pixels import scale_bytes
from heads.linear import LinearClassifier

CLASSES = 12
TEXT = tuple(sorted(map(str, range(1, CLASSES + 1))))  # 1, 10, 11, 12, 2, ...
NATURAL = tuple(map(str, range(1, CLASSES + 1)))
SIZE, BACKBONE = 64, "deit_t"
BUILT = {"img_size": SIZE}
TYPED = (
    "task=classification", f"backbone={BACKBONE}", "trainer=cpu", "data=folder",
    f"data.image_size={SIZE}", "data.num_workers=0", "data.batch_size=12",
    "data.augmentation={_target_: datamodules.images.transforms.LightAugmentation}",
)  # fmt: skip


def picture(number):
    """An image of its own for each class."""
    pixels = np.random.default_rng(number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.NEAREST)


def write_folders(root, val="val", copies=1, ending="png"):
    """Write ``train/<class>/`` and ``val/<class>/`` of the classes 1 to 12."""
    for split in ("train", val):
        for name in NATURAL:
            folder = root / split / name
            folder.mkdir(parents=True)
            for copy in range(copies):
                picture(int(name)).save(folder / f"{copy}.{ending}")
    return root


@torch.no_grad()
def classifier(root, order):
    """A network whose classifier is solved for the folders, in an order of the classes."""
    torch.manual_seed(0)
    from backbones import create_backbone

    network = LinearClassifier(create_backbone(BACKBONE, **BUILT), CLASSES).eval()
    data = ClassFoldersDataModule(
        root, image_size=SIZE, augmentation=LightAugmentation(), num_workers=0, class_order=order
    )
    data.setup()
    dataset = data.dataset("val")
    batch = data.normalise(default_collate([dataset[0, i] for i in range(len(dataset))]))
    embedded = network.backbone.embed(batch["image"])
    wanted = torch.nn.functional.one_hot(batch["label"], CLASSES).float() * 10
    centred = embedded - embedded.mean(0)
    weight = torch.linalg.lstsq(centred, wanted, driver="gelsd").solution
    network.classifier.weight.copy_(weight.T)
    network.classifier.bias.copy_(-embedded.mean(0) @ weight)
    assert network(batch["image"]).argmax(1).equal(batch["label"])
    return network


def prepared(image):
    """Return an image (C, H, W) as the network reads it."""
    recipe = LightAugmentation()
    return scale_bytes(recipe.eval(SIZE)(image), 255, recipe.mean, recipe.std)


def save_ours(network, file, names):
    """Write a checkpoint as a run leaves it."""
    tensors = {f"model.{key}": value for key, value in network.state_dict().items()}
    torch.save(seal({"state_dict": tensors, "class_names": list(names)}), file)


def save_foreign(network, file):
    """Write the bare tensors, as timm does."""
    torch.save(network.state_dict(), file)
