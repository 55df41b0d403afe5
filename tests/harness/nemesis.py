"""Makes processes of a run fail at labelled points of their lives (`arm`), or at random moments from outside
(`RandomKills`).

A strike is `point[@actor]:action[:nth]`; actions are kill, stop and cut=SECONDS (nothing that the process sends reaches
any other). Strikes come one after the other, whichever process is the first to get there; a mark in a folder makes each
happen once. A run of the tests gets them by the variable `VARIABLE` of its command: the fork server that its actors are
forked from wraps the functions of `POINTS` (standing_by.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psutil

VARIABLE = "MYXA_TEST_STRIKES"
SPEC = "MYXA_WORKER_SPEC"

_BUFFER = "actors.buffer.buffer:Buffer"
_COORDINATOR = "actors.coordinator.coordinator:Coordinator"
_STEP = "actors.backends.torch_backend.accounting:Learner"
_CHECKPOINT = "actors.backends.checkpoint"
POINTS: dict[str, tuple[str, ...]] = {
    "buffer.dispatch": ("after actors.buffer.groups:Groups._dispatch",),  # written down as given, not answered
    "buffer.put": (f"before {_BUFFER}.put_groups",),
    "buffer.claim": ("after actors.buffer.groups:Groups.claim",),  # written down as formed, not answered
    "buffer.trained": (f"before {_BUFFER}.trained",),
    "buffer.durable": (f"before {_BUFFER}.durable",),
    "rollout.partial": ("before actors.stream_checks:_Stream.wrong",),  # tokens of an answer are there
    "rollout.reward": ("before actors.rollout.group_runner:GroupRunner._timed_reward",),
    "rollout.put": ("before actors.rollout.rollout:Rollout._deliver",),
    "rollout.prepare": ("before actors.weights.receive:EngineWeights.prepare",),
    "rollout.rebuild": ("before actors.weights.channels.host:patch_folder",),  # copied or renamed, old bytes
    "rollout.commit": ("before actors.weights.receive:EngineWeights.commit",),
    "trainer.claim": ("before actors.trainer.step_plan:ClaimedBatch.check",),
    "trainer.forward": (f"before {_STEP}.passes",),
    "trainer.all_reduce": ("before actors.backends.torch_backend.parallel:TorchModel.gradient_norm",),
    "trainer.optimizer": (f"before {_STEP}.update",),
    "trainer.publish": ("before actors.trainer.trainer:Trainer.publish",),
    "trainer.delta": ("after actors.weights.channels.host:DiskWeightWriter._write_delta",),  # nobody knows the file
    "trainer.trained": ("after actors.trainer.train_loop:TrainerGang.train",),  # the buffer does not know yet
    "trainer.checkpoint_write": (f"before {_CHECKPOINT}:PendingCheckpoint.write",),
    "trainer.manifest_commit": (f"before {_CHECKPOINT}:commit",),
    "coordinator.ready": (
        f"before {_COORDINATOR}.rollout_ready",
        f"before {_COORDINATOR}.trainer_ready",
    ),
    "coordinator.version_made": (f"before {_COORDINATOR}.version_made",),
    "coordinator.adopt": ("before actors.weights.rollout_update:Adopter._bring",),
    "coordinator.knobs_decided": ("after actors.coordinator.knob_conductor:KnobConductor._decide",),
    "monitor.telemetry": ("before actors.monitor.monitor:Monitor.telemetry",),
}
"""Point -> functions of `myxa`, before or after which it is (after: only if they returned something)."""

_STRIKE = re.compile(r"([a-z_.]+)(?:@([^\s:@]+))?:(kill|stop|cut=[0-9.]+)(?::([1-9][0-9]*))?")


@dataclass(frozen=True)
class Struck:
    """A strike that was carried out."""

    text: str
    actor: str
    pid: int
    wall_s: float


@dataclass(frozen=True)
class Plan:
    """Strikes of a run, one after the other, each `rest_s` after the one before, or after the end of a cut, at the
    earliest."""

    strikes: tuple[str, ...]
    marks: str
    """Folder, made when it is needed."""
    rest_s: float = 0.0

    def variable(self) -> dict[str, str]:
        """For the environment of the command."""
        return {VARIABLE: json.dumps(asdict(self))}


def struck(marks: Path) -> tuple[Struck, ...]:
    """What was carried out, in order."""
    return tuple(Struck(**json.loads(path.read_text())) for path in sorted(marks.glob("*.json")))


class Nemesis:
    """Carries out one process's part of a plan."""

    def __init__(self, plan: Plan, actor: str = "") -> None:
        """`actor`: its name; empty: that of the worker that this process is going to be."""
        self._plan, self._actor = plan, actor
        self._read = [_parse(text) for text in plan.strikes]
        self._visits: dict[int, int] = {}
        self.node: Any = None

    def reached(self, point: str) -> None:
        """Strike, if it is the turn of a strike at this point by this actor."""
        marks = Path(self._plan.marks)
        done = sorted(marks.glob("*.json"))
        number = len(done)
        if number >= len(self._read):
            return
        at, actor, action, nth = self._read[number]
        before = self._read[number - 1][2] if number else ""
        rest_s = 1.2 * float(before.removeprefix("cut=")) if before.startswith("cut=") else self._plan.rest_s
        if at != point or (done and time.time() < done[-1].stat().st_mtime + rest_s):
            return
        self._actor = self._actor or json.loads(Path(os.environ[SPEC]).read_bytes())["actor"]["name"]
        if not fnmatchcase(self._actor, actor):
            return
        self._visits[number] = self._visits.get(number, 0) + 1
        if self._visits[number] >= nth and self._mark(marks, number):
            self._act(action)

    def _mark(self, marks: Path, number: int) -> bool:
        """False if another process did so at the same time."""
        marks.mkdir(parents=True, exist_ok=True)
        beside = marks / f".{number:04d}.{os.getpid()}"
        note = Struck(self._plan.strikes[number], self._actor, os.getpid(), time.time())
        beside.write_text(json.dumps(asdict(note)))
        try:
            os.link(beside, marks / f"{number:04d}.json")
        except FileExistsError:
            return False
        finally:
            beside.unlink()
        return True

    def _act(self, action: str) -> None:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            for peer in self.node.peers(""):
                if peer != self._actor:
                    cut_off(self.node, peer, float(action.partition("=")[2]))


def _parse(text: str) -> tuple[str, str, str, int]:
    found = _STRIKE.fullmatch(text)
    if found is None or found[1] not in POINTS:
        raise ValueError(f'"{text}" is no strike')
    return found[1], found[2] or "*", found[3], int(found[4] or 1)


def arm(nemesis: Nemesis) -> None:
    """This process, and all that are forked from it, strike where that says."""
    for point in {strike[0] for strike in nemesis._read}:
        for place in POINTS[point]:
            when, _, name = place.partition(" ")
            _wrap(name, functools.partial(nemesis.reached, point), is_before=when == "before")
    if any("cut=" in text for text in nemesis._plan.strikes):
        _keep_node(nemesis)


def _wrap(name: str, reached: Callable[[], None], *, is_before: bool) -> None:
    owner, attribute = _find(name)
    inner = getattr(owner, attribute)

    def told(result: Any) -> Any:
        if not is_before and (result or (result is None and inspect.iscoroutinefunction(inner))):
            reached()
        return result

    @functools.wraps(inner)
    async def wrapped_async(*args: Any, **keywords: Any) -> Any:
        if is_before:
            reached()
        return told(await inner(*args, **keywords))

    @functools.wraps(inner)
    def wrapped(*args: Any, **keywords: Any) -> Any:
        if is_before:
            reached()
        return told(inner(*args, **keywords))

    setattr(owner, attribute, wrapped_async if inspect.iscoroutinefunction(inner) else wrapped)


def _find(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(f"myxa.{module}")
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute


_cut_until: dict[tuple[int, int], float] = {}
"""By transport and node, over all incarnations of it."""


def make_cuttable() -> None:
    """From now on `cut_off` works: connections of this process ask it before they are made."""
    from myxa.core.errors import LaunchError
    from myxa.transport.socket_transport import SocketTransport

    make_outbox: Any = SocketTransport._make_outbox

    def unless_cut(self: Any, endpoint: str, peer: Any, entry: Any, lane: Any) -> Any:
        if time.monotonic() < _cut_until.get((id(self), peer.node_id), 0.0):
            raise LaunchError("cut off on purpose")
        return make_outbox(self, endpoint, peer, entry, lane)

    SocketTransport._make_outbox = unless_cut


def cut_off(node: Any, name: str, for_s: float) -> None:
    """For so long nothing that this node sends reaches the one that hosts that actor; 0: it does again.

    A network is gone when both sides cut: each sends on connections that it made itself. Connections break and cannot be
    made; what was on its way already still arrives."""
    transport, node_id = node._transport, node._mirror.directory.find(name).node.node_id
    _cut_until[id(transport), node_id] = time.monotonic() + for_s
    for peer, known in list(transport._peers.items()):
        for outbox in known.outboxes:
            if for_s > 0 and outbox is not None and peer.node_id == node_id:
                outbox._on_broken("cut off on purpose")


def _keep_node(nemesis: Nemesis) -> None:
    make_cuttable()
    worker = importlib.import_module("myxa.launch.worker")
    attach = worker.attach_worker

    async def kept(spec: Any) -> Any:
        nemesis.node = await attach(spec)
        return nemesis.node

    worker.attach_worker = kept  # pyright: ignore[reportAttributeAccessIssue]


def arm_by(environ: dict[str, str]) -> None:
    """As the variable says, if it is set."""
    if text := environ.get(VARIABLE):
        arm(Nemesis(Plan(**json.loads(text))))


def actors_of(launcher_pid: int) -> dict[str, int]:
    """Name of each actor of that launcher -> its process."""
    found: dict[str, int] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher_pid).children():
            with contextlib.suppress(psutil.Error, OSError):
                if spec := child.environ().get(SPEC):
                    found[json.loads(Path(spec).read_bytes())["actor"]["name"]] = child.pid
    return found


class RandomKills(threading.Thread):
    """SIGKILL to an actor every `every_s`, drawn by a seed, from when the launcher has all of `roles` until `stop`."""

    def __init__(self, launcher_pid: int, every_s: float, seed: int, patterns: Sequence[str] = ("*",)) -> None:
        super().__init__(daemon=True)
        self.killed: list[str] = []
        self._launcher_pid, self._every_s, self._patterns = launcher_pid, every_s, patterns
        self._random = random.Random(seed)
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(self._every_s):
            there = actors_of(self._launcher_pid)
            names = sorted(name for name in there if any(fnmatchcase(name, pattern) for pattern in self._patterns))
            chance = self._random.random()
            if not names:
                continue
            name = names[int(chance * len(names))]
            try:
                os.kill(there[name], signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.killed.append(name)

    def stop(self) -> None:
        self._is_over.set()
        if self.is_alive():
            self.join()
