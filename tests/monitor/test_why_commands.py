"""`myxa why`, `suggest`, `trace` and `grafana` on real runs, as a person types them; and the autopilot."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.harness.run_job import Job, make_job
from tests.harness.waiting import wait_until
from tests.monitor.live_run import live, myxa
from tests.monitor.trace_rules import check_events, follow

from myxa.actors.coordinator.audit import AUDIT_FILE, read_audit, verify_audit
from myxa.core.errors import MyxaError
from myxa.launch.control.client import ControlClient
from myxa.launch.views.grafana import PANELS, dashboard_metrics

TINY = ("rollout.max_groups=1", "rollout.max_new_tokens=96", "guard.every=0")
"""So little concurrency that it is the bottleneck."""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


def knob(client: ControlClient, name: str) -> Any:
    table = client.ask("get", names=[name])
    return table["sheets"][0]["knobs"][0]["value"]


def proposed(client: ControlClient, knob_name: str, window_s: float = 5.0) -> dict[str, Any]:
    """The open suggestion about a knob, once there is one."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [s for s in client.ask("suggest", window_s=window_s)["open"] if s["knob"] == knob_name]
        return bool(found)

    wait_until(is_there, lambda: str(client.ask("suggest", window_s=window_s)), 90)
    return found[0]


@pytest.mark.timeout(420)
def test_a_person_asks_why_and_decides(job: Job) -> None:
    with live(job, *TINY) as client:
        suggestion = proposed(client, "concurrency")
        shown = myxa(client, "why", "--window", "5s", cwd=job.folder)
        assert shown.returncode == 0, shown.stderr
        assert "is the bottleneck" in shown.stdout
        assert "trainer/0" in shown.stdout
        told = json.loads(myxa(client, "why", "rollout/0", "--window", "5s", "--json", cwd=job.folder).stdout)
        assert told["target"] == "rollout/0"
        assert sum(told["shares"]["rollout/0"].values()) == pytest.approx(1.0, abs=0.01)
        wrong = myxa(client, "why", "rolout", cwd=job.folder)
        assert wrong.returncode == 2
        assert "no actor of this run is called 'rolout'" in wrong.stderr

        assert suggestion["id"] in myxa(client, "suggest", "--window", "5s", cwd=job.folder).stdout
        pinned = myxa(client, "suggest", "pin", "concurrency", cwd=job.folder)
        assert pinned.returncode == 0, pinned.stderr
        assert not [s for s in client.ask("suggest", window_s=5.0)["open"] if s["knob"] == "concurrency"]
        assert "pinned: concurrency" in myxa(client, "suggest", cwd=job.folder).stdout
        assert myxa(client, "suggest", "pin", "concurency", cwd=job.folder).returncode == 2
        assert myxa(client, "suggest", "approve", suggestion["id"], cwd=job.folder).returncode == 2
        assert myxa(client, "suggest", "unpin", "concurrency", cwd=job.folder).returncode == 0

        again = proposed(client, "concurrency")
        assert myxa(client, "suggest", "forbid", again["id"], "-m", "not now", cwd=job.folder).returncode == 0
        assert not [s for s in client.ask("suggest", window_s=5.0)["open"] if s["new"] == again["new"]]
        assert myxa(client, "suggest", "allow", "concurrency", cwd=job.folder).returncode == 0

        third = proposed(client, "concurrency")
        done = myxa(client, "suggest", "approve", third["id"], "-m", "it waits", cwd=job.folder)
        assert done.returncode == 0, done.stderr + done.stdout
        assert f"concurrency 1 -> {third['new']}" in done.stdout
        wait_until(lambda: knob(client, "concurrency") == third["new"], lambda: str(knob(client, "concurrency")), 30)

        viewer = ControlClient.of(client.run_dir, view=True)
        assert viewer.ask("why", window_s=5.0)["sentence"]
        with pytest.raises(MyxaError, match="only shows"):
            viewer.ask("suggest-decide", action="pin", what="lr")

    records = read_audit(job.run_dir() / AUDIT_FILE, 1000)
    decided = [(r.arguments.get("action"), r.result) for r in records if r.verb == "suggest-decide"]
    assert [a for a, result in decided if result == "done"] == ["pin", "unpin", "forbid", "allow", "approve"]
    assert Counter(result for _, result in decided)["refused"] >= 2
    (change,) = [record for record in records if record.moves]
    assert {(move.name, move.old, move.new) for move in change.moves} == {("concurrency", 1, third["new"])}
    assert (change.who.via, change.reason) == ("auto", "it waits")
    assert change.who.user
    assert not verify_audit(job.run_dir() / AUDIT_FILE).complaint


@pytest.mark.timeout(420)
def test_a_pause_is_booked_as_one_and_explained(job: Job) -> None:
    with live(job, "guard.every=0") as client:
        client.ask("pause", reason="a look around")

        def is_booked() -> bool:
            answer = client.ask("why", window_s=3.0)
            rest = [
                answer["shares"].get(actor, {}).get("paused", 0.0) for actor in ("trainer/0", "rollout/0", "buffer")
            ]
            return answer["bound"] == "paused" and min(rest) > 0.9

        wait_until(is_booked, lambda: str(client.ask("why", window_s=3.0)), 60)
        assert client.ask("why", window_s=3.0)["command"] == "myxa resume"
        client.ask("resume", reason="seen")
        wait_until(lambda: client.ask("why", window_s=3.0)["bound"] != "paused", lambda: str(client.ask("why")), 60)


@pytest.mark.timeout(420)
def test_the_timeline_of_a_real_run(job: Job, tmp_path: Path) -> None:
    with live(job, *job.paced()) as client:
        client.ask("set", values={"lr": 5e-4}, reason="for the trace")
        time.sleep(4)
        cut = tmp_path / "tail.json"
        done = myxa(client, "trace", "--last", "3s", "-o", str(cut), cwd=job.folder)
        assert done.returncode == 0, done.stderr
        assert "ui.perfetto.dev" in done.stdout
        own = myxa(client, "trace", "-o", str(client.run_dir / "trace.json"), cwd=job.folder)
        assert own.returncode == 2
        assert "the run's own trace" in own.stderr
    tail = json.loads(cut.read_text())
    check_events(tail)
    follow(tail)
    ends = [event["ts"] + event.get("dur", 0) for event in tail if event["ph"] != "M"]
    assert max(ends) - min(ends) <= 3_000_000
    whole = json.loads((job.run_dir() / "trace.json").read_text())
    check_events(whole)
    assert len(tail) < len(whole)
    arrows = follow(whole)
    joined = Counter((a.source["name"].split(" ")[0], a.target["name"].split(" ")[0]) for a in arrows)
    print(joined)
    for pair in (("dispatch", "generate"), ("generate", "reward"), ("reward", "claim"), ("claim", "train")):
        assert joined[pair] > 10, joined
    assert joined["publish", "adopt"] > 3, joined
    for arrow in arrows:
        if arrow.category == "group":
            group = int(arrow.name.removeprefix("group "))
            assert group in arrow.source["args"]["flows"]
            assert group in arrow.target["args"]["flows"]
        else:
            assert arrow.source["args"]["makes_version"] == arrow.target["args"]["adopts_version"]
    changes = [event for event in whole if event["ph"] == "i" and event["name"] == "knob"]
    assert [(event["s"], event["args"]["name"]) for event in changes] == [("g", "lr")]
    # Of a run that is over, the file is cut without asking anybody.
    late = myxa(client, "trace", "--last", "2s", "-o", str(cut), "--json", cwd=job.folder)
    assert late.returncode == 0, late.stderr
    assert json.loads(late.stdout)["num_events"] == len(json.loads(cut.read_text()))


@pytest.mark.timeout(420)
def test_the_dashboard_asks_for_what_a_run_serves(job: Job) -> None:
    with live(job, *job.paced()) as client:
        wanted = dashboard_metrics()
        done = myxa(client, "grafana", "-o", "files", cwd=job.folder)
        assert done.returncode == 0, done.stderr
        scrape = (job.folder / "files" / "prometheus.yml").read_text()
        address = scrape.split('targets: ["')[1].split('"')[0]

        def served() -> set[str]:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
                lines = page.read().decode().splitlines()
            return {line.split("{")[0].split(" ")[0] for line in lines if line and not line.startswith("#")}

        wait_until(lambda: wanted <= served(), lambda: f"not served: {sorted(wanted - served())}", 60)
        client.ask("set", values={"lr": 5e-4})
        wait_until(lambda: "myxa_events_total" in served(), lambda: "no events", 30)
    page = json.loads((job.folder / "files" / "dashboard.json").read_text())
    assert len(page["panels"]) == len(PANELS)
    expressions = [target["expr"] for panel in page["panels"] for target in panel["targets"]]
    assert all(any(name in expression for name in wanted) for expression in expressions)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in page["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_the_autopilot_mends_a_planted_imbalance_in_few_moves(job: Job) -> None:
    with live(job, *TINY, "control.autopilot=true") as client:
        before = client.ask("why", window_s=3.0)["share"]
        wait_until(lambda: knob(client, "concurrency") > 1, lambda: str(client.ask("why", window_s=5.0)), 120)
        time.sleep(25)
        print(before, client.ask("why", window_s=5.0)["sentence"])
    changes = [r for r in read_audit(job.run_dir() / AUDIT_FILE, 1000) if r.moves]
    moves = [(m.name, m.old, m.new) for r in changes for m in r.moves]
    print(moves)
    assert {r.who.user for r in changes} == {"autopilot"}
    by_knob: dict[str, list[Any]] = {}
    for name, old, new in moves:
        by_knob.setdefault(name, [old]).append(new)
    for values in by_knob.values():
        assert values == sorted(values), moves  # one way only
    assert len(by_knob["concurrency"]) - 1 < 5
