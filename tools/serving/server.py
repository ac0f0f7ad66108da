"""HTTP server of one network: a page, and POST /predict as JSON.

Of the standard library: a body is one file, so that neither forms nor paths are parsed. Each
connection has one request and a time limit, and one prediction is computed at a time.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tools.serving.answers import Question

PAGE = Path(__file__).with_name("page.html")
CONNECTIONS = 32  # at the same time
PART = 2**16  # bytes
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
SWITCHES = {"0": False, "1": True}


class Refusal(Exception):
    """A request that is answered by a status and a sentence."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Attributes:
        upload: Bytes of a body.
        seconds: For sending a request, and for waiting until its computation begins.
    """

    upload: int
    seconds: float


class Server(ThreadingHTTPServer):
    """Server of a network.

    Args:
        address: Host and port.
        facts: What the page shows of the network.
        answer: Function of a question that returns its answer, or raises a ValueError.
        limits: Limits of a request.
    """

    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        facts: Mapping[str, Any],
        answer: Callable[[Question], Mapping[str, Any]],
        limits: Limits,
    ) -> None:
        self.facts, self.answer, self.limits = facts, answer, limits
        self.turn = threading.Lock()  # hooks of an analysis would see other passes
        self.places = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a request in a thread, or close its connection if there are too many."""
        if self.places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out clients that went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answer of one request; its connection closes afterwards."""

    server: Server
    server_version, sys_version = "mixerlab", ""

    def setup(self) -> None:
        """Limit the time in which the request must arrive, however slowly."""
        super().setup()
        self.connection.settimeout(self.server.limits.seconds + 5)  # for taking the answer
        self._timer = threading.Timer(self.server.limits.seconds, self._hang_up)
        self._timer.daemon = True
        self._timer.start()

    def finish(self) -> None:
        """Close the connection."""
        self._timer.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RD)

    def log_message(self, *_: Any) -> None:
        """Leave the terminal to what is wrong."""

    def do_GET(self) -> None:
        """Return the page, or what it shows of the network."""
        path = urlsplit(self.path).path
        if path == "/":
            self._send(HTTPStatus.OK, PAGE.read_bytes(), "text/html; charset=utf-8")
        elif path == "/model":
            self._send_json(HTTPStatus.OK, self.server.facts)
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "there are /, /model and /predict"})

    def do_POST(self) -> None:
        """Return the answer for the body."""
        try:
            answer = self._predict()
        except Refusal as refusal:
            self._send_json(refusal.status, {"error": str(refusal)})
            self._drain()
        except ValueError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except Exception as error:  # of the network: the server goes on
            traceback.print_exc()
            text = f"the prediction failed ({type(error).__name__})"
            self._send_json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": text})
        else:
            self._send_json(HTTPStatus.OK, answer)

    def _predict(self) -> Mapping[str, Any]:
        parts = urlsplit(self.path)
        if parts.path != "/predict":
            raise Refusal(HTTPStatus.NOT_FOUND, "there are /, /model and /predict")
        options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        question = _question(self._body(), options)
        with self._turn():
            return self.server.answer(question)

    def _body(self) -> bytes:
        limits, text = self.server.limits, self.headers.get("Content-Length", "")
        if not text.isdecimal() or len(text) > 18 or "Transfer-Encoding" in self.headers:
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "the body needs a Content-Length")
        length = int(text)
        if not 0 < length <= limits.upload:
            raise Refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE if length else HTTPStatus.BAD_REQUEST,
                f"the body must have 1 to {limits.upload:,} bytes, got {length:,}",
            )
        content = self.rfile.read(length)
        self._timer.cancel()
        if len(content) < length:
            raise Refusal(
                HTTPStatus.REQUEST_TIMEOUT,
                f"{len(content):,} of {length:,} bytes came within {limits.seconds:g} s",
            )
        return content

    def _drain(self) -> None:
        """Read the rest of a body within the time limit: clients read once they have sent."""
        self.connection.shutdown(socket.SHUT_WR)
        while self.rfile.read(PART):
            pass

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        seconds = self.server.limits.seconds
        if not self.server.turn.acquire(timeout=seconds):
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE, f"others were computed for {seconds:g} s; try again"
            )
        try:
            yield
        finally:
            self.server.turn.release()

    def _send_json(self, status: HTTPStatus, content: Any) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        lines = {"Content-Type": kind, "Content-Length": str(len(content)), **HEADERS}
        for name, value in lines.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _question(content: bytes, options: Mapping[str, str]) -> Question:
    """Return the question of a body and the options of its address.

    Raises:
        ValueError: An option is unknown or has another form.
    """
    strangers = set(options) - {"name", "threshold", "draw", "explain"}
    if strangers:
        raise ValueError(f"{min(strangers)}= is unknown; there are name, threshold, draw, explain")
    for key in ("draw", "explain"):
        if options.get(key, "1") not in SWITCHES:
            raise ValueError(f"{key}= must be 0 or 1, got {options[key][:20]!r}")
    text = options.get("threshold")
    try:
        threshold = None if text is None else float(text)
    except ValueError:
        raise ValueError(f"threshold= must be a number, got {text!r:.30}") from None
    return Question(
        content,
        options.get("name", "input"),
        threshold,
        SWITCHES[options.get("draw", "1")],
        SWITCHES[options.get("explain", "0")],
    )
