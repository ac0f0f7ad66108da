"""Serve a trained network on a page, and as JSON over HTTP.

usage: python tools/serve.py ckpt=RUN [key=value ...]

  ckpt=RUN         run folder, checkpoint, or model folder (hf-hub:OWNER/NAME, local-dir:FOLDER)
  host=127.0.0.1   address to listen at; 0.0.0.0 lets other machines in
  port=8000        0 for any free one
  device=cpu       or cuda
  upload=32        largest file in MiB
  megapixels=40    largest image
  seconds=30       for an upload to arrive, and for its turn to come

The page shows the input, the answer drawn on it, where the network looked, and a slider for the
threshold. POST /predict takes the bytes of a file and returns JSON:
curl --data-binary @photo.jpg 'http://127.0.0.1:8000/predict?name=photo.jpg&draw=0'
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse_integer, parse_options
from tools.cli.command import exit_with, run_command

DEFAULTS = {
    "ckpt": "", "host": "127.0.0.1", "port": "8000", "device": "cpu", "upload": "32",
    "megapixels": "40", "seconds": "30",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("serve.py", __doc__, serve, arguments, needs_arguments=True)


def serve(arguments: Sequence[str]) -> None:
    """Load the network and serve it until Ctrl-C.

    Raises:
        ValueError: An option is missing or wrong, or the port is taken.
    """
    options = parse_options(arguments, DEFAULTS, {})
    if not options["ckpt"]:
        raise ValueError("ckpt=<run folder> is missing; see --help")
    port = parse_integer("port", options["port"], least=0)
    upload, pixels, seconds = (
        parse_integer(key, options[key]) for key in ("upload", "megapixels", "seconds")
    )

    from tasks import load
    from tools.serving.answers import answer, describe
    from tools.serving.server import Limits, Server

    task = load(options["ckpt"], device=options["device"])
    label = task.model.backbone.name
    respond = functools.partial(answer, task, most_pixels=pixels * 10**6)
    address, limits = (options["host"], port), Limits(upload * 2**20, seconds)
    try:
        server = Server(address, describe(task, label), respond, limits)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen at {address[0]}:{port} ({error}); pass port=") from error
    with server, contextlib.suppress(KeyboardInterrupt):
        host, port = server.server_address[:2]
        print(f"http://{host!s}:{port}/ serves {label}; Ctrl-C ends it", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    exit_with(main)
