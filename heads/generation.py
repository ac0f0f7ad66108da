"""Training and sampling of diffusion models over a backbone for noisy inputs.

Axes: B inputs, C channels, H W size, K classes; K itself stands for an unknown class.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from backbones import Backbone
from backbones.hosts.scaffolds.denoising import DenoisingBackbone
from backbones.layers.bounds import check_range, check_share
from backbones.layers.precision import at_least_float32
from backbones.options import Remembering, check_value
from heads.diffusion import (
    TIMES,
    ddim_step,
    noise_of,
    noisy,
    per_input,
    predicted,
    schedule,
    variational_bound,
    velocity,
)
from heads.host_check import check_host

TARGETS = ("Generator",)

LATENT_SCALE = 0.18215  # of Stable Diffusion's VAE
Objective = Literal["diffusion", "flow"]
Prediction = Literal["noise", "velocity"]
Sampler = Literal["ddpm", "ddim", "euler"]
SAMPLING = (
    "objective", "prediction", "sampler", "steps", "guidance", "guided_channels", "clip",
)  # fmt: skip


class Generator(Remembering, nn.Module):
    """Class-conditional diffusion model, or flow, with classifier-free guidance.

    Args:
        backbone: A host for noisy inputs.
        objective: "diffusion" denoises over 1000 steps, "flow" predicts velocities from data to
            noise.
        prediction: What diffusion predicts: "noise", or "velocity", which weighs noisy inputs more;
            flows have their own velocity.
        label_dropout: Share of labels that training replaces by the unknown class.
        sampler: "ddpm" or "ddim" for diffusion, "euler" for flows.
        steps: Steps of the sampler.
        guidance: Scale of classifier-free guidance; 1 turns it off.
        guided_channels: Guidance acts on the first so many channels; None for all.
        clip: Clip clean inputs to [-1, 1] while sampling, for images instead of latents.
        vae: Folder of a diffusers AutoencoderKL that maps images to latents and back; None for
            data that are latents or small images themselves.
        latent_scale: Factor of the VAE's latents; None for ``scaling_factor`` of its config, after
            ``shift_factor`` is subtracted.

    Shape: images (B, C, H, W) from -1 to 1, or latents.

    Raises:
        ValueError: Options that do not fit together, or a backbone of another kind.

    Source: Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022,
    https://arxiv.org/abs/2207.12598; three guided channels are those of DiT's code.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        objective: Objective = "diffusion",
        prediction: Prediction = "noise",
        label_dropout: float = 0.1,
        sampler: Sampler = "ddpm",
        steps: int = 250,
        guidance: float = 1.5,
        guided_channels: int | None = 3,
        clip: bool = False,
        vae: str | None = None,
        latent_scale: float | None = None,
    ) -> None:
        super().__init__()
        check_value("head.objective", objective, Objective)
        check_value("head.prediction", prediction, Prediction)
        check_value("head.sampler", sampler, Sampler)
        check_host(backbone, DenoisingBackbone, "denoise", "u_ffnet_tiny")
        is_flow = objective == "flow"
        predicts_variance = backbone.out_channels != backbone.channels
        if is_flow != (sampler == "euler") or (is_flow and predicts_variance):
            needs = "euler and backbone.learn_sigma=false" if is_flow else "ddpm or ddim"
            raise ValueError(f"head.objective={objective} needs head.sampler={needs}")
        check_share("head.label_dropout", label_dropout)
        check_range("head.steps", steps, 1, TIMES)
        self.backbone = cast("DenoisingBackbone", backbone)
        self.objective, self.sampler, self.steps = objective, sampler, steps
        self.prediction = prediction
        self.label_dropout, self.guidance, self.clip = label_dropout, guidance, clip
        self.guided_channels = guided_channels
        # Outside of the modules: the VAE is neither trained nor saved.
        self.__dict__["vae"] = None if vae is None else load_vae(vae)
        self.latent_scale, self.latent_shift = LATENT_SCALE, 0.0
        if latent_scale is not None:  # as runs did that knew no shift
            self.latent_scale = latent_scale
        elif vae is not None:
            config = self.__dict__["vae"].config
            self.latent_scale = float(config.get("scaling_factor") or LATENT_SCALE)
            self.latent_shift = float(config.get("shift_factor") or 0.0)

    @property
    def num_classes(self) -> int:
        """K."""
        return self.backbone.num_classes

    @property
    def sampling(self) -> dict[str, Any]:
        """Options that samples depend on, besides the weights."""
        names = (
            "objective",
            "prediction",
            "sampler",
            "steps",
            "guidance",
            "guided_channels",
            "clip",
        )
        settings = {name: getattr(self, name) for name in names}
        if self.latent_shift:
            settings["latent_shift"] = self.latent_shift
        return settings | {"latent_scale": self.latent_scale if self.has_vae else None}

    def forward(self, images: Tensor) -> Tensor:
        """Return the prediction at time 0 for an unknown class, as counting runs it."""
        return self.backbone(images)[0]

    @property
    def has_vae(self) -> bool:
        """True if it maps images to latents."""
        return self.__dict__["vae"] is not None

    def check_images(self) -> None:
        """Check that samples are images.

        Raises:
            ValueError: They are latents, and the VAE that decodes them is missing.
        """
        if not self.has_vae and self.backbone.channels not in (1, 3):
            raise ValueError(
                f"samples with {self.backbone.channels} channels are latents; pass "
                "head.vae=<folder of a diffusers AutoencoderKL> to decode them, or "
                "task.num_samples=0 in a training"
            )

    @torch.no_grad()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the VAE's means and deviations of images, without its scale.

        Shape: (B, 3, H, W) -> (B, C, h, w) each.
        """
        vae: Any = self.__dict__["vae"]
        vae.to(images.device)
        latents = vae.encode(images).latent_dist
        return latents.mean, latents.std

    def vae_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the VAE by name."""
        tensors: dict[str, Tensor] = self.__dict__["vae"].state_dict()
        return tensors

    @torch.no_grad()
    def encode(self, images: Tensor, *, draw: bool) -> Tensor:
        """Return what is denoised: latents of images by the VAE, or the inputs themselves.

        Args:
            images: (B, C, H, W).
            draw: Draw from the VAE's distribution; False takes its mean.
        """
        if not self.has_vae or images.shape[1] == self.backbone.channels:
            return images
        mean, deviation = self.moments(images)
        latents = mean + deviation * torch.randn_like(mean) if draw else mean
        return self.latent_scale * (latents - self.latent_shift)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images from -1 to 1 of what was denoised."""
        vae: Any = self.__dict__["vae"]
        if vae is None:
            return latents.clamp(-1, 1)
        vae.to(latents.device)
        latents = latents / self.latent_scale + self.latent_shift
        decoded: Tensor = vae.decode(latents.to(vae.dtype)).sample
        return decoded.clamp(-1, 1)

    def loss(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the losses of ``images`` with ``labels`` at random times."""
        clean, labels = self.encode(batch["images"], draw=True), batch["labels"]
        dropped = torch.rand(len(labels), device=labels.device) < self.label_dropout
        labels = labels.masked_fill(dropped, self.num_classes)
        noise = torch.randn_like(clean)
        if self.objective == "flow":
            times = torch.rand(len(clean), device=clean.device, dtype=torch.float32)
            return {"loss_flow": self._flow_errors(clean, noise, times, labels).mean()}
        step = torch.randint(TIMES, (len(clean),), device=clean.device)
        betas = schedule(TIMES, clean.device)
        alpha = betas.alphas[step]
        x = noisy(clean, noise, alpha)
        (output,) = self.backbone(x, step, labels)
        errors = self._diffusion_errors(output, clean, noise, alpha)
        losses = {f"loss_{self.prediction}": errors.mean()}
        if output.shape[1] > clean.shape[1]:
            terms = variational_bound(clean, x, self._noise(x, output, alpha), betas, step)
            losses["loss_variance"] = terms.mean()
        return losses

    def _diffusion_errors(
        self, output: Tensor, clean: Tensor, noise: Tensor, signal_share: Tensor
    ) -> Tensor:
        """Return the mean squared error of each input (B,)."""
        target = noise if self.prediction == "noise" else velocity(clean, noise, signal_share)
        return (output[:, : clean.shape[1]] - target).square().flatten(1).mean(1)

    def _noise(self, x: Tensor, output: Tensor, signal_share: Tensor) -> Tensor:
        """Return the output with noise in the place of a velocity."""
        if self.prediction == "noise":
            return output
        channels = x.shape[1]
        return torch.cat(
            [noise_of(x, output[:, :channels], signal_share), output[:, channels:]], dim=1
        )

    def _flow_errors(self, clean: Tensor, noise: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        share = per_input(times, clean)
        (velocity,) = self.backbone((1 - share) * clean + share * noise, TIMES * times, labels)
        return (velocity - (noise - clean)).square().flatten(1).mean(1)

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean squared error of each input's prediction (B,).

        Noise and time of an input depend on its ``sample_id`` alone, so runs compare.
        """
        clean, labels = self.encode(batch["images"], draw=False), batch["labels"]
        numbers = batch["sample_id"].tolist()
        noise = seeded_noise(numbers, clean)
        # Times spread evenly over consecutive inputs.
        shares = [(0.5 + number * 0.618034) % 1 for number in numbers]
        times = torch.tensor(shares, dtype=torch.float32)
        if self.objective == "flow":
            return self._flow_errors(clean, noise, times.to(clean.device), labels)
        step = (times * TIMES).long().to(clean.device)
        alpha = schedule(TIMES, clean.device).alphas[step]
        x = noisy(clean, noise, alpha)
        (output,) = self.backbone(x, step, labels)
        return self._diffusion_errors(output, clean, noise, alpha)

    @torch.no_grad()
    def sample(self, labels: Tensor, seeds: Sequence[int]) -> Tensor:
        """Return images of classes; each depends on its label and seed alone.

        Args:
            labels: (B,).
            seeds: B whole numbers.

        Shape: -> (B, C, H, W) from -1 to 1.
        """
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        like = next(self.backbone.parameters())
        shape = (len(seeds), self.backbone.channels, *self.backbone.img_size)
        x = _draw(generators, at_least_float32(like.new_empty(shape)))
        labels = labels.to(like.device)
        if self.objective == "flow":
            ends = torch.linspace(1, 0, self.steps + 1, dtype=torch.float32).tolist()
            for start, end in itertools.pairwise(ends):
                times = x.new_full((len(x),), start)
                x = x + (end - start) * self.guided(x, TIMES * times, labels)
            return self.decode(x)
        spaced = schedule(self.steps, x.device)
        for index in reversed(range(self.steps)):
            step = torch.full((len(x),), index, device=x.device)
            output = self.guided(x, spaced.times[step], labels)
            output = self._noise(x, output, spaced.alphas[step])
            if self.sampler == "ddim":
                noise = output[:, : x.shape[1]]
                x = ddim_step(x, noise, spaced.alphas[step], spaced.alphas_before[step], self.clip)
                continue
            mean, log_variance = predicted(x, output, spaced, step, clip=self.clip)
            x = mean
            if index:
                x = x + (0.5 * log_variance).exp() * _draw(generators, x)
        return self.decode(x)

    def guided(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """Return the prediction u + s (c - u) with that of an unknown class, u, in one pass."""
        if self.guidance == 1:
            return self.backbone(x, times, labels)[0]
        two_labels = torch.cat([labels, torch.full_like(labels, self.num_classes)])
        (output,) = self.backbone(torch.cat([x, x]), torch.cat([times, times]), two_labels)
        conditional, unconditional = output.chunk(2)
        channels = x.shape[1] if self.guided_channels is None else self.guided_channels
        change = (self.guidance - 1) * (conditional - unconditional)
        change[:, min(channels, x.shape[1]) :] = 0
        return conditional + change


def _draw(generators: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Return noise of each generator, drawn on the CPU so that devices agree."""
    noises = [
        torch.randn(like.shape[1:], generator=generator, dtype=torch.float32)
        for generator in generators
    ]
    return torch.stack(noises).to(like)


def seeded_noise(seeds: Sequence[int], like: Tensor) -> Tensor:
    """Return noise (B, ...) of one seed per input."""
    return _draw([torch.Generator().manual_seed(seed) for seed in seeds], like)


def load_vae(path: str) -> Any:
    """Load a VAE of diffusers from a folder, for evaluation.

    Raises:
        ValueError: diffusers or the folder is missing.
    """
    if find_spec("diffusers") is None or not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"head.vae={path} needs diffusers (pip install diffusers) and the folder of an "
            "AutoencoderKL with its config.json, such as a copy of stabilityai/sd-vae-ft-ema; or "
            "train on latents"
        )
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(path, local_files_only=True, low_cpu_mem_usage=False)
    return vae.eval().requires_grad_(False)
