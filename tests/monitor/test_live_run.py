"""One real run, asked as a person asks: `why`, `trace`, with one stall after another planted in it.

The tests share the run; each sets up what it looks at.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.control.live import Live as ControlledRun
from tests.control.live import live_run
from tests.harness.waiting import wait_until
from tests.monitor.sink_world import trace_of
from tests.monitor.slowed_parts import REWARD, SLOW_FILE
from tests.monitor.trace_rules import check_events, follow

from myxa.actors.coordinator.audit import AUDIT_FILE, read_audit
from myxa.launch.control.client import ControlClient

WINDOW_S = 2.0
TINY = ("rollout.max_groups=1", "rollout.max_new_tokens=96")
"""So little concurrency that it is the bottleneck."""


@dataclass
class Live:
    """A run that goes on, and who asks it."""

    run: ControlledRun
    client: ControlClient

    def ask(self, verb: str, **arguments: Any) -> Any:
        return self.client.ask(verb, **arguments)

    def why(self, **arguments: Any) -> Any:
        return self.ask("why", window_s=WINDOW_S, **arguments)

    def done(self, *words: str) -> str:
        """What a command prints that succeeds."""
        found = self.run.myxa(*words, "--run", str(self.client.run_dir))
        assert found.returncode == 0, found.stderr + found.stdout
        return found.stdout

    def slow(self, part: str) -> None:
        (self.run.job.folder / SLOW_FILE).write_text(part)

    def knob(self, name: str) -> Any:
        return self.ask("get", names=[name])["sheets"][0]["knobs"][0]["value"]

    def set(self, **values: Any) -> None:
        self.ask("set", values=values, reason="for the test")
        wait_until(lambda: all(self.knob(name) == value for name, value in values.items()), str(values))

    def named(self, bound: str) -> dict[str, Any]:
        """The answer of `why`, once it named the same bottleneck in three looks in a row, 0.3 s apart."""
        said: list[dict[str, Any]] = []

        def is_named() -> bool:
            time.sleep(0.5)
            said.append(self.why())
            return [answer["bound"] for answer in said[-3:]] == [bound] * 3

        wait_until(is_named, lambda: f"{bound} was not named: {[answer['sentence'] for answer in said]}")
        return said[-1]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Generator[Live]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    files, words = {"reward.py": REWARD, SLOW_FILE: ""}, ("--program", "slowed_parts:slowed")
    overrides = (*TINY, 'reward.fn="reward.py:reward"')
    with live_run(tmp_path_factory.mktemp("live"), *overrides, steps=1, words=words, files=files, env=env) as run:
        yield Live(run, ControlClient.of(run.run_dir))


@pytest.mark.timeout(420)
def test_concurrency_is_named_with_the_knob_that_turns_it(live: Live) -> None:
    answer = live.named("concurrency")
    assert answer["remedy"].startswith("`myxa set concurrency=N`")
    assert "trainer/0" in live.done("why", "--window", "2s")
    told = json.loads(live.done("why", "--window", "2s", "--json"))
    assert sum(told["shares"]["rollout/0"].values()) == pytest.approx(1.0, abs=0.01)

    live.done("set", "concurrency=2", "-m", "it waits")
    wait_until(lambda: live.knob("concurrency") == 2, lambda: str(live.knob("concurrency")))
    change = next(record for record in read_audit(live.client.run_dir / AUDIT_FILE, 1000) if record.moves)
    assert {(move.name, move.old, move.new) for move in change.moves} == {("concurrency", 1, 2)}
    assert change.reason == "it waits" and change.who.user

    seen = live.ask("status", whole=True)
    assert seen["why"] and seen["knobs"]["sheets"] and seen["history"] and not seen["troubles"]
    assert {"trainer/0", "rollout/0", "monitor"} <= {actor["name"] for actor in seen["actors"] if actor["doing"]}


Check = Callable[[dict[str, Any]], bool]
STALLS: list[tuple[str, Check]] = [
    ("reward", lambda a: a["shares"]["rollout/0"]["wait-data"] > 0.4 and "reward.workers" in a["remedy"]),
    ("weights", lambda a: a["shares"]["rollout/0"]["wait-weights"] > 0.4 and "weights_every" in a["remedy"]),
]


@pytest.mark.timeout(420)
@pytest.mark.parametrize(("part", "is_right"), STALLS, ids=[part for part, _ in STALLS])
def test_a_slow_part_is_named_with_what_helps(live: Live, part: str, is_right: Check) -> None:
    live.set(concurrency=16, max_new_tokens=12)
    live.slow(part)
    answer = live.named(part)
    assert is_right(answer), answer


@pytest.mark.timeout(420)
def test_a_pause_is_booked_as_one_and_explained(live: Live) -> None:
    live.ask("pause", reason="a look around")

    def is_booked() -> bool:
        answer = live.why()
        rest = [answer["shares"].get(actor, {}).get("paused", 0.0) for actor in ("trainer/0", "rollout/0", "buffer")]
        return answer["bound"] == "paused" and min(rest) > 0.9

    wait_until(is_booked, lambda: str(live.why()))
    assert live.why()["remedy"] == "`myxa resume`"
    live.ask("resume", reason="seen")


@pytest.mark.timeout(420)
def test_prometheus_is_served(live: Live) -> None:
    base = live.ask("dashboard")["url"].partition("/?")[0]
    wanted = {"myxa_train_loss", "myxa_rollout_running", "myxa_time_share", "myxa_events_total", "myxa_step"}

    def missing() -> set[str]:
        with urllib.request.urlopen(f"{base}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        return wanted - {line.split("{")[0].split(" ")[0] for line in lines}

    wait_until(lambda: not missing(), lambda: f"not served: {sorted(missing())}")


@pytest.mark.timeout(420)
def test_the_timeline_is_whole_while_the_run_lasts_and_after_it(live: Live) -> None:
    """The last one: it ends the run."""
    trace = live.client.run_dir / "trace.json"
    live.slow("training")  # some steps a second
    live.set(concurrency=8, lr=5e-4)
    first = int(live.ask("status")["status"]["version"])
    wait_until(lambda: int(live.ask("status")["status"]["version"]) > first + 4)
    early = trace_of(trace)
    check_events(early)
    follow(early)
    live.run.launcher.send_signal(signal.SIGINT)
    live.run.launcher.wait(90)
    whole = json.loads(trace.read_text())
    check_events(whole)
    assert len(early) < len(whole)
    arrows = follow(whole)
    joined = Counter((a.source["name"].split(" ")[0], a.target["name"].split(" ")[0]) for a in arrows)
    for pair in (("dispatch", "generate"), ("generate", "reward"), ("reward", "claim"), ("claim", "train")):
        assert joined[pair] > 10, joined
    assert joined["publish", "adopt"] > 3, joined
    for arrow in arrows:
        if arrow.category == "group":
            group = int(arrow.name.removeprefix("group "))
            assert group in arrow.source["args"]["flows"] and group in arrow.target["args"]["flows"]
        else:
            facts = arrow.source["args"]
            assert facts.get("makes_version", facts.get("adopts_version")) == arrow.target["args"]["adopts_version"]
    changes = {(event["s"], event["args"]["name"]) for event in whole if event["ph"] == "i" and event["name"] == "knob"}
    assert ("g", "lr") in changes
