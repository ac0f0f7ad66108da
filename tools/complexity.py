"""Prints parameters and multiply-adds (MACs) of backbones, or a paper's figures beside ours.

usage: python tools/complexity.py [key=value ...]

  backbone=NAME,NAME,PATTERN    names or patterns such as 'swin_*' (default: all)
  paper=PAPER                   the rows of one paper with what it reports: {papers}
  image_size=224                side, or HEIGHTxWIDTH (default: 224, with paper= the row's)
  rule=RULE                     how MACs are counted; default macs, with paper= the paper's own
                                macs: convolutions, linear layers and matrix products
                                fvcore: also norms, as fvcore counts; runs the model once
                                torchprofile: also norms, element-wise products and means
  format=table                  table, json or csv

Counted is the published classification network: the backbone with 1000 classes, one image.
With paper=, diff is ours minus reported (of the change against the plain host, where the paper
prints one), in M and G; the verdict says whether it is within the tolerance of configs/published.
Rows of which a paper prints accuracies alone have none.
"""

from __future__ import annotations

import csv
import difflib
import functools
import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python sees the folder tools/ only; the packages lie one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.exporters import TARGETS
from tools.published import Row, list_papers, load_rows

DEFAULTS = {"backbone": "*", "paper": "", "image_size": "", "rule": "", "format": "table"}
CHOICES = {"rule": ("macs", "fvcore", "torchprofile"), "format": ("table", "json", "csv")}
NUM_CLASSES = 1000

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for arguments that cannot be served."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help", "help"} & set(arguments):
        print((__doc__ or "").format(papers=", ".join(list_papers())).strip())
        return 0
    try:
        options = parse(arguments)
        rows = load_rows(options["paper"], "classification") if options["paper"] else []
        records = complexity(options, rows)
    except ValueError as error:
        print(f"complexity.py: {error}", file=sys.stderr)
        return 2
    WRITERS[options["format"]](records)
    return 0


def parse(
    arguments: Sequence[str],
    defaults: Mapping[str, str] = DEFAULTS,
    choices: Mapping[str, Sequence[str]] = CHOICES,
) -> dict[str, str]:
    """Options out of ``key=value`` arguments, with defaults."""
    options = dict(defaults)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in options or not equals or not value:
            near = difflib.get_close_matches(key, options, n=1) if key not in options else []
            meant = f" (did you mean {near[0]}=?)" if near else ""
            raise ValueError(
                f"cannot use {argument!r}{meant}; arguments are key=value, with the keys "
                f"{', '.join(options)}; see --help"
            )
        options[key] = value
    for key, valid in choices.items():
        if options.get(key) and options[key] not in valid:
            raise ValueError(f"{key} must be one of {', '.join(valid)}; got {options[key]!r}")
    return options


def image_size(text: str, usual: int = 224) -> tuple[int, int]:
    """``224`` or ``800x1280`` as (H, W); ``usual`` for an empty text."""
    text = text or str(usual)
    sides = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    size = (int(sides[1]), int(sides[2] or sides[1])) if sides else (0, 0)
    if min(size) < 64:
        raise ValueError(f"image_size must be 224 or 800x1280, from 64 up; got {text!r}")
    return size


def complexity(options: dict[str, str], rows: Sequence[Row]) -> list[Record]:
    """Count what the options ask for; one record per backbone, or per row of the paper."""
    image_size(options["image_size"])  # to be refused before anything is built
    names = select(options["backbone"])
    rule = options["rule"] or (rows[0].rule if rows else "macs")
    count = functools.partial(count_model, rule=rule)
    if not options["paper"]:
        size = image_size(options["image_size"])
        return [plain_record(name, *count(name, "{}", size)) for name in names]
    records = []
    for row in rows:
        if row.backbone in names:
            size = image_size(options["image_size"], row.image_size)
            base = count(row.base, "{}", size) if row.base else None
            ours = count(row.backbone, json.dumps(row.options), size)
            records.append(paper_record(row, ours, base))
    if not records:
        raise ValueError(f"paper={options['paper']} has no row for backbone={options['backbone']}")
    return records


def select(text: str) -> list[str]:
    """Registered names out of names and patterns with commas between them."""
    from backbones import backbone_schema, list_backbones

    names = []
    for item in text.split(","):
        found = list_backbones(item)
        if not found and any(sign in item for sign in "*?["):
            raise ValueError(f"no backbone matches {item!r}; 'swin_*' or '*_afbo' are patterns")
        # Refuses an unknown name with the nearest ones, and knows names that are not listed.
        names += found or [backbone_schema(item)["name"]]
    return list(dict.fromkeys(names))


@functools.cache
def count_model(name: str, options: str, size: tuple[int, int], rule: str) -> tuple[int, int]:
    """Parameters and multiply-adds of a backbone with its classifier; options as JSON."""
    import torch

    from backbones import create_backbone
    from backbones.complexity import count_macs, count_parameters
    from heads.linear import LinearClassifier

    # fvcore runs the model, so it needs weights; the other rules need shapes only.
    with torch.device("cpu" if rule == "fvcore" else "meta"):
        model = LinearClassifier(create_backbone(name, **json.loads(options)), NUM_CLASSES)
    return count_parameters(model), count_macs(model, size, rule)


def plain_record(name: str, params: int, macs: int) -> Record:
    """What is shown of a backbone."""
    return {"backbone": name, "params": params, "params_m": params / 1e6, "macs_g": macs / 1e9}


def paper_record(row: Row, ours: tuple[int, int], base: tuple[int, int] | None) -> Record:
    """What is shown of a row of a paper."""
    params, macs = ours
    found = row.residuals(
        params / 1e6, macs / 1e9, (base[0] / 1e6, base[1] / 1e9) if base else None
    )
    return {
        "backbone": str(row),
        "table": row.table,
        "params": params,
        "params_m": params / 1e6,
        "reported_params_m": row.reported.get("params"),
        "residual_params_m": found.get("params"),
        "macs_g": macs / 1e9,
        "reported_flops_g": row.reported.get("flops"),
        "residual_flops_g": found.get("flops"),
        "verdict": row.verdict(found) if found else None,
        "note": row.note,
    }


# Column of the table -> heading and how its values are written.
COLUMNS = {
    "backbone": ("backbone", "{}"),
    "table": ("table", "{}"),
    "params": ("params", "{:,}"),
    "params_m": ("M", "{:.2f}"),
    "reported_params_m": ("paper M", "{}"),
    "residual_params_m": ("diff", "{:+.2f}"),
    "macs_g": ("MACs G", "{:.4f}"),
    "reported_flops_g": ("paper G", "{}"),
    "residual_flops_g": ("diff", "{:+.2f}"),
    "verdict": ("verdict", "{}"),
    "note": ("note", "{}"),
    # of benchmark.py
    "mixer": ("mixer", "{}"),
    "step": ("step", "{}"),
    "image_size": ("image", "{}"),
    "grid": ("grid", "{}"),
    "batch": ("batch", "{}"),
    "ms": ("ms", "{:.1f}"),
    "ratio": ("ratio", "{:.3f}"),
    "ratio_p10": ("10 %", "{:.3f}"),
    "ratio_p90": ("90 %", "{:.3f}"),
    "paper_ratio": ("paper", "{:.3f}"),
    "us_per_token": ("us/token", "{:.3f}"),
    "growth": ("growth", "{:.2f}"),
    # of export.py
    **{to: (to, "{}") for to in TARGETS},
}
WORDS = ("backbone", "mixer", "verdict", "note", "step")  # set flush left
NAMES = ("backbone", "mixer")


def write_table(records: Sequence[Record]) -> None:
    """A table: on a terminal with its notes below it, elsewhere in plain aligned columns."""
    if sys.stdout.isatty():
        write_rich_table(records)
        return
    keys = _shown(records[0])
    cells = [[COLUMNS[key][0] for key in keys], *(_cells(record) for record in records)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        parts = [
            cell.ljust(width) if key in WORDS else cell.rjust(width)
            for key, cell, width in zip(keys, row, widths, strict=True)
        ]
        print("  ".join(parts).rstrip())


def write_rich_table(records: Sequence[Record]) -> None:
    """A table as wide as the terminal; sentences would not fit, so they are numbered."""
    from rich.console import Console
    from rich.table import Table

    notes = list(dict.fromkeys(record["note"] for record in records if record.get("note")))
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold underline")
    for key in _shown(records[0]):
        flush = "left" if key in WORDS else "right"
        # On a narrow terminal names are folded, figures never.
        table.add_column(COLUMNS[key][0], justify=flush, overflow="fold", no_wrap=key not in NAMES)
    for record in records:
        number = {"note": str(notes.index(record["note"]) + 1)} if record.get("note") else {}
        table.add_row(*_cells(record | number))
    console = Console(highlight=False)
    console.print(table)
    for number, note in enumerate(notes, start=1):
        console.print(f"{number}  {note}", markup=False)


def _shown(record: Record) -> list[str]:
    """Columns of a table; beside a paper's figures the exact count is enough."""
    return [key for key in record if key != "params_m" or "reported_params_m" not in record]


def _cells(record: Record) -> list[str]:
    values = [(key, record[key]) for key in _shown(record)]
    return ["-" if value is None else COLUMNS[key][1].format(value) for key, value in values]


def write_json(records: Sequence[Record]) -> None:
    """A list of objects."""
    print(json.dumps([_rounded(record) for record in records], indent=2))


def write_csv(records: Sequence[Record]) -> None:
    """A line of headings, then one line per record."""
    writer = csv.DictWriter(sys.stdout, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rounded(record) for record in records)


def _rounded(record: Record) -> Record:
    """Figures without the noise of their last binary digits; G to the single operation."""
    return {k: round(v, 9) if isinstance(v, float) else v for k, v in record.items()}


WRITERS = {"table": write_table, "json": write_json, "csv": write_csv}

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe, as behind head, is no fault
    sys.exit(main())
