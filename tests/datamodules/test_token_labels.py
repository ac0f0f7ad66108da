"""Label maps follow their images, and errors name their file."""

import random
import zipfile

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import auto_augment
from torchvision.transforms.functional import normalize, to_tensor

from datamodules.images import token_labels
from datamodules.images.class_folders import ClassFoldersDataModule
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.token_labels import MOVES, LabelledTransform, move_map
from datamodules.images.transforms import PaperAugmentation
from heads.dense_logits import dense_logits
from tests.datamodules.loading import ready
from tests.errors import refuses
from tools.annotate import main

SIDE, CLASSES = 8, 3
NEAREST = {"resample": Image.Resampling.NEAREST, "fillcolor": 0}


def to_map(image):
    """Return a label map with a grey image's pixels as scores and their numbers as classes."""
    pixels = torch.from_numpy(np.array(image)).float()
    return torch.stack([pixels, torch.arange(pixels.numel()).view_as(pixels).float()])[:, None]


@pytest.mark.parametrize(
    ("function", "values"),
    [("shear_x", 0.3), ("shear_x", -0.2), ("shear_y", 0.3), ("shear_y", -0.11),
     ("translate_x_rel", 0.25), ("translate_y_rel", -0.25), ("translate_x_abs", 3),
     ("translate_y_abs", -2), ("rotate", 24.0), ("rotate", -8.0)],
)  # fmt: skip
@pytest.mark.parametrize("size", [(16, 16), (24, 12)])
def test_a_map_moves_as_pillow_moves_the_image(function, values, size):
    pixels = np.random.default_rng(0).integers(1, 250, size[::-1], dtype=np.uint8)
    image = Image.fromarray(pixels)
    operation = getattr(auto_augment, function)
    expected = np.array(operation(image, values, **NEAREST))
    got = move_map(to_map(image), MOVES[operation](*size, values))[0, 0].numpy()
    assert (got == expected).mean() > 0.97  # Pillow rounds its coefficients


def test_every_operation_that_moves_is_followed():
    still = {"auto_contrast", "equalize", "invert", "posterize", "solarize", "solarize_add",
             "color", "contrast", "brightness", "sharpness", "gaussian_blur_rand", "gaussian_blur",
             "desaturate"}  # fmt: skip
    assert {f for f in auto_augment.NAME_TO_OP.values() if f.__name__ not in still} == set(MOVES)


def shown(seed, transform, image, label_map):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return transform(image, label_map)


@pytest.mark.parametrize("policy", [None, "rand-m9-mstd0.5-inc1"])
def test_the_maps_box_equals_the_crop(policy):
    """A white spot in the image keeps the map's class after all changes."""
    augmentation = PaperAugmentation(
        auto_augment=policy, color_jitter=0.0, random_erasing=0.0, crop_scale=(0.3, 0.9),
        mean=(0, 0, 0), std=(1, 1, 1),
    )  # fmt: skip
    side = 16
    scores = torch.zeros(2, 1, side, side)
    scores[0, 0, 3:7, 8:12] = 1
    pixels = np.zeros((320, 320, 3), np.uint8)
    pixels[60:140, 160:240] = 255
    transform = LabelledTransform(augmentation, 64, "maps", "image")
    agreements = []
    for seed in range(60):
        image, label_map, box = shown(seed, transform, Image.fromarray(pixels), scores)
        left, top, right, bottom = (box * side).tolist()
        rows = (torch.linspace(top, bottom, 65)[:-1] + (bottom - top) / 128).long()
        columns = (torch.linspace(left, right, 65)[:-1] + (right - left) / 128).long()
        expected = label_map[0, 0][rows.clamp(0, 15)][:, columns.clamp(0, 15)] > 0
        bright = image.float().mean(0) / 255
        if not expected.any() or bright[expected].std() > 0.4 or bright.max() - bright.min() < 0.5:
            continue
        inner = expected if bright[expected].mean() > bright.mean() else ~expected
        agreements.append(((bright > bright.mean()) == inner).float().mean())
    assert len(agreements) > 20
    assert np.mean(agreements) > 0.93


def test_released_boxes_swap_rows_and_columns():
    image, label_map = Image.new("RGB", (40, 60)), torch.zeros(2, 5, 6, 6)
    boxes = []
    for kind in ("image", "released"):
        transform = LabelledTransform(PaperAugmentation(), 32, "maps", kind)
        boxes.append(shown(4, transform, image, label_map)[2])
    assert torch.equal(boxes[1], boxes[0][[1, 0, 3, 2]])
    assert not torch.equal(*boxes)
    assert (boxes[0][2:] > boxes[0][:2]).all()


@pytest.fixture
def root(tmp_path):
    for split in ("train", "val"):
        for name in "abc":
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (40, 30), (80 * number, 60, 30)).save(folder / f"{number}.jpg")
    return tmp_path / "data"


@pytest.fixture
def maps(root, tmp_path):
    """Write label maps of the training images."""
    for name in "abc":
        (tmp_path / "maps" / name).mkdir(parents=True)
        for number in range(2):
            classes = torch.tensor([1.0, 2.0])[:, None, None].expand(2, 6, 6)
            label_map = torch.stack([torch.randn(2, 6, 6), classes]).half()
            torch.save(label_map, tmp_path / "maps" / name / f"{number}.pt")
    return tmp_path / "maps"


def data(root, maps, kind=ImageFolderDataModule, **options):
    return kind(root, image_size=32, token_labels=str(maps), batch_size=4, num_workers=0, **options)


@pytest.mark.parametrize("kind", [ImageFolderDataModule, ClassFoldersDataModule])
def test_batches_have_the_maps_of_their_images(kind, root, maps):
    made = checked(root, maps, kind)
    batch = next(iter(made.train_dataloader()))
    assert batch["token_scores"].shape == batch["token_classes"].shape == (4, 2, 6, 6)
    assert batch["token_classes"].dtype == torch.int64
    assert batch["token_scores"].dtype == torch.float32
    assert batch["token_box"].shape == (4, 4)
    assert not any(key.startswith("token") for key in next(iter(made.val_dataloader())))
    again = checked(root, maps, kind)
    torch.testing.assert_close(next(iter(again.train_dataloader())), batch)


def checked(*given, **options):
    made = ready(data, *given, **options)
    made.check_files()
    return made


WRONG_MAPS = [
    (torch.zeros(5, 6, 6), r"must hold a dense tensor \(2, T, h, w\) .* got \(5, 6, 6\)"),
    (torch.zeros(2, 5, 7, 7), r"is a label map of \(2, 5, 7, 7\), the first one of \(2, 2, 6"),
    (torch.full((2, 2, 6, 6), 4.0), r"has the classes 4 to 4, but the data have 3"),
    (torch.full((2, 2, 6, 6), torch.nan), "has the classes nan to nan"),
    (torch.zeros(2, 2, 6, 6).to(torch.float8_e4m3fn), "is not a label map"),
    (torch.empty(2, 2, 6, 6, device="meta"), "is not a label map"),
    (torch.zeros(2, 2, 6, 6).to_sparse(), "is not a label map: it must hold a dense"),
    (torch.zeros(1).expand(2, 2, 10**6, 10**6), "is not a label map"),
    (torch.quantize_per_tensor(torch.zeros(2, 2, 6, 6), 1.0, 0, torch.qint8), "is not a label"),
    (torch.nested.nested_tensor([torch.zeros(2, 6, 6)] * 2), "is not a label map"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_MAPS)
def test_wrong_maps_are_rejected(root, maps, wrong, message):
    torch.save(wrong, maps / "c" / "1.pt")
    made = ready(data, root, maps)
    with pytest.raises(ValueError, match=message):
        list(made.train_dataloader())


def test_damaged_and_missing_maps_are_rejected(root, maps, tmp_path, monkeypatch):
    monkeypatch.setattr(token_labels, "MOST_BYTES", 10_000)
    checked(root, maps)
    (maps / "b" / "1.pt").rename(maps / "1.pt")
    with pytest.raises(FileNotFoundError, match=r"1 label maps are missing in .*: b/1\.pt; make"):
        checked(root, maps)
    (maps / "1.pt").rename(maps / "b" / "1.pt")
    file = maps / "a" / "0.pt"
    file.write_bytes(b"nothing")
    refuses(r"a/0\.pt is not a label map", checked, root, maps)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(20_000))
    assert file.stat().st_size < 10_000
    refuses(r"0\.pt is not a label map: .* at most 10\.0 KB, got 20000", checked, root, maps)
    gone = ready(data, root, tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"none does not exist; data\.token_labels="):
        gone.check_files()
    assert next(iter(gone.val_dataloader()))["image"].ndim == 4  # evaluation needs no label maps


@pytest.fixture
def small(tmp_path):
    """Return weights of timm's smallest network for the three classes."""
    network = timm.create_model("test_resnet", num_classes=CLASSES)
    torch.save(network.state_dict(), tmp_path / "s.pth")
    return tmp_path / "s.pth"


def test_maps_of_the_command_train(root, small, tmp_path, capsys):
    out = tmp_path / "maps"
    typed = [f"root={root}", f"out={out}", "teacher=test_resnet", f"checkpoint={small}", "top=2"]
    assert main(typed) == 0
    said = "label maps of test_resnet at 160 pixels written,"
    assert f"6 {said} 0 existed already" in capsys.readouterr().out
    label_map = torch.load(out / "b" / "1.pt")
    assert (label_map.shape, label_map.dtype) == ((2, 2, 5, 5), torch.float16)
    network = timm.create_model("test_resnet", num_classes=CLASSES).eval()
    network.load_state_dict(torch.load(small))
    image = Image.open(root / "train" / "b" / "1.jpg").resize((160, 160), Image.Resampling.BICUBIC)
    own = network.pretrained_cfg
    pixels = normalize(to_tensor(image), own["mean"], own["std"])
    best = dense_logits(network, pixels[None])[0].topk(2, 0)
    torch.testing.assert_close(label_map[0].float(), best.values, rtol=2e-3, atol=2e-3)
    assert torch.equal(label_map[1].long(), best.indices)
    (out / "a" / "0.pt").unlink()
    assert main(typed) == 0
    assert f"1 {said} 5 existed" in capsys.readouterr().out
    made = ready(data, root, out)
    assert next(iter(made.train_dataloader()))["token_scores"].shape == (4, 2, 5, 5)


def test_annotating_rejects_wrong_input(root, small, tmp_path, capsys):
    here, teacher = f"root={root}", ("teacher=test_resnet", f"checkpoint={small}")

    def check_error(message, *typed):
        assert main([f"out={tmp_path / 'maps'}", *typed]) == 2
        assert message in capsys.readouterr().err

    check_error("annotate.py: root=FOLDER is missing", *teacher)
    check_error("teacher=NAME or checkpoint=<run folder> is missing", here)
    check_error("folder nowhere does not exist; pass a", "root=nowhere", *teacher)
    check_error("'resnt' is neither a backbone", here, "teacher=resnt")
    check_error("top=5 is more than the number of classes, 3", here, *teacher)
    (root / "train" / "a" / "0.png").write_bytes((root / "train" / "a" / "0.jpg").read_bytes())
    check_error("a/0.jpg and a/0.png would share one label map", here, *teacher)
    assert not (tmp_path / "maps").exists()
