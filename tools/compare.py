"""Compare mixers by a plan: one table with verdicts, their errors and the costs.

usage: python tools/compare.py plan=FILE | mixer=A,B host=X,Y data=P,Q baseline=A [key=value ...]
       python tools/compare.py publish=FOLDER [new_cells=true] [leaderboard=docs/leaderboard]
       python tools/compare.py verify=MIXER [host=X] [data=P] [leaderboard=docs/leaderboard]

  plan=FILE                 a yaml file with the keys below; typed ones override it
  mixer=ffn,afbo,glu        names of mixers of one kind, own for the host's own, or lists per stage
                            such as [ffn,afbo,afbo,ffn]; options follow a name after a space:
                            "ffn,glu backbone.mixer.act=mish"
  host=deit_t,NAME          backbones; options likewise: "timm backbone.model=convnextv2_tiny"
  data=P,Q                  files of configs/data: "cifar10 data.root=/data/cifar10"
  baseline=ffn              one of the mixers; all others are compared with it
  task=classification       a task family
  seeds=2                   runs per mixer and cell, which is a host on a data set
  first_seed=0              seed of the first of them
  budget=steps              what all get alike: steps; macs or params (widths are solved, see
                            backbone.mixer.match); seconds, of training at the measured pace
  rates=0.25,1,4            factors of the recipe's learning rate: each mixer and cell gets the best
                            on held-out training samples; 1 leaves the recipe's rate
  tuned_on=cifar10          one of the data sets, which chooses the rates for all of them
  held_out=0.2              share of the training samples that chooses the rate
  metric=NAME               default: the task's main one
  equivalence=0.5           differences up to this size count as none, in the metric's unit
  deviation=0.6             expected deviation of a seed, for the smallest visible difference
  kind=channel              of mixers whose name both kinds have: channel or token
  jobs=1                    runs side by side on this machine, on one GPU as well
  hydra/launcher=submitit_slurm hydra.launcher.partition=gpu
                            runs as jobs of a cluster, jobs= at a time
  name=comparison           the folder is <output_dir>/comparisons/<name>; default: the file's name
  output_dir=outputs        where earlier runs are looked for
  only=plan                 print the plan with its cost and stop; only=table writes the files anew

  publish=FOLDER            add the runs of a comparison, such as outputs/comparisons/mine, to the
                            leaderboard: a CSV per mixer; new_cells=true adds its hosts and data
  verify=MIXER              repeat a mixer's runs of the leaderboard and print whether they fall
                            into the interval of the published ones, else end with status 1; host=
                            and data= choose cells by their labels:
                            data="cifar10 data.root=/data/cifar10"

All other arguments go to every run of tools/run.py. Rows of a cell start with the same weights of
the host, see the same batches in the same order, share all settings, and report the last epoch, so
that none is chosen by the reported data. Controls are added: identity, random, the host's own mixer
and the baseline with other seeds, whose verdict tests the table. Before the first run plan.yaml is
written and hashed; later changes are listed in the report. Repeat the command to continue; equal
runs of before are used again. Verdicts: better, equivalent, worse, cannot tell.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse_options
from tools.cli.command import exit_with, run_command
from tools.cli.errors import one_line_errors
from tools.comparison.leaderboard import FOLDER, publish
from tools.comparison.plan import read_plan
from tools.comparison.verify import verify
from tools.comparison.work import compare, say

DEFAULTS, CHOICES = {"only": ""}, {"only": ("plan", "table")}
LEADERBOARD = {"leaderboard": str(FOLDER)}
PUBLISH = {"publish": "", "new_cells": "false", **LEADERBOARD}
VERIFY = {"verify": "", "host": "", "data": "", "output_dir": "outputs", **LEADERBOARD}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("compare.py", __doc__, run_compare, arguments, needs_arguments=True)


def run_compare(arguments: Sequence[str]) -> None:
    """Compare with the given arguments; errors of runs appear as run.py prints them."""
    keys = {word.partition("=")[0] for word in arguments}
    with one_line_errors():
        if "publish" in keys:
            options = parse_options(arguments, PUBLISH, {"new_cells": ("true", "false")})
            source, place = Path(options["publish"]), Path(options["leaderboard"])
            publish(source, place, say, new_cells=options["new_cells"] == "true")
        elif "verify" in keys:
            options = parse_options(arguments, VERIFY, {})
            place = Path(options["leaderboard"])
            verify(
                options["verify"], options["host"], options["data"], place, options["output_dir"]
            )
        else:
            words = [word for word in arguments if word.partition("=")[0] in DEFAULTS]
            options = parse_options(words, DEFAULTS, CHOICES)
            compare(read_plan([word for word in arguments if word not in words]), options["only"])


if __name__ == "__main__":
    exit_with(main, writes_files=True)
