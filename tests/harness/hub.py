"""The Hugging Face hub's routes over real HTTP, for repositories that a test makes, and a process that asks them.

huggingface_hub reads its environment when it is imported, so what asks the stand-in is always a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^?]+)")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
PIECE = 1 << 14


@dataclass
class Repo:
    """Files by path. `main` and the commit name it, and `tags`."""

    files: dict[str, bytes]
    commit: str
    tags: tuple[str, ...] = ()
    status: int = 0
    """What requests for files are answered with, instead of the file: 401, 403, 503."""
    cut_after: int = -1
    """Bytes of a file's answer after which the connection breaks, while `num_cuts` lasts."""
    num_cuts: int = 0
    pause_s: float = 0.0
    """From one piece of a file to the next one."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of files that are said to be larger than they are."""


@dataclass
class Hub:
    """Repositories by kind ("models", "datasets") and name."""

    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    is_silent: bool = False
    """Requests are taken and not answered."""
    status: int = 0
    """What every request is answered with, as a proxy does, instead."""

    def add(self, kind: str, name: str, files: Mapping[str, bytes], **more: Any) -> Repo:
        commit = hashlib.sha1(f"{name}{sorted(files)}{sum(map(len, files.values()))}".encode()).hexdigest()
        repo = self.repos[kind, name] = Repo({".gitattributes": b"", **files}, **{"commit": commit, **more})
        return repo

    def add_folder(self, kind: str, name: str, folder: Path, **more: Any) -> Repo:
        return self.add(kind, name, {path.name: path.read_bytes() for path in sorted(folder.iterdir())}, **more)

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.is_silent = False
            server.shutdown()
            server.server_close()
            thread.join()

    def env(self, home: Path, **more: str) -> dict[str, str]:
        """Of a process that asks this hub, with its cache in a folder."""
        own = {"HF_HOME": str(home), "HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_test"}
        return {**os.environ, **own, **more}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def _answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                with suppress(ConnectionError):  # it has given up
                    self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(self.path)
            hub.asked.append(f"{self.command} {path}")
            while hub.is_silent:
                time.sleep(0.02)
            if hub.status:
                return self._answer(hub.status, b"")
            api, file = API.match(path), FILE.match(path.partition("?")[0])
            kind = api[1] if api else "datasets" if file and file[1] else "models"
            name, revision = (api[2], api[4]) if api else (file[2], file[3]) if file else ("", "")
            repo = hub.repos.get((kind, name))
            if repo is None:
                return self._answer(404, b"{}", X_Error_Code="RepoNotFound")
            if revision not in ("main", repo.commit, *repo.tags):
                return self._answer(404, b"{}", X_Error_Code="RevisionNotFound")
            if api:
                rows: Any = [{"rfilename": one} for one in repo.files]
                found: Any = {"id": name, "sha": repo.commit, "siblings": rows}
                if api[3] == "tree":
                    found = [
                        {
                            "type": "file",
                            "path": one,
                            "oid": hashlib.sha1(body).hexdigest(),
                            "size": repo.sizes.get(one, len(body)),
                        }
                        for one, body in repo.files.items()
                    ]
                return self._answer(200, json.dumps(found).encode(), Content_Type="application/json")
            assert file
            if repo.status:
                code = "GatedRepo" if repo.status in (401, 403) else "Down"
                return self._answer(repo.status, b"{}", X_Error_Code=code)
            if file[4] not in repo.files:
                return self._answer(404, b"{}", X_Error_Code="EntryNotFound")
            return self._file(repo, file[4])

        def _file(self, repo: Repo, path: str) -> None:
            body = repo.files[path]
            etag = f'"{hashlib.sha1(body).hexdigest()}"'
            begin = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
            first = int(begin[1]) if begin else 0
            self.send_response(206 if begin else 200)
            self.send_header("Content-Length", str(repo.sizes.get(path, len(body)) - first))
            if begin:
                self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
            self.send_header("ETag", etag)
            self.send_header("X-Repo-Commit", repo.commit)
            self.send_header("Accept-Ranges", "bytes")
            self.end_headers()
            if self.command != "GET":
                return
            due_s = time.monotonic()
            for at in range(first, len(body), PIECE):
                if 0 <= repo.cut_after <= at - first and repo.num_cuts > 0:
                    repo.num_cuts -= 1
                    self.close_connection = True
                    return
                try:
                    self.wfile.write(body[at : at + PIECE])
                except ConnectionError:
                    return  # it has given up
                if repo.pause_s:
                    self.wfile.flush()
                    due_s += repo.pause_s  # so that one that lasted too long does not slow the whole
                    time.sleep(max(0.0, due_s - time.monotonic()))

        do_HEAD = do_GET

    return Handler


ASK = """
import json, sys, time
from myxa.actors import hub
from myxa.core.config import RunConfig, dump_config
from myxa.core.errors import MyxaError
time.sleep = lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05))  # huggingface_hub's, between its own tries
for line in sys.stdin:
    call, values = json.loads(line)
    said, done = [], []
    try:
        config = RunConfig.model_validate(values)
        if call == "fetched":
            config = hub.fetched(config, say=said.append, doing=done.append)
        else:
            config, downloads, findings = hub.looked_up(config)
            said = [[one.key, one.num_bytes] for one in downloads] + [[one.key, str(one.error)] for one in findings]
        paths = hub.cached(config)
        found = {"train": config.data.train, "model": config.model.path, "said": said, "done": done,
                 "paths": [paths.model.path, paths.data.train], "dump": dump_config(config)}
    except (MyxaError, ValueError) as error:
        found = {"error": str(error), "kind": type(error).__name__}
    print(json.dumps(found), flush=True)
"""


class Asker:
    """A process that fetches what configurations name, one after the other, from the hub into its own cache."""

    def __init__(self, hub: Hub, home: Path, **env: str) -> None:
        self._env, self.home = hub.env(home, **env), home
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Asker:
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=self._env,
        )  # fmt: skip
        return self

    def ask(self, call: str, *, model: str = "m", train: Any = "t.jsonl", **more: Any) -> dict[str, Any]:
        assert self._process and self._process.stdin and self._process.stdout
        values = {"model": {"path": model}, "data": {"train": train}, **more}
        self._process.stdin.write(json.dumps([call, values]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def fetched(self, **named: Any) -> dict[str, Any]:
        return self.ask("fetched", **named)

    def said_aloud(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def __exit__(self, *_: object) -> None:
        assert self._process and self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()
        self._log.close()
