# %% [markdown]
# # Look inside
#
# Analyses take run folders. First a network to look into, trained on sample data.

# %%
from pathlib import Path

from PIL import Image

import mixerlab  # makes tools importable
from tools import analyse, run

run.main(["task=classification", "backbone=deit_t_afbo", "data.train_copies=2"])
folder = Path("outputs/classification/deit_t_afbo/latest")


def look(analysis: str, *words: str) -> Image.Image:
    """Return the first picture of an analysis."""
    files = analyse.run_named([analysis, f"ckpt={folder}", *words])
    return Image.open(next(file for file in files if file.suffix == ".png"))


# %% [markdown]
# ## Its errors
#
# Confusions, calibration, and the images whose class it finds least likely.

# %%
look("errors")

# %% [markdown]
# ## Where it looks
#
# Class activation maps at the last block, for the predicted class.

# %%
look("cam", "images=4")

# %% [markdown]
# What the class token reads in each layer, and how far each head looks:

# %%
look("attention", "images=2")

# %% [markdown]
# ## What its mixers do
#
# AFBO maps channels by sparse matrices and multiplies the results: which channels read which, and
# which pairs interact.

# %%
look("mappings")

# %% [markdown]
# How much of the image an output depends on:

# %%
look("erf", "image_size=64")

# %% [markdown]
# `analyse.main(["report", f"ckpt={folder}"])` writes all analyses that apply into one HTML page.
