"""Print an upper bound on the Lipschitz constant of every channel mixer of a backbone.

usage: python tools/lipschitz.py [key=value ...]

  backbone=NAME            name of the backbone (default: that of ckpt=<run folder> with its
                           options; without a run, deit_t_affn)
  backbone.KEY=VALUE       an option of the backbone, as in run.py, such as
                           backbone.mixer.hidden_ratio=2
  ckpt=PATH                run folder or checkpoint of the backbone (default: random weights)
  block=PATTERN            blocks to bound, such as 'blocks.0.*' (default: all)
  form=joint               joint, or split: one bound per branch, summed as in the IFFN paper
  method=auto              reduced, or sdp (pip install "mixerlab[lipschitz]"); auto uses sdp for
                           mixers with few channels
  solver=CLARABEL          CLARABEL or SCS, with method=sdp
  iterations=600           maximum steps per temperature of method=reduced; fewer are faster and
                           give a looser, equally valid bound
  residual=false           true: bound x + f(x), a block without its norm
  format=table             table or json

Only mixers that process every token by itself are bounded: affn, iffn_bn with
backbone.mixer.spatial=false, ffn and the hosts' own FFNs. product is
||W1|| ||diag(max |slope|) W0||, the simple bound for comparison.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse_integer, parse_options
from tools.cli.command import exit_with, run_command
from tools.cli.tables import Record
from tools.cli.typed_network import merge_options, read_network, run_options, split_backbone_options

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
DEFAULT_BACKBONE = "deit_t_affn"  # without backbone= and run
CHOICES = {"residual": ("true", "false"), "format": ("table", "json")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("lipschitz.py", __doc__, print_bounds, arguments)


def print_bounds(arguments: Sequence[str]) -> None:
    """Print the table."""
    words, option_words = split_backbone_options(arguments)
    options = parse_options(option_words, DEFAULTS, CHOICES, takes_backbone=True)
    parse_integer("iterations", options["iterations"])
    records = compute_bounds(options, words)
    if options["format"] == "json":
        print(json.dumps(list(records), indent=2))
    else:
        write_table(records)


def compute_bounds(options: dict[str, str], words: Sequence[str]) -> Iterator[Record]:
    """Yield one record per block as soon as it is computed."""
    from backbones import create_backbone
    from backbones.analysis.lipschitz import lipschitz_bound
    from backbones.checkpoints.adoption import adopt
    from backbones.hosts.timm_model.placed import Placed
    from tasks.engine.run_folder.saved_runs import open_saved

    saved = open_saved(options["ckpt"]) if options["ckpt"] else None
    run = None if saved is None else saved.run
    usual = DEFAULT_BACKBONE if run is None else run.config["backbone"]["name"]
    name, changes = read_network(options["backbone"] or usual, words)
    if "pretrained" in changes:
        raise ValueError("backbone.pretrained is not supported here: pass the file as ckpt=")
    values = merge_options(run_options(None if run is None else run.config, name), changes)
    dense = run is not None and bool(run.config["backbone"].get("dense"))
    backbone = create_backbone(name, **{"dense": dense, **values}).eval()
    if saved is not None:
        adopt(backbone, saved.checkpoint, trained=True)
    places = backbone.channel_places()
    if not places:
        raise ValueError(f"the channel mixers of {name} are fixed, so they cannot be bounded")
    blocks = [name for name in places if fnmatch.fnmatchcase(name, options["block"])]
    if not blocks:
        raise ValueError(
            f"block={options['block']} matches no channel mixer of {name}; it has "
            f"{places[0]} to {places[-1]}"
        )
    # ``lipschitz_bound`` checks these closed lists.
    choices: dict[str, Any] = {key: options[key] for key in ("form", "method", "solver")}
    for name in blocks:
        module = backbone.get_submodule(name)
        result = lipschitz_bound(
            module.mixer if isinstance(module, Placed) else module,
            **choices,
            residual=options["residual"] == "true",
            iterations=int(options["iterations"]),
        )
        yield {
            "block": name,
            "bound": result.bound,
            "product": result.product,
            "form": result.form,
            "method": result.method,
            "certified": result.certified,
            "seconds": round(result.seconds, 2),
        }


def write_table(records: Iterator[Record]) -> None:
    """Print a line per block at once, since a wide network takes minutes."""
    line = "{block:38} {bound:>10} {product:>10} {form:>6} {method:>8} {seconds:>8}"
    for index, record in enumerate(records):
        if index == 0:
            print(line.format_map({key: key for key in record}))
        figures = {key: f"{record[key]:.4f}" for key in ("bound", "product")}
        print(line.format_map(record | figures), flush=True)


if __name__ == "__main__":
    exit_with(main)
