"""Inputs as a client of tools/serve.py sends them."""

import io

import numpy as np
from PIL import Image


def png(seed, side=40):
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def input_of(family, task, run):
    """Return the bytes and the file name of an input of a family's run."""
    if family == "generation":
        return f"{task.class_names[1]}\n".encode(), "text"
    if family == "glue":
        return b"the cat sleeps\nthe cats sleeps\n", "text"
    if family == "point_segmentation":
        return (run / "preview" / "00.ply").read_bytes(), "cloud.ply"
    if family == "forecasting":
        names = ",".join(task.series_facts["names"])
        values = ",".join("1.5" for _ in task.series_facts["names"])
        times = [f"2024-01-{day:02d} {hour:02d}:00:00" for day in (1, 2) for hour in range(24)]
        lines = [f"date,{names}", *(f"{time},{values}" for time in times)]
        return "\n".join(lines).encode(), "series.csv"
    return png(0), "photo.png"
