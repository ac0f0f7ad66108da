"""Prints parameters and multiply-adds (MACs) of backbones, or a paper's figures beside ours.

usage: python tools/complexity.py [key=value ...]

  backbone=NAME,NAME,PATTERN    names or patterns such as 'swin_*' (default: all)
  backbone.KEY=VALUE            an option of all of them, in run.py's words: backbone.mixer.g2=6,
                                backbone.token_mixer=sbm; of several values, as in
                                backbone.mixer.g2=2,4,6, each is counted
  paper=PAPER                   the rows of one paper with what it reports: {papers}
  table=NUMBER                  with paper=, of that table alone
  task=TASK                     counts the whole model of a task: {tasks}
  head=NAME                     with task=: a file of configs/head (default: {heads})
  image_size=224                side, or HEIGHTxWIDTH (default: {sizes}, with paper= the row's)
  rule=RULE                     how MACs are counted; default macs, with paper= the paper's own
                                macs: convolutions, linear layers, matrix products, FFTs (a complex
                                one of n points is 2 n log2 n, a real one half of that) and complex
                                products (4); a warning names modules with uncounted operators
                                fvcore: also norms, as fvcore counts; runs the model once
                                torchprofile: also norms, element-wise products and means
  format=table                  table, json or csv

Counted is the published classification network: the backbone with 1000 classes, one image, built
for image_size unless backbone.img_size is typed, as run.py builds it. Models of the MM toolkits are
counted part by part, with 80 classes (COCO) or 150 (ADE20K): of two stages the second one sees 1000
proposals, of which 100 get masks, as MMDetection counts; an auxiliary head trains only.
With paper=, diff is ours minus reported, in M and G. Where the paper prints a change against the
plain host, it is shown beside ours and diff is theirs. A count "agrees" if ours, rounded or cut off
to the printed digits, is the printed one (a change: rounded). Otherwise the verdict names the
difference and its cause, as in "differs by +0.57 M: rounding": misprint (the paper contradicts
itself or what can be), rounding (to whole millions, or a sum of rounded counts), quoted (another
paper's count) or counting (by another rule, which fits). "DIFFERS by +0.39 M" has no known cause.
Rows of which a paper prints accuracies alone have no verdict. Rows of detection, segmentation and
transfer are not counted anew: theirs are the whole model's in configs/published. A name under
experiment= is what run.py takes.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks.engine.family import Family, families, find_family
from tools.cli.arguments import image_size, parse, select
from tools.cli.command import answer, exit_with
from tools.cli.tables import FORMATS, Record, write
from tools.cli.typed_network import label, read_networks, separate
from tools.cli.usual_family import usual_task
from tools.comparing.hosts import notes_on
from tools.config.config_checks import tasks_of
from tools.config.run_config import CONFIGS
from tools.papers.experiments import describe
from tools.papers.published import Row, list_papers, load_rows

COUNTED = {name: one.counted for name, one in families().items() if one.counted}
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
    "backbone.pretrained": "weights change nothing of what is counted",
    "backbone.dense": "counted is the classification network",
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
# Beside a paper's figures the exact count is enough.
PAPER_COLUMNS = {key: column for key, column in COLUMNS.items() if key not in ("params_m", "part")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for arguments that cannot be served."""
    heads = ", ".join(f"{one.head} of {name}" for name, one in COUNTED.items())
    sizes = ", ".join(f"{one.size} of {name}" for name, one in COUNTED.items() if one.size)
    text = (__doc__ or "").format(
        papers=", ".join(list_papers()), tasks=", ".join(COUNTED), heads=heads, sizes=sizes
    )
    return answer("complexity.py", text, count, arguments)


def count(arguments: Sequence[str]) -> None:
    """Print the table that the arguments ask for."""
    words, own = separate(arguments)
    options = parse(own, DEFAULTS, CHOICES, takes_backbone=True)
    _refuse(words, options)
    rows = rows_of(options["paper"], options["table"]) if options["paper"] else []
    if options["table"] and not rows:
        raise ValueError(f"table={options['table']} needs a paper: pass paper=afbo beside it")
    records = complexity(options, rows, words)
    columns = PAPER_COLUMNS if options["paper"] else COLUMNS
    if not any(record.get("reported_params_change_m") for record in records):
        columns = {key: column for key, column in columns.items() if "change" not in key}
    for optional in ("head", "part"):
        if not any(record.get(optional) for record in records):
            columns = {key: column for key, column in columns.items() if key != optional}
    write(records, options["format"], columns)
    _note_hosts(options, rows, words)


def _note_hosts(options: dict[str, str], rows: Sequence[Row], words: Sequence[str]) -> None:
    """Say on standard error which networks differ in more than their mixers."""
    family = family_of(options)
    if options["paper"]:
        names = select(options["backbone"])
        shown = [row for row in rows if row.backbone in names and is_counted(row)]
        networks = [(row.backbone, dict(row.options)) for row in shown]
    else:
        networks = read_networks(options["backbone"], words, family)
    for line in notes_on(networks, dense=bool(COUNTED[family.name].parts)):
        print(f"complexity.py: {line}", file=sys.stderr)


def family_of(options: dict[str, str]) -> Family:
    """Return the family that is counted."""
    return find_family(options["task"] or usual_task())


def is_counted(row: Row) -> bool:
    """Return True for a paper's row that is counted anew; others have their counts in its YAML."""
    counted = COUNTED.get(row.task)
    return counted is not None and counted.rows


def rows_of(paper: str, table: str) -> list[Row]:
    """The rows of a paper or of one of its tables, those of a table together.

    Raises:
        ValueError: There is no such paper or table.
    """
    rows = sorted(load_rows(paper), key=lambda row: row.table)
    chosen = [row for row in rows if table in ("", str(row.table))]
    if not chosen:
        tables = dict.fromkeys(str(row.table) for row in rows)
        raise ValueError(f"paper={paper} has no table={table}; it has {', '.join(tables)}")
    return chosen


def _refuse(words: Sequence[str], options: dict[str, str]) -> None:
    """Refuse options that have no place in what is counted."""
    counted = COUNTED[family_of(options).name]
    if options["head"] and not options["task"]:
        file = CONFIGS / "head" / f"{options['head']}.yaml"
        tasks = [one for one in COUNTED if not file.exists() or one in tasks_of(file, "head")]
        named = " or ".join(f"task={one}" for one in tasks)
        raise ValueError(f"head={options['head']} needs its task: pass {named}")
    if counted.shape and options["image_size"]:
        raise ValueError(f"image_size= is for images, and task={options['task']} takes others")
    if options["task"] not in ("", usual_task()) and options["paper"]:
        raise ValueError(f"paper= counts rows of all tasks; leave task={options['task']} out")
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if options["paper"]:
            raise ValueError(f"paper= counts its rows with the options they have; leave {word} out")
        if key in UNCOUNTED:
            raise ValueError(f"{word} is refused: {UNCOUNTED[key]}")


def complexity(
    options: dict[str, str], rows: Sequence[Row], words: Sequence[str] = ()
) -> list[Record]:
    """Count what the options ask for; one record per network, or per row of the paper."""
    image_size(options["image_size"])  # to be refused before anything is built
    rule = options["rule"] or (rows[0].rule if rows else "macs")
    count = functools.partial(count_model, rule=rule)
    if not options["paper"]:
        family = family_of(options)
        if COUNTED[family.name].parts:
            return dense_records(options, words)
        count = functools.partial(count, task=family.name, head=options["head"])
        size = image_size(options["image_size"])
        networks = {label(one): one for one in read_networks(options["backbone"], words, family)}
        return [
            plain_record(typed, *count(name, json.dumps(own), size))
            for typed, (name, own) in networks.items()
        ]
    names, records = select(options["backbone"]), []
    for row in rows:
        if row.backbone in names and not is_counted(row):
            records.append(paper_record(row, (row.params, row.exact_macs), None))
        elif row.backbone in names:
            size = image_size(options["image_size"], row.image_size)
            base = count(row.base, "{}", size) if row.base else None
            ours = count(row.backbone, json.dumps(row.options), size)
            usual = (rule, size) == (row.rule, (row.image_size, row.image_size))
            records.append(paper_record(row, ours, base, as_published=usual))
    if not records:
        raise ValueError(f"paper={options['paper']} has no row for backbone={options['backbone']}")
    return records


@functools.cache
def count_model(
    name: str, options: str, size: tuple[int, int], rule: str, task: str = "", head: str = ""
) -> tuple[int, int]:
    """Count parameters and multiply-adds of a whole model that takes one tensor.

    Args:
        name: Of the backbone.
        options: Of the backbone, as JSON.
        size: (H, W) of the image; a family with inputs of one shape ignores it.
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
    # Tables that belong to a map are those of a run with images of this size.
    built = {**({} if counted.shape else {"img_size": size}), **json.loads(options)}
    config = {"head": head_config(task, head or counted.head)}
    # fvcore runs the model, so it needs weights; the other rules need shapes only.
    with torch.device("cpu" if rule == "fvcore" else "meta"):
        model = build(config, "head", backbone=create_backbone(name, **built), **counted.targets)
    shape = counted.shape or (3, *size)
    return count_parameters(model), count_macs(model, rule=rule, shape=shape)


def dense_records(options: dict[str, str], words: Sequence[str]) -> list[Record]:
    """Every part of a detector or segmentor around each backbone, and the whole."""
    from tools.papers.dense_counts import dense_parts, head_config

    task, rule = options["task"], options["rule"] or "macs"
    counted = COUNTED[task]
    head = options["head"] or counted.head
    head_config(task, head)  # to be refused before anything is built
    size, classes = image_size(options["image_size"] or counted.size), counted.targets
    records = []
    for name, own in read_networks(options["backbone"], words, find_family(task)):
        parts = dense_parts(
            name, json.dumps(own), task, head, "{}", classes["num_classes"], size, rule
        )
        whole = ("whole", sum(part[1] for part in parts), sum(part[2] for part in parts))
        for part, params, macs in [*parts, whole]:
            record = plain_record(label((name, own)), params, macs)
            records.append({**record, "head": head, "part": part})
    return records


def plain_record(typed: str, params: int, macs: int) -> Record:
    """What is shown of a network, with its name and options as they are typed."""
    return {"backbone": typed, "params": params, "params_m": params / 1e6, "macs_g": macs / 1e9}


def paper_record(
    row: Row,
    ours: tuple[int, int | None],
    base: tuple[int, int | None] | None,
    *,
    as_published: bool = True,
) -> Record:
    """What is shown of a row of a paper.

    Args:
        row: The row.
        ours: Our parameters and multiply-adds, the latter None if they are not counted.
        base: The same of the row's base.
        as_published: Ours are counted by the row's own rule at its own image size.
    """
    params, macs = ours
    found = row.residuals(params, macs, base)
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
        "params_change_m": _number(changes.get("params")),
        "residual_params_m": _number(found.get("params")),
        "macs_g": None if macs is None else macs / 1e9,
        "reported_flops_g": row.reported.get("flops"),
        "reported_flops_change_g": row.reported.get("flops_delta"),
        "macs_change_g": _number(changes.get("flops")),
        "residual_flops_g": _number(found.get("flops")),
        "verdict": row.verdict(found, as_published=as_published) if found else None,
        "note": row.note,
    }


def _number(exact: Decimal | None) -> float | None:
    """A count as JSON and CSV have it."""
    return None if exact is None else float(exact)


if __name__ == "__main__":
    exit_with(main)
