"""Prints an upper bound on the Lipschitz constant of every channel mixer of a backbone.

usage: python tools/lipschitz.py [key=value ...]

  backbone=NAME            name of the backbone (default: that of ckpt=<run folder>, with its
                           options; without a run deit_t_affn)
  backbone.KEY=VALUE       an option that it was built with, in run.py's words, such as
                           backbone.mixer.hidden_ratio=2
  ckpt=PATH                run folder, or checkpoint of the backbone; without, random weights
  block=PATTERN            blocks to take, such as 'blocks.0.*' (default: all)
  form=joint               joint, or split: a bound for each branch, added up as in the IFFN paper
  method=auto              reduced, or sdp (needs cvxpy: pip install -e '.[lipschitz]'); auto takes
                           sdp for mixers of a few channels
  solver=CLARABEL          CLARABEL or SCS, with method=sdp
  iterations=600           steps per temperature of method=reduced, at most; fewer are quicker and
                           give a bound that is a little looser and as valid
  residual=false           true bounds x + f(x), as a block without its norm computes
  format=table             table or json

It bounds mixers that treat every token by itself: affn, iffn with backbone.mixer.spatial=false, ffn
and the hosts' own FFNs. product is ||W1|| ||diag(max |slope|) W0||, what one would say without this
bound.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import number, parse
from tools.cli.command import answer, exit_with
from tools.cli.tables import Record
from tools.cli.typed_network import merged, options_of_run, read_network, separate

DEFAULTS = {
    "backbone": "",
    "ckpt": "",
    "block": "*",
    "form": "joint",
    "method": "auto",
    "solver": "CLARABEL",
    "iterations": "600",
    "residual": "false",
    "format": "table",
}
USUAL = "deit_t_affn"  # of a command without backbone and run
CHOICES = {"residual": ("true", "false"), "format": ("table", "json")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for arguments that cannot be served."""
    return answer("lipschitz.py", __doc__, bound, arguments)


def bound(arguments: Sequence[str]) -> None:
    """Print the table that the arguments ask for."""
    words, own = separate(arguments)
    options = parse(own, DEFAULTS, CHOICES, takes_backbone=True)
    number("iterations", options["iterations"])
    records = bounds(options, words)
    if options["format"] == "json":
        print(json.dumps(list(records), indent=2))
    else:
        write_table(records)


def bounds(options: dict[str, str], words: Sequence[str]) -> Iterator[Record]:
    """One record per block, as soon as it is computed."""
    from backbones import create_backbone
    from backbones.analysis.lipschitz import lipschitz_bound
    from backbones.checkpoints.adoption import adopt
    from tasks.engine.saved_config import open_saved

    saved = open_saved(options["ckpt"]) if options["ckpt"] else None
    run = None if saved is None else saved.run
    usual = USUAL if run is None else run.config["backbone"]["name"]
    name, typed = read_network(options["backbone"] or usual, words)
    if "pretrained" in typed:
        raise ValueError("backbone.pretrained is refused: pass the file as ckpt=")
    given = merged(options_of_run(None if run is None else run.config, name), typed)
    dense = run is not None and run.config["task_name"] in ("detection", "segmentation")
    backbone = create_backbone(name, **{"dense": dense, **given}).eval()
    if saved is not None:
        adopt(backbone, saved.checkpoint, trained=True)
    places = backbone.channel_places()
    if not places:
        raise ValueError(f"the channel mixers of {name} are not exchangeable, so none is bounded")
    blocks = [name for name in places if fnmatch.fnmatchcase(name, options["block"])]
    if not blocks:
        raise ValueError(
            f"block={options['block']} matches no channel mixer of {name}; it has "
            f"{places[0]} to {places[-1]}"
        )
    # They are closed lists there, and another word is refused.
    chosen: dict[str, Any] = {key: options[key] for key in ("form", "method", "solver")}
    for name in blocks:
        found = lipschitz_bound(
            backbone.get_submodule(name),
            **chosen,
            residual=options["residual"] == "true",
            iterations=int(options["iterations"]),
        )
        yield {
            "block": name,
            "bound": found.bound,
            "product": found.product,
            "form": found.form,
            "method": found.method,
            "certified": found.certified,
            "seconds": round(found.seconds, 2),
        }


def write_table(records: Iterator[Record]) -> None:
    """A line per block; a wide network takes minutes, so each is shown when it is there."""
    line = "{block:38} {bound:>10} {product:>10} {form:>6} {method:>8} {seconds:>8}"
    for index, record in enumerate(records):
        if index == 0:
            print(line.format_map({key: key for key in record}))
        figures = {key: f"{record[key]:.4f}" for key in ("bound", "product")}
        print(line.format_map(record | figures), flush=True)


if __name__ == "__main__":
    exit_with(main)
