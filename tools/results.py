"""Puts runs side by side: a table for each evaluation, averaged over seeds, beside the papers.

usage: python tools/results.py [FOLDER or PATTERN ...] [key=value ...]

  FOLDER, PATTERN           run folders, folders above them, or patterns of such, like
                            'outputs/*/swin_*' (default: outputs)
  by=backbone,head          the settings that name the rows: backbone, head, data, task, or any
                            of a run's config.yaml such as optimizer.lr (default: backbone, and
                            head where it differs)
  metric=top1,top5          of the closing test (default: top1, AP or mIoU)
  free=KEY,KEY              settings that may differ within a row, such as data.root
  format=table              table, markdown, latex, csv or json
  plot=COST                 also a picture of the first metric over params, macs or latency, or over
                            a setting such as optimizer.lr or experiment
  out=FILE                  of the picture (default: results_<task>_<cost>.png beside the runs),
                            without plot= of the table

Runs share a table, and a picture, if they were evaluated alike: the same task, classes, validation
images, image size, crop, views and windows. Headings say what differs. Older runs without these
facts share tables with their like alone. Runs are averaged if they differ in their seed alone, and
in what changes no result (workers, logs, the accelerator); others have rows of their own with what
tells them apart. Rows with the same letter under "terms" differ in the mixer alone; beneath a table
stands what else differs between the networks and trainings of its rows. +- is the sample deviation,
time the mean of the whole command. Unfinished, failed and unreadable runs are named on standard
error. A run is compared with a paper if its config names a row of configs/published (as experiments
do) and it has that row's model, data and settings; runs on sample data are not.
plot=latency times the backbones here: one image, one after the other in turns, median; papers have
other machines, so none of their points are in it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse
from tools.cli.command import answer, exit_with
from tools.cli.tables import FORMATS, TEXT_FORMATS
from tools.comparing.run_records import find_runs
from tools.comparing.side_by_side import DEFAULTS, show

CHOICES = {"format": (*FORMATS, *TEXT_FORMATS)}
OUTPUTS = "outputs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 if there is nothing to show."""
    return answer("results.py", __doc__, find_and_show, arguments)


def find_and_show(arguments: Sequence[str]) -> None:
    """Print the runs in the folders among the arguments."""
    places = [item for item in arguments if "=" not in item or Path(item).exists()]
    rest = [item for item in arguments if item not in places]
    show(find_runs(places or [OUTPUTS]), parse(rest, DEFAULTS, CHOICES, "run folders"))


if __name__ == "__main__":
    exit_with(main)
