"""Builds the logs that a config asks for besides metrics.csv, which every run has."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from backbones.options import check_arguments, unknown
from tasks.engine.callbacks.loggers import LEAST_SPACE, RunLog, TensorBoardLog, check_free
from tasks.engine.run_folder.atomic_writes import is_own_file, refuse_link, write_whole
from tasks.engine.run_folder.run_config import RunConfig
from tools.cli.nested_config import flatten
from tools.cli.network_names import config_network_name

log_info = rank_zero_only(logging.getLogger(__name__).info)

Opener = Callable[[], Logger]
PATIENCE = 20.0  # seconds that a server has to answer in
LONGEST_PARAMETER = 250  # characters that Lightning's logger passes on to MLflow


class RemoteLog(RunLog):
    """A log of another program, opened at the first metric, that never stops a run.

    Args:
        name: For messages.
        opener: Makes Lightning's logger, with the run's settings.
        folder: Folder on this machine that the program writes to, if there is one.
    """

    def __init__(self, name: str, opener: Opener, folder: Path | None = None) -> None:
        super().__init__()
        self._what, self._opener, self._folder = name, opener, folder
        self._log: Logger | None = None
        self._failed = False

    def resume_at(self, step: int, *, validates: bool = False) -> None:
        """Do nothing: the service continues its run and shows the later value of a step."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Hand on the metrics of a step, until that fails for the first time."""
        if self._failed:
            return
        with self._giving_up():
            if self._folder is not None:  # Weights & Biases does not tell of a full disk
                check_free(self._folder)
            if self._log is None:
                self._log = self._opener()
            self._log.log_metrics(dict(metrics), step)

    @rank_zero_only
    def close(self, status: str) -> None:
        """End the other program's run: "success" or "failed"."""
        if self._log is None:
            return
        with self._giving_up():
            self._log.finalize(status)
            finish = getattr(self._log.experiment, "finish", None)  # type: ignore[attr-defined]
            if finish is not None:
                finish(exit_code=int(status != "success"))
        self._log = None

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, training is worth more than this log
            self._failed, self._log = True, None
            log_info(
                f"logger {self._what} stopped, training continues: {' '.join(str(error).split())}"
            )


def make_loggers(
    loggers: Mapping[str, Mapping[str, Any]], folder: Path, config: RunConfig
) -> list[RunLog]:
    """Make the logs of a config's group ``logger``.

    Args:
        loggers: Options by name.
        folder: Run folder.
        config: All settings of the run, which the logs read at their first metric.

    Raises:
        ValueError: An unknown logger or option, a package that is not installed, or a store on this
            machine that cannot be written.
    """
    logs: list[RunLog] = []
    for name, options in loggers.items():
        if name not in MAKERS:
            raise ValueError(unknown("logger", name, ["csv", *MAKERS]))
        check_arguments(MAKERS[name], options, f"logger.{name}")
        logs.append(MAKERS[name](folder, config, **options))
    return logs


def tensorboard(folder: Path, config: RunConfig) -> RunLog:
    """TensorBoard's events in the run folder."""
    _check_store(folder / "tensorboard", "tensorboard")
    return TensorBoardLog(folder / "tensorboard")


def wandb(
    folder: Path,
    config: RunConfig,
    *,
    project: str = "mixerlab",
    entity: str | None = None,
    name: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
    mode: Literal["online", "offline", "disabled"] | None = None,
) -> RunLog:
    """Weights & Biases; a resumed run continues there as the same run."""
    _require("wandb", "wandb", 'pip install "mixerlab[wandb]"')
    if mode != "disabled":
        _check_store(folder / "wandb", "wandb")

    def start() -> Logger:
        import wandb as package
        from lightning.pytorch.loggers import WandbLogger

        refuse_link(folder / "wandb")
        fields: dict[str, Any] = {
            "project": project, "entity": entity, "group": group, "tags": list(tags) or None,
            "name": name or _title(folder, config), "id": _identifier(folder),
            "dir": str(folder), "resume": "allow", "reinit": "create_new",
        }  # fmt: skip
        settings = package.Settings(silent=True, console="off", init_timeout=PATIENCE)
        wandb_mode: Any = (
            mode or os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")
        )
        if wandb_mode == "online" and not _answers(_server()):
            log_info(
                f"logger wandb: {_server()} does not answer; the run is written to {folder}/wandb"
            )
            wandb_mode = "offline"
        try:
            run = package.init(mode=wandb_mode, settings=settings, **fields)
        except Exception as error:  # no key, no network, its own kinds: all mean no server
            if wandb_mode != "online":
                raise
            log_info(f"logger wandb: {_first(error)}; the run is written to {folder}/wandb")
            package.teardown()  # it holds the run's name
            run = package.init(mode="offline", settings=settings, **fields)
        # Lightning does this for runs that it opens; the axis would count calls otherwise.
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        log = WandbLogger(experiment=run, save_dir=str(folder))
        log.log_hyperparams(flatten(config.plain()))
        return log

    return RemoteLog("wandb", start, folder)


def mlflow(
    folder: Path,
    config: RunConfig,
    *,
    tracking_uri: str | None = None,
    experiment: str = "mixerlab",
    name: str | None = None,
    tags: Mapping[str, Any] | None = None,
) -> RunLog:
    """MLflow; a resumed run continues there as the same run.

    A parameter keeps its first value there. What a resumed run changes becomes a tag of its name.
    """
    _require("mlflow", "mlflow-skinny", 'pip install "mixerlab[mlflow]"')
    local = f"sqlite:///{folder / 'mlflow.db'}"
    address = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or local
    store = _local_path(address)
    if store is not None:
        _check_store(store, "mlflow")

    def start() -> Logger:
        importlib.import_module("mlflow.tracking")  # sets its logs' levels, which change here
        from lightning.pytorch.loggers import MLFlowLogger

        for noisy in ("mlflow", "alembic", MLFlowLogger.__module__):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        refuse_link(folder / "mlflow.db")
        uri = address
        if not _answers(uri):
            log_info(f"logger mlflow: {uri} does not answer; the run is written to {local} instead")
            uri = local
        note = folder / "mlflow_run.txt"  # store and name of the run there, to continue it
        content = note.read_text() if is_own_file(note) else ""
        store, _, run_id = content.strip().partition("\n")
        log = MLFlowLogger(
            experiment_name=experiment, run_name=name or _title(folder, config),
            tracking_uri=uri, tags={str(k): str(v) for k, v in (tags or {}).items()},
            artifact_location=None if "://" in uri and uri != local else str(folder),
            run_id=run_id if store == uri else None,
        )  # fmt: skip
        write_whole(note, f"{uri}\n{log.run_id}\n")
        parameters, settings = (
            log.experiment.get_run(log.run_id).data.params,
            flatten(config.plain()),
        )
        log.log_hyperparams({key: settings[key] for key in settings.keys() - parameters.keys()})
        for key in settings.keys() & parameters.keys():
            if str(settings[key])[:LONGEST_PARAMETER] != parameters[key]:
                log.experiment.set_tag(log.run_id, key, str(settings[key]))
        log.experiment.update_run(log.run_id, status="RUNNING")
        return log

    return RemoteLog("mlflow", start, store and _nearest_folder(store))


MAKERS: dict[str, Callable[..., RunLog]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}


@contextlib.contextmanager
def closing_loggers(loggers: Sequence[Logger]) -> Iterator[None]:
    """Close the runs of logging services with this run, before a sweep's next one."""
    status = "failed"
    try:
        yield
        status = "success"
    finally:
        for log in loggers:
            if isinstance(log, RemoteLog):
                log.close(status)


def _require(module: str, package: str, remedy: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"logger={module} needs the package {package}: {remedy}")


@rank_zero_only
def _check_store(path: Path, logger: str) -> None:
    """Refuse a file or folder that a log cannot write; links are left to the log."""
    try:
        if path.is_file() and not path.is_symlink():
            path.open("r+b").close()
        if not path.is_symlink():
            with tempfile.TemporaryFile(dir=_nearest_folder(path), buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, LEAST_SPACE)
    except OSError as error:
        raise ValueError(
            f"logger={logger} cannot write {path} ({error.strerror}); free space there, check its "
            "permissions, or pass logger=csv"
        ) from error


def _nearest_folder(path: Path) -> Path:
    """Return a folder, or the nearest existing one above a path."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def _local_path(address: str) -> Path | None:
    """Return the file or folder of MLflow's store on this machine, or None."""
    parts = urlsplit(address)
    if parts.scheme == "sqlite":
        return Path(parts.path[1:]) if parts.path not in ("", "/:memory:") else None
    return Path(parts.path) if parts.scheme in ("", "file") else None


def _title(folder: Path, config: RunConfig) -> str:
    return f"{config_network_name(config.backbone)} {folder.name}"


def _identifier(folder: Path) -> str:
    """Return the id of a run, which its folder keeps for continuations."""
    note = folder / "wandb_run.txt"
    if not is_own_file(note):
        write_whole(note, f"{os.urandom(8).hex()}\n")
    return note.read_text().strip()


def _has_key() -> bool:
    """Return True if wandb finds a key without asking for one."""
    from wandb.sdk.lib.wbauth import read_netrc_auth

    return bool(os.environ.get("WANDB_API_KEY") or read_netrc_auth(host=_server()))


def _server() -> str:
    return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")


def _answers(address: str) -> bool:
    """Return True if a server's address answers, and for any other store."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https"):
        return True
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=PATIENCE / 4).close()
    except OSError:
        return False
    return True


def _first(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
