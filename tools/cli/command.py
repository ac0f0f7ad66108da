"""What the commands have in common: help, one line for what cannot be served, an exit status."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tools.cli.printable import printable
from tools.cli.streams import lost_output, protect_streams

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
    except Exception as error:
        from tools.cli.errors import sentence  # Hydra, which not every command needs

        text = str(error) if isinstance(error, ValueError | ImportError) else sentence(error)
        if text is None and isinstance(error, OSError):
            text = str(error)
        if text is None:
            raise
        print(f"{script}: {printable(text)}", file=sys.stderr)
        return 2
    return 0


def exit_with(main: Callable[[], int], *, writes_files: bool = False) -> NoReturn:
    """Run a command as a program.

    Args:
        main: Returns its status.
        writes_files: True for a command that writes files and goes on where its lines are lost. For
            another one the lines are the result: it ends where its pipe is closed, as behind head,
            and fails where its output is full.
    """
    protect_streams()
    if writes_files:
        sys.exit(check_folder() or main())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    status = check_folder() or main()
    lost = lost_output()
    if lost is not None:
        print(f"error: the output could not be written ({lost})", file=sys.stderr)
        status = 2
    sys.exit(status)


def check_folder() -> int:
    """Return 0, or 2 in a folder that was removed, which one line on stderr says."""
    try:
        Path.cwd()
    except OSError:
        print(
            "error: the current folder was removed or cannot be read; type cd <another folder> "
            "and repeat the command",
            file=sys.stderr,
        )
        return 2
    return 0
