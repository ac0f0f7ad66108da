"""Label maps follow their images, and errors name their file."""

import random
import zipfile

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import auto_augment
from torchvision.transforms.functional import to_tensor

from datamodules.images import token_labels
from datamodules.images.class_folders import ClassFoldersDataModule
from datamodules.images.image_folder import ImageFolderDataModule
from datamodules.images.token_labels import MOVES, LabelledTransform, move_map
from datamodules.images.transforms import LightAugmentation, PaperAugmentation
from heads.dense_logits import dense_logits
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
        bright = image.mean(0)
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


@pytest.mark.parametrize(
    "augmentation", [LightAugmentation(), PaperAugmentation(auto_augment="augmix-m5-w4-d2")]
)
def test_unsupported_augmentations_are_rejected(augmentation):
    with pytest.raises(ValueError, match=r"pass data\.augmentation\._target_=.*PaperAugmentation"):
        LabelledTransform(augmentation, 32, "maps")


@pytest.fixture
def root(tmp_path):
    for split in ("train", "val"):
        for name in "abc":
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (40, 30), (80 * number, 60, 30)).save(folder / f"{number}.jpg")
    return tmp_path / "data"


def write_maps(folder, root, label_map=None):
    for path in (root / "train").rglob("*.jpg"):
        file = folder / path.parent.name / f"{path.stem}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        scores = torch.randn(2, 6, 6)
        classes = torch.stack([torch.full((6, 6), 1.0), torch.full((6, 6), 2.0)])
        torch.save(torch.stack([scores, classes]).half() if label_map is None else label_map, file)
    return folder


def data(root, maps, kind=ImageFolderDataModule, **options):
    return kind(root, image_size=32, token_labels=str(maps), batch_size=4, num_workers=0, **options)


@pytest.mark.parametrize("kind", [ImageFolderDataModule, ClassFoldersDataModule])
def test_batches_have_the_maps_of_their_images(kind, root, tmp_path):
    maps = write_maps(tmp_path / "maps", root)
    made = data(root, maps, kind)
    check(made)
    batch = next(iter(made.train_dataloader()))
    assert batch["token_scores"].shape == batch["token_classes"].shape == (4, 2, 6, 6)
    assert batch["token_classes"].dtype == torch.int64
    assert batch["token_scores"].dtype == torch.float32
    assert batch["token_box"].shape == (4, 4)
    assert not any(key.startswith("token") for key in next(iter(made.val_dataloader())))
    again = data(root, maps, kind)
    again.setup()
    torch.testing.assert_close(next(iter(again.train_dataloader())), batch)


def check(made):
    made.setup()
    made.check_files()


def test_wrong_maps_are_rejected(root, tmp_path):
    maps = write_maps(tmp_path / "maps", root)
    (maps / "b" / "1.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 label maps are missing in .*: b/1\.pt; make"):
        check(data(root, maps))
    write_maps(maps, root)
    (maps / "a" / "0.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"a/0\.pt is not a label map"):
        check(data(root, maps))
    write_maps(maps, root)
    for wrong, message in (
        (torch.zeros(5, 6, 6), r"must hold a tensor \(2, T, h, w\)"),
        (torch.zeros(2, 5, 7, 7), r"is a label map of \(2, 5, 7, 7\), the first one of \(2, 2, 6"),
        (torch.full((2, 2, 6, 6), 4.0), r"has the classes 4 to 4, but the data have 3"),
        (torch.full((2, 2, 6, 6), torch.nan), "has the classes nan to nan"),
        (torch.zeros(2, 2, 6, 6).to(torch.float8_e4m3fn), "is not a label map: .*float8_e4m3fn"),
        (torch.empty(2, 2, 6, 6, device="meta"), "is not a label map"),
        (torch.zeros(2, 2, 6, 6).to_sparse(), "is not a label map: it must hold one dense"),
        (torch.zeros(1).expand(2, 2, 10**6, 10**6), "is not a label map"),
        (torch.quantize_per_tensor(torch.zeros(2, 2, 6, 6), 1.0, 0, torch.qint8), "is not a label"),
        (torch.nested.nested_tensor([torch.zeros(2, 6, 6)] * 2), "is not a label map"),
    ):
        torch.save(wrong, maps / "c" / "1.pt")
        made = data(root, maps)
        made.setup()
        with pytest.raises(ValueError, match=message):
            list(made.train_dataloader())
    with pytest.raises(
        FileNotFoundError, match=r"folder .*none does not exist; data\.token_labels="
    ):
        check(data(root, tmp_path / "none"))
    gone = data(root, tmp_path / "none")
    gone.setup()  # evaluation works without label maps
    assert next(iter(gone.val_dataloader()))["image"].ndim == 4
    with pytest.raises(ValueError, match=r"data\.token_boxes=yx must be one of image, released"):
        data(root, maps, token_boxes="yx")


def test_maps_that_unpack_beyond_the_limit_are_rejected(root, tmp_path, monkeypatch):
    maps = write_maps(tmp_path / "maps", root)
    monkeypatch.setattr(token_labels, "MOST_BYTES", 10_000)
    check(data(root, maps))
    with zipfile.ZipFile(maps / "a/0.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(20_000))
    assert (maps / "a/0.pt").stat().st_size < 10_000
    with pytest.raises(ValueError, match=r"0\.pt is not a label map: it unpacks to 20\.0 KB, but"):
        check(data(root, maps))


def test_recipes_with_required_maps_stop_only_training(root):
    made = data(root, "required")
    made.setup()
    assert next(iter(made.val_dataloader()))["image"].ndim == 4
    with pytest.raises(ValueError, match=r"pass data\.token_labels=<folder of label maps> .* or "):
        made.check_files()


@pytest.fixture
def small(tmp_path):
    torch.save(
        timm.create_model("test_resnet", num_classes=CLASSES).state_dict(), tmp_path / "s.pth"
    )
    return tmp_path / "s.pth"


def test_maps_of_the_command_train(root, small, tmp_path, capsys):
    out = tmp_path / "maps"
    typed = [f"root={root}", f"out={out}", "teacher=test_resnet", f"checkpoint={small}", "top=2"]
    assert main(typed) == 0
    assert (
        "6 label maps of test_resnet at 160 pixels written, 0 existed already"
        in capsys.readouterr().out
    )
    label_map = torch.load(out / "b" / "1.pt")
    assert label_map.shape == (2, 2, 5, 5)
    assert label_map.dtype == torch.float16
    network = timm.create_model("test_resnet", num_classes=CLASSES).eval()
    network.load_state_dict(torch.load(small))
    image = Image.open(root / "train" / "b" / "1.jpg").resize((160, 160), Image.Resampling.BICUBIC)
    own = network.pretrained_cfg
    pixels = to_tensor(image).sub(torch.tensor(own["mean"])[:, None, None])
    pixels = pixels.div(torch.tensor(own["std"])[:, None, None])
    best = dense_logits(network, pixels[None])[0].topk(2, 0)
    torch.testing.assert_close(label_map[0].float(), best.values, rtol=2e-3, atol=2e-3)
    assert torch.equal(label_map[1].long(), best.indices)
    (out / "a" / "0.pt").unlink()
    assert main(typed) == 0
    assert "1 label maps of test_resnet at 160 pixels written, 5 existed" in capsys.readouterr().out
    made = data(root, out)
    made.setup()
    assert next(iter(made.train_dataloader()))["token_scores"].shape == (4, 2, 5, 5)


def test_annotating_rejects_wrong_input(root, small, tmp_path, capsys):
    def error_of(*typed):
        assert main([f"out={tmp_path / 'maps'}", *typed]) == 2
        return capsys.readouterr().err

    teacher = ("teacher=test_resnet", f"checkpoint={small}")
    assert "annotate.py: root=FOLDER is missing" in error_of(*teacher)
    assert "teacher=NAME or checkpoint=<run folder> is missing" in error_of(f"root={root}")
    assert "folder nowhere does not exist; pass a" in error_of("root=nowhere", *teacher)
    assert "'resnt' is neither a backbone" in error_of(f"root={root}", "teacher=resnt")
    assert "top=5 is more than the number of classes, 3" in error_of(f"root={root}", *teacher)
    (root / "train" / "a" / "0.png").write_bytes((root / "train" / "a" / "0.jpg").read_bytes())
    assert "a/0.jpg and a/0.png would share one label map" in error_of(f"root={root}", *teacher)
    assert not (tmp_path / "maps").exists()


def test_maps_name_the_order_of_their_classes(root, small, tmp_path, capsys):
    for split in ("train", "val"):
        for name, new in zip("abc", ("1", "10", "2"), strict=True):
            (root / split / name).rename(root / split / new)
    (root / "train/10/0.jpg").rename(root / "train/10/close.jpg")
    typed = [f"root={root}", f"out={tmp_path / 'maps'}", "teacher=test_resnet", "top=2"]
    with pytest.warns(UserWarning, match="teacher .* lacks class names.*class_order=nat"):
        assert main([*typed, f"checkpoint={small}"]) == 0
    check(data(root, tmp_path / "maps"))
    with pytest.raises(ValueError, match="label maps of these classes in another order; pass the"):
        check(data(root, tmp_path / "maps", class_order="natural"))
    assert main([*typed, f"checkpoint={small}", "class_order=natural"]) == 2
    assert "label maps of these classes in another order" in capsys.readouterr().err
    typed[1] = f"out={tmp_path / 'natural'}"
    assert main([*typed, f"checkpoint={small}", "class_order=natural"]) == 0
    check(data(root, tmp_path / "natural", class_order="natural"))
    (tmp_path / "natural/classes.json").write_text('["1"]')
    with pytest.raises(ValueError, match=r"classes\.json lists 1 classes, not the 3 of the data"):
        check(data(root, tmp_path / "natural", class_order="natural"))
