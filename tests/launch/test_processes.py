"""Real processes: started, watched, ended with all they started; folders that go however their owner goes."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path

import pytest
import uvloop
from tests.harness.waiting import is_running, wait_until

from myxa.core.errors import LaunchError
from myxa.core.process import ProcessorTime, boot_id, die_with_parent
from myxa.launch.first_failure import FirstFailure, read_end, read_tail
from myxa.launch.nodes.child import ORDERLY_END, Child, start_child
from myxa.launch.run_dir import RunDir
from myxa.launch.runtime_dir import RuntimeDir

WAIT_S = 30.0
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def run_child(tmp_path: Path, code: str, act=None) -> tuple[Child, list[tuple[str, int]]]:
    told: list[tuple[str, int]] = []
    child = start_child(
        "rollout/0", 3, [sys.executable, "-u", "-c", code], env=dict(os.environ), log_path=tmp_path / "log",
        on_exit=lambda c, status: told.append((c.name, status)),
    )  # fmt: skip
    if act is not None:
        await act(child)
    assert await child.wait(WAIT_S)
    return child, told


@pytest.fixture(params=[0, errno.ENOSYS, errno.EPERM], ids=["pidfd", "old kernel", "policy"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 5.3 has no pidfd, and some containers forbid it."""

    def refuse(pid: int) -> int:
        raise OSError(request.param, os.strerror(request.param))

    if request.param:
        monkeypatch.setattr(os, "pidfd_open", refuse)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("make_loop", LOOPS)
def test_the_exit_status_is_told_once_and_output_is_in_the_log(tmp_path: Path, make_loop):
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    with asyncio.Runner(loop_factory=make_loop) as runner:
        child, told = runner.run(run_child(tmp_path, code))
    assert told == [("rollout/0", 7)]
    assert (child.status, child.attempt) == (7, 3)
    assert (tmp_path / "log").read_text() == "out\nerr\n"


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("make_loop", LOOPS)
def test_it_is_asked_to_end_once_and_then_killed(tmp_path: Path, make_loop):
    code = (
        f"import signal, time; signal.signal({ORDERLY_END}, lambda *_: signal.signal({ORDERLY_END}, signal.SIG_DFL));"
        "print('on', flush=True); time.sleep(60)"
    )

    async def ask(child: Child) -> None:
        while "on" not in (tmp_path / "log").read_text():
            await asyncio.sleep(0.01)
        for _ in range(5):
            child.ask_to_end()
            assert not await child.wait(0.05)
        child.kill()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        child, told = runner.run(run_child(tmp_path, code, ask))
        assert told == [("rollout/0", -9)]
        child.ask_to_end()
        child.kill()
    assert child.status == -9


def test_what_it_started_ends_with_it(tmp_path: Path):
    code = "import subprocess, os; p = subprocess.Popen(['sleep', '60']); print(p.pid); os._exit(1)"
    with asyncio.Runner() as runner:
        runner.run(run_child(tmp_path, code))
    grandchild = int((tmp_path / "log").read_text())
    wait_until(lambda: not is_running(grandchild), "the grandchild's end")


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, time
from myxa.core.process import die_with_parent
die_with_parent(int(os.environ["PARENT"]))
print(os.getpid(), flush=True)
time.sleep(60)
'''], env={**__import__("os").environ, "PARENT": str(__import__("os").getpid())})
time.sleep(60)
"""


def test_a_child_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.kill()
        parent.wait(WAIT_S)
        wait_until(lambda: not is_running(child), "the child's end")


def test_a_child_whose_parent_is_gone_already_ends_at_once():
    with pytest.raises(SystemExit):
        die_with_parent(parent_pid=1 if os.getppid() != 1 else 2)


def test_processes_of_two_containers_of_a_machine_do_not_see_each_other():
    """Nor is the end of one known to the other: memory is not shared, and no process is taken for dead."""
    here = [sys.executable, "-c", "from myxa.core.process import boot_id; print(boot_id())"]
    apart = subprocess.run(["unshare", "--pid", "--fork", *here], capture_output=True, text=True, check=False)
    if apart.returncode:
        pytest.skip(f"no container can be made here: {apart.stderr}")
    assert subprocess.run(here, capture_output=True, text=True, check=True).stdout == f"{boot_id()}\n" != apart.stdout


@pytest.mark.parametrize(
    "program", [["-m", "myxa.launch", "plan", "no.toml"], ["-m", "myxa.actors.subreaper", "PID", "0", "false"]]
)
def test_a_program_that_ignores_its_childrens_ends_does_not_keep_us_from_seeing_ours(program: list[str]):
    """Those that it starts inherit that."""
    code = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    words = [str(os.getpid()) if word == "PID" else word for word in program]
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *words], capture_output=True, timeout=30, check=False
    )
    assert done.returncode == (1 if "false" in words else 2), done.stderr


OWNER = "import time, sys; from myxa.launch.runtime_dir import RuntimeDir; one = RuntimeDir(); print(one.path, flush=True); time.sleep(60)"


def test_the_runtime_folder_of_a_killed_launcher_goes_with_the_next_launcher():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        folder = Path(owner.stdout.readline().strip())
        (folder / "socket").touch()
        with RuntimeDir():
            assert folder.is_dir()
        owner.kill()
        owner.wait(WAIT_S)
    with RuntimeDir():
        assert not folder.exists()


def test_no_folder_with_a_short_name_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/tmp")
    with pytest.raises(LaunchError, match="TMPDIR"):
        RuntimeDir()


def test_run_directories_do_not_collide_and_latest_points_at_the_newest(tmp_path: Path):
    now = datetime(2026, 1, 2, 3, 4, 5)
    first = RunDir.create(str(tmp_path / "runs"), "sort", now)
    second = RunDir.create(str(tmp_path / "runs"), "sort", now)
    assert [first.path.name, second.path.name] == ["sort-20260102-030405", "sort-20260102-030405-2"]
    assert (tmp_path / "runs/latest").resolve() == second.path
    assert second.new_log("rollout/1", 0).name == "rollout.1.0.log"
    newest = second.new_log("rollout/1", 1)
    newest.write_text("hello")
    assert (second.logs / "latest/rollout.1.log").read_text() == "hello"


def test_the_tail_is_the_last_lines_and_the_cause_comes_last(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(100_000)) + b"x" * 1000 + b"\n\xff broken\n\n\n")
    tail = read_tail(log)
    assert len(tail) == 25
    assert tail[-1] == "\ufffd broken"
    assert len(tail[-2]) < 500
    assert tail[0] == "line 99977"
    text = FirstFailure("rollout/1", "exit status 1", str(log), tail, node=2).last_words()
    assert text.splitlines() == [f"log: {log} on node 2", "first failure: rollout/1: exit status 1 (node 2)"]
    assert read_tail(tmp_path / "none") == ()


def test_a_log_that_has_no_room_for_the_cause_says_so_in_its_place(tmp_path: Path):
    log = tmp_path / "buffer.1.log"
    log.write_text("INFO it serves\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, before[1]))  # Python ignores SIGXFSZ
    try:
        full, killed = read_end(log, 1), read_end(log, -9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert killed == ("INFO it serves",), "nobody expects a word of it"
    why = f"myxa: nothing can be written to its log any more: File too large -- make room in {tmp_path}"
    assert full == ("INFO it serves", why)
    assert FirstFailure("buffer", "buffer ended with exit status 1", str(log), full).report().splitlines() == [
        "first failure: buffer ended with exit status 1", why, f"---- end of {log} ----", "INFO it serves",
    ]  # fmt: skip
    assert read_end(log, 1) == ("INFO it serves",), "there is room: it had nothing to say"
    log.write_text("myxa: the disk is full -- make room\n")
    assert read_end(log, 1) == ("myxa: the disk is full -- make room",)
    assert read_end(tmp_path / "none", 1) == ()


def test_time_on_a_processor_and_waiting_for_one_is_told_and_never_falls() -> None:
    """It shares one processor with a process that always computes."""
    time_of, processors = ProcessorTime(), os.sched_getaffinity(0)
    before = time_of.seconds()
    if not before:
        pytest.skip("this kernel tells nothing")
    os.sched_setaffinity(0, {min(processors)})
    rival = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert rival.stdout is not None and rival.stdout.readline()

        def compute() -> None:
            until_s = time.thread_time() + 0.2
            while time.thread_time() < until_s:
                pass

        compute()
        working = threading.Thread(target=compute)
        working.start()
        at_work = time_of.seconds()
        working.join()
        after = time_of.seconds()
    finally:
        os.sched_setaffinity(0, processors)
        rival.kill()
        rival.communicate()
    assert at_work["cpu/ran"] - before["cpu/ran"] >= 0.15
    assert at_work["cpu/waited"] - before["cpu/waited"] >= 0.05
    assert all(after[name] >= at_work[name] for name in after), "also once a thread has ended"
