"""Run a command: print its help, turn errors into one line, return an exit status."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tools.cli.printable import as_typed, printable
from tools.cli.streams import protect_streams

HELP = frozenset({"-h", "--help", "help"})
# Missing packages and full disks are not bugs of this project either.
REFUSALS = (ValueError, ImportError, OSError)


def run_command(
    script: str,
    text: str | Callable[[list[str]], str] | None,
    work: Callable[[list[str]], object],
    arguments: Sequence[str] | None,
    *,
    needs_arguments: bool = False,
) -> int:
    """Print the help if it is requested, else run the command.

    Args:
        script: The command's file name, for messages.
        text: The help, or a function of the arguments that returns it.
        work: The command; it takes the arguments.
        arguments: The typed arguments; None for those of this process.
        needs_arguments: Print the help and return 2 without arguments.

    Returns:
        0, or 2 after an error, which is printed in one line to stderr.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    asks_help = not HELP.isdisjoint(words)
    try:
        if asks_help or (needs_arguments and not words):
            print(as_typed((text(words) if callable(text) else text or "").strip()))
            return 0 if asks_help else 2
        work(words)
    except Exception as error:
        from tools.cli.errors import user_message  # imports Hydra, which few commands need

        text = user_message(error) or (str(error) if isinstance(error, REFUSALS) else None)
        if text is None:
            raise
        print(f"{script}: {printable(as_typed(text))}", file=sys.stderr)
        return 2
    return 0


def exit_with(main: Callable[[], int], *, writes_files: bool = False) -> NoReturn:
    """Run a command as a program and exit with its status.

    Args:
        main: Returns the status.
        writes_files: True for commands that write files and continue if stdout is closed. The
            printed lines of the others are their result: they end when their pipe closes
            (``| head``).
    """
    warnings.formatwarning = format_warning
    if writes_files:
        protect_streams()
    else:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        Path.cwd()
    except OSError:
        print("error: the current folder was removed; cd to another one", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())


def format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning in one line, without the code that raised it."""
    return f"warning: {printable(str(message))}\n"
