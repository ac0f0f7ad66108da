"""Noise schedules, and steps of samplers: DDPM, DDIM and flow matching.

Source: Ho et al., "Denoising Diffusion Probabilistic Models", NeurIPS 2020,
https://arxiv.org/abs/2006.11239 (DDPM, linear schedule); Nichol and Dhariwal, "Improved Denoising
Diffusion Probabilistic Models", ICML 2021, https://arxiv.org/abs/2102.09672 (learnt variances,
fewer steps); Song et al., "Denoising Diffusion Implicit Models", ICLR 2021,
https://arxiv.org/abs/2010.02502; Lipman et al., "Flow Matching for Generative Modeling", ICLR 2023,
https://arxiv.org/abs/2210.02747.

Axes: B inputs. Times of diffusion are whole numbers from 0 to T - 1 of T = 1000 steps; those of
flows run from 0 (data) to 1 (noise).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backbones.layers.bounds import check_range

TIMES = 1000  # T
BETAS = (1e-4, 0.02)
CPU = torch.device("cpu")


class Betas(NamedTuple):
    """Noise of each step and what follows from it, as float64 tensors (S,).

    Attributes:
        times: Time of each step in T.
        betas: Variance of the noise that a step adds.
        alphas: Product of 1 - beta up to this step.
        alphas_before: The same up to the step before; 1 for the first.
    """

    times: Tensor
    betas: Tensor
    alphas: Tensor
    alphas_before: Tensor

    @property
    def posterior(self) -> Tensor:
        """Variance of a step backwards, given the clean input; 0 for the first step."""
        return self.betas * (1 - self.alphas_before) / (1 - self.alphas)


@functools.cache
@torch.inference_mode(False)
def schedule(steps: int = TIMES, device: torch.device = CPU) -> Betas:
    """Return the linear schedule of T steps, or ``steps`` evenly spaced ones of it.

    It is kept per device, so that a step copies nothing between devices.

    Raises:
        ValueError: More steps than T, or none.
    """
    check_range("steps", steps, 1, TIMES)
    alphas = torch.linspace(*BETAS, TIMES, dtype=torch.float64).neg().add(1).cumprod(0)
    stride = (TIMES - 1) / (steps - 1) if steps > 1 else 1.0
    times = torch.from_numpy(np.rint(np.arange(steps) * stride).astype(np.int64))
    alphas = alphas[times]
    before = torch.cat([torch.ones(1, dtype=torch.float64), alphas[:-1]])
    columns = (times, 1 - alphas / before, alphas, before)
    return Betas(*(values.to(device) for values in columns))


def per_input(values: Tensor, like: Tensor) -> Tensor:
    """Return values (B,) with the axes, type and device of inputs (B, ...)."""
    return values.to(like).reshape(-1, *[1] * (like.ndim - 1))


def noisy(clean: Tensor, noise: Tensor, alphas: Tensor) -> Tensor:
    """Return sqrt(a) x + sqrt(1 - a) noise for the shares a (B,)."""
    return per_input(alphas.sqrt(), clean) * clean + per_input((1 - alphas).sqrt(), clean) * noise


def velocity(clean: Tensor, noise: Tensor, alphas: Tensor) -> Tensor:
    """Return the velocity sqrt(a) noise - sqrt(1 - a) x for the shares a (B,).

    Source: Salimans and Ho, "Progressive Distillation for Fast Sampling of Diffusion Models", ICLR
    2022, https://arxiv.org/abs/2202.00512, App. D.
    """
    return noisy(noise, -clean, alphas)


def noise_of(x: Tensor, velocity: Tensor, alphas: Tensor) -> Tensor:
    """Return the noise that noisy inputs and their velocity stand for."""
    return noisy(velocity, x, alphas)


def clean_of(x: Tensor, noise: Tensor, alphas: Tensor, clip: bool) -> Tensor:
    """Return the clean input that noisy inputs and their noise stand for."""
    clean = (x - per_input((1 - alphas).sqrt(), x) * noise) / per_input(alphas.sqrt(), x)
    return clean.clamp(-1, 1) if clip else clean


def ddim_step(x: Tensor, noise: Tensor, alphas: Tensor, before: Tensor, clip: bool) -> Tensor:
    """Return the input of the step before, without new noise (eta = 0).

    Source: DDIM, Eq. 12. With ``clip`` the noise follows from the clipped clean input.
    """
    clean = clean_of(x, noise, alphas, clip)
    if clip:
        noise = (x - per_input(alphas.sqrt(), x) * clean) / per_input((1 - alphas).sqrt(), x)
    return noisy(clean, noise, before)


class Gaussian(NamedTuple):
    """Mean and logarithm of the variance of a normal distribution."""

    mean: Tensor
    log_variance: Tensor


def posterior(clean: Tensor, x: Tensor, betas: Betas, step: Tensor) -> Gaussian:
    """Return the distribution of the step before, given clean and noisy inputs.

    Args:
        clean: (B, ...).
        x: (B, ...) at ``step``.
        betas: See ``schedule``.
        step: Indices (B,).

    Source: DDPM, Eq. 6 and 7. The variance of the first step is that of the second.
    """
    beta, alpha, before = (
        values[step] for values in (betas.betas, betas.alphas, betas.alphas_before)
    )
    clean_factor = before.sqrt() * beta / (1 - alpha)
    noisy_factor = (1 - beta).sqrt() * (1 - before) / (1 - alpha)
    floor = betas.posterior.clone()
    floor[0] = floor[1] if len(floor) > 1 else betas.betas[0]
    mean = per_input(clean_factor, x) * clean + per_input(noisy_factor, x) * x
    return Gaussian(mean, per_input(floor[step].log(), x).expand_as(x))


def predicted(
    x: Tensor, output: Tensor, betas: Betas, step: Tensor, *, clip: bool = False
) -> Gaussian:
    """Return the network's distribution of the step before.

    Args:
        x: (B, C, ...).
        output: Noise (B, C, ...), or noise and variances (B, 2 C, ...).
        betas: See ``schedule``.
        step: Indices (B,).
        clip: Clip the clean input to [-1, 1].

    Source: Improved DDPM, Eq. 15: variances lie between those of ``posterior`` and beta. Without
    them the variance is that of ``posterior``.
    """
    channels = x.shape[1]
    clean = clean_of(x, output[:, :channels], betas.alphas[step], clip)
    mean, least = posterior(clean, x, betas, step)
    if output.shape[1] == channels:
        return Gaussian(mean, least)
    most = per_input(betas.betas[step].log(), x)
    share = (output[:, channels:] + 1) / 2
    return Gaussian(mean, share * most + (1 - share) * least)


def variational_bound(
    clean: Tensor, x: Tensor, output: Tensor, betas: Betas, step: Tensor
) -> Tensor:
    """Return the bound's term of each input in bits per value (B,); noise gets no gradient.

    The first step has the likelihood of 8-bit values, the others a divergence.

    Source: Improved DDPM, Sec. 3.1 and the authors' code.
    """
    channels = x.shape[1]
    frozen = torch.cat([output[:, :channels].detach(), output[:, channels:]], dim=1)
    truth, guess = posterior(clean, x, betas, step), predicted(x, frozen, betas, step)
    divergence = 0.5 * (
        guess.log_variance
        - truth.log_variance
        - 1
        + (truth.log_variance - guess.log_variance).exp()
        + (truth.mean - guess.mean).square() * (-guess.log_variance).exp()
    )
    likelihood = discrete_log_likelihood(clean, guess)
    terms = torch.where(per_input(step == 0, x).bool(), -likelihood, divergence)
    return terms.flatten(1).mean(1) / math.log(2)


def discrete_log_likelihood(values: Tensor, guess: Gaussian) -> Tensor:
    """Return the log-likelihood of 8-bit values, scaled to [-1, 1], under a normal distribution.

    Normal probabilities use the approximation by a hyperbolic tangent of Page (1977), as in the
    authors' code.
    """
    scale = (-0.5 * guess.log_variance).exp()
    centred = values - guess.mean
    upper, lower = (_normal(scale * (centred + half)) for half in (1 / 255, -1 / 255))
    least = 1e-12
    inner = (upper - lower).clamp(min=least).log()
    ends = torch.where(values > 0.999, (1 - lower).clamp(min=least).log(), inner)
    return torch.where(values < -0.999, upper.clamp(min=least).log(), ends)


def _normal(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
