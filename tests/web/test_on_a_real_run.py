"""One real run with the dashboard in its launcher, looked at over HTTP and by `myxa top`, which turns a knob."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.run_job import make_job
from tests.harness.waiting import wait_until
from textual.widgets import Input

from myxa.launch.control.client import ControlClient
from myxa.launch.tui.app import TopApp
from myxa.launch.tui.feed import Feed

PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that trains until it is ended."""
    job = make_job(tmp_path_factory.mktemp("job"))
    # the little model earns nothing, so without an entropy term no token would be computed; and it moves fast
    terms = ("algo.entropy_coef=0.001", "async.max_staleness=0")
    process = job.start("run.num_steps=100000", "control.dashboard_port=0", *terms, *job.paced())
    try:
        wait_until(
            lambda: (job.folder / "runs").exists() and bool(list((job.folder / "runs").glob("*/dashboard.url"))),
            "a dashboard",
        )
        folder = job.run_dir()
        wait_until(lambda: _version(folder) >= 2, "the second step")
        yield folder
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert not (folder / "dashboard.url").exists(), "the secret goes with the run"


def _version(folder: Path) -> int:
    status = ControlClient.of(folder).ask("status")["status"]
    return status["version"] if status else -1


def read(url: str, path: str, **changes: Any) -> Any:
    base, _, query = url.partition("/?")
    request = urllib.request.Request(f"{base}{path}?{query}", **changes)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def gaps_of(url: str) -> Iterator[float]:
    """|trainer - engine| of every token that is told with both, over the newest groups."""
    for group in read(url, "/api/view/samples")["result"]["groups"]:
        for sample in group["samples"]:
            told = zip(sample["logprobs"], sample["train_logprobs"], sample["loss_mask"], strict=False)
            yield from (abs(drawn - trained) for drawn, trained, is_trained in told if is_trained)


@pytest.mark.timeout(300)
def test_the_launcher_serves_the_dashboard_and_only_shows(run_dir: Path) -> None:
    path = run_dir / "dashboard.url"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "token" not in (run_dir / "control.json").read_text(), "the secret is in one file only"
    url = path.read_text().strip()
    told = read(url, "/api/state")
    assert {"trainer/0", "rollout/0", "buffer", "coordinator"} <= {actor["name"] for actor in told["state"]["actors"]}
    assert all(actor["pid"] for actor in told["state"]["actors"])
    assert "lr" in {knob["name"] for knob in told["state"]["knobs"]}
    deadline = time.monotonic() + PATIENCE_S
    while "Reward" not in {chart["title"] for chart in read(url, "/api/state")["history"]["charts"]}:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    (group, *_) = read(url, "/api/view/samples")["result"]["groups"]
    sample = group["samples"][0]
    assert len(sample["tokens"]) == len(sample["logprobs"]) == len(sample["versions"])
    gaps = list(gaps_of(url))
    while not gaps:
        assert time.monotonic() < deadline
        time.sleep(0.2)
        gaps = list(gaps_of(url))
    assert 0.0 <= max(gaps) < 1e-3, "the same tokens under the same weights"
    with pytest.raises(urllib.error.HTTPError) as refused:
        read(url, "/api/operate/set", method="POST", data=b"{}", headers={"Content-Type": "application/json"})
    assert refused.value.code == 403
    refused.value.close()


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_top_turns_a_knob_of_the_run(run_dir: Path) -> None:
    app = TopApp(Feed.of(run_dir))
    async with app.run_test(size=(170, 40)) as pilot, asyncio.timeout(PATIENCE_S):

        async def seen(*words: str) -> str:
            while True:
                await pilot.pause(0.1)
                strips = app.screen._compositor.render_strips()
                text = "\n".join("".join(segment.text for segment in strip) for strip in strips)
                if all(word in " ".join(text.split()) for word in words):
                    return text

        await seen("small running", "+ trainer/0", "+ rollout/0", "slots")
        await pilot.press("3")
        await seen("lr", "max_grad_norm")
        table: Any = app.query_one("#knob-table")
        names = [str(key.value) for key in table.rows]
        for _ in range(names.index("lr")):
            await pilot.press("down")
        await pilot.press("enter")
        await seen("Learning rate", "new value")
        app.screen.query_one("#value", Input).value = ""
        await pilot.press(*"0.0005", "enter", *"a test", "enter")
        await seen("*lr 0.0005")
        await pilot.press("4")
        await seen("lr 0.001 -> 0.0005", "done", "a test")
        await pilot.press("5")
        await seen("serves as attempt 0")
        await pilot.press("6")
        await seen("File")
    (record,) = [r for r in ControlClient.of(run_dir).ask("history") if r["verb"] == "set"]
    assert (record["reason"], record["moves"][0]["new"]) == ("a test", 0.0005)
