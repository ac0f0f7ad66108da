"""What stands between a typed command and a run: the backbones as options, and errors of one line."""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(
    str(ROOT / package) for package in ("backbones", "heads", "tasks", "datamodules", "tools")
)
MODES = ("fit", "validate", "test", "predict")
# Options that Hydra answers itself, or that hold several values at once.
NOT_CHECKED = (
    "--help",
    "-h",
    "--hydra-help",
    "--multirun",
    "-m",
    "--cfg",
    "-c",
    "--info",
    "-i",
    "--version",
)


def prepare(arguments: Sequence[str]) -> None:
    """Register the backbones as Hydra's group ``backbone`` and check the command before Hydra runs it.

    Raises:
        ValueError: A name or key that does not exist, with the nearest ones that do.
    """
    warnings.filterwarnings("ignore", module=r"(torch|timm|mm\w+|lightning|torchmetrics)(\.|$)")
    from backbones import backbone_schema, list_backbones

    for name in list_backbones():
        ConfigStore.instance().store(group="backbone", name=name, node=backbone_schema(name))
    # A rate given for a reference batch, scaled linearly to the batch in use.
    OmegaConf.register_new_resolver(
        "scale_lr", lambda lr, batch, reference: lr * batch / reference, replace=True
    )
    if any(argument in NOT_CHECKED for argument in arguments):
        return
    overrides = [argument for argument in arguments if not argument.startswith(("-", "hydra."))]
    try:
        _compose(overrides)
    except MissingConfigException as error:
        raise ValueError(_missing(error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_unknown_key(error, overrides)) from None


def resolved(config: Any) -> dict[str, Any]:
    """Check what no single part can, and fill in the checkpoint files that folders stand for.

    Raises:
        ValueError: An impossible combination, with the command that works.
    """
    from tools.run_folder import checkpoint_file

    mode, backbone = config["mode"], config["backbone"]
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if mode != "fit" and config["ckpt"] is None:
        raise ValueError(
            f"mode={mode} needs the weights: pass ckpt=<run folder or checkpoint file>"
        )
    if mode != "fit" and config["resume"]:
        raise ValueError(
            f"resume=true goes on with training; with mode={mode} pass ckpt=<run folder> alone"
        )
    if (
        config["require_pretrained"]
        and mode == "fit"
        and backbone["pretrained"] is None
        and not config["resume"]
    ):
        name, root = backbone["name"], config["output_dir"]
        raise ValueError(
            f"task={config['task_name']} starts from a trained backbone. Train one:\n"
            f"  python tools/run.py task=classification backbone={name}\n"
            f"then pass it:\n"
            f"  python tools/run.py task={config['task_name']} backbone={name} "
            f"backbone.pretrained={root}/classification/{name}/latest\n"
            "or pass backbone.pretrained=true for timm's weights, backbone.pretrained=false for random ones"
        )
    if isinstance(backbone["pretrained"], str):
        backbone["pretrained"] = str(checkpoint_file(backbone["pretrained"]))
    return dict(config)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one message for an error that our own code raised for the user.

    Such an error is a ValueError or OSError raised in our packages; anything else is a fault and keeps
    its traceback.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        text = _message(error)
        if text is None:
            raise
        logging.shutdown()
        print(f"\nerror: {text}", file=sys.stderr)
        sys.exit(2)


def _message(error: BaseException) -> str | None:
    """The text for the user, or None if the error is not ours."""
    text = str(error)
    if "in DataLoader worker process" in text:
        # torch puts the worker's traceback into the text; its last line is the message.
        last = text.strip().splitlines()[-1]
        return last.partition(": ")[2] or last
    frames = traceback.extract_tb(error.__traceback__)
    return text if frames and frames[-1].filename.startswith(OURS) else None


def _compose(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "configs")):
        return compose("run", overrides=list(overrides))


def _missing(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    options = list(error.options or [])
    near = difflib.get_close_matches(name, options, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"there is no {group} called {name!r}; {hint}known: {', '.join(options)}"


def _unknown_key(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra names the key that does not exist; the valid ones are in the config without it."""
    found = re.search(
        r"Could not (?:override|append to config, an item is already at) '([\w.@/]+)'", str(error)
    )
    if not isinstance(error, ConfigCompositionException) or found is None:
        return str(error).strip()
    key = found.group(1)
    others = [override for override in overrides if not override.lstrip("+~").startswith(f"{key}=")]
    try:
        node: Any = _compose(others)
    except (HydraException, OmegaConfBaseException):
        return str(error).strip()
    *parents, last = key.split(".")
    path = []
    for parent in parents:
        if not isinstance(node, DictConfig) or parent not in node:
            last = parent
            break
        node, path = node[parent], [*path, parent]
    known = sorted(map(str, node)) if isinstance(node, DictConfig) else []
    near = difflib.get_close_matches(last, known, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    where = ".".join(path) or "the config"
    return f"{where} has no option {last!r}; {hint}it has: {', '.join(known)}"
