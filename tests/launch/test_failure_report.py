"""The report of a first failure in real runs of toy actors: at once, cause first, under 25 lines, with what
followed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from myxa.launch.contracts import ChildEnd
from myxa.launch.first_failure import REPORT_LINES, Failures, FirstFailure, meaning, remedy

FIRST = ("monitor", "buffer", "coordinator", "trainer/0", "rollout/0")


def report_of(one) -> list[str]:
    lines = one.output.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("first failure: "))
    return lines[begin : begin + REPORT_LINES]


def test_a_rank_that_segfaults_is_named_at_once_with_its_stack_and_what_followed(tmp_path: Path, run):
    flags = ("--set", "roles.trainer.count=2", "--set", "roles.trainer.max_restarts=0", "--stop-timeout", "5")
    with run(tmp_path, "up", *flags, toy="trainer.0.needy rollout.0.hang-at-stop") as one:
        one.until_serving(*FIRST, "trainer/1")
        one.switch("trainer.1.segfault")
        assert one.ended() == 4, one.evidence()
        lines = one.output.splitlines()
        report = report_of(one)
        assert report[0].startswith(
            "first failure: trainer/1 ended with signal SIGSEGV and is never restarted: it touched"
        )
        assert report[1].startswith("remedy: the log names the Python line")
        assert any("Fatal Python error: Segmentation fault" in line for line in report), one.evidence()
        assert any("toy_program.py" in line and "_misbehave" in line for line in report), one.evidence()
        then = [line for line in report if line.startswith("then: ")]
        assert any("trainer/0 ended with exit status 1: lost its mate trainer/1" in line for line in then), report
        order = [
            next(i for i, line in enumerate(lines) if said in line)
            for said in ("first failure: trainer/1", "rollout/0 did not end within 5 s and is killed")
        ]
        assert order == sorted(order), "nobody has to end before the cause is told"
        assert lines[-1].startswith("first failure: trainer/1")


# -- the text --------------------------------------------------------------------------------------------------------


def end(name: str, status: int, *tail: str, node: int = 0) -> ChildEnd:
    return ChildEnd(name=name, attempt=0, status=status, node=node, log_path=f"logs/{name}.log", pid=5, tail=tail)


def test_the_report_is_bounded_whatever_happened():
    failures = Failures()
    failures.note_end(end("trainer/1", -9, *(f"line {i}" for i in range(25)), node=3), "signal SIGKILL", 0.0)
    failures.blame("trainer/1", "trainer/1 ended with signal SIGKILL and is never restarted", 10.0)
    failures.blame("buffer", "too late", 10.1)
    for i in range(20):
        failures.note_end(end(f"rollout/{i}", 1, "myxa: lost " + "x" * 900), "exit status 1", 10.5 + i / 10)
    failures.note_end(end("rollout/99", 0), "exit status 0", 12.0)
    failures.note_end(end("rollout/98", -15), "signal SIGTERM", 12.0)
    first = failures.first
    assert first is not None
    lines = first.report().splitlines()
    assert len(lines) == REPORT_LINES < 25
    assert lines[0] == (
        "first failure: trainer/1 ended with signal SIGKILL and is never restarted (node 3): "
        "it was killed, most often by the kernel for lack of memory"
    )
    assert "dmesg" in lines[1]
    assert lines[2].startswith("then: 0.5 s later: rollout/0 ended with exit status 1: lost xxx")
    assert lines[6] == "then: 16 more", "who was asked to end and did has not failed"
    assert lines[7] == "---- end of logs/trainer/1.log on node 3 ----"
    assert lines[-1] == "line 24"
    assert max(map(len, lines)) < 250


def killed_by_us(*, status: int = -9, attempt: int = 0) -> str:
    failures = Failures()
    failures.killed("buffer", attempt, "`myxa kill` by alice (the disk is swapped)")
    failures.note_end(end("buffer", status, "its last line"), "signal SIGKILL", 1.0)
    failures.blame("buffer", "buffer ended with signal SIGKILL and is never restarted", 1.0)
    assert failures.first is not None
    return failures.first.report()


def test_e07_what_myxa_killed_is_not_blamed_on_the_kernel():
    report = killed_by_us()
    assert "is never restarted: `myxa kill` by alice (the disk is swapped)" in report
    assert "kernel" not in report and "dmesg" not in report, "there is no memory to look for"
    assert "kernel" in killed_by_us(attempt=1), "another attempt of it was meant"
    assert "native code" in killed_by_us(status=-11), "it was faster"


def test_a_cause_of_many_lines_leaves_room_for_the_rest():
    tail = ("a", "b", "myxa: the run cannot start: 30 problems", *(f"  problem {i}" for i in range(30)))
    failure = FirstFailure("buffer", "buffer ended with exit status 1", "log", tail, status=1, followed=("x",) * 9)
    assert len(failure.report().splitlines()) <= REPORT_LINES


@pytest.mark.parametrize(
    ("status", "log", "has_word", "words"),
    [
        (3, (), False, "called exit"),
        (1, ("RuntimeError: [enforce fail] can't allocate memory: you tried",), True, "ran out of memory"),
        (1, ("myxa: MemoryError: Unable to allocate 9.00 GiB for an array",), True, "engine.max_running"),
        (-6, ("terminate called after throwing an instance of 'std::bad_alloc'",), False, "ran out of memory"),
        (-6, ("Resource temporarily unavailable (src/thread.cpp:269)",), False, "pids limit"),
        (1, ("myxa: RuntimeError: can't start new thread",), True, "ulimit -u"),
        (-60, (), False, ""),
        (1, ("myxa: EngineError: glass",), True, ""),
    ],
)
def test_signals_and_silent_exits_have_remedies(status: int, log: tuple[str, ...], has_word: bool, words: str):
    advice = remedy(status, log, has_word=has_word)
    assert words in advice and bool(words) == bool(advice)
    assert "native code" in meaning(-signal.SIGSEGV) and meaning(1) == meaning(-60) == ""
