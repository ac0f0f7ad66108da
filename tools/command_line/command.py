"""What the commands have in common: help, one line for what cannot be served, an exit status."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

HELP = frozenset({"-h", "--help", "help"})
# Packages that cannot be imported and full disks are no faults of ours either.
REFUSALS = (ValueError, ImportError, OSError)


def answer(
    script: str,
    text: str | Callable[[list[str]], str] | None,
    work: Callable[[list[str]], object],
    arguments: Sequence[str] | None,
    *,
    needs_arguments: bool = False,
) -> int:
    """Print the help that is asked for, or do the work.

    Args:
        script: The command's file, for messages.
        text: The help, or what makes it out of the arguments.
        work: Takes the arguments.
        arguments: As they were typed; None for those of this process.
        needs_arguments: Whether nothing typed is a mistake, which the help answers.

    Returns:
        0, or 2 for arguments that cannot be served, which one line on stderr says.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    asked = not HELP.isdisjoint(typed)
    try:
        if asked or (needs_arguments and not typed):
            print((text(typed) if callable(text) else text or "").strip())
            return 0 if asked else 2
        work(typed)
    except REFUSALS as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 2
    return 0


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Run a command as a program; a closed pipe, as behind head, is no fault."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
