"""A server that speaks what huggingface_hub asks of a hub: files of commits, and their upload."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


def commit_of(files):
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


class Hub:
    """Repositories in memory: the newest commit is ``main``, and earlier ones stay."""

    def __init__(self):
        self.repos, self.main, self.seen = {}, {}, []

    def add(self, repo, files):
        commit = commit_of(files)
        self.repos.setdefault(repo, {})[commit] = files
        self.main[repo] = commit
        return commit

    def find(self, repo, revision):
        commit = self.main.get(repo) if revision == "main" else revision
        return commit, self.repos.get(repo, {}).get(commit)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, content=b"", **headers):
        self.send_response(status)
        for key, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def as_json(self, value):
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server.hub, unquote(self.path.partition("?")[0])
        hub.seen.append((self.command, path))
        repo, resolve, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        commit, files = hub.find(repo, revision)
        if not resolve:
            return self.answer(200)
        if files is None or name not in files:
            error = "EntryNotFound" if files else "RepoNotFound"
            return self.answer(404, X_Error_Code=error, X_Repo_Commit=commit or "")
        etag = hashlib.sha1(files[name]).hexdigest()
        return self.answer(200, files[name], ETag=f'"{etag}"', X_Repo_Commit=commit)

    def do_POST(self):
        hub = self.server.hub
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub.seen.append(("POST", self.path))
        if self.headers.get("Authorization") != "Bearer hf_test":
            return self.answer(401)
        url = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            return self.as_json({"url": f"{url}/{repo}"})
        if self.path == "/api/validate-yaml":
            return self.as_json({"errors": [], "warnings": []})
        repo = "/".join(self.path.split("/")[3:5])
        if "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = [
                {"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths
            ]
            return self.as_json({"files": modes})
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        commit = hub.add(repo, files)
        return self.as_json({"commitUrl": f"{url}/{repo}/commit/{commit}", "commitOid": commit})


@contextmanager
def served_hub():
    """Serve a ``Hub`` on this machine; yield it and its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
