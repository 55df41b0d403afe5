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
from tests.harness.waiting import until

from myxa.core.config import load_config
from myxa.core.process import adopting_orphans, adopts_orphans
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.nodes import fork_server, fork_server_pool
from myxa.launch.nodes.agent import Orphans
from myxa.launch.nodes.child import Child, start_child
from myxa.launch.nodes.fork_server import ForkRequest, pack
from myxa.launch.nodes.fork_server_pool import ForkServerPool
from myxa.launch.nodes.preloads import LIGHT, TORCH, preloads_of
from myxa.launch.supervisor.placement import place
from myxa.launch.worker_spec import DEFAULT_PROGRAM, ProcessSpec, child_env, worker_command, write_spec

HERE = Path(__file__).parent
WAIT_S = 60.0
FIRST = ("monitor", "buffer", "coordinator", "trainer/0", "trainer/1", "rollout/0")
RUN_TOML = '[model]\npath = "model"\n[data]\ntrain = "data.jsonl"\n'


@dataclass
class Room:
    """A nursery in this process, which adopts orphans meanwhile, and what was told of its children."""

    folder: Path
    nursery: ForkServerPool
    ends: list[tuple[str, int]] = field(default_factory=list)
    attempts: int = 0

    def told(self, child: Child, status: int) -> None:
        self.ends.append((child.name, status))

    def env(self, actor: ActorSpec) -> dict[str, str]:
        spec = ProcessSpec(
            actor=actor, attempt=self.attempts, launcher_pid=os.getpid(), config_path=str(self.folder / "run.toml"),
            run_dir=str(self.folder), socket_dir=str(self.folder), rdzv_path="", program="facts_program:build",
        )  # fmt: skip
        path = write_spec(spec, self.folder)
        return child_env(os.environ, actor, spec_path=str(path), run_id="r", attempt=0)

    async def fork(self, actor: ActorSpec, kit: str = LIGHT) -> Child | None:
        return await self.nursery.start(
            kit, actor.name, 0, env=self.env(actor), log_path=self.log(actor), on_exit=self.told
        )

    async def forked(self, actor: ActorSpec, kit: str = LIGHT) -> Child:
        child = await self.fork(actor, kit)
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


SMALL_SETS = """
import sys
if "myxa.launch.nodes.fork_server" in sys.orig_argv:
    from dataclasses import replace
    from myxa.launch.nodes import preloads
    small = {"light": ("myxa.launch.worker", "safetensors"), "torch": ("ssl",)}
    sets = preloads.PRELOAD_SETS
    preloads.PRELOAD_SETS = {name: replace(kit, modules=small.get(name, kit.modules)) for name, kit in sets.items()}
"""
"""Servers that import little, where what they import is not looked at."""


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(HERE)]))
    (tmp_path / "run.toml").write_text(RUN_TOML)
    (tmp_path / "sitecustomize.py").write_text(SMALL_SETS)

    @asynccontextmanager
    async def open_room() -> AsyncIterator[Room]:
        room = Room(tmp_path, ForkServerPool(tmp_path, logging.getLogger("test")))
        with adopting_orphans():
            try:
                yield room
            finally:
                await room.nursery.close()
                Orphans(lambda pid: False).look(is_last=True)

    return open_room


def actor(name: str = "rollout/0", kind: str = "facts", **more: Any) -> ActorSpec:
    role = name.partition("/")[0]
    return ActorSpec(name=name, role=role, kind=kind, index=0, node=0, **more)  # pyright: ignore[reportArgumentType]


Enter = Callable[[], Any]


@pytest.mark.usefixtures("null_device")
async def test_a_forked_actor_is_as_a_fresh_interpreter(enter: Enter):
    async with enter() as room:
        (room.folder / "sitecustomize.py").unlink()
        room.nursery.warm([TORCH])
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
    for facts in (forked, fresh):
        facts.pop("numpy_draw", None)
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
    assert (killed.status, asked.status) == (-9, -15)


async def threads_are_those_of_the_role_and_numbers_differ(room: Room) -> None:
    one, sibling = await room.forked(actor("rollout/6", threads=2), TORCH), await room.forked(actor("rollout/7"), TORCH)
    for child in (one, sibling):
        assert await child.wait(WAIT_S)
    facts, others = [await room.facts(f"rollout/{n}") for n in (6, 7)]
    assert not [source for source in ("draw", "numpy_draw", "torch_draw") if facts[source] == others[source]]
    assert not others["cuda"], "the server started CUDA"
    assert (others["num_tasks"], others["modules"]) == (1, True)
    assert facts["threads"] == {"torch": 2, "begun": 1, "elsewhere": 2, "numpy": 2}, "as an interpreter has them"


async def test_actors_outlive_their_servers_and_a_server_that_died_or_hangs_forks_no_more(
    enter: Enter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    others = set(psutil.Process().children())
    async with enter() as room:
        children = [await room.forked(actor(f"rollout/{n}", "sleeps"), kit) for n, kit in ((0, TORCH), (3, LIGHT))]
        await one_that_is_not_wanted_any_more_does_not_begin(room)
        light, torch = [(await room.nursery._ready(kit)).child.pid for kit in (LIGHT, TORCH)]
        os.kill(torch, signal.SIGKILL)
        await until(lambda: room.nursery.pids == {light}, "the server's end")
        assert await room.fork(actor("rollout/2"), TORCH) is None
        os.kill(light, signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr(fork_server_pool, "FORK_S", 0.3)
            assert await room.fork(actor("rollout/2")) is None
        await until(lambda: not room.nursery.pids, "the server's end")
        assert await room.fork(actor("rollout/2")) is None
        assert not (room.folder / "rollout.2.facts").exists()
        assert [child.status for child in children] == [None] * len(children)
        for child in children:
            child.kill()
            assert await child.wait(WAIT_S)
        born = set(psutil.Process().children()) - others
        assert not [child for child in born if child.status() != psutil.STATUS_ZOMBIE]
    no_more, why = "actors with preload set {} are not forked any more: {}".format, warnings_of(caplog)
    assert why[0] == no_more("torch", f"its fork server (process {torch}) ended with status -9: it wrote nothing")
    assert why[1:] == [no_more("light", "the fork server light did not answer within 0.3 s")], "each told once"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def one_that_is_not_wanted_any_more_does_not_begin(room: Room) -> None:
    """As when the launcher has given up while the server was slow: it does not answer GO."""
    server = await room.nursery._ready(LIGHT)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    unwanted = actor("rollout/1")
    env = tuple((key.encode(), value.encode()) for key, value in room.env(unwanted).items())
    request = ForkRequest(name="rollout/1", launcher_pid=os.getpid(), env=env)
    with theirs, room.log(unwanted).open("wb") as log:
        socket.send_fds(server.link, [pack(request)], [theirs.fileno(), log.fileno()])
    pid = (await asyncio.to_thread(fork_server_pool.unpack_reply, await asyncio.to_thread(ours.recv, 100))).pid
    assert psutil.Process(pid).ppid() == os.getpid()
    ours.close()
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the end of the process")
    assert room.log(unwanted).read_text() == ""


async def test_a_set_that_cannot_be_imported_leaves_its_base_and_none_of_a_base_that_cannot_is_forked(
    enter: Enter, caplog: pytest.LogCaptureFixture
):
    for name, kits in (("torch", (TORCH,)), ("safetensors", (LIGHT, TORCH))):
        caplog.clear()
        async with enter() as room:
            (room.folder / f"{name}.py").write_text('raise ImportError("none today")')
            (room.folder / "sitecustomize.py").write_text(SMALL_SETS.replace("ssl", "torch"))
            for _ in range(2):
                assert await room.fork(actor(), TORCH) is None
            if LIGHT not in kits:
                assert await (await room.forked(actor())).wait(WAIT_S)
        assert warnings_of(caplog) == [
            f"actors with preload set {kit} are not forked any more: ImportError: none today" for kit in kits
        ], "told once"


SLEEPS = """
import sys, time
if "myxa.launch.nodes.fork_server" in sys.orig_argv:
    time.sleep(30)
"""


async def test_servers_that_still_import_are_given_up_and_end_with_the_pool(
    enter: Enter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async with enter() as room:
        (room.folder / "sitecustomize.py").write_text(SLEEPS)
        room.nursery.warm([LIGHT])
        await until(lambda: len(room.nursery.pids) == 1, "the server")
        (server,) = map(psutil.Process, room.nursery.pids)
        await room.nursery.close()
        assert not server.is_running()
        assert await room.fork(actor()) is None
    monkeypatch.setattr(fork_server_pool, "IMPORT_S", 0.2)
    async with enter() as room:
        (room.folder / "sitecustomize.py").write_text(SLEEPS)
        assert await room.fork(actor(), TORCH) is None
        await until(lambda: not room.nursery.pids, "the server's end")
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
    done = subprocess.run([sys.executable, "-c", code, str(held)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"['', 'an import opened {held}', 'an import started 1 threads (")
    assert fork_server.GPU_FILES == "/dev/nvidia"


SFT = 'answer_key = "answer"\n[algo]\nkind = "sft"\n[rollout]\nworkflow = "demonstration"\nnum_samples = 1\n'

# -- who is forked -----------------------------------------------------------------------------------------------------


def test_which_actors_are_forked(tmp_path: Path):
    file = tmp_path / "run.toml"

    def kits(text: str = "", program: str = DEFAULT_PROGRAM, env: dict[str, str] | None = None) -> dict[str, str]:
        file.write_text(RUN_TOML + text)
        config = load_config(file)
        actors = place(config, 1)
        found = preloads_of(config, program, actors, env or {"OMP_NUM_THREADS": "4"})
        return {} if found is None else {each.role: found.set_of(each) for each in actors}

    light = {"monitor": "light", "buffer": "light", "coordinator": "light"}
    assert kits() == light | {"trainer": "torch", "rollout": "torch"}
    assert kits('[roles.trainer]\nenv = {A = "1"}\n')["trainer"] == ""
    assert kits('[roles.rollout]\npython = "/usr/bin/python3"\n')["rollout"] == ""
    assert kits('[roles.trainer]\nkind = "megatron"\n[roles.rollout]\nkind = "sglang"\n') == light | {
        "trainer": "megatron",
        "rollout": "light",
    }
    gpus = '[roles.trainer]\nkind = "megatron"\ndevices = "0"\n'
    assert kits(gpus)["trainer"] == "torch", "megatron-core asks CUDA for devices when it is imported"
    assert set(kits(program="mine:build").values()) == {"light"}
    assert kits("[run]\npreload = false\n") == {}
    assert kits(env={"MKL_NUM_THREADS": "4"}) == {}, "read when the library is loaded, not when the actor is known"
    assert kits(SFT)["rollout"] == "light"
    assert kits('preset = "recorded"\n[roles.rollout]\nkind = "recorded"\n')["rollout"] == "light"


# -- orphans -----------------------------------------------------------------------------------------------------------

LEAVES_ONE = "import subprocess; print(subprocess.Popen(['/bin/sleep', '0.1'], stdout=-3, start_new_session=True).pid)"


def test_orphans_are_reaped_and_children_that_somebody_waits_for_are_not():
    assert not adopts_orphans()
    orphans = Orphans(lambda pid: pid == watched.pid)
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
        assert orphan.ppid() == os.getpid()
        orphans.look()
        assert orphan.status() == psutil.STATUS_ZOMBIE, "somebody may be about to wait for it"
        orphans.look()
        assert not orphan.is_running()
        assert (waited.wait(), watched.wait()) == (3, 4)
    assert not adopts_orphans()


# -- in a run ----------------------------------------------------------------------------------------------------------


def servers_of(run: Any) -> list[psutil.Process]:
    return [child for child in run.children() if fork_server_pool.SERVER_MODULE in child.cmdline()]


def is_forked(pid: int) -> bool:
    """A fresh interpreter is called after its program."""
    return not Path(f"/proc/{pid}/comm").read_text().startswith("python")


def test_actors_are_restarted_by_forks_and_a_killed_launcher_ends_all(tmp_path: Path, run: Any):
    """A role with variables of its own gets an interpreter."""
    flags = ("--set", "roles.rollout.count=2", "--set", "roles.trainer.count=2", "--set", 'roles.buffer.env.MINE="1"')
    with run(tmp_path, "up", *flags, is_plain=True) as one:
        one.until_serving(*FIRST)
        assert {name: is_forked(one.pid_of(name)) for name in FIRST} == {name: name != "buffer" for name in FIRST}
        assert len(servers_of(one)) == 1
        for name in ("rollout/0", "trainer/1"):
            os.kill(one.pid_of(name), signal.SIGKILL)
            one.until_serving(name, attempt=1)
            assert is_forked(one.pid_of(name, attempt=1))
            assert psutil.Process(one.pid_of(name, attempt=1)).ppid() == one.process.pid
        one.until_serving("trainer/0", attempt=1)
        children = one.children()
        one.signal(signal.SIGKILL)
        one.process.wait(WAIT_S)
        one.until_gone(children)
