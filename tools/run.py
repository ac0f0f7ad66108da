"""Train, evaluate or apply any registered backbone on any task: python tools/run.py task=... backbone=...

python tools/run.py --help lists the groups, backbones and options. No line here asks which task it is.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # python puts tools/ there; imports are written from the root

# OpenMP's threads spin while they wait, so that one busy neighbour process makes every parallel
# region wait for it: on two shared cores a training step then takes up to 15 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hydra  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402

from tools import command_line  # noqa: E402


def run(config: dict[str, Any]) -> dict[str, float]:
    """Build the parts in the order of the data flow, then train or evaluate.

    Returns:
        The final metrics.
    """
    import lightning.pytorch as lightning

    from backbones import create_backbone
    from tools import report, run_folder
    from tools.instantiate import build
    from tools.trainer import evaluate, fit, make_trainer, predict

    started = time.perf_counter()
    folder = run_folder.open_folder(config)
    lightning.seed_everything(config["seed"], workers=True, verbose=False)

    datamodule = build(config["data"], seed=config["seed"], predict_path=config["input"])
    datamodule.prepare_data()
    datamodule.setup()
    backbone = create_backbone(**config["backbone"])
    model = build(config["head"], backbone=backbone, num_classes=datamodule.num_classes)
    task = build(
        config["task"],
        model=model,
        class_names=datamodule.class_names,
        optimizer=config["optimizer"],
        schedule=config["schedule"],
    )
    trainer = make_trainer(config["trainer"], folder, task.monitor)

    if config["mode"] == "fit":
        metrics = fit(trainer, task, datamodule, resume=config["resume"])
    elif config["mode"] == "predict":
        metrics = predict(trainer, task, datamodule, config["ckpt"])
    else:
        metrics = evaluate(trainer, task, datamodule, config["mode"], config["ckpt"])
    if trainer.is_global_zero:
        report.write(folder, config, task, datamodule, metrics, time.perf_counter() - started)
    return metrics


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="run")
def main(config: DictConfig) -> None:
    """Run one composed config; a user's mistake ends in one line, a fault of ours in a traceback."""
    with command_line.one_line_errors():
        run(command_line.resolved(OmegaConf.to_container(config, resolve=True)))


if __name__ == "__main__":
    with command_line.one_line_errors():
        command_line.prepare(sys.argv[1:])
    main()
