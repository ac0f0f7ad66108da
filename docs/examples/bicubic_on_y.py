"""Bicubic enlargement of the Y channel alone, as the published rows of the benchmarks have it.

usage: python docs/examples/bicubic_on_y.py FOLDER SCALE
"""

import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from skimage import data as photographs

from datamodules.super_resolution.imresize import crop_to_multiple, imresize
from tasks.super_resolution.quality import luma, psnr, ssim

scale = int(sys.argv[2]) if len(sys.argv) > 2 else 4
files = sorted(Path(sys.argv[1]).glob("*.png")) if len(sys.argv) > 2 else []
images = [np.asarray(Image.open(file)) for file in files] or [photographs.coffee()]


def rounded_y(image: np.ndarray) -> np.ndarray:
    """Return Y in whole numbers; those of a grey image are as they are, from 0 to 255."""
    if image.ndim == 2:
        return image.astype(float)
    return luma(torch.tensor(image).permute(2, 0, 1) / 255.0).double().round().numpy()


def quality(image: np.ndarray) -> tuple[float, float]:
    """Return PSNR and SSIM; the small image is not rounded, and borders are cropped."""
    truth = crop_to_multiple(rounded_y(image), scale)
    large = imresize(imresize(truth, Fraction(1, scale)), scale).round().clip(0, 255)
    inner = slice(scale, -scale)
    pair = [torch.tensor(y)[inner, inner] for y in (large, truth)]
    return float(psnr(*pair)), float(ssim(*pair))


means = np.mean([quality(image) for image in images], axis=0)
print(f"{len(images)} images, x{scale}: {means[0]:.2f} dB, SSIM {means[1]:.4f}")
