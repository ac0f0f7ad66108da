"""Evaluate the benchmarks' sets one by one, and print the papers' table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tasks.engine.run_folder.run_config import RunConfig
from tasks.super_resolution.family import FIGURES


def measure(
    engine: Any, task: Any, datamodule: Any, config: RunConfig, folder: Path
) -> dict[str, float]:
    """Evaluate all sets of a ``BenchmarkDataModule``; print PSNR and SSIM of each.

    Args:
        engine: Lightning's trainer.
        task: A ``SuperResolutionTask`` with its weights.
        datamodule: The data.
        config: Config of the run.
        folder: Run folder.

    Returns:
        ``psnr_<set>`` and ``ssim_<set>``.
    """
    del folder
    run = engine.validate if config.mode == "validate" else engine.test
    results: dict[str, float] = {}
    for name, _ in datamodule.parts:
        datamodule.choose(name)
        (metrics,) = run(task, datamodule=datamodule, verbose=False) or [{}]
        figures = {key.rpartition("/")[2]: float(value) for key, value in metrics.items()}
        results |= {f"{metric}_{name}": figures[metric] for metric in FIGURES if metric in figures}
    if engine.is_global_zero:
        _show(results, datamodule, task.scale)
    return results


def _show(metrics: Mapping[str, float], datamodule: Any, scale: int) -> None:
    table = Table(title=f"x{scale}, Y channel, {scale} pixels cropped", title_justify="left")
    for column in ("set", "images", "PSNR", "SSIM"):
        table.add_column(column)
    for name, pairs in datamodule.parts:
        figures = f"{metrics[f'psnr_{name}']:.2f}", f"{metrics[f'ssim_{name}']:.4f}"
        table.add_row(name, str(len(pairs)), *figures)
    Console(width=None if Console().is_terminal else 100).print(table)
