"""The runs of a comparison, by the words that a user types."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backbones.checkpoints.behaviour import describe_answers
from tasks.engine.loops.signals import STATUSES
from tasks.engine.run_folder.bounded_reading import DamagedFile
from tasks.engine.run_folder.run_config import RunConfig
from tasks.engine.run_folder.saved_runs import CONFIG, read_config
from tasks.engine.run_folder.schemas import read_summary
from tools.cli.grammar import format_value, key_of
from tools.cli.network_names import config_network_name
from tools.cli.printable import counted
from tools.comparison.cells import CellPlan, compose_run, run_words
from tools.comparison.journal import Journal, Run
from tools.comparison.plan import TUNING_SEED, Entry, Plan
from tools.comparison.workers import ClusterWorkers, Workers
from tools.runs.folder import LATEST, describe_new_length, differences
from tools.runs.lock import refuse_if_held

START_UP = 5.0  # seconds of a run besides its steps, until some are known
RUN_FOLDER = "Run folder: "


@dataclass
class Comparison:
    """A plan with all that its runs need.

    Attributes:
        plan: The plan.
        mixers: Rows of its table.
        hosts: Its hosts.
        data: Its data sets.
        cells: As measured.
        folder: Its folder.
        journal: Its runs that have ended.
        report: Prints a line.
        pace: Seconds of a run over the estimate, of those that ended.
    """

    plan: Plan
    mixers: Sequence[Entry]
    hosts: Sequence[Entry]
    data: Sequence[Entry]
    cells: Sequence[CellPlan]
    folder: Path
    journal: Journal
    report: Callable[[str], None]
    pace: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folders_before = self._list_folders()

    def planned(self) -> Iterator[Run]:
        """Yield the runs of the plan: of each cell those that choose rates, then its blocks.

        Where another rate than the recipe's was chosen, runs with the recipe's follow.
        """
        # Cells that choose rates for others come first.
        for cell in sorted(self.cells, key=lambda cell: not self.plan.chooses_rates(cell.data)):
            mixers = [mixer for mixer in self.mixers if mixer.label in cell.networks]
            if self.plan.chooses_rates(cell.data):
                for mixer in (m for m in mixers if not m.later):
                    for rate in self.plan.rates:
                        yield self._run("tune", mixer, cell, TUNING_SEED, rate)
            for seed in self.plan.run_seeds:
                for mixer in mixers:
                    yield self._run("final", mixer, cell, mixer.later + seed, 1.0)
            for seed in self.plan.run_seeds if len(self.plan.rates) > 1 else ():
                for mixer in (m for m in mixers if not m.later):
                    if self.chosen_factor(mixer.label, cell.key) not in (None, 1.0):
                        yield self._run("untuned", mixer, cell, seed, 1.0)

    def _run(self, stage: Any, mixer: Entry, cell: CellPlan, seed: int, factor: float) -> Run:
        return Run(
            stage=stage, mixer=mixer.label, host=cell.host, data=cell.data, seed=seed,
            factor=factor,
        )  # fmt: skip

    def settled(self, run: Run) -> Run | None:
        """Return a planned run with its chosen rate; None if all rates of its mixer failed."""
        if run.stage != "final" or len(self.plan.rates) == 1:
            return run
        factor = self.chosen_factor(run.mixer, run.cell)
        return None if factor is None else run.model_copy(update={"factor": factor})

    def chosen_factor(self, mixer: str, cell: tuple[str, str]) -> float | None:
        """Return the factor of the rate with the best held-out metric; the nearest to 1 of equals.

        The baseline's second row follows the baseline.
        """
        entry = next(row for row in self.mixers if row.label == mixer)
        label = self.plan.baseline if entry.later else mixer
        place = cell[0], self.plan.tuned_on or cell[1]
        tuned = self.tuned(label, place)
        if not tuned:
            return None
        best = max(tuned, key=lambda r: (self.plan.sign * r.value, -abs(math.log(r.factor))))
        return best.factor

    def tuned(self, mixer: str, cell: tuple[str, str]) -> list[Run]:
        """Return the runs that choose the rate of a mixer in a cell, among the plan's rates."""
        runs = [run for run in self.journal.finished("tune") if run.factor in self.plan.rates]
        return [run for run in runs if (run.mixer, run.cell) == (mixer, cell)]

    def outdated(self, before: Plan | None) -> list[str]:
        """Forget runs of other settings, or of other code of their mixers, and describe them.

        Args:
            before: The plan as the last command left it; None before the first run.
        """
        lines, count = [], 0
        for run in list(self.journal):
            cell = next((c for c in self.cells if c.key == run.cell), None)
            network = cell.networks.get(run.mixer) if cell else None
            if network is None or run.status != "finished":
                continue
            if before is not None and _settings(before, run) != _settings(self.plan, run):
                del self.journal.runs[run.key]
                count += 1
                continue
            summary = _summary(Path(run.folder))
            if summary and _code_change(summary, network.answers):
                del self.journal.runs[run.key]
                lines.append(f"{run} was made by other code and runs again")
        self.folders_before = self._list_folders()
        again = f"of other settings left the table: {counted(count, 'run')}"
        return [again, *lines] if count else lines

    def words(self, run: Run) -> list[str]:
        """Return the words of run.py for a run."""
        host, data, mixer = (
            next(entry for entry in entries if entry.label == label)
            for entries, label in (
                (self.hosts, run.host), (self.data, run.data), (self.mixers, run.mixer)
            )
        )  # fmt: skip
        cell = next(cell for cell in self.cells if cell.key == run.cell)
        words = [*run_words(self.plan, host, data, mixer), *cell.words, f"seed={run.seed}"]
        if cell.rate is not None:
            words.append(f"optimizer.lr={format_value(float(f'{cell.rate * run.factor:.6g}'))}")
        if self.plan.budget == "seconds":
            steps = cell.networks[run.mixer].steps
            words += ["trainer.max_epochs=-1", f"trainer.max_steps={steps}"]
        if run.stage == "tune":
            words.append(f"held_out={self.plan.held_out}")
        return [*words, f"output_dir={self.folder / 'runs'}"]

    def estimate(self, run: Run) -> float:
        """Return the expected seconds of a run, by the steps that were timed."""
        network = next(c for c in self.cells if c.key == run.cell).networks[run.mixer]
        share = 1 - self.plan.held_out if run.stage == "tune" else 1.0
        expected = network.steps * network.step * share + START_UP
        seconds_taken, before = (
            (sum(values) for values in zip(*self.pace, strict=True)) if self.pace else (1, 1)
        )
        return expected * seconds_taken / before

    def remaining(self) -> list[Run]:
        """Return the planned runs without a result."""
        runs = [self.settled(run) or run for run in self.planned()]
        return [run for run in runs if self.journal.completed(run) is None]

    def made_before(self) -> list[Run]:
        """Return the planned runs that equal a run made before, with its results."""
        runs = []
        for run in map(self.settled, self.planned() if self.folders_before else ()):
            if run is None or self.journal.completed(run) is not None:
                continue
            cell = next(cell for cell in self.cells if cell.key == run.cell)
            finished, _ = self._earlier(compose_run(self.words(run)), cell, run)
            if finished is not None:
                runs.append(self._earlier_result(run, finished))
        return runs

    def start(self, run: Run, workers: Workers | ClusterWorkers) -> Run | None:
        """Start a run or continue one that was stopped; return one that was made before."""
        words = self.words(run)
        cell = next(cell for cell in self.cells if cell.key == run.cell)
        finished, stopped = self._earlier(compose_run(words), cell, run)
        if finished is not None:
            return self._earlier_result(run, finished)
        if stopped is not None:
            words += ["resume=true", f"ckpt={stopped}"]
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{len(list(logs.iterdir())):05d}.log"
        log.touch()
        expected, started = self.estimate(run), time.monotonic()

        def result(status: int) -> Run:
            if status == 0:
                self.pace.append((time.monotonic() - started, expected))
            return self._result(run, status, log)

        workers.start(words, log, result)
        return None

    def _result(self, run: Run, status: int, log: Path) -> Run:
        """Return a run that ended, by its exit status and output."""
        lines = log.read_text(errors="replace").strip().splitlines()
        if status in STATUSES:
            raise KeyboardInterrupt
        if status < 0:
            reason = f"signal {-status} ended it; repeat the command to continue it"
            return run.model_copy(update={"status": "failed", "reason": reason})
        if status:
            reason = (lines[-1] if lines else f"exit status {status}").removeprefix("error: ")
            if os.strerror(errno.ENOSPC) in reason:  # the next run would end in the same way
                raise OSError(errno.ENOSPC, f"{run} stopped: {reason}; make room and repeat")
            return run.model_copy(update={"status": "failed", "reason": reason[:300]})
        names = [line.removeprefix(RUN_FOLDER) for line in lines if line.startswith(RUN_FOLDER)]
        folder = Path(names[-1]).resolve()
        cell = next(cell for cell in self.cells if cell.key == run.cell)
        if run.stage != "tune" and not _has_data(read_summary(folder / "summary.json"), cell):
            reason = "its data differ from those of the plan; restore them, or pass another name="
            return run.model_copy(update={"status": "failed", "reason": reason})
        return _with_results(run, folder, self.plan.primary)

    def _earlier_result(self, run: Run, folder: Path) -> Run:
        """Return a run with the results of a folder, which a killed command may have left here."""
        is_ours = folder.is_relative_to((self.folder / "runs").resolve())
        return _with_results(run, folder, self.plan.primary, reused=not is_ours)

    def _earlier(
        self, config: RunConfig, cell: CellPlan, run: Run
    ) -> tuple[Path | None, Path | None]:
        """Find a finished and a stopped run of the same settings, code and data.

        Raises:
            ValueError: The run goes on in another process.
        """
        name = config_network_name(config.backbone)
        ours = (self.folder / "runs").resolve()
        stopped = None
        for folder in self.folders_before.get(name, ()):
            is_ours = folder.is_relative_to(ours)
            if run.stage in ("tune", "repeat") and not is_ours:
                continue
            try:
                has_data = _root(folder) == _resolve(config.data.get("root"))
                if not has_data or differences(folder, config):
                    continue
                if describe_new_length(folder, config):
                    continue
            except ValueError:  # the config of another version, or a damaged one
                continue
            summary = _summary(folder)
            if summary is not None and self._is_same(summary, cell, run):
                return folder, None
            if summary is None and is_ours:
                refuse_if_held(folder)  # by a run whose comparison was killed
                if any(folder.glob("checkpoints/*.ckpt")):
                    stopped = stopped or folder
        return None, stopped

    def _list_folders(self) -> dict[str, list[Path]]:
        """Return the run folders of before without a row here, newest first, by network."""
        places = [
            self.folder / "runs",
            Path(self.plan.output_dir),
            *self.folder.parent.glob("*/runs"),
        ]
        rows = {run.folder and Path(run.folder).resolve() for run in self.journal.finished()}
        paths = {
            path.parent.resolve()
            for place in places
            for path in place.glob(f"{self.plan.task}/*/*/{CONFIG}")
        }
        folders: dict[str, list[Path]] = {}
        for path in sorted(paths - rows, key=str, reverse=True):
            if path.name != LATEST:
                folders.setdefault(path.parent.name, []).append(path)
        return folders

    def _is_same(self, summary: dict[str, Any], cell: CellPlan, run: Run) -> bool:
        is_code = _code_change(summary, cell.networks[run.mixer].answers) is None
        # A tuning is one of this comparison, whose data are unchanged.
        return is_code and (run.stage == "tune" or _has_data(summary, cell))


def _has_data(summary: dict[str, Any], cell: CellPlan) -> bool:
    """Return True if a run had the data of a cell."""
    data = summary.get("data") or {}
    prints, samples = data.get("fingerprints") or {}, data.get("samples") or {}
    is_data = all(prints[name] == cell.prints.get(name) for name in prints)
    return bool(prints) and is_data and samples == cell.samples


def _summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a finished training, or None."""
    try:
        summary = read_summary(folder / "summary.json")
    except (FileNotFoundError, DamagedFile):
        return None
    return None if summary.get("finished") is False or summary.get("mode") != "fit" else summary


def _root(folder: Path) -> Any:
    """Return the folder of a run's data, which tells sets of equal settings apart."""
    return _resolve(read_config(folder / CONFIG)["data"].get("root"))


def _resolve(path: Any) -> Any:
    return Path(path).expanduser().resolve() if isinstance(path, str) else path


def _settings(plan: Plan, run: Run) -> tuple[Any, ...]:
    """Return what decides a run besides its mixer, host, data, seed and rate."""
    options = {key_of(word): word for word in plan.options}
    return options, plan.budget, plan.held_out if run.stage == "tune" else None


def _code_change(summary: dict[str, Any], answers: dict[str, list[float]]) -> str | None:
    """Describe how the code of a run differs from today's; None if it computes the same."""
    answers_then = summary.get("fingerprint")
    if not answers_then:
        return None if not answers else "it lacks a fingerprint"
    return describe_answers("the run", answers_then, answers)


def _training_memory(summary: Mapping[str, Any]) -> float:
    """Return the peak memory of a GPU; NaN of a processor, whose peak is that of the imports."""
    is_gpu = summary.get("accelerator") != "cpu"
    return (summary.get("peak_memory_mib") or math.nan) if is_gpu else math.nan


def _with_results(run: Run, folder: Path, metric: str, *, reused: bool = False) -> Run:
    """Return a run with the results of its folder; without the metric it is a failed one."""
    summary = read_summary(folder / "summary.json")
    metrics = summary["metrics"]
    value = metrics.get(metric, math.nan)
    facts = {
        "value": value, "ece": metrics.get("ece", math.nan), "folder": str(folder),
        "memory": _training_memory(summary), "seconds": summary["seconds"],
        "reused": reused, "status": "finished",
    }  # fmt: skip
    if not math.isfinite(value):
        reason = f"{metric} is not a number" if metric in metrics else (
            f"the run has no {metric}; it has {', '.join(metrics)}"
        )  # fmt: skip
        facts |= {"status": "failed", "reason": reason}
    return run.model_copy(update=facts)
