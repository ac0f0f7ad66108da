"""Help of ``python tools/run.py --help``: one screen, or the details of a subject.

usage: python tools/run.py --help [SUBJECT] [option=value ...]

SUBJECT is a group of options (``backbone``, ``data``, ``recipe``, ...), ``mixer``, or ``config``
for every value that the given options compose. ``mixer NAME`` and ``token_mixer NAME`` show one
mixer with its options.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from omegaconf import OmegaConf

from backbones.options import listed, unknown
from tasks.engine.optimisation.automatic import comment_auto
from tools.cli.catalogue import catalogue
from tools.cli.paths import CONFIGS
from tools.config.overrides import read_command
from tools.papers.experiments import describe, experiments

FLAGS = {"-h", "--help"}
Kinds = tuple[Literal["channel", "token"], ...]
HIDDEN_GROUPS = ("published", "plans")  # the papers' tables, plans of comparisons
WIDTH = 100
# Maximum lines per list of names; lists of other groups have 1. If all are full, the screen has 40
# lines, so it fits a terminal whatever is registered.
LINES = {"task": 2, "data": 3, "head": 2, "recipe": 5, "hosts": 4, "mixers": 3, "tokens": 2}
# Endings that are grouped in braces: after the first underscore, or a size.
LAST, SIZE = r"(?<=_).*$", r"(?<=_)[a-z]{0,3}\d*$|\d+$"
SCREEN = """\
python tools/run.py [option=value ...]      train, evaluate or apply a backbone on a task

  python tools/run.py task=classification backbone=deit_t_afbo trainer.max_epochs=50
  python tools/run.py task=detection backbone=swin_t_afbo data=coco data.root=/data/coco
  python tools/run.py mode=predict ckpt=<run folder> input=<image or folder>
  python tools/run.py -m task=classification backbone=deit_t,swin_t,poolformer_s12

{groups}
  mode        fit, validate, test, predict; the last three with ckpt=<run folder or file>
  resume      resume=true continues an interrupted run
  ...         any value of the config by its name, such as backbone.mixer.g2=6 or seed=1

backbone is a host (swin_t) or a host with a channel mixer (swin_t_afbo); not all pairs fit.
{hosts}
{mixers}
{tokens}

python tools/run.py --help backbone         all {count} names; any option above, mixer, mixer glu
python tools/run.py --help config task=...  every value that the options compose
"""


def help_words(arguments: Sequence[str]) -> list[str] | None:
    """Return the words beside --help, or None without --help."""
    if not FLAGS & set(arguments):
        return None
    return [argument for argument in arguments if not argument.startswith("-")]


def help_text(words: Sequence[str]) -> str:
    """Return the help on a subject, or the overview.

    Args:
        words: The subject and options of a run.

    Raises:
        ValueError: The subject is unknown.
    """
    subjects = [word for word in words if "=" not in word]
    if not subjects:
        return overview()
    subject = subjects[0]
    if subject == "config":
        return _show_config([word for word in words if "=" in word])
    if subject == "backbone":
        return _list_backbones(catalogue().list_backbones())
    if subject in ("mixer", "token_mixer"):
        kinds: Kinds = ("token",) if subject == "token_mixer" else ("channel", "token")
        return "\n\n".join(_show_mixer(name, kinds) for name in subjects[1:]) or _list_mixers(kinds)
    if subject == "experiment":
        return _list_experiments()
    if subject in list_groups():
        return "\n".join(_wrap(f"{name:24} ", [first]) for name, first in _group_files(subject))
    valid_subjects = ["backbone", "mixer", "experiment", *list_groups(), "token_mixer", "config"]
    raise ValueError(f"unknown subject {subject!r} of --help; known: {listed(valid_subjects)}")


def overview() -> str:
    """Return the overview."""
    registered = catalogue()
    rows = []
    for group in list_groups():
        names = [name for name, _ in _group_files(group)]
        rows.append(_fit_lines(f"  {group:11} ", names, LINES.get(group, 1), group))
    rows.append(_wrap("  experiment  ", [_experiment_line()]))
    channel, token = registered.list_mixers("channel"), registered.list_mixers("token")
    return SCREEN.format(
        groups="\n".join(rows),
        hosts=_fit_lines("  hosts       ", registered.hosts, LINES["hosts"], "backbone", SIZE),
        mixers=_fit_lines("  mixers      ", channel, LINES["mixers"], "mixer"),
        tokens=_fit_lines("backbone.token_mixer    ", token, LINES["tokens"], "mixer"),
        count=len(registered.backbones),
    ).rstrip()


def list_groups() -> list[str]:
    """Return the groups of options that have files, the task first."""
    folders = [path.name for path in CONFIGS.iterdir() if path.is_dir()]
    return sorted(
        (name for name in folders if name not in HIDDEN_GROUPS), key=lambda n: (n != "task", n)
    )


def _group_files(group: str) -> list[tuple[str, str]]:
    """Return the names of a group's files and their first sentences."""
    return [
        (path.stem, _first_sentence(path.read_text()))
        for path in sorted((CONFIGS / group).glob("*.yaml"))
    ]


def _first_sentence(content: str) -> str:
    """Return the first sentence of a file's opening comment."""
    lines = content.splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    words = [line.lstrip("# ") for line in comment if not line.startswith("# @")]
    return re.split(r"(?<=\.) ", " ".join(words))[0].rstrip(".")


def _experiment_line() -> str:
    """Return a line on the number and the naming of experiments, with an example."""
    rows = experiments()
    papers = len({row.paper for row in rows.values()})
    return f"{len(rows)} rows of {papers} papers; afbo_t2_deit_t_afbo is paper, table, network"


def _list_experiments() -> str:
    """List all experiments with their reported metric and, where they cannot run, the reason."""
    lines = []
    for name, row in experiments().items():
        reason = row.train.cannot_run
        where = f"{row.paper.upper()} Table {row.table}"
        lines.append(f"{name:52} {describe(row)} ({where})")
        if reason:
            lines.append(_wrap("    cannot run: ", [reason]))
    return "\n".join(lines)


def _fit_lines(label: str, names: Sequence[str], lines: int, subject: str, end: str = LAST) -> str:
    """Fit names into ``lines`` lines, then how many more there are and which command lists them."""
    text = label
    for count in range(len(names), 0, -1):
        rest = len(names) - count
        more = [f"... and {rest} more: --help {subject}"] if rest else []
        text = _wrap(label, [*_group_names(names[:count], end), *more])
        if text.count("\n") < lines:
            break
    return text.rstrip()


def _group_names(names: Iterable[str], end: str) -> list[str]:
    """Group neighbouring names that differ only in their ends: ``swin_{t,s,b}``."""

    def family(name: str) -> str:
        return re.sub(end, "", name, count=1)

    words = []
    for stem, members in itertools.groupby(names, family):
        ends = [name.removeprefix(stem) for name in members]
        words.append(f"{stem}{{{','.join(ends)}}}" if len(ends) > 1 else stem + ends[0])
    return words


def _list_backbones(names: Sequence[str]) -> str:
    """List all names, one paragraph per host."""
    hosts = set(catalogue().hosts)
    paragraphs: list[list[str]] = []
    for name in names:
        if name in hosts:
            paragraphs.append([])
        paragraphs[-1].append(name)
    return "\n".join(
        textwrap.fill(" ".join(paragraph), WIDTH, subsequent_indent="    ")
        for paragraph in paragraphs
    )


def _show_mixer(name: str, kinds: Kinds) -> str:
    """Describe a mixer: what it computes, its source, its usage and its options."""
    registered = catalogue()
    names = [mixer_name for kind in kinds for mixer_name in registered.list_mixers(kind)]
    if name not in names:
        noun = "token mixer" if len(kinds) == 1 else "mixer"
        raise ValueError(unknown(noun, name, names))
    mixer = registered.mixer(name)
    token = mixer["kind"] == "token"
    usage = f"backbone.token_mixer={name}" if token else f"backbone=<host>_{name}"
    prefix = "backbone.token_mixer" if token else "backbone.mixer"
    lines = [f"{name}, a {mixer['kind']} mixer: {usage}", ""]
    lines += [
        _wrap("  computes  ", [mixer["about"]]),
        _wrap("  source    ", [mixer["source"]]),
    ]
    for option, default in mixer["options"].items():
        usual = " (as the host has it)" if option == "hidden_ratio" and default is None else ""
        lines += ["", f"  {prefix}.{option}={_format_value(default)}{usual}"]
        lines.append(_wrap(" " * 6, [mixer["meanings"].get(option, "")]))
    return "\n".join(lines)


def _format_value(value: Any) -> str:
    """Format a default as users type it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_format_value, value))}]"
    return str(value)


def _list_mixers(kinds: Kinds) -> str:
    registered, lines = catalogue(), []
    for kind in kinds:
        lines.append(f"{kind} mixers")
        for name in registered.list_mixers(kind):
            mixer = registered.mixer(name)
            options = ", ".join(f"{key}={value}" for key, value in mixer["options"].items())
            lines += [f"  {name:14} {mixer['source']}"]
            lines.append(_wrap(" " * 17, [options]))
    return "\n".join(lines)


def _show_config(overrides: Sequence[str]) -> str:
    return comment_auto(OmegaConf.to_yaml(read_command(overrides).config)).rstrip()


def _wrap(label: str, words: Iterable[str]) -> str:
    text = textwrap.fill(
        ", ".join(words),
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_on_hyphens=False,
    )
    return text or label.rstrip()
