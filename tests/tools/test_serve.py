"""mixerlab serve: the page and its JSON over HTTP, for clients that are wrong, slow or many."""

import base64
import functools
import http.client
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from PIL import Image

from tasks import load
from tests.browser import CHROMIUM, Browser
from tests.families import rest_slow
from tests.runs import SMALLEST
from tests.served_inputs import input_of, png
from tools import serve
from tools.cli.paths import ROOT
from tools.serving.answers import answer, describe
from tools.serving.server import Limits, Server


@contextmanager
def served(task, upload=2**20, seconds=5.0, most_pixels=10**6, respond=None):
    respond = respond or functools.partial(answer, task, most_pixels=most_pixels)
    server = Server(("127.0.0.1", 0), describe(task, "net"), respond, Limits(upload, seconds))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def ask(port, method="POST", path="/predict", body=None, headers=()):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    content = response.read()
    connection.close()
    is_json = response.headers["Content-Type"] == "application/json"
    return response.status, json.loads(content) if is_json else content.decode()


@pytest.fixture(scope="module")
def task(smallest_run):
    return load(smallest_run("classification"))


@pytest.fixture(scope="module")
def port(task):
    with served(task) as port:
        yield port


def test_the_page_shows_the_network(port):
    status, page = ask(port, "GET", "/")
    assert status == 200
    assert '<input type="file"' in page
    status, facts = ask(port, "GET", "/model")
    assert (status, facts["label"], facts["task"]) == (200, "net", "classification")
    assert facts["explains"] is True
    assert facts["threshold"] is None


def test_an_answer_is_that_of_predict_with_pictures(port, task, tmp_path):
    (tmp_path / "photo.png").write_bytes(png(0))
    (row,) = task.predict(tmp_path / "photo.png")
    status, found = ask(port, path="/predict?name=photo.png&explain=1", body=png(0))
    assert status == 200
    assert found["rows"] == [row | {"input": "photo.png"}]
    assert found["answer"] == task.answer(row)
    for url in (*found["pictures"], found["looked"]):
        kind, _, content = url.partition(",")
        assert kind == "data:image/png;base64"
        assert Image.open(io.BytesIO(base64.b64decode(content))).size > (1, 1)
    assert "looked" not in ask(port, path="/predict?draw=0", body=png(0))[1]
    assert ask(port, path="/predict?draw=0", body=png(0))[1]["pictures"] == []


def test_requests_at_the_same_time_get_each_its_own_answer(port, task):
    """With maps among them, whose hooks see the passes of the network."""
    seeds = range(8)
    alone = [ask(port, path="/predict?draw=0&name=a.png", body=png(seed))[1] for seed in seeds]
    assert len({json.dumps(found) for found in alone}) > 1
    with ThreadPoolExecutor(8) as pool:
        paths = [f"/predict?draw=0&explain={seed % 2}&name=a.png" for seed in seeds]
        asked = [
            pool.submit(ask, port, path=path, body=png(seed))
            for seed, path in zip(seeds, paths, strict=True)
        ]
        together = [future.result()[1] for future in asked]
    assert [found["rows"] for found in together] == [found["rows"] for found in alone]
    looked = {found["looked"] for found in together if "looked" in found}
    assert len(looked) == len(seeds) / 2


def slow_chunks():
    """Parts that are still sent while the answer comes."""
    for _ in range(5):
        time.sleep(0.05)
        yield b"x" * 1000


WRONG = {
    "broken": ({"body": png(0)[:500], "path": "/predict?name=../../x.png"}, 400, "x.png is trunc"),
    "no image": ({"body": b"hello"}, 400, "is not an image"),
    "empty": ({"body": b""}, 400, "1 to 1,048,576 bytes"),
    "large": ({"body": bytes(2**20 + 1)}, 413, "got 1,048,577"),
    "a large image": ({"body": png(0, 1001)}, 413, "got 3"),
    "unknown option": ({"body": b"x", "path": "/predict?shell=ls"}, 400, "shell= is unknown"),
    "switch": ({"body": b"x", "path": "/predict?draw=yes"}, 400, "draw= must be 0 or 1"),
    "threshold": ({"body": b"x", "path": "/predict?threshold=x"}, 400, "must be a number"),
    "no threshold": ({"body": png(0), "path": "/predict?threshold=0.5"}, 400, "that have one"),
    "not finite": ({"body": png(0), "path": "/predict?threshold=nan"}, 400, "from 0 to 1"),
    "length": ({"body": b"x", "headers": {"Content-Length": "-1"}}, 411, "Content-Length"),
    "chunks": ({"body": slow_chunks()}, 411, "Content-Length"),
    "a large body elsewhere": ({"path": "/x", "body": bytes(2**20)}, 404, "/predict"),
    "a file of the server": ({"method": "GET", "path": "/../tools/serve.py"}, 404, "/predict"),
    "an absolute file": ({"method": "GET", "path": "//etc/passwd"}, 404, "/predict"),
    "another address": ({"path": "/predict/../x", "body": b"x"}, 404, "/predict"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_request_gets_a_sentence_without_paths(kind, port):
    request, status, said = WRONG[kind]
    found, content = ask(port, **request)
    assert found == status
    assert set(content) == {"error"}
    assert said in content["error"]
    assert "/tmp" not in content["error"]
    assert ask(port, path="/predict?draw=0", body=png(0))[0] == 200


def test_an_image_of_many_pixels_is_refused_by_its_header(task):
    with served(task, most_pixels=1000) as port:
        status, content = ask(port, body=png(0))
        assert (status, content["error"]) == (
            400, "the image has 1,600 pixels; at most 1,000 are served",
        )  # fmt: skip


@pytest.mark.parametrize("sent", [b"", b"POST /predict HTTP/1.1\r\n", b"half"])
def test_a_slow_client_ends_and_others_go_on(task, sent):
    if sent == b"half":
        sent = b"POST /predict HTTP/1.1\r\nContent-Length: 9\r\n\r\n1234"
    with served(task, seconds=1.0) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.settimeout(20)
        slow.sendall(sent)
        assert ask(port, path="/predict?draw=0", body=png(0))[0] == 200
        text = slow.makefile("rb").read().decode()
    assert ("4 of 9 bytes came within 1 s" in text) == ("1234" in sent.decode())


def test_a_turn_that_does_not_come_and_a_fault_are_answered(task, capsys):
    begun, goes_on = threading.Event(), threading.Event()

    def respond(question):
        begun.set()
        assert goes_on.wait(30)
        raise RuntimeError(question.name)

    with served(task, seconds=0.5, respond=respond) as port, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, port, body=b"x")
        assert begun.wait(30)
        assert ask(port, body=b"x") == (503, {"error": "others were computed for 0.5 s; try again"})
        goes_on.set()
        assert first.result() == (500, {"error": "the prediction failed (RuntimeError)"})
    assert "RuntimeError: input" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["ckpt=absent"], ["port=x", "ckpt=a"], ["host=256.0.0.1"]])
def test_a_wrong_command_ends_in_one_line(words, capsys):
    assert serve.main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("family", rest_slow(SMALLEST, ["classification"]))
def test_a_run_of_any_family_is_served(family, smallest_run):
    run = smallest_run(family)
    task = load(run)
    content, name = input_of(family, task, run)
    with served(task) as port:
        facts = ask(port, "GET", "/model")[1]
        explain = f"&explain={int(facts['explains'])}"
        status, found = ask(port, path=f"/predict?name={name}{explain}", body=content)
        assert status == 200, found
        assert found["answer"]
        assert found["pictures"]
        assert ("looked" in found) == facts["explains"]
        if facts["threshold"] is not None:
            path = f"/predict?name={name}&draw=0&threshold="
            few, many = (ask(port, path=path + text, body=content)[1] for text in ("1", "0"))
            assert few["answer"] != many["answer"]
            assert task.threshold == facts["threshold"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_in_a_browser(smallest_run, tmp_path):
    """A detector's photograph, its answer, the slider, the map, and a broken file."""
    command = [sys.executable, ROOT / "tools" / "serve.py", "port=0"]
    server = subprocess.Popen(
        [*command, f"ckpt={smallest_run('detection')}"], stdout=subprocess.PIPE, text=True
    )
    browser = Browser(tmp_path / "profile")
    try:
        address = server.stdout.readline().partition(" ")[0]
        browser.open(address)
        browser.wait("document.getElementById('label').textContent == 'resnet18'")
        assert browser.value("document.getElementById('threshold').value") == "0.3"
        (tmp_path / "photo.png").write_bytes(png(0, 96))
        (tmp_path / "broken.png").write_bytes(png(0)[:300])
        answer = "document.getElementById('answer').textContent"
        images = "document.querySelectorAll('#pictures img').length"
        browser.choose("#file", tmp_path / "photo.png")
        browser.wait(f"{images} == 2")
        assert "above 0.3" in browser.value(answer)
        browser.value(
            "const t = document.getElementById('threshold'); t.value = 0;"
            "t.dispatchEvent(new Event('input')); t.dispatchEvent(new Event('change'))"
        )
        browser.wait(f"{answer}.includes('above 0.0')")
        assert browser.value("document.getElementById('value').textContent") == "0"
        browser.value("document.getElementById('explain').click()")
        browser.wait(f"{images} == 3")
        browser.wait("[...document.images].every(image => image.naturalWidth > 1)")
        if folder := os.environ.get("SCREENSHOTS"):
            browser.picture(tmp_path / "page.png")
            shutil.copy(tmp_path / "page.png", folder)
        browser.choose("#file", tmp_path / "broken.png")
        browser.wait(f"{answer}.includes('broken.png is truncated')")
        assert browser.value("document.getElementById('answer').className") == "wrong"
    finally:
        browser.close()
        server.kill()
        server.wait()
        server.stdout.close()
