"""The task of super-resolution: figures, pictures, files of enlarged images, checkpoints."""

import io
import math
import warnings

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure

from backbones import create_backbone
from datamodules.super_resolution.imresize import imresize
from datamodules.super_resolution.reading import ImagesToEnlarge, read_pixels
from heads.super_resolution import SuperResolver
from tasks.super_resolution.png import write_png
from tasks.super_resolution.quality import compared, luma, psnr, ssim
from tasks.super_resolution.task import SuperResolutionTask
from tests.families import shorten
from tests.references import super_resolution as plain
from tests.runs import run_here, summary


def images(height=40, width=33):
    """An image of 8 bits, and a noisy one that is not rounded: (3, H, W) from 0 to 1."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(3, height // 8 + 1, width // 8 + 1, generator=generator)
    truth = torch.nn.functional.interpolate(truth[None], (height, width), mode="bilinear")[0]
    truth = (truth * 255).round() / 255
    return truth + 0.06 * torch.randn(truth.shape, generator=generator), truth


def eight_bits(image):
    return (image.clamp(0, 1) * 255).round().permute(1, 2, 0).double().numpy()


def task(name="bicubic", scale=2):
    model = SuperResolver(shorten(create_backbone(name, fast=False)), scale)
    return SuperResolutionTask(model).eval()


@pytest.mark.parametrize("scale", [2, 4])
def test_figures_equal_plain_ones(scale):
    enlarged, truth = images()
    inner = (slice(scale, -scale), slice(scale, -scale))
    one, other = (plain.luma(eight_bits(image))[inner] for image in (enlarged, truth))
    ours = compared(enlarged, truth, scale)
    assert psnr(*ours).item() == pytest.approx(plain.psnr(one, other), abs=1e-9)
    assert ssim(*ours).item() == pytest.approx(plain.ssim(one, other), abs=1e-9)


def test_torchmetrics_agrees_where_it_is_correct():
    one, other = compared(*images(), 3)
    theirs = PeakSignalNoiseRatio(data_range=255.0)(one[None, None], other[None, None])
    assert psnr(one, other).item() == pytest.approx(theirs.item(), abs=1e-4)
    whole = StructuralSimilarityIndexMeasure(
        data_range=255.0, sigma=1.5, kernel_size=11, return_full_image=True
    )
    mean, full = whole(one[None, None], other[None, None])
    # Public trap: its mean has the border in it, which is made of mirrored pixels.
    assert ssim(one, other).item() == pytest.approx(full[..., 5:-5, 5:-5].mean().item(), abs=1e-6)
    assert abs(ssim(one, other).item() - mean.item()) > 1e-4


def test_y_is_matlabs_studio_swing():
    """Public trap: OpenCV's Y from 0 to 255 gives 1.3 dB less."""
    assert luma(torch.ones(3, 1, 1).double()).item() == pytest.approx(235)
    assert luma(torch.zeros(3, 1, 1).double()).item() == pytest.approx(16)
    enlarged, truth = images()
    full = [
        cv2.cvtColor(eight_bits(image).astype(np.uint8), cv2.COLOR_RGB2YCrCb)[2:-2, 2:-2, 0]
        for image in (enlarged, truth)
    ]
    theirs = plain.psnr(*(one.astype(float) for one in full))
    less = psnr(*compared(enlarged, truth, 2)).item() - theirs
    assert less == pytest.approx(20 * math.log10(255 / 219), abs=0.1)  # 1.32 dB


def test_a_figure_is_the_mean_of_the_images_figures():
    """Public trap: neither pixels nor batches are pooled."""
    own = task()
    truths = [images(40, 33)[1], images(80, 66)[1], images(41, 50)[1]]
    guesses = [images(40, 33)[0], images(80, 66)[1] + 0.01, images(41, 50)[0]]
    pairs = [compared(guess, truth, 2) for guess, truth in zip(guesses, truths, strict=True)]
    for batches in ([[0], [1], [2]], [[0, 1], [2]], [[0, 1, 2]]):
        own.reset_metrics()
        for batch in batches:
            own.update_metrics({"high": [truths[i] for i in batch]}, [guesses[i] for i in batch])
        found = own.compute_metrics()
        for name, figure in (("psnr", psnr), ("ssim", ssim)):
            mean = np.mean([figure(*pair).item() for pair in pairs])
            assert found[name].item() == pytest.approx(mean, rel=1e-6)


def test_an_image_without_error_leaves_the_mean_finite():
    own, (guess, truth) = task(), images(40, 33)
    black = torch.zeros_like(truth)
    for batch in ([(black, black)], [(guess, truth)]):
        own.update_metrics({"high": [pair[1] for pair in batch]}, [pair[0] for pair in batch])
    with pytest.warns(UserWarning, match=r"1 images equal their true ones"):
        figures = own.compute_metrics()
    pair = compared(guess, truth, 2)
    assert figures["psnr"].item() == pytest.approx(psnr(*pair).item(), rel=1e-6)
    assert figures["ssim"].item() == pytest.approx((1 + ssim(*pair).item()) / 2, rel=1e-6)
    own.reset_metrics()
    own.update_metrics({"high": [truth]}, [guess])
    with warnings.catch_warnings(action="error"):
        own.compute_metrics()


def premultiplied(image, scale):
    """Enlarge an image as a plain reference: colours times alpha, divided by the enlarged alpha."""
    if image.shape[2] in (1, 3):
        return imresize(image, scale).astype(np.int64)
    most = np.iinfo(image.dtype).max
    values = image.astype(np.float64) / most
    values[..., :-1] *= values[..., -1:]
    wide = imresize(values, scale)
    alpha = wide[..., -1:].clip(0.5 / most)
    wide = np.concatenate([wide[..., :-1] / alpha, wide[..., -1:]], -1)
    return np.floor(wide.clip(0, 1) * most + 0.5).astype(np.int64)


def test_transparent_edges_keep_their_colour():
    """Transparent pixels are black in most files, which darkened the edges."""
    image = np.zeros((12, 12, 4), np.uint8)
    image[:, 6:] = (200, 100, 50, 255)
    batch = {key: value[None] for key, value in ImagesToEnlarge([image])[0].items()}
    enlarged = task(scale=2).describe(batch, None)[0]["enlarged"]
    edge = enlarged[enlarged[..., 3] > 8]
    assert abs(edge[:, :3].astype(int) - (200, 100, 50)).max() <= 1
    assert (enlarged[..., 3] < 255).any()


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_png_files_are_read_by_others(tmp_path, channels, kind):
    generator = np.random.default_rng(channels)
    image = generator.integers(0, np.iinfo(kind).max, (11, 7, channels), dtype=kind, endpoint=True)
    file = io.BytesIO()
    write_png(file, [image[:4], image[4:5], image[5:]], 11)
    (tmp_path / "a.png").write_bytes(file.getvalue())
    assert np.array_equal(read_pixels(tmp_path / "a.png"), image)
    by_opencv = cv2.imread(str(tmp_path / "a.png"), cv2.IMREAD_UNCHANGED)
    assert by_opencv.dtype == kind
    if channels != 2:
        order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}[channels]
        assert np.array_equal(by_opencv.reshape(11, 7, -1), image[..., order])


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_depth_alpha_and_grey_are_kept(channels, kind):
    generator = np.random.default_rng(channels)
    image = generator.integers(0, np.iinfo(kind).max, (9, 8, channels), dtype=kind)
    sample = ImagesToEnlarge([image])[0]
    batch = {key: value[None] for key, value in sample.items()}
    own = task(scale=3)
    (row,) = own.describe(batch, None)
    enlarged = row["enlarged"]
    assert (enlarged.shape, enlarged.dtype) == ((27, 24, channels), kind)
    wanted = premultiplied(image, 3)
    # Single precision has 24 bits, of which a small alpha takes some from the colours.
    opaque = (wanted[..., -1:] > 0.1 * np.iinfo(kind).max) | (channels in (1, 3))
    assert abs((enlarged - wanted) * opaque).max() <= (1 if kind is np.uint8 else 2)
    assert (enlarged == wanted).mean() > (0.98 if kind is np.uint8 else 0.4)


def test_released_files_load_and_other_scales_are_named(tmp_path):
    tensors = {key: value.float() for key, value in plain.ffnet_sr_tensors(2, 2).items()}
    file = tmp_path / "FFNetSR_light_DIV2K_2.pth"
    torch.save({"params": tensors}, file)
    own = task("ffnet_sr_light", 2)
    own.load_weights(file)
    x = torch.rand(1, 3, 8, 8)
    theirs = plain.ffnet_sr({k: v.double() for k, v in tensors.items()}, x.double(), 2)
    torch.testing.assert_close(own.model(x).double(), theirs, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"DIV2K_2.pth enlarges 2 times; pass data.scale=2"):
        task("ffnet_sr_light", 4).load_weights(file)
    # A network for another scale starts from the body alone.
    body = create_backbone("ffnet_sr_light", fast=False)
    tensors = {key: value.float() for key, value in plain.ffnet_sr_tensors(36, 2).items()}
    torch.save({"params": tensors}, file)
    body = create_backbone("ffnet_sr_light", pretrained=file)
    assert torch.equal(body.stem.weight, tensors["proj.weight"])


def test_swinirs_files_load(tmp_path):
    network = vars(pytest.importorskip("spandrel.architectures.SwinIR"))["SwinIR"]
    torch.manual_seed(0)
    theirs = network(
        upscale=2, img_size=64, window_size=8, img_range=1.0, depths=[2, 2], embed_dim=60,
        num_heads=[6, 6], mlp_ratio=2, upsampler="pixelshuffledirect", resi_connection="1conv",
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    file = tmp_path / "002_lightweightSR_DIV2K_s64w8_SwinIR-S_x2.pth"
    torch.save({"params": theirs.state_dict()}, file)
    own = task("swinir_light", 2)
    own.load_weights(file)
    x = torch.rand(1, 3, 19, 16)
    with torch.no_grad():
        torch.testing.assert_close(own.model(x), theirs(x), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"S_x2.pth enlarges 2 times; pass data.scale=2"):
        task("swinir_light", 3).load_weights(file)


TINY = ("data.patches_per_image=2", "data.patch_size=16", "data.batch_size=4",
        "trainer.max_epochs=1", "schedule.warmup=0")  # fmt: skip


@pytest.mark.slow
def test_a_run_is_tested_and_enlarges(tmp_path, capsys, caplog):
    caplog.set_level("INFO")

    def run(*words, status=0):
        typed = ["task=super_resolution", "trainer=cpu", "logger=csv", f"output_dir={tmp_path}/out"]
        ended = run_here([*typed, *words], capsys)
        assert ended.status == status, ended.err
        return ended

    trained = run("backbone=ffnet_sr_light", *TINY).folder()
    facts = summary(trained)
    assert (facts["data"]["scale"], facts["parameters"]) == (4, 1_820_592)
    assert len(list((trained / "preview").glob("*.png"))) == 6
    test = ("mode=test", f"ckpt={trained}")
    assert summary(run(*test).folder())["metrics"] == facts["metrics"]
    sets = tmp_path / "sets/Set5"
    sets.mkdir(parents=True)
    for name in "abcde":
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (61, 50, 3), np.uint8)).save(
            sets / f"{name}.png"
        )
    ended = run(*test, "data=set5", f"data.root={tmp_path / 'sets'}")
    assert "x4, Y channel, 4 pixels cropped" in ended.out
    assert summary(ended.folder())["metrics"].keys() == {"psnr_set5", "ssim_set5"}
    Image.fromarray(np.full((20, 30, 4), 77, np.uint8)).save(tmp_path / "a.png")
    ended = run("mode=predict", f"ckpt={trained}", f"input={tmp_path}/a.png")
    assert "a.png: 120x80 pixels, enlarged/a_x4.png" in caplog.text
    with Image.open(ended.folder() / "enlarged/a_x4.png") as enlarged:
        assert (enlarged.size, enlarged.mode) == ((120, 80), "RGBA")
        assert set(np.asarray(enlarged)[..., 3].flatten()) == {77}
    assert "enlarges 4 times" in run(*test, "data.scale=2", status=2).err
