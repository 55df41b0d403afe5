"""Commands on one live run: docs/control.md's examples in their order, then what the page does not show."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.control.live import Live, live_run
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import events
from tests.harness.waiting import wait_until

from myxa.launch.cli import main
from myxa.launch.commands.views import WatchedRun
from myxa.launch.control.client import ControlClient, find_run
from myxa.launch.verbs import ALL

pytestmark = pytest.mark.timeout(600)

PAGE = Path(__file__).parents[2] / "docs" / "control.md"
BLOCK = re.compile(r"^```console(?: exit=(?P<exit>\d+))?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
SHELL = set("$|;<>")
"""What a shell has a part in; all other examples are commands alone."""
WITHOUT_COMMAND = {"status", "verbs"}
"""Verbs for programs."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    flags = ("roles.rollout.count=2", "control.dashboard_port=0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))  # for torch's profiler
        yield from _live(tmp_path_factory.mktemp("seat"), *flags)


def _live(folder: Path, *flags: str) -> Iterator[Live]:
    with live_run(folder, *flags) as run:
        run_dir = run.run_dir
        yield replace(run, fixed=run_dir)
    assert not (run_dir / "control.json").exists()
    assert not (run_dir / "dashboard.url").exists(), "the secret goes with the run"


# -- the page ------------------------------------------------------------------------------------------------------


def examples() -> list[tuple[str, int, list[str]]]:
    """(command, exit status, lines of its output) of the whole page."""
    found: list[tuple[str, int, list[str]]] = []
    for block in BLOCK.finditer(PAGE.read_text()):
        for line in block["body"].splitlines():
            if line.startswith("$ "):
                found.append((line[2:], int(block["exit"] or 0), []))
            else:
                found[-1][2].append(line)
    return found


def pattern(line: str) -> re.Pattern[str]:
    """What a line of the page stands for: any numbers, any blanks, "..." for anything."""
    parts: list[str] = []
    for word in re.split(r"(\.\.\.|\s+)", line.strip()):
        if word == "...":
            parts.append(".*")
        elif word.isspace():
            parts.append(r"\s+")
        else:
            at = 0
            for number in NUMBER.finditer(word):
                parts += [re.escape(word[at : number.start()]), r"-?[\d.]+(?:e[+-]?\d+)?"]
                at = number.end()
            parts.append(re.escape(word[at:]))
    return re.compile(r"\s*" + "".join(parts).replace(r".*\s+", r".*").replace(r"\s+.*", r".*") + r"\s*")


def missing_lines(shown: list[str], printed: str) -> list[str]:
    """Lines of the page that the output does not have, in order; a line that is only "..." may stand for none."""
    lines = iter(printed.splitlines())
    return [
        line for line in shown if line.strip() not in ("...", "") and not any(pattern(line).fullmatch(p) for p in lines)
    ]


def check_example(live: Live, command: str, status: int, shown: list[str]) -> str:
    """What is wrong with it, or nothing."""
    is_plain = command.startswith("myxa ") and not SHELL & set(command)
    done = live.myxa(*shlex.split(command)[1:]) if is_plain else live.shell(command)
    printed = done.stdout + done.stderr
    if done.returncode == status and not missing_lines(shown, printed):
        return ""
    return f"$ {command}\n{printed}-> {done.returncode}; not there: {missing_lines(shown, printed)}"


def test_lines_are_compared_as_the_page_says():
    assert missing_lines(["lr  0.1 -> 0.2  trainer/0, at step 12"], "lr  0.001 -> 1e-05  trainer/0, at step 7") == []
    assert missing_lines(["a ... b 1", "...", "c"], "x\na y z b 22\nmore\nc") == []
    assert missing_lines(["a", "b"], "b\na") == ["b"]


def test_every_verb_has_an_example():
    commands = " ".join(command for command, _, _ in examples())
    for verb in ALL:
        has_example = f"myxa {verb.name}" in commands or verb.name in WITHOUT_COMMAND
        assert has_example, f"{verb.name}: no example in docs/control.md"


def test_every_example_does_what_the_page_shows(live: Live):
    *before_the_end, (last, _, _) = examples()
    assert last.startswith("myxa down"), "the last test has that one"
    wrong = [told for example in before_the_end if (told := check_example(live, *example))]
    assert not wrong, "\n\n".join(wrong)
    client = ControlClient.of(live.run_dir)
    wait_until(lambda: ("rollout/1", "concurrency") in values_of(client), "the actor that was killed is back")


# -- looking -------------------------------------------------------------------------------------------------------


def test_the_only_run_needs_no_name_and_is_found_from_elsewhere(live: Live, tmp_path: Path):
    assert json.loads((live.run_dir / "control.json").read_text())["pid"] == live.launcher.pid
    here = live.ask("where")
    assert here["run_dir"] == str(live.run_dir.resolve())
    assert json.loads(live.myxa("where", "--json", folder=tmp_path).stdout) == here
    by_name = live.myxa("ps", "--json", "--run", str(live.run_dir), folder=tmp_path)
    rows = {row["name"]: row for row in json.loads(by_name.stdout)}
    assert {"monitor", "buffer", "coordinator", "trainer/0", "rollout/0"} <= set(rows)
    row = rows["trainer/0"]
    assert (row["state"], row["host"], row["node"], row["attempt"]) == ("up", socket.gethostname(), 0, 0)
    assert Path(f"/proc/{row['pid']}").exists() and row["memory_bytes"] > 10 << 20 and row["doing"]


@pytest.mark.parametrize("words", ["ps", "get", "get lr", "history", "why"])
def test_every_json_is_one_line_of_json(
    live: Live, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(live.job.folder)
    assert main([*words.split(), "--json"]) == 0
    out, said = capsys.readouterr()
    (line,) = out.splitlines()
    json.loads(line)
    assert len(said.splitlines()) == 1, "which run it is, once"


def test_the_launcher_serves_the_dashboard_which_only_shows(live: Live):
    path = live.run_dir / "dashboard.url"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "token" not in (live.run_dir / "control.json").read_text(), "the secret is in one file only"
    base, _, query = path.read_text().strip().partition("/?")

    def read(place: str, **changes: Any) -> Any:
        request = urllib.request.Request(f"{base}{place}?{query}", **changes)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    state = read("/api/state")["state"]
    assert {"trainer/0", "rollout/0", "buffer", "coordinator"} <= {actor["name"] for actor in state["actors"]}
    assert all(actor["pid"] for actor in state["actors"])
    assert "lr" in {knob["name"] for knob in state["knobs"]}
    assert "reward/raw_mean" in {row[0] for row in read("/api/state")["history"]["series"]}
    assert read("/api/samples")["groups"][0]["answers"][0]["num_tokens"] > 0
    with pytest.raises(urllib.error.HTTPError) as refused:
        head = {"Content-Type": "application/json", "X-Myxa-Token": query.partition("=")[2]}
        read("/api/verbs/set", method="POST", data=b"{}", headers=head)
    assert refused.value.code == 403
    refused.value.close()


def test_top_reads_what_the_run_answers(live: Live):
    view = WatchedRun(find_run(live.run_dir)).look()
    assert view.troubles == ()
    assert {"trainer/0", "rollout/0", "buffer"} <= {actor.name for actor in view.actors}
    assert view.version >= 3 and view.why and view.history and view.knobs


# -- changing ------------------------------------------------------------------------------------------------------

WRONG = [
    ("lr=-1", "must be above 0"),
    ("lr=1.0", "say --force"),
    ("lr=true", "must be a number"),
    ("lr=inf", "must be finite"),
    ("lr=[1]", "knobs are numbers"),
    ("'lr = 1 2'", "is no TOML value"),
    ("lr", "must look like NAME=VALUE"),
    ("lr=1e-4 lr=2e-4", "given twice"),
    ("lr=1" + "0" * 400, ""),
    ("lrr=1", "is no knob"),
    ("learning_rate=1", 'did you mean "lr"'),
    ("optimizer.lr=1", "the knob is 'lr'"),
    ("lr=1e-4 --for soon", "is no time"),
    ("lr=1e-4 --for 0steps", "is no time"),
    ("lr=1e-4 --if lr=0.5", "not 0.5 as expected"),
    ("lr=1e-4 --if lrr=0.5", "lrr"),
    ("max_staleness=1.5", "whole number"),
    ("on_stale=fast", "pace"),
    ("temperature=0.9 lr=-1", "must be above 0"),
]


def test_what_is_wrong_is_refused_and_changes_nothing(
    live: Live, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    client = ControlClient.of(live.run_dir)
    before = values_of(client)
    monkeypatch.chdir(live.job.folder)
    for words, said in WRONG:
        assert main(["set", *shlex.split(words)]) == 2, words
        out, err = capsys.readouterr()
        assert (out, said in err, len(err.strip().splitlines())) == ("", True, 1), err
    assert values_of(client) == before


def values_of(client: ControlClient) -> dict[tuple[str, str], Any]:
    """What holds once all that is decided is in force: a change made before may reach its boundary meanwhile."""
    return {
        (sheet["owner"], state["tunable"]["name"]): state["value"] if state["pending"] is None else state["pending"]
        for sheet in client.ask("get")["sheets"]
        for state in sheet["knobs"]
    }


def test_f6_a_knob_that_is_named_tells_where_its_value_comes_from(live: Live):
    told = live.ask("get", "temperature", "lr")["origins"]
    assert told["temperature"].startswith("rollout.temperature = 1, the default")
    key, place = told["lr"].split(", ", 1)
    assert key == "optimizer.lr = 0.001"
    number = int(place.split()[1])
    assert (live.run_dir / "config.toml").read_text().splitlines()[number - 1] == "lr = 0.001"
    live.ask("set", "max_staleness=3", "-m", "told")
    wait_until(lambda: ", epoch " in live.ask("get", "max_staleness")["origins"]["max_staleness"])


def test_compare_and_set_dry_run_and_time(live: Live):
    client, lr = ControlClient.of(live.run_dir), ("trainer/0", "lr")
    first = values_of(client)[lr]
    dry = live.ask("set", f"lr={first * 2}", "--dry-run")
    assert (dry["epoch"], [m["new"] for m in dry["moves"]]) == (0, [first * 2])
    assert values_of(client)[lr] == first
    live.ask("set", f"lr={first / 2}", "--if", f"lr={first}", "--for", "2steps")
    live.ask("set", "concurrency=5", "--for", "0.5s")
    wait_until(lambda: values_of(client)[lr] == first, "it goes back by itself")
    wait_until(lambda: values_of(client)["rollout/0", "concurrency"] == 16, "so does a change for a time")


# -- trouble, and the end ------------------------------------------------------------------------------------------


def test_the_launcher_answers_while_the_coordinator_does_not(live: Live):
    client = ControlClient.of(live.run_dir)
    pid = {row["name"]: row for row in client.ask("ps")}["coordinator"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert {row["name"]: row for row in client.ask("ps")}["coordinator"]["pid"] == pid
        assert client.ask("logs", target="coordinator")
        told = client.ask("status")
        assert told["status"] is None, "the coordinator's part is missing, the others' are there"
        assert told["buffer"]["states"]
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: client.ask("status")["status"] is not None, "the coordinator answers again")


def test_down_is_the_end(live: Live):
    run_dir = str(live.run_dir)
    assert not check_example(live, *examples()[-1])
    assert live.launcher.wait(90) == 0
    assert live.myxa("get", "--run", run_dir).returncode == 3, "it is over"
    assert live.ask("history", "--run", run_dir)[-1]["verb"] == "down"
    found = audit_ledger(live.run_dir / "ledger.sqlite")
    assert found.problems == (), "engines came, left and were restarted, and no prompt was lost or trained twice"
    assert set(found.trained.values()) == {1}
    joined, left = (
        {event["text"].split()[0].rstrip(":") for event in events(live.run_dir, kind)}
        for kind in ("engine-joined", "engine-left")
    )
    assert joined & {"rollout/2"} <= left, "unless it was drained before it had joined"
    assert "rollout/2 has left the run" in (live.run_dir / "logs" / "launcher.0.log").read_text()
