"""Latents of images, computed once by the VAE of a run and read in all later ones."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heads.generation import Generator
from tasks.engine.callbacks.pace import duration
from tasks.engine.run_folder.atomic_writes import whole_file
from tasks.generation.records import differences, digest, write_record

BATCH = 8  # images of one pass
EVERY = 30.0  # seconds between lines
log = logging.getLogger(__name__).info


def write_latents(
    model: Generator, data: Any, device: torch.device, rank: int = 0, processes: int = 1
) -> None:
    """Write the missing files of ``data.latents``: means and deviations as float16.

    With ``data.flip`` they also hold those of the mirror image.

    Args:
        model: Generator with a VAE; without one, missing files are an error of the data module.
        data: A ``GenerationDataModule`` with ``latents``.
        device: Device of the VAE.
        rank: Number of this process, which computes every ``processes``-th file.
        processes: Number of processes.

    Raises:
        ValueError: The folder holds latents of another VAE, image size or form.
    """
    made_by: dict[str, Any] = {"image_size": data.image_size, "mirrored": data.flip}
    if model.has_vae:
        made_by["vae"] = digest(model.vae_tensors())
    change = differences(data.latents, made_by)
    if change:
        raise ValueError(
            f"data.latents={data.latents} holds other latents ({change}); pass another folder"
        )
    if not model.has_vae:
        return
    if rank == 0:
        scale = {"scale": model.latent_scale, "shift": model.latent_shift}
        write_record(data.latents, made_by | scale)
    files = data.images()[rank::processes]
    missing = [file for file in files if not data.latent_file(file).is_file()]
    started = last_message = time.monotonic()
    for start in range(0, len(missing), BATCH):
        batch = missing[start : start + BATCH]
        _write(model, data, batch, device)
        now, count = time.monotonic(), start + len(batch)
        if rank == 0 and (now - last_message > EVERY or count == len(missing)):
            last_message, rate = now, count / (now - started)
            log(
                f"Latents of {count:,} of {len(missing):,} images in {data.latents}, "
                f"{duration((len(missing) - count) / rate)} left"
            )


def _write(model: Generator, data: Any, files: list[Path], device: torch.device) -> None:
    images = torch.stack([torch.from_numpy(data.values(file)) for file in files])
    views = [images, images.flip(3)] if data.flip else [images]
    moments = [torch.cat(model.moments(view.to(device)), dim=1).cpu().numpy() for view in views]
    for index, file in enumerate(files):
        values = np.stack([view[index] for view in moments]).astype(np.float16)
        target = data.latent_file(file)
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as opened:
            np.save(opened, values if data.flip else values[0])
