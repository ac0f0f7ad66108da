"""Print parameters and multiply-adds (MACs) of backbones, or a paper's figures next to ours.

usage: python tools/complexity.py [key=value ...]

  backbone=NAME,NAME,PATTERN    names or patterns such as 'swin_*' (default: all)
  backbone.KEY=VALUE            an option of all networks, as in run.py: backbone.mixer.g2=6,
                                backbone.token_mixer=sbm; of several values, such as
                                backbone.mixer.g2=2,4,6, each is counted
  paper=PAPER                   the rows of one paper with its figures: {papers}
  table=NUMBER                  with paper=, only that table
  task=TASK                     count the whole model of a task: {tasks}
  head=NAME                     with task=: a file of configs/head (default: {heads})
  image_size=224                side or HEIGHTxWIDTH (default: {sizes}, with paper= the row's)
  rule=RULE                     how MACs are counted (default: macs, with paper= the paper's rule)
                                macs: convolutions, linear layers, matrix products, FFTs (a complex
                                FFT of n points is 2 n log2 n, a real one half of that) and complex
                                products (4); a warning names modules with uncounted operators
                                fvcore: also norms, as fvcore counts; runs the model once
                                torchprofile: also norms, element-wise products and means
  format=table                  table, json or csv

The classification network is counted: the backbone with 1000 classes and one image, built for
image_size unless backbone.img_size is typed. Models of the MM toolkits are counted part by part,
with 80 classes (COCO) or 150 (ADE20K). As in MMDetection, the second stage sees 1000 proposals, of
which 100 get masks. Auxiliary heads only count parameters.
With paper=, diff is ours minus reported, in M and G. Where the paper prints a change relative to
the plain host, diff compares the changes. A count "agrees" if ours, rounded or truncated to the
printed digits, equals it (a change: rounded). Otherwise the verdict gives the difference and its
cause, such as "differs by +0.57 M: rounding":
  misprint   the paper contradicts itself or arithmetic
  rounding   to whole millions, or a sum of rounded counts
  quoted     another paper's count
  counting   another rule reproduces it
"DIFFERS by +0.39 M" is unexplained. Rows that only report accuracies lack a verdict. Rows of
detection, segmentation and transfer show the stored counts of the whole model from
configs/published. Names under experiment= are values for run.py.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.engine.family import Family, families, find_family
from tools.cli.arguments import parse_image_size, parse_options, select_backbones
from tools.cli.command import exit_with, run_command
from tools.cli.paths import CONFIGS
from tools.cli.tables import FORMATS, Record, write
from tools.cli.typed_network import network_label, read_networks, split_backbone_options
from tools.cli.usual_family import usual_task
from tools.comparing.hosts import describe_differences
from tools.config.config_checks import read_tasks
from tools.papers.experiments import describe
from tools.papers.published import Row, list_papers, load_rows

COUNTED = {name: family.counted for name, family in families().items() if family.counted}
DEFAULTS = {
    "backbone": "*",
    "paper": "",
    "table": "",
    "task": "",
    "head": "",
    "image_size": "",
    "rule": "",
    "format": "table",
}
UNCOUNTED = {
    "backbone.pretrained": "weights do not change the counts",
    "backbone.dense": "the classification network is counted",
}
CHOICES = {
    "rule": ("macs", "fvcore", "torchprofile"),
    "task": tuple(COUNTED),
    "format": FORMATS,
}
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "table": ("table", "{}"),
    "experiment": ("experiment=", "{}"),
    "head": ("head", "{}"),
    "part": ("part", "{}"),
    "reported_metric": ("reports", "{}"),
    "params": ("params", "{:,}"),
    "params_m": ("M", "{:.2f}"),
    "reported_params_m": ("paper M", "{}"),
    "reported_params_change_m": ("paper change", "{}"),
    "params_change_m": ("ours", "{:+.2f}"),
    "residual_params_m": ("diff", "{:+.2f}"),
    "macs_g": ("MACs G", "{:.4f}"),
    "reported_flops_g": ("paper G", "{}"),
    "reported_flops_change_g": ("paper change", "{}"),
    "macs_change_g": ("ours", "{:+.2f}"),
    "residual_flops_g": ("diff", "{:+.2f}"),
    "verdict": ("verdict", "{}"),
    "note": ("note", "{}"),
}
# Next to a paper's figures the exact count is enough.
PAPER_COLUMNS = {key: column for key, column in COLUMNS.items() if key not in ("params_m", "part")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    heads = ", ".join(f"{counted.head} of {name}" for name, counted in COUNTED.items())
    sizes = ", ".join(f"{count.size} of {name}" for name, count in COUNTED.items() if count.size)
    text = (__doc__ or "").format(
        papers=", ".join(list_papers()), tasks=", ".join(COUNTED), heads=heads, sizes=sizes
    )
    return run_command("complexity.py", text, print_counts, arguments)


def print_counts(arguments: Sequence[str]) -> None:
    """Print the table."""
    words, option_words = split_backbone_options(arguments)
    options = parse_options(option_words, DEFAULTS, CHOICES, takes_backbone=True)
    _check_options(words, options)
    rows = select_rows(options["paper"], options["table"]) if options["paper"] else []
    if options["table"] and not rows:
        raise ValueError(f"table={options['table']} needs a paper: pass paper=afbo too")
    records = count_records(options, rows, words)
    columns = PAPER_COLUMNS if options["paper"] else COLUMNS
    if not any(record.get("reported_params_change_m") for record in records):
        columns = {key: column for key, column in columns.items() if "change" not in key}
    for optional in ("head", "part"):
        if not any(record.get(optional) for record in records):
            columns = {key: column for key, column in columns.items() if key != optional}
    write(records, options["format"], columns)
    _print_host_notes(options, rows, words)


def _print_host_notes(options: dict[str, str], rows: Sequence[Row], words: Sequence[str]) -> None:
    """Print to standard error which networks differ in more than their mixers."""
    family = counted_family(options)
    if options["paper"]:
        names = select_backbones(options["backbone"])
        counted_rows = [row for row in rows if row.backbone in names and is_counted(row)]
        networks = [(row.backbone, dict(row.options)) for row in counted_rows]
    else:
        networks = read_networks(options["backbone"], words, family)
    for line in describe_differences(networks, dense=bool(COUNTED[family.name].parts)):
        print(f"complexity.py: {line}", file=sys.stderr)


def counted_family(options: dict[str, str]) -> Family:
    """Return the family that is counted."""
    return find_family(options["task"] or usual_task())


def is_counted(row: Row) -> bool:
    """Return True for a paper's row that is counted here; others have their counts in the YAML."""
    counted = COUNTED.get(row.task)
    return counted is not None and counted.rows


def select_rows(paper: str, table: str) -> list[Row]:
    """Return the rows of a paper, or of one of its tables, ordered by table.

    Raises:
        ValueError: The paper or the table is unknown.
    """
    rows = sorted(load_rows(paper), key=lambda row: row.table)
    selection = [row for row in rows if table in ("", str(row.table))]
    if not selection:
        tables = dict.fromkeys(str(row.table) for row in rows)
        raise ValueError(
            f"table={table} is not in paper={paper}; its tables are {', '.join(tables)}"
        )
    return selection


def _check_options(words: Sequence[str], options: dict[str, str]) -> None:
    """Check that the options apply to what is counted."""
    counted = COUNTED[counted_family(options).name]
    if options["head"] and not options["task"]:
        file = CONFIGS / "head" / f"{options['head']}.yaml"
        tasks = [task for task in COUNTED if not file.exists() or task in read_tasks(file, "head")]
        choices = " or ".join(f"task={task}" for task in tasks)
        raise ValueError(f"head={options['head']} needs a task: pass {choices}")
    if counted.shape and options["image_size"]:
        raise ValueError(f"image_size= is for images, and task={options['task']} takes others")
    if options["task"] not in ("", usual_task()) and options["paper"]:
        raise ValueError(f"paper= has rows of all tasks; leave task={options['task']} out")
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if options["paper"]:
            raise ValueError(f"paper= counts rows with their own options; leave {word} out")
        if key in UNCOUNTED:
            raise ValueError(f"leave {word} out: {UNCOUNTED[key]}")


def count_records(
    options: dict[str, str], rows: Sequence[Row], words: Sequence[str] = ()
) -> list[Record]:
    """Count the networks or rows; return one record for each."""
    parse_image_size(options["image_size"])  # checks the size before anything is built
    rule = options["rule"] or (rows[0].rule if rows else "macs")
    count = functools.partial(count_model, rule=rule)
    if not options["paper"]:
        family = counted_family(options)
        if COUNTED[family.name].parts:
            return dense_records(options, words)
        count = functools.partial(count, task=family.name, head=options["head"])
        size = parse_image_size(options["image_size"])
        networks = {
            network_label(network): network
            for network in read_networks(options["backbone"], words, family)
        }
        return [
            network_record(label, *count(name, json.dumps(network_options), size))
            for label, (name, network_options) in networks.items()
        ]
    names, records = select_backbones(options["backbone"]), []
    for row in rows:
        if row.backbone in names and not is_counted(row):
            records.append(paper_record(row, (row.params, row.exact_macs), None))
        elif row.backbone in names:
            size = parse_image_size(options["image_size"], row.image_size)
            base = count(row.base, "{}", size) if row.base else None
            ours = count(row.backbone, json.dumps(row.options), size)
            usual = (rule, size) == (row.rule, (row.image_size, row.image_size))
            records.append(paper_record(row, ours, base, as_published=usual))
    if not records:
        raise ValueError(f"backbone={options['backbone']} is not in paper={options['paper']}")
    return records


@functools.cache
def count_model(
    name: str, options: str, size: tuple[int, int], rule: str, task: str = "", head: str = ""
) -> tuple[int, int]:
    """Count parameters and multiply-adds of a whole model that takes one tensor.

    Args:
        name: Name of the backbone.
        options: Options of the backbone, as JSON.
        size: (H, W) of the image; ignored by a family with inputs of one shape.
        rule: How multiply-adds are counted.
        task: Name of the family; by default that of configs/run.yaml.
        head: Name of the head; by default the family's usual one.
    """
    import torch

    from backbones import create_backbone
    from backbones.analysis.counting import count_macs, count_parameters
    from tasks.engine.instantiate import build
    from tools.papers.dense_counts import head_config

    task = task or usual_task()
    counted = COUNTED[task]
    # Tables that depend on the map size are built for this image size.
    built = {**({} if counted.shape else {"img_size": size}), **json.loads(options)}
    config = {"head": head_config(task, head or counted.head)}
    # fvcore runs the model, so it needs weights; the other rules only need shapes.
    with torch.device("cpu" if rule == "fvcore" else "meta"):
        model = build(
            config["head"], "head", backbone=create_backbone(name, **built), **counted.targets
        )
    shape = counted.shape or (built.get("in_chans", 3), *size)
    return count_parameters(model), count_macs(model, rule=rule, shape=shape)


def dense_records(options: dict[str, str], words: Sequence[str]) -> list[Record]:
    """Count every part of a detector or segmentor with each backbone, and the whole."""
    from tools.papers.dense_counts import count_dense_parts, head_config

    task, rule = options["task"], options["rule"] or "macs"
    counted = COUNTED[task]
    head = options["head"] or counted.head
    head_config(task, head)  # checks the head before anything is built
    size, classes = parse_image_size(options["image_size"] or counted.size), counted.targets
    records = []
    for name, network_options in read_networks(options["backbone"], words, find_family(task)):
        parts = count_dense_parts(
            name, json.dumps(network_options), task, head, "{}", classes["num_classes"], size, rule
        )
        total = ("whole", sum(part[1] for part in parts), sum(part[2] for part in parts))
        for part, params, macs in [*parts, total]:
            record = network_record(network_label((name, network_options)), params, macs)
            records.append({**record, "head": head, "part": part})
    return records


def network_record(label: str, params: int, macs: int) -> Record:
    """Return the record of a network with its name and options as typed."""
    return {"backbone": label, "params": params, "params_m": params / 1e6, "macs_g": macs / 1e9}


def paper_record(
    row: Row,
    ours: tuple[int, int | None],
    base: tuple[int, int | None] | None,
    *,
    as_published: bool = True,
) -> Record:
    """Return the record of a paper's row.

    Args:
        row: The row.
        ours: Our parameters and multiply-adds; the latter may be None.
        base: The same for the row's base.
        as_published: Ours are counted by the row's rule at its image size.
    """
    params, macs = ours
    residuals = row.residuals(params, macs, base)
    changes = row.changes(params, macs, base) if base else {}
    return {
        "backbone": str(row),
        "table": row.table,
        "experiment": row.name or None,
        "head": row.head,
        "reported_metric": describe(row) if row.metrics else None,
        "params": params,
        "params_m": params / 1e6,
        "reported_params_m": row.reported.get("params"),
        "reported_params_change_m": row.reported.get("params_delta"),
        "params_change_m": _to_float(changes.get("params")),
        "residual_params_m": _to_float(residuals.get("params")),
        "macs_g": None if macs is None else macs / 1e9,
        "reported_flops_g": row.reported.get("flops"),
        "reported_flops_change_g": row.reported.get("flops_delta"),
        "macs_change_g": _to_float(changes.get("flops")),
        "residual_flops_g": _to_float(residuals.get("flops")),
        "verdict": row.verdict(residuals, as_published=as_published) if residuals else None,
        "note": row.note,
    }


def _to_float(exact: Decimal | None) -> float | None:
    """Convert an exact count for JSON and CSV."""
    return None if exact is None else float(exact)


if __name__ == "__main__":
    exit_with(main)
