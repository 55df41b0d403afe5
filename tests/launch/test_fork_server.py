"""Actors forked from a process that has their imports: like a fresh interpreter's process, the launcher's children, and
independent of the server from their start."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from tests.harness.run_job import make_job
from tests.harness.waiting import until

from myxa.core.config import load_config
from myxa.core.process import adopting_orphans, adopts_orphans
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.nodes import fork_server
from myxa.launch.nodes.agent import reap_orphans
from myxa.launch.nodes.child import ORDERLY_END, Child, start_child
from myxa.launch.nodes.fork_server import LIGHT, MEGATRON, TORCH, ForkRequest, ForkServer, is_forked, pack, preloaded
from myxa.launch.supervisor.placement import place
from myxa.launch.worker_spec import DEFAULT_PROGRAM, ProcessSpec, child_env, worker_command, write_spec

HERE = Path(__file__).parent
WAIT_S = 60.0
FIRST = ("monitor", "buffer", "coordinator", "trainer/0", "trainer/1", "rollout/0")
RUN_TOML = '[model]\npath = "model"\n[data]\ntrain = "data.jsonl"\n'


@dataclass
class Room:
    """A fork server of this process, which adopts orphans meanwhile, and what was told of its children."""

    folder: Path
    server: ForkServer
    ends: list[tuple[str, int]] = field(default_factory=list)
    attempts: int = 0

    def told(self, child: Child, status: int) -> None:
        self.ends.append((child.name, status))

    def env(self, actor: ActorSpec) -> dict[str, str]:
        spec = ProcessSpec(
            actor=replace(actor, attempt=self.attempts), launcher_pid=os.getpid(),
            run_dir=str(self.folder), socket_dir=str(self.folder), program="facts_program:build",
        )  # fmt: skip
        path = write_spec(spec, self.folder)
        return child_env(os.environ, actor, spec_path=str(path), run_id="r")

    async def fork(self, actor: ActorSpec) -> Child | None:
        return await self.server.start(actor.name, 0, env=self.env(actor), log_path=self.log(actor), on_exit=self.told)

    async def forked(self, actor: ActorSpec) -> Child:
        child = await self.fork(actor)
        assert child is not None, f"{actor.name} is not forked"
        return child

    def fresh(self, actor: ActorSpec) -> Child:
        return start_child(
            actor.name, 0, worker_command(actor), env=self.env(actor), log_path=self.log(actor), on_exit=self.told
        )

    def log(self, actor: ActorSpec) -> Path:
        return self.folder / f"{actor.name.replace('/', '.')}.log"

    async def facts(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name.replace('/', '.')}.facts"
        await until(path.exists, f"{name} to tell of itself")
        return json.loads(path.read_text())


SMALL = ("myxa.launch.worker", "safetensors")
"""Imports where what is imported is not looked at."""


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE)]))
    (tmp_path / "config.toml").write_text(RUN_TOML)

    @asynccontextmanager
    async def open_room(modules: tuple[str, ...] = SMALL) -> AsyncIterator[Room]:
        room = Room(tmp_path, ForkServer(modules, tmp_path, logging.getLogger("test")))
        with adopting_orphans():
            try:
                yield room
            finally:
                await room.server.close()
                reap_orphans(lambda pid: False)

    return open_room


def actor(name: str = "rollout/0", kind: str = "facts", **more: Any) -> ActorSpec:
    role = name.partition("/")[0]
    return ActorSpec(name=name, role=role, kind=kind, index=0, node=0, **more)  # pyright: ignore[reportArgumentType]


Enter = Callable[..., Any]


@pytest.mark.usefixtures("null_device")
async def test_a_forked_actor_is_as_a_fresh_interpreter(enter: Enter):
    async with enter((*LIGHT, *TORCH)) as room:
        one, other = await room.forked(actor("rollout/0")), room.fresh(actor("rollout/1"))
        assert await one.wait(WAIT_S)
        assert await other.wait(WAIT_S)
        assert sorted(room.ends) == [("rollout/0", 7), ("rollout/1", 7)]
        assert room.log(actor("rollout/0")).read_text() == room.log(actor("rollout/1")).read_text() == "out\nerr\n"
        forked, fresh = await room.facts("rollout/0"), await room.facts("rollout/1")
        await signals_end_it_and_are_its_status(room)
        for said, status, last in (("5", 5, "err"), ('"my own words"', 1, "my own words")):
            child = await room.forked(actor("rollout/4", f"exits {said}"))
            assert await child.wait(WAIT_S)
            assert (child.status, room.log(actor("rollout/4")).read_text().splitlines()[-1]) == (status, last)
        await threads_are_those_of_the_role_and_numbers_differ(room)
    assert forked["parent"] == os.getpid()
    assert forked["stdin"] == ""
    assert (forked.pop("comm"), fresh.pop("comm")[:6]) == ("rollout/0", "python")
    assert forked["modules"] and not fresh["modules"], "others of the node need torch"
    for facts in (forked, fresh):
        for name in ("numpy_draw", "torch_draw", "cuda", "modules"):
            facts.pop(name, None)
    assert forked.pop("draw") != fresh.pop("draw")
    logs = [facts["descriptors"].count(str(room.log(actor(name)))) for name, facts in
            (("rollout/0", forked), ("rollout/1", fresh))]  # fmt: skip
    assert logs == [2, 2]
    for number, facts in enumerate((forked, fresh)):
        facts["descriptors"] = [path for path in facts["descriptors"] if not path.endswith(f"rollout.{number}.log")]
    assert forked == fresh


async def signals_end_it_and_are_its_status(room: Room) -> None:
    killed, asked = [await room.forked(actor(f"rollout/{n}", "sleeps")) for n in (2, 3)]
    await room.facts("rollout/2")
    await room.facts("rollout/3")
    killed.kill()
    asked.ask_to_end()
    assert await killed.wait(WAIT_S)
    assert await asked.wait(WAIT_S)
    assert (killed.status, asked.status) == (-9, -ORDERLY_END)


async def threads_are_those_of_the_role_and_numbers_differ(room: Room) -> None:
    one, sibling = await room.forked(actor("rollout/6", threads=2)), await room.forked(actor("rollout/7"))
    for child in (one, sibling):
        assert await child.wait(WAIT_S)
    facts, others = [await room.facts(f"rollout/{n}") for n in (6, 7)]
    assert not [source for source in ("draw", "numpy_draw", "torch_draw") if facts[source] == others[source]]
    assert not others["cuda"], "the server started CUDA"
    assert (others["num_tasks"], others["modules"]) == (1, True)
    num = min(2, len(os.sched_getaffinity(0)))
    assert facts["threads"] == {"torch": num, "begun": num - 1, "elsewhere": num, "numpy": 1}, (
        "numpy has what the server loaded it with"
    )


@pytest.mark.parametrize(
    ("strike", "why"),
    [
        (signal.SIGKILL, "(process {}) ended with status -9: it wrote nothing"),
        (signal.SIGSTOP, "did not answer within 0.3 s"),
    ],
)
async def test_actors_outlive_their_server_and_one_that_died_or_hangs_forks_no_more(
    enter: Enter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strike: signal.Signals, why: str
):
    others = set(psutil.Process().children())
    async with enter() as room:
        child = await room.forked(actor("rollout/0", "sleeps"))
        await one_that_is_not_wanted_any_more_does_not_begin(room)
        monkeypatch.setattr(fork_server, "FORK_S", 0.3)
        os.kill(pid := room.server.pid, strike)
        if strike is signal.SIGKILL:
            await until(lambda: not room.server.pid, "the server's end")
        for _ in range(2):
            assert await room.fork(actor("rollout/2")) is None
        await until(lambda: not room.server.pid, "the server's end")
        assert not (room.folder / "rollout.2.facts").exists()
        assert child.status is None
        child.kill()
        assert await child.wait(WAIT_S)
        born = set(psutil.Process().children()) - others
        assert not [child for child in born if child.status() != psutil.STATUS_ZOMBIE]
    told = f"actors are not forked any more: the fork server {why.format(pid)}"
    assert warnings_of(caplog) == [told], "once"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def one_that_is_not_wanted_any_more_does_not_begin(room: Room) -> None:
    """As when the launcher has given up while the server was slow: it does not answer GO."""
    link = room.server._link
    assert link is not None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    unwanted = actor("rollout/1")
    env = tuple((key.encode(), value.encode()) for key, value in room.env(unwanted).items())
    request = ForkRequest(name="rollout/1", launcher_pid=os.getpid(), env=env)
    with theirs, room.log(unwanted).open("wb") as log:
        socket.send_fds(link, [pack(request)], [theirs.fileno(), log.fileno()])
    pid = (await asyncio.to_thread(fork_server.unpack_reply, await asyncio.to_thread(ours.recv, 100))).pid
    assert psutil.Process(pid).ppid() == os.getpid()
    ours.close()
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the end of the process")
    assert room.log(unwanted).read_text() == ""


async def test_a_server_whose_imports_fail_is_told_of_once(enter: Enter, caplog: pytest.LogCaptureFixture):
    async with enter() as room:
        (room.folder / "safetensors.py").write_text('raise ImportError("none today")')
        for _ in range(2):
            assert await room.fork(actor()) is None
    assert warnings_of(caplog) == ["actors are not forked any more: ImportError: none today"]


async def test_a_server_that_still_imports_is_given_up_and_ends_with_its_launcher(
    enter: Enter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    (tmp_path / "slow.py").write_text("import time; time.sleep(30)")
    async with enter(("slow",)) as room:
        room.server.warm()
        await until(lambda: bool(room.server.pid), "the server")
        server = psutil.Process(room.server.pid)
        await room.server.close()
        assert not server.is_running()
        assert await room.fork(actor()) is None
    monkeypatch.setattr(fork_server, "IMPORT_S", 0.2)
    async with enter(("slow",)) as room:
        assert await room.fork(actor()) is None
        await until(lambda: not room.server.pid, "the server's end")
    assert "still imports after 0.2 s" in caplog.text


def test_a_process_with_a_gpu_open_or_a_second_thread_is_unfit(tmp_path: Path):
    code = (
        "import sys, threading, time; from myxa.launch.nodes import fork_server\n"
        "said = [fork_server.unfit()]; fork_server.GPU_FILES = sys.argv[1]; held = open(sys.argv[1])\n"
        "said.append(fork_server.unfit()); held.close()\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "print([*said, fork_server.unfit()])"
    )
    held = tmp_path / "nvidiactl"
    held.touch()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # numpy starts no thread
    done = subprocess.run([sys.executable, "-c", code, str(held)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"['', 'an import opened {held}', 'an import started 1 threads'")
    assert fork_server.GPU_FILES == "/dev/nvidia"


SFT = 'answer_key = "answer"\n[algo]\nkind = "sft"\n[rollout]\nworkflow = "demonstration"\nnum_samples = 1\n'

# -- who is forked -----------------------------------------------------------------------------------------------------


def test_what_is_imported_ahead_and_who_is_forked(tmp_path: Path):
    file = tmp_path / "run.toml"

    def modules(text: str = "", program: str = DEFAULT_PROGRAM, env: dict[str, str] | None = None) -> tuple[str, ...]:
        file.write_text(RUN_TOML + text)
        config = load_config(file)
        return preloaded(config, program, place(config, 1), env or {"OMP_NUM_THREADS": "4"})

    sglang = '[roles.rollout]\nkind = "sglang"\n'
    assert modules() == (*LIGHT, *TORCH)
    assert (
        not is_forked(actor(env={"A": "1"})) and not is_forked(actor(python="/usr/bin/python3")) and is_forked(actor())
    )
    assert modules('[roles.trainer]\nenv = {A = "1"}\n' + sglang) == LIGHT
    assert modules('[roles.trainer]\nkind = "megatron"\n' + sglang) == (*LIGHT, *TORCH, MEGATRON)
    gpus = '[roles.trainer]\nkind = "megatron"\ndevices = "0"\n'
    assert modules(gpus) == (*LIGHT, *TORCH), "megatron-core asks CUDA for devices when it is imported"
    assert modules(program="mine:build") == LIGHT
    assert modules("[run]\npreload = false\n") == ()
    assert modules(env={"MKL_NUM_THREADS": "4"}) == (), "read when the library is loaded, not when the actor is known"
    alone = '[roles.trainer]\npython = "/usr/bin/python3"\n'
    assert modules(SFT + alone) == LIGHT
    assert modules('preset = "recorded"\n' + alone) == LIGHT


# -- orphans -----------------------------------------------------------------------------------------------------------

LEAVES_ONE = "import subprocess; print(subprocess.Popen(['/bin/sleep', '0.1'], stdout=-3, start_new_session=True).pid)"


def test_orphans_are_reaped_and_children_that_somebody_waits_for_are_not():
    assert not adopts_orphans()
    with adopting_orphans(), subprocess.Popen([sys.executable, "-c", LEAVES_ONE], stdout=-1) as parent:
        assert adopts_orphans()
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        waited = subprocess.Popen(["/bin/sh", "-c", "exit 3"])
        watched = subprocess.Popen(["/bin/sh", "-c", "exit 4"], start_new_session=True)
        deadline = time.monotonic() + WAIT_S
        for process in (orphan, psutil.Process(waited.pid), psutil.Process(watched.pid)):
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        while orphan.ppid() != os.getpid():  # its parent may end after it
            assert time.monotonic() < deadline
            time.sleep(0.01)
        reap_orphans(lambda pid: pid == watched.pid)
        assert not orphan.is_running()
        assert (waited.wait(), watched.wait()) == (3, 4)
    assert not adopts_orphans()


# -- in a run ----------------------------------------------------------------------------------------------------------


def servers_of(run: Any) -> list[psutil.Process]:
    return [child for child in run.children() if fork_server.SERVER_MODULE in child.cmdline()]


def was_forked(pid: int) -> bool:
    """A fresh interpreter is called after its program."""
    return not Path(f"/proc/{pid}/comm").read_text().startswith("python")


def test_actors_are_restarted_by_forks_and_a_killed_launcher_ends_all(tmp_path: Path, run: Any):
    """A role with variables of its own gets an interpreter."""
    flags = ("--set", "roles.rollout.count=2", "--set", "roles.trainer.count=2", "--set", 'roles.buffer.env.MINE="1"')
    with run(tmp_path, "up", *flags, is_plain=True) as one:
        one.until_serving(*FIRST)
        assert {name: was_forked(one.pid_of(name)) for name in FIRST} == {name: name != "buffer" for name in FIRST}
        assert len(servers_of(one)) == 1
        for name in ("rollout/0", "trainer/1"):
            os.kill(one.pid_of(name), signal.SIGKILL)
            one.until_serving(name, attempt=1)
            assert was_forked(one.pid_of(name, attempt=1))
            assert psutil.Process(one.pid_of(name, attempt=1)).ppid() == one.process.pid
        one.until_serving("trainer/0", attempt=1)
        children = one.children()
        one.signal(signal.SIGKILL)
        one.process.wait(WAIT_S)
        one.until_gone(children)


def test_a_process_that_reads_no_tokenizer_and_trains_nothing_imports_neither_library(tmp_path: Path):
    job = make_job(tmp_path)
    (job.folder / "run").mkdir()
    program = (
        "import sys; from pathlib import Path; from myxa.core.config import load_config;"
        "from myxa.launch.program import build_actor; from myxa.launch.supervisor.placement import place;"
        "import myxa.launch.worker; config = load_config('run.toml');"
        "light = [each for each in place(config, 1) if each.role in ('coordinator', 'buffer', 'monitor')];"
        "[build_actor(each, config, Path('run').absolute()) for each in light];"
        "print(len(light), sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=job.folder, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.stdout == "3 []\n", done.stderr
