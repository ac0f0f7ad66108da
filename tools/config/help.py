"""What ``python tools/run.py --help`` says: one screen, and more of what is named behind it.

usage: python tools/run.py --help [SUBJECT] [option=value ...]

SUBJECT is a group of options (``backbone``, ``data``, ``recipe``, ...), ``mixer`` or ``config``,
every value of the run that the options behind it compose. ``mixer NAME`` and ``token_mixer NAME``
show one mixer with the meaning of its options.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from omegaconf import OmegaConf

from backbones.options import listed, unknown
from tools.cli.catalogue import catalogue
from tools.cli.paths import CONFIGS
from tools.config.automatic import commented
from tools.config.overrides import read
from tools.papers.experiments import describe, experiments

FLAGS = {"-h", "--help"}
Kinds = tuple[Literal["channel", "token"], ...]
NO_CHOICE = ("published",)  # the papers' tables
WIDTH = 100
# The most lines of the screen that a list of names takes, those of other groups one; with all of
# them full it has 40. So it fits a terminal whatever is registered.
LINES = {"data": 3, "head": 2, "recipe": 6, "hosts": 4, "mixers": 3, "tokens": 2}
# The ends of names that are written in braces: what follows the first underscore, or a size.
LAST, SIZE = r"(?<=_).*$", r"(?<=_)[a-z]{0,3}\d*$|\d+$"
SCREEN = """\
python tools/run.py [option=value ...]      train, evaluate or apply a backbone on a task

  python tools/run.py task=classification backbone=deit_t_afbo trainer.max_epochs=50
  python tools/run.py task=detection backbone=swin_t_afbo data=coco data.root=/data/coco
  python tools/run.py mode=predict ckpt=<run folder> input=<image or folder>
  python tools/run.py -m task=classification backbone=deit_t,swin_t,poolformer_s12

{groups}
  mode        fit, validate, test, predict; the last three with ckpt=<run folder or file>
  resume      resume=true goes on with a run that was broken off
  ...         every value of the config by its name, such as backbone.mixer.g2=6 or seed=1

backbone is a host, alone (swin_t) or with a channel mixer (swin_t_afbo); not all pairs fit.
{hosts}
{mixers}
{tokens}

python tools/run.py --help backbone         all {count} names; any option above, mixer, mixer glu
python tools/run.py --help config task=...  every value of the run that the options compose
"""


def subject_of(arguments: Sequence[str]) -> list[str] | None:
    """What stands beside a call for help; None where help is not called for."""
    if not FLAGS & set(arguments):
        return None
    return [argument for argument in arguments if not argument.startswith("-")]


def help_on(words: Sequence[str]) -> str:
    """The help on a subject, or the screen without one.

    Args:
        words: The subject and options of a run.

    Raises:
        ValueError: There is no such subject.
    """
    subjects = [word for word in words if "=" not in word]
    if not subjects:
        return screen()
    subject = subjects[0]
    if subject == "config":
        return _config([word for word in words if "=" in word])
    if subject == "backbone":
        return _families(catalogue().list_backbones())
    if subject in ("mixer", "token_mixer"):
        kinds: Kinds = ("token",) if subject == "token_mixer" else ("channel", "token")
        return "\n\n".join(_mixer(name, kinds) for name in subjects[1:]) or _mixers(kinds)
    if subject == "experiment":
        return _experiments()
    if subject in groups():
        return "\n".join(_wrapped(f"{name:24} ", [first]) for name, first in _choices(subject))
    known = ["backbone", "mixer", "experiment", *groups(), "token_mixer", "config"]
    raise ValueError(f"there is no help on {subject!r}; there is on {listed(known)}")


def screen() -> str:
    """Everything at a glance."""
    known = catalogue()
    rows = []
    for group in groups():
        names = [name for name, _ in _choices(group)]
        rows.append(_bounded(f"  {group:11} ", names, LINES.get(group, 1), group))
    rows.append(_wrapped("  experiment  ", [_rows_in_brief()]))
    channel, token = known.list_mixers("channel"), known.list_mixers("token")
    return SCREEN.format(
        groups="\n".join(rows),
        hosts=_bounded("  hosts       ", known.hosts, LINES["hosts"], "backbone", SIZE),
        mixers=_bounded("  mixers      ", channel, LINES["mixers"], "mixer"),
        tokens=_bounded("backbone.token_mixer    ", token, LINES["tokens"], "mixer"),
        count=len(known.backbones),
    ).rstrip()


def groups() -> list[str]:
    """The groups of options that have files, the task first."""
    found = [path.name for path in CONFIGS.iterdir() if path.is_dir()]
    return sorted((name for name in found if name not in NO_CHOICE), key=lambda n: (n != "task", n))


def _choices(group: str) -> list[tuple[str, str]]:
    """Names of a group's files and what each says first of itself."""
    return [
        (path.stem, _first_words(path.read_text()))
        for path in sorted((CONFIGS / group).glob("*.yaml"))
    ]


def _first_words(content: str) -> str:
    """The first sentence of a file's opening comment."""
    lines = content.splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    said = [line.lstrip("# ") for line in comment if not line.startswith("# @")]
    return re.split(r"(?<=\.) ", " ".join(said))[0].rstrip(".")


def _rows_in_brief() -> str:
    """What the names of the papers' rows are made of, with an example."""
    rows = experiments()
    papers = len({row.paper for row in rows.values()})
    return f"{len(rows)} rows of {papers} papers; afbo_t2_deit_t_afbo is paper, table, network"


def _experiments() -> str:
    """All rows of the papers that can be typed, and what each reports or why it cannot run."""
    lines = []
    for name, row in experiments().items():
        reason = row.train.cannot_run
        where = f"{row.paper.upper()} Table {row.table}"
        lines.append(f"{name:52} {describe(row)} ({where})")
        if reason:
            lines.append(_wrapped("    cannot run: ", [reason]))
    return "\n".join(lines)


def _bounded(label: str, names: Sequence[str], lines: int, subject: str, end: str = LAST) -> str:
    """As many names as the lines hold, then how many more there are and what lists them all."""
    text = label
    for shown in range(len(names), 0, -1):
        rest = len(names) - shown
        more = [f"... and {rest} more: --help {subject}"] if rest else []
        text = _wrapped(label, [*_compact(names[:shown], end), *more])
        if text.count("\n") < lines:
            break
    return text.rstrip()


def _compact(names: Iterable[str], end: str) -> list[str]:
    """Neighbours that differ in their ends alone as one: ``swin_{t,s,b}``."""

    def family(name: str) -> str:
        return re.sub(end, "", name, count=1)

    words = []
    for stem, members in itertools.groupby(names, family):
        ends = [name.removeprefix(stem) for name in members]
        words.append(f"{stem}{{{','.join(ends)}}}" if len(ends) > 1 else stem + ends[0])
    return words


def _families(names: Sequence[str]) -> str:
    """All names, a paragraph for each host."""
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


def _mixer(name: str, kinds: Kinds) -> str:
    """One mixer: what it computes, where it is from, how it is typed, and each of its options."""
    known = catalogue()
    names = [one for kind in kinds for one in known.list_mixers(kind)]
    if name not in names:
        what = "token mixer" if len(kinds) == 1 else "mixer"
        raise ValueError(unknown(what, name, names))
    mixer = known.mixer(name)
    token = mixer["kind"] == "token"
    usage = f"backbone.token_mixer={name}" if token else f"backbone=<host>_{name}"
    prefix = "backbone.token_mixer" if token else "backbone.mixer"
    lines = [f"{name}, a {mixer['kind']} mixer: {usage}", ""]
    lines += [
        _wrapped("  computes  ", [mixer["about"]]),
        _wrapped("  source    ", [mixer["source"]]),
    ]
    for option, default in mixer["options"].items():
        usual = " (as the host has it)" if option == "hidden_ratio" and default is None else ""
        lines += ["", f"  {prefix}.{option}={_typed(default)}{usual}"]
        lines.append(_wrapped(" " * 6, [mixer["meanings"].get(option, "")]))
    return "\n".join(lines)


def _typed(value: Any) -> str:
    """A default as it is typed."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_typed, value))}]"
    return str(value)


def _mixers(kinds: Kinds) -> str:
    known, lines = catalogue(), []
    for kind in kinds:
        lines.append(f"{kind} mixers")
        for name in known.list_mixers(kind):
            mixer = known.mixer(name)
            options = ", ".join(f"{key}={value}" for key, value in mixer["options"].items())
            lines += [f"  {name:14} {mixer['source']}"]
            lines.append(_wrapped(" " * 17, [options]))
    return "\n".join(lines)


def _config(overrides: Sequence[str]) -> str:
    return commented(OmegaConf.to_yaml(read(overrides).config)).rstrip()


def _wrapped(label: str, words: Iterable[str]) -> str:
    text = textwrap.fill(
        ", ".join(words),
        WIDTH,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_on_hyphens=False,
    )
    return text or label.rstrip()
