"""Diffusion, flows, samples and their figures; runs of task=generation."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from PIL import Image
from scipy.linalg import sqrtm

import tasks
from backbones import create_backbone
from datamodules.generation.images import GenerationDataModule, LabelledImages
from heads.diffusion import (
    clean_of,
    ddim_step,
    noise_of,
    noisy,
    posterior,
    predicted,
    schedule,
    variational_bound,
    velocity,
)  # fmt: skip
from heads.generation import Generator
from tasks.generation.latents import write_latents
from tasks.generation.quality import (
    extract,
    fid,
    inception_score,
    kid,
    load_extractor,
    pixel_kid,
    statistics,
)
from tasks.generation.task import GenerationTask, sheet, to_bytes
from tests.runs import composed, run_here, run_shared


def generator(**options):
    torch.manual_seed(0)
    learn = options.pop("learn_sigma", False)
    host = create_backbone(
        "dit_tiny", channels=1, num_classes=3, img_size=8, learn_sigma=learn, fast=False
    )
    for value in host.state_dict().values():
        value.copy_(0.05 * torch.randn(value.shape))
    usual = {"sampler": "ddim", "steps": 4, "guided_channels": None}
    return Generator(host, **{**usual, **options}).eval()


def test_the_schedule_and_its_steps_equal_their_formulas():
    full, few = schedule(), schedule(5)
    assert few.times.tolist() == [0, 250, 500, 749, 999]
    torch.testing.assert_close(few.alphas, full.alphas[few.times])
    torch.testing.assert_close((1 - few.betas).cumprod(0), few.alphas)
    clean, noise = torch.randn(5, 1, 2, 2).double(), torch.randn(5, 1, 2, 2).double()
    x = noisy(clean, noise, few.alphas)
    torch.testing.assert_close(clean_of(x, noise, few.alphas, clip=False), clean)
    torch.testing.assert_close(noise_of(x, velocity(clean, noise, few.alphas), few.alphas), noise)
    before = ddim_step(x, noise, few.alphas, few.alphas_before, clip=False)
    torch.testing.assert_close(before, noisy(clean, noise, few.alphas_before))
    with pytest.raises(ValueError, match="steps must be from 1 to 1000, got 0"):
        schedule(0)


@torch.no_grad()
@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("objective", ["diffusion", "flow"])
def test_times_are_those_of_float32_in_every_precision(objective, precision):
    """In bfloat16 sample 250,020 of an evaluation would be at step 1000 of 1000."""
    plugin = {"bf16-true": HalfPrecision, "64-true": lambda _: DoublePrecision()}[precision]
    model = generator(objective=objective, sampler="euler" if objective == "flow" else "ddim")
    number = next(n for n in range(10**6) if (0.5 + n * 0.618034) % 1 > 0.9995)
    batch = {"images": torch.rand(2, 1, 8, 8), "labels": torch.tensor([0, 1]),
             "sample_id": torch.tensor([number, 7])}  # fmt: skip
    times, denoise = [], model.backbone.denoise
    model.backbone.denoise = lambda x, at, labels: times.append(at) or denoise(x, at, labels)
    exact = model.predict(batch)
    with plugin(precision).forward_context():
        coarse = plugin(precision).convert_module(model).predict(batch)
        model.loss(batch)
    torch.testing.assert_close(times[1], times[0], rtol=0, atol=0)
    assert times[0].max() < 1000
    assert times[2].dtype == times[0].dtype
    torch.testing.assert_close(coarse, exact.to(coarse), rtol=0.02, atol=0.02)


def test_learnt_variances_and_their_bound():
    full = schedule()
    step = torch.tensor([0, 1, 500, 999])
    clean = torch.rand(4, 2, 3, 3).double() * 2 - 1
    noise = torch.randn_like(clean)
    x = noisy(clean, noise, full.alphas[step])
    truth = posterior(clean, x, full, step)
    best = predicted(x, torch.cat([noise, -torch.ones_like(noise)], 1), full, step)
    torch.testing.assert_close(best.mean, truth.mean)
    torch.testing.assert_close(best.log_variance, truth.log_variance)
    most = predicted(x, torch.cat([noise, torch.ones_like(noise)], 1), full, step)
    wanted = full.betas[step].log()[:, None, None, None].expand_as(x)
    torch.testing.assert_close(most.log_variance, wanted)
    output = torch.cat([noise, -torch.ones_like(noise)], 1).requires_grad_()
    bound = variational_bound(clean, x, output, full, step)
    torch.testing.assert_close(bound[1:], torch.zeros(3).double(), rtol=0, atol=1e-9)
    bound.sum().backward()
    assert (output.grad[:, :2] == 0).all()
    assert output.grad[0, 2:].abs().sum() > 0


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_samplers_equal_those_of_diffusers(sampler):
    diffusers = pytest.importorskip("diffusers")
    kind = {"ddpm": diffusers.DDPMScheduler, "ddim": diffusers.DDIMScheduler}[sampler]
    theirs = kind(beta_schedule="linear", clip_sample=False, timestep_spacing="leading")
    model = generator(sampler=sampler, steps=1000, guidance=1.0)
    full = schedule()
    torch.testing.assert_close(theirs.alphas_cumprod.double(), full.alphas, rtol=1e-4, atol=1e-6)
    theirs.set_timesteps(1000)
    x, noise = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4)
    for index in (700, 1, 0):
        step = torch.tensor([index])
        result = theirs.step(noise, index, x)
        if sampler == "ddim":
            found = ddim_step(x, noise, full.alphas[step], full.alphas_before[step], clip=False)
            torch.testing.assert_close(found, result.prev_sample, rtol=1e-3, atol=1e-3)
        else:
            if index == 0:  # the last step, which adds no noise
                mean = predicted(x, noise, full, step).mean
                torch.testing.assert_close(mean, result.prev_sample, rtol=1e-3, atol=1e-3)
            clean = clean_of(x, noise, full.alphas[step], clip=False)
            torch.testing.assert_close(clean, result.pred_original_sample, rtol=1e-3, atol=1e-3)
    assert schedule(model.steps).times.tolist() == list(range(1000))


@pytest.mark.parametrize(
    "options",
    [{}, {"sampler": "ddpm"}, {"sampler": "ddpm", "learn_sigma": True},
     {"prediction": "velocity"}, {"objective": "flow", "sampler": "euler"}],
    ids=["ddim", "ddpm", "learnt", "velocity", "flow"],
)  # fmt: skip
def test_samples_depend_on_label_and_seed_alone(options):
    model = generator(**options)
    labels = torch.tensor([0, 1, 2, 0])
    whole = model.sample(labels, [5, 6, 7, 5])
    assert whole.shape == (4, 1, 8, 8)
    assert whole.abs().max() <= 1
    torch.testing.assert_close(whole[0], whole[3])
    torch.testing.assert_close(whole[1:2], model.sample(labels[1:2], [6]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole[0], model.sample(labels[:1], [6])[0])
    batch = {"images": torch.randn(4, 1, 8, 8), "labels": labels, "sample_id": torch.arange(4)}
    losses = model.train().loss(batch)
    assert len(losses) == 1 + options.get("learn_sigma", False)
    sum(losses.values()).backward()
    one, again = model.eval().predict(batch), model.predict(batch)
    assert torch.equal(one, again)
    assert one.shape == (4,)


def test_guidance_acts_on_the_first_channels():
    model = generator(guidance=3.0, guided_channels=1, learn_sigma=True)
    x, times, labels = torch.randn(2, 1, 8, 8), torch.tensor([5, 5]), torch.tensor([0, 1])
    (known,), (unknown,) = (model.backbone(x, times, one) for one in (labels, labels * 0 + 3))
    found = model.guided(x, times, labels)
    torch.testing.assert_close(found[:, :1], (unknown + 3 * (known - unknown))[:, :1])
    torch.testing.assert_close(found[:, 1:], known[:, 1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"objective": "flow"}, r"head\.objective=flow needs head\.sampler=euler"),
     ({"sampler": "euler"}, r"needs head\.sampler=ddpm or ddim"),
     ({"steps": 1001}, r"head\.steps must be from 1 to 1000"),
     ({"label_dropout": 1.0}, r"head\.label_dropout must be from 0 to below 1"),
     ({"vae": "/nowhere"}, r"head\.vae")],
    ids=["flow", "euler", "steps", "dropout", "vae"],
)  # fmt: skip
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        generator(**options)


def test_figures_of_sets_of_images():
    torch.manual_seed(0)
    one, other = torch.randn(60, 4).double(), 0.5 + torch.randn(80, 4).double()
    a, b = statistics(one), statistics(other)
    root = sqrtm(a.covariance @ b.covariance).real
    wanted = ((a.mean - b.mean) ** 2).sum() + np.trace(a.covariance + b.covariance - 2 * root)
    assert fid(a, b) == pytest.approx(wanted, rel=1e-6)
    assert fid(a, a) == pytest.approx(0, abs=1e-6)
    assert kid(one, other) > 5 * abs(kid(other[:40], other[40:]))
    images = torch.randint(0, 255, (6, 1, 16, 16), dtype=torch.uint8)
    small = images.double().div(255).unflatten(3, (8, 2)).unflatten(2, (8, 2)).mean((3, 5))
    wanted = kid(*small.flatten(1).split(3))
    assert pixel_kid(images[:3], images[3:]) == pytest.approx(wanted)
    certain = 100 * torch.eye(4).repeat(10, 1)
    assert inception_score(certain) == pytest.approx(4)
    assert inception_score(torch.zeros(40, 4)) == pytest.approx(1)


def test_samples_are_drawn_once(tmp_path):
    task = GenerationTask(generator(), ["a", "b", "c"], num_samples=5, sample_batch=2)
    files = task.draw_samples(tmp_path)
    pixels = [np.array(Image.open(file)) for file in files]
    times = [file.stat().st_mtime_ns for file in files]
    files[3].unlink()
    again = task.draw_samples(tmp_path)
    assert again == files
    assert np.array_equal(np.array(Image.open(files[3])), pixels[3])
    assert [f.stat().st_mtime_ns for f in files[:3]] == times[:3]
    assert to_bytes(torch.tensor([[[-1.0, 0, 1]]])).tolist() == [[[0, 128, 255]]]
    assert sheet(["a", "b"], torch.zeros(4, 1, 8, 8)).size[1] == 132


def test_folders_of_images_and_latents(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (20, 12), "white").save(tmp_path / split / name / "a.png")
    own = {"batch_size": 2, "num_workers": 0}
    data = GenerationDataModule(
        tmp_path, image_size=8, latent_channels=None, factor=1, draw_count=2, **own
    )
    assert data.backbone_arguments == {"channels": 3, "num_classes": 2, "img_size": 8}
    data.setup()
    batch = next(iter(data.val_dataloader()))
    assert batch["images"].shape == (2, 3, 8, 8)
    assert (data.normalise(batch)["images"] == 1).all()
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    floats = every.numpy() / np.float32(127.5) - 1
    assert torch.equal(data.normalise({"images": every})["images"], torch.from_numpy(floats))
    requests = next(iter(data.predict_dataloader()))
    assert requests["seeds"].tolist() == [0, 1]
    data.set_predict_inputs("dog")
    assert next(iter(data.predict_dataloader()))["labels"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="'bird' is not a class of these data; known are cat, dog"):
        data.set_predict_inputs("bird")
    for file in tmp_path.rglob("*.png"):
        file.unlink()
        np.save(file.with_suffix(".npy"), np.ones((8, 2, 2), dtype=np.float32))
    latents = GenerationDataModule(tmp_path, image_size=16, **own)
    latents.setup()
    mean = torch.full((4, 2, 2), 0.18215)
    torch.testing.assert_close(latents.dataset("val")[0, 0]["images"], mean)
    assert not torch.equal(latents.dataset("train")[0, 0]["images"], mean)
    assert latents.real_images() is None
    for file in tmp_path.rglob("*.npy"):
        np.save(file, np.full((4, 2, 2), 3.0, dtype=np.float16))  # drawn and scaled by the user
    assert latents.dataset("train")[0, 0]["images"].tolist() == np.full((4, 2, 2), 3.0).tolist()


class ToyVAE(torch.nn.Module):
    """The interface of a diffusers AutoencoderKL: means of 8 x 8 pixels, and their deviations."""

    dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(2.0))

    def encode(self, images):
        mean = torch.nn.functional.avg_pool2d(images, 8) * self.gain
        mean = torch.cat([mean, mean[:, :1]], dim=1)
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=mean, std=torch.ones_like(mean)))

    def decode(self, latents):
        return SimpleNamespace(
            sample=latents[:, :3].repeat_interleave(8, 2).repeat_interleave(8, 3)
        )


def folders_of_images(root):
    generator = np.random.default_rng(0)
    for split, name in itertools.product(("train", "val"), ("cat", "dog")):
        (root / split / name).mkdir(parents=True)
        pixels = generator.integers(0, 255, (16, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / split / name / "a.png")
    return root


def latent_generator():
    host = create_backbone("dit_tiny", channels=4, num_classes=2, img_size=2, fast=False)
    model = Generator(host)
    model.__dict__["vae"] = ToyVAE()
    return model


def test_latents_are_computed_once_and_read(tmp_path):
    root, folder = folders_of_images(tmp_path / "images"), tmp_path / "latents"
    data = GenerationDataModule(
        root, image_size=16, batch_size=2, num_workers=0, latents=folder, latent_scale=0.5
    )
    data.setup()
    with pytest.raises(ValueError, match=r"a\.png\.npy is missing; pass head\.vae="):
        data.dataset("val")[0, 0]
    model, device = latent_generator(), torch.device("cpu")
    write_latents(model, data, device, rank=1, processes=2)
    assert len(list(folder.rglob("*.npy"))) == 2  # the half of the second process
    write_latents(model, data, device)
    times = {file: file.stat().st_mtime_ns for file in folder.rglob("*.npy")}
    assert len(times) == 4
    write_latents(model, data, device)
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.npy")} == times
    image = torch.from_numpy(data.values(root / "val" / "cat" / "a.png"))[None]
    wanted = 0.5 * model.moments(image)[0][0]
    torch.testing.assert_close(data.dataset("val")[0, 0]["images"], wanted, rtol=1e-3, atol=1e-3)
    image = torch.from_numpy(data.values(root / "train" / "cat" / "a.png"))[None]
    views = torch.stack([model.moments(view)[0][0] for view in (image, image.flip(3))])
    train = LabelledImages(data, [(root / "train" / "cat" / "a.png", 0)], training=True)
    drawn = torch.stack([train[0]["images"] / 0.5 for _ in range(200)])
    torch.testing.assert_close(drawn.mean(0), views.mean(0), rtol=0, atol=0.5)
    stored = np.load(folder / "train" / "cat" / "a.png.npy")
    np.testing.assert_allclose(stored[:, :4], views.detach().numpy(), rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        model.__dict__["vae"].gain.fill_(3.0)
    with pytest.raises(ValueError, match=r"holds other latents \(vae \w+ there and \w+ here\)"):
        write_latents(model, data, device)


def test_samples_of_two_models_never_mix(tmp_path):
    task = GenerationTask(generator(), ["a", "b", "c"], num_samples=2)
    task.claim_samples(tmp_path, is_run=False)
    task.claim_samples(tmp_path, is_run=False)
    other = GenerationTask(generator(guidance=4.0), ["a", "b", "c"], num_samples=2)
    with pytest.raises(ValueError, match=r"other samples \(guidance 1\.5 there and 4\.0 here\)"):
        other.claim_samples(tmp_path, is_run=False)
    (tmp_path / "made_by.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"other samples \(.*guidance None there and 4\.0 here"):
        other.claim_samples(tmp_path, is_run=False)
    (tmp_path / "000000_1.png").touch()
    other.claim_samples(tmp_path, is_run=True)
    assert [file.name for file in tmp_path.iterdir()] == ["made_by.json"]


def test_the_published_recipe():
    config = composed("task=generation", "recipe=u_dit", "data=image_generation", "data.root=/d",
                      "backbone=u_dit_b")  # fmt: skip
    assert (config.head["steps"], config.head["guidance"]) == (250, 1.5)
    assert config.task["num_samples"] == 50_000
    assert config.task["ema"]["decay"] == 0.9999


def test_samples_of_latents_need_a_vae():
    with pytest.raises(ValueError, match=r"samples with 4 channels are latents; pass head\.vae="):
        Generator(latent_generator().backbone).check_images()
    latent_generator().check_images()
    generator().check_images()


def test_the_extractor_of_torch_fidelity_scores_images(tmp_path, monkeypatch):
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    kind = module.FeatureExtractorInceptionV3
    torch.save({}, tmp_path / "weights.pth")
    with monkeypatch.context() as patched:
        patched.setattr(kind, "load_state_dict", lambda self, tensors: None)
        random = load_extractor(tmp_path / "weights.pth")
    torch.save(random.state_dict(), tmp_path / "weights.pth")
    extractor = load_extractor(tmp_path / "weights.pth")
    images = list(torch.randint(0, 255, (5, 1, 20, 20), dtype=torch.uint8))
    features, logits = extract(extractor, images, torch.device("cpu"))
    assert (features.shape, logits.shape) == ((5, 2048), (5, 1008))
    same = [image.expand(3, -1, -1) for image in images]
    torch.testing.assert_close(extract(extractor, same, torch.device("cpu"))[0], features)
    with pytest.raises(ValueError, match="FID compares images of one size"):
        extract(extractor, [*images, torch.zeros(1, 8, 8, dtype=torch.uint8)], torch.device("cpu"))
    torch.save({}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"task\.inception=.*other\.pth lacks the tensors"):
        load_extractor(tmp_path / "other.pth")


@pytest.mark.parametrize(("scale", "shift"), [(0.18215, None), (0.13025, 0.25)])
def test_a_released_vae_encodes_and_decodes(tmp_path, scale, shift):
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2,
              "up_block_types": ["UpDecoderBlock2D"] * 2}  # fmt: skip
    theirs = diffusers.AutoencoderKL(
        latent_channels=4, block_out_channels=[8, 8], norm_num_groups=4,
        scaling_factor=scale, shift_factor=shift, **blocks
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    host = create_backbone("dit_tiny", channels=4, num_classes=2, img_size=8, fast=False)
    model = Generator(host, vae=str(tmp_path))
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        wanted = theirs.eval().encode(images).latent_dist.mode()
        latents = scale * (wanted - (shift or 0))
        torch.testing.assert_close(model.encode(images, draw=False), latents)
        decoded = theirs.decode(wanted).sample.clamp(-1, 1)
    torch.testing.assert_close(model.decode(latents), decoded)
    earlier = Generator(host, vae=str(tmp_path), latent_scale=0.18215)  # of a run without a shift
    torch.testing.assert_close(earlier.encode(images, draw=False), 0.18215 * wanted)
    assert not any("vae" in key for key in model.state_dict())


TINY = ("head.steps=2", "trainer.max_epochs=1", "trainer.limit_train_batches=2",
        "trainer.limit_val_batches=1", "schedule.warmup=0", "task.num_samples=4",
        "data.eval_batch_size=8")  # fmt: skip


@pytest.mark.slow
def test_a_run_ends_with_a_sheet_and_predicts(tmp_path, capsys):
    words = ["task=generation", "backbone=dit_tiny", "trainer=cpu", "logger=csv", *TINY]
    ended = run_shared([*words, f"output_dir={tmp_path}"])
    assert ended.status == 0, ended.err
    folder = ended.folder()
    found = json.loads((folder / "summary.json").read_text())
    assert {"mse", "kid"} == found["metrics"].keys()
    assert len(list((folder / "samples").glob("*.png"))) == 4
    assert len(list((folder / "preview").glob("*.png"))) == 1
    typed = ["mode=predict", f"ckpt={folder}", f"output_dir={tmp_path / 'out'}"]
    ended = run_here([*typed, "data.draw_classes=[3]", "data.draw_count=2"], capsys)
    assert ended.status == 0, ended.err
    files = sorted(file.name for file in (ended.folder() / "images").glob("*.png"))
    assert files == ["3_000000.png", "3_000001.png"]
    task = tasks.load(folder)
    (row,) = task.predict(["3"])[:1]
    assert row["pixels"].shape == (32, 32)
    for target, name in (("torch_export", "denoiser.pt2"), ("onnx", "denoiser.onnx")):
        pytest.importorskip("onnxruntime")
        written = task.export(target, out=str(tmp_path / target))
        assert written[0].name == name  # compared with the network at several batches
