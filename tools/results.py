"""Compare runs: one table per kind of evaluation, averaged over seeds, next to the papers' results.

usage: python tools/results.py [FOLDER or PATTERN ...] [key=value ...]

  FOLDER, PATTERN           run folders, folders that contain them, or patterns such as
                            'outputs/*/swin_*' (default: outputs)
  by=backbone,head          settings that name the rows: backbone, head, data, task, or any key of
                            config.yaml such as optimizer.lr (default: backbone, and head where it
                            differs)
  metric=top1,top5          of the final test (default: top1, AP or mIoU)
  free=KEY,KEY              settings that may differ within a row, such as data.root
  format=table              table, markdown, latex, csv or json
  plot=COST                 plot the first metric over params, macs or latency, or over a setting
                            such as optimizer.lr or experiment
  out=FILE                  of the plot (default: results_<task>_<cost>.png next to the runs);
                            without plot= of the table

Runs share a table and a plot if their evaluations are equal: task, classes, validation images,
image size, crop, views and windows. Headings name what differs. Older runs that did not record
these facts only share tables with each other.
Runs that differ only in the seed, or in settings without effect on results (workers, logs,
accelerator), are averaged in one row. Any other difference makes a new row and is named. Rows with
the same letter under "terms" differ only in the mixer; other differences are listed below the
table. +- is the sample standard deviation, time the mean of the whole command. Unfinished, failed
and unreadable runs are listed on standard error.
A run is compared with a paper if its config names a row of configs/published, as experiments do.
It must have the row's model, data and settings, so runs on sample data are never compared.
plot=latency measures the backbones on this machine: one image at a time, interleaved, median.
Papers' points are left out, because their machines differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse_options
from tools.cli.command import exit_with, run_command
from tools.cli.tables import FORMATS, TEXT_FORMATS
from tools.comparing.run_records import find_runs
from tools.comparing.side_by_side import DEFAULTS, show

CHOICES = {"format": (*FORMATS, *TEXT_FORMATS)}
OUTPUTS = "outputs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("results.py", __doc__, show_results, arguments)


def show_results(arguments: Sequence[str]) -> None:
    """Print the runs found in the folders among the arguments."""
    places = [item for item in arguments if "=" not in item or Path(item).exists()]
    rest = [item for item in arguments if item not in places]
    show(find_runs(places or [OUTPUTS]), parse_options(rest, DEFAULTS, CHOICES, "run folders"))


if __name__ == "__main__":
    exit_with(main)
