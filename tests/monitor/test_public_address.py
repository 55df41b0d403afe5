"""What events tell of an address holds no secret of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from myxa.actors.sinks.public_address import public_address, told_in_public


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("", ""),
        ("mlruns", "mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
        ("http://[::1]:4318/v1", "http://[::1]:4318/v1"),
        ("https://me:s3cret@host:5000/path?token=s3cret#s3cret", "https://host:5000/path"),
        ("https://s3cret@host", "https://host"),
        ("postgresql://me:s3cret@host/db?password=s3cret", "postgresql://host/db"),
        ("http://host/?mail=s3cret@x", "http://..."),
        ("http://me:s3cret/more@host/", "http://..."),
        ("http://me:s3cret?more@host/", "http://..."),
        ("http://me:s3cret#more@host/", "http://..."),
        ("http://me:s3@cret@host/", "http://..."),
        ("http://[s3cret", "http://..."),
    ],
)
def test_only_what_is_surely_no_secret_is_shown(address: str, shown: str) -> None:
    assert public_address(address) == shown


def test_errors_that_quote_the_address_are_told_without_it() -> None:
    address = "http://me:s3cret@host:5000/x?token=t0ken"
    with (
        pytest.raises(OSError, match="ValueError: http://host:5000/x does not answer") as caught,
        told_in_public(address),
    ):
        raise ValueError(f"{address} does not answer, nor does //me:s3cret@host with t0ken")
    assert not any(word in str(caught.value) for word in ("s3cret", "t0ken"))
    assert caught.value.__suppress_context__
    with pytest.raises(KeyError, match="run"), told_in_public(address):
        raise KeyError("run")


# -- MLflow, by its own client

ANSWERS = {
    "/api/2.0/mlflow/experiments/get-by-name": {"experiment": {"experiment_id": "1", "name": "myxa"}},
    "/api/2.0/mlflow/runs/create": {"run": {"info": {"run_id": "r1", "run_uuid": "r1"}, "data": {}}},
    "/api/2.0/mlflow/runs/log-batch": {},
    "/api/2.0/mlflow/runs/update": {"run_info": {"run_id": "r1", "run_uuid": "r1"}},
}

WRITES = """
import sys
from pathlib import Path
from myxa.actors.monitor.sink_thread import BesideSink
from myxa.actors.sinks.registry import make_sink
from myxa.core.clock import SystemClock
from myxa.core.messages import MetricPoint, Telemetry
from myxa.core.sink import SinkContext

loss = MetricPoint(source="trainer/0", step=1, wall_s=1.0, values={"train/loss": 0.5})
for port in sys.argv[2:]:
    emit = lambda *event: print("TOLD", port, *event)
    sink = BesideSink(make_sink("mlflow", {"tracking_uri": f"http://me:s3cret@127.0.0.1:{port}"}), open_s=60, close_s=60)
    sink.open(SinkContext(run_dir=Path(sys.argv[1]), run_name="x", clock=SystemClock(), emit=emit))
    sink.write(Telemetry(metrics=(loss,)))
    sink.close()
"""


@contextmanager
def mlflow_server(refused: str = "") -> Generator[int]:
    """A port that answers as far as the sink asks; `refused`: end of the path that fails."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            body = json.dumps(ANSWERS.get(path, {})).encode()
            self.send_response(500 if refused and path.endswith(refused) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Not on the test's screen."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow-skinny is not installed")
def test_mlflow_tells_where_it_writes_without_secrets(tmp_path: Path) -> None:
    """One process, as importing the library takes long: a server that answers, and two that refuse one thing each."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    env = {**own, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    refusals = ("", "get-by-name", "log-batch")
    with ExitStack() as servers:
        ports = [servers.enter_context(mlflow_server(refused)) for refused in refusals]
        command = [sys.executable, "-c", WRITES, str(tmp_path), *map(str, ports)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=True)
    assert "s3cret" not in done.stdout + done.stderr
    for port, refused in zip(ports, refusals, strict=True):
        said = [line for line in done.stdout.splitlines() if line.startswith(f"TOLD {port} ")]
        assert any("mlflow-opened MLflow run r1 in http://127.0.0.1" in line for line in said) == (
            refused != "get-by-name"
        ), said
        assert any("failed to" in line or "cannot be opened" in line for line in said) == bool(refused), said
