"""Logs in bounded pieces: last lines, what is added, the next attempt, hostile names."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from myxa.core.errors import ConfigError
from myxa.launch.contracts import LogChunk
from myxa.launch.nodes.log_reader import CHUNK_BYTES, MAX_LINE, read_logs
from myxa.launch.run_dir import RunDir
from myxa.launch.verbs import LogsArguments


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(str(tmp_path), "toy", datetime(2026, 1, 1))


def ask(run_dir: RunDir, after: LogChunk | None = None, **options) -> LogChunk:
    (found,) = read_logs(run_dir, 0, request(after, **options))
    return found


def request(*after: LogChunk | None, **options) -> LogsArguments:
    places = {one.name: (one.file, one.offset) for one in after if one is not None}
    return LogsArguments(target=options.pop("name", "rollout/1"), after=places, **options)


def test_the_last_lines_then_what_is_added(run_dir: RunDir):
    log = run_dir.new_log("rollout/1", 0)
    log.write_text("".join(f"line {n}\n" for n in range(1000)) + "begun")
    last = ask(run_dir, num_lines=2)
    assert last.lines == ("line 998", "line 999"), "a line that is not ended comes later"
    assert ask(run_dir, last).lines == ()
    with log.open("a") as file:
        file.write(" and ended\nmore\n")
    added = ask(run_dir, last)
    assert added.lines == ("begun and ended", "more")
    assert not added.is_more


def test_only_lines_with_a_text(run_dir: RunDir):
    run_dir.new_log("rollout/1", 0).write_text("".join(f"line {n}\n" for n in range(1000)))
    assert ask(run_dir, num_lines=3, grep="99").lines == ("line 997", "line 998", "line 999")
    assert ask(run_dir, num_lines=3, grep="99", name="rollout/1").file == "rollout.1.0.log"
    assert ask(run_dir, num_lines=0).lines == ()


def test_the_next_attempt_follows_when_the_last_one_is_read_to_its_end(run_dir: RunDir):
    first = run_dir.new_log("rollout/1", 0)
    first.write_text("a\n")
    seen = ask(run_dir)
    first.write_text("a\n" + "b\n" * CHUNK_BYTES + "died in mid-line")
    run_dir.new_log("rollout/1", 1).write_text("again\n")
    lines: list[str] = []
    for _ in range(10):
        seen = ask(run_dir, seen)
        lines += seen.lines
        if not seen.is_more:
            break
    assert lines == ["b"] * CHUNK_BYTES + ["died in mid-line", "again"]
    assert seen.file == "rollout.1.1.log"


def test_answers_are_bounded(run_dir: RunDir):
    log = run_dir.new_log("rollout/1", 0)
    log.write_bytes(b"\xff" * (3 * CHUNK_BYTES) + b"\n" + b"y" * 1000 + b"\n")
    seen = ask(run_dir, num_lines=10_000)
    assert sum(map(len, seen.lines)) <= CHUNK_BYTES + MAX_LINE + 10
    assert seen.lines[-1] == "y" * 1000
    everything = ask(run_dir, LogChunk(name="rollout/1", file=log.name, offset=0, lines=()))
    assert everything.is_more
    assert sum(map(len, everything.lines)) <= CHUNK_BYTES


def test_a_log_that_was_cut_is_read_from_its_beginning(run_dir: RunDir):
    log = run_dir.new_log("rollout/1", 0)
    log.write_text("one\ntwo\nthree\n")
    seen = ask(run_dir)
    log.write_text("anew\n")
    assert ask(run_dir, seen).lines == ("anew",)


@pytest.mark.parametrize("name", ["rollout/7", "../../../etc/passwd", "", "latest", "x" * 5000, "a\0b"])
def test_what_is_no_log_of_this_run_is_refused(run_dir: RunDir, name: str):
    secret = run_dir.path.parent / "secret.log"
    secret.write_text("secret\n")
    (run_dir.logs / "latest" / "trick.log").symlink_to(secret)
    with pytest.raises(ConfigError, match="has no log on node 0"):
        ask(run_dir, name=name)
    with pytest.raises(ConfigError, match="has no log on node 0"):
        ask(run_dir, name="trick")
    with pytest.raises(ConfigError):
        ask(run_dir, name=name, engine=True)


def test_a_place_in_a_file_of_another_folder_is_not_read(run_dir: RunDir):
    run_dir.new_log("rollout/1", 0).write_text("mine\n")
    (run_dir.path / "secret").write_text("secret\n")
    there = LogChunk(name="rollout/1", file="../secret", offset=0, lines=())
    assert ask(run_dir, there).lines == ("mine",)


def test_the_launchers_own_log_and_that_of_a_server(run_dir: RunDir):
    (run_dir.logs / "launcher.0.log").write_text("joined\n")
    (run_dir.logs / "rollout.1.sglang.log").write_text("serving\n")
    assert ask(run_dir, name="launcher").lines == ("joined",)
    assert ask(run_dir, engine=True).lines == ("serving",)


def test_the_logs_of_all_servers_of_a_pair(run_dir: RunDir):
    names = ["rollout/1/decode.0", "rollout/1/decode.1", "rollout/1/prefill.0"]
    logs = [run_dir.logs / f"{name.replace('/', '.')}.sglang.log" for name in names]
    for log in (*logs, run_dir.logs / "rollout.10.prefill.0.sglang.log", run_dir.logs / "rollout.11.sglang.log"):
        log.write_text(f"{log.name} serves\n")
    first = read_logs(run_dir, 0, request(engine=True))
    assert [(chunk.name, chunk.lines) for chunk in first] == [
        (name, (f"{log.name} serves",)) for name, log in zip(names, logs, strict=True)
    ]
    with logs[1].open("a") as file:
        file.write("more\n")
    second = read_logs(run_dir, 0, request(*first, engine=True))
    assert [chunk.lines for chunk in second] == [(), ("more",), ()]
    assert ask(run_dir, name=names[2], engine=True).lines == first[2].lines, "and one by its own name"
