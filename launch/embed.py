"""A rollout actor of a live run, hosted by a program that has its own event loop, such as a web service.

It sets no loop policy, no signal handler and no logging handler, ends all that it starts, and never ends the host.

    joining    the engine loads; the coordinator brings it to the trainer's version
    serving    it gets groups
    leaving    it takes no new groups and hands unfinished ones back with their tokens
    left       everything of it is closed; `reason` says why (it was asked to, the run is over, it failed)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ..actors.contracts import CoordinatorContract, RolloutContract
from ..actors.hub import cached
from ..core.config import RunConfig, load_config
from ..core.daemon_thread import in_daemon_thread
from ..core.errors import CallError, LaunchError, MyxaError, raised_as
from ..core.messages import EngineStatus, RunStatus
from ..core.refs import with_deadline
from ..core.samples import NO_VERSION
from ..transport.address import Rendezvous
from ..transport.node import Node
from .composition.memory_parts import takes_turns
from .program import build_actor
from .run_dir import RunDir
from .supervisor.placement import FIRST_EMBEDDED, check_has_rollouts, make_spec


async def attach_to(place: RunDir, timeout_s: float) -> Node:
    """Join the run with a node of one's own. Raises LaunchError for a run that is over or runs on another host."""
    if not place.rdzv.exists():
        raise LaunchError(
            f"no live run in {place.path}",
            remedy="start one with `myxa up` and name the run directory that it prints; this one is over or is none",
        )
    record = Rendezvous.load(place.rdzv)
    if not (place.is_held and Path(record.socket_dir).is_dir()):
        raise LaunchError(
            f"the run in {place.path} is over, or runs on another host",
            remedy="its launcher is gone from here; do this on the host on which `myxa up` runs",
        )
    # The node's name is never used twice, so joining replaces no other node; the registry checks actor names.
    return await Node.attach(
        name=f"embed/{secrets.token_hex(6)}", rdzv=record, node_rank=record.endpoints.node_rank, timeout_s=timeout_s
    )


LOOK_EVERY_S = 1.0
"""How often the host asks whether the run is still live."""
ASK_S = 1.0
LOST_S = 20.0
"""How long the run may be silent before the actor leaves by itself."""
DRAIN_S = 40.0
CLOSE_S = 5.0
NUM_NAMES = 900_000
"""That are drawn from."""

_log = logging.getLogger("myxa.embed")

EmbeddedPhase = Literal["joining", "serving", "leaving", "left"]


@dataclass(frozen=True, slots=True)
class EmbeddedStatus:
    """State of the embedded actor; plain values, ready for a JSON response."""

    rollout: str
    """Actor name in the run."""
    phase: EmbeddedPhase
    version: int = NO_VERSION
    """Weight version that the engine serves; -1: none yet, or not any more."""
    running: int = 0
    waiting: int = 0
    """Requests that wait for room in it."""
    reason: str = ""


class EmbeddedRollout:
    """Handle of an actor that `rollout_in` hosts; belongs to the loop it was made on."""

    def __init__(self, node: Node, name: str, run_dir: RunDir) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        """In the run, e.g. "rollout/271828"."""
        self.node = node
        """Makes references to every other actor of the run: `node.ref(BufferContract, "buffer")`."""
        self._ended: asyncio.Future[str] = loop.create_future()
        self._run_dir = run_dir
        self._rollout = node.ref(RolloutContract, name)
        self._coordinator = with_deadline(node.ref(CoordinatorContract, "coordinator"), ASK_S)
        self._asked: asyncio.Future[str] = loop.create_future()
        self._is_leaving = False
        self._heard = EngineStatus(rollout=name, version=NO_VERSION, running=0, waiting=0)
        self._life = loop.create_task(self._live(), name=f"{name}: embedded")

    async def status(self) -> EmbeddedStatus:
        """Its state, of the last answer where the engine is in the middle of a long step. Never raises."""
        if not self._is_leaving:
            with contextlib.suppress(MyxaError):
                self._heard = await with_deadline(self._rollout, ASK_S).status()
        if self._ended.done():
            return EmbeddedStatus(self.name, "left", reason=self._ended.result())
        heard = self._heard
        phase: EmbeddedPhase = "joining" if heard.version == NO_VERSION else "serving"
        return EmbeddedStatus(
            self.name, "leaving" if self._is_leaving else phase, heard.version, heard.running, heard.waiting
        )

    async def ended(self) -> str:
        """Wait until the actor has left; returns why. For programs that want to join again."""
        return await asyncio.shield(self._ended)

    async def drain(self) -> int:
        """Take nothing new and hand back what is unfinished, with its tokens; returns the number of groups.

        There is no way back: leave and join again. Leaving does this by itself. Raises MyxaError if the engine does
        not answer, for example because it is not loaded yet.
        """
        return await with_deadline(self._rollout, DRAIN_S).drain()

    async def leave(self, reason: str = "it was asked to leave") -> None:
        """Drain, stop the actor, leave the run; returns when nothing is left. The end of `rollout_in` calls it.

        It is carried through even if the caller is cancelled meanwhile. Harmless to call again.
        """
        if not self._asked.done():
            self._asked.set_result(reason)
        await asyncio.shield(self._life)

    # -- start and end

    async def _live(self) -> None:
        """The only task: waits for a reason to end, then ends everything, whatever happens on the way."""
        reason = "the program ended"
        try:
            reason = await self._until_over()
            self._is_leaving = True
            if self._asked.done():
                await self._hand_back()
        finally:
            self._is_leaving = True
            try:
                await self.node.close(grace_s=CLOSE_S)
            finally:
                _log.info("%s left the run: %s", self.name, reason)
                self._ended.set_result(reason)

    async def _until_over(self) -> str:
        """Wait until the actor is asked to leave, it or its node fails, or the run is over; returns which."""
        clock = self.node.clock
        heard_s = clock.monotonic()
        while True:
            await asyncio.wait(
                {self._asked, self.node.failed}, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED
            )
            if self._asked.done():
                return self._asked.result()
            if self.node.failed.done():
                return f"it failed: {self.node.failed.result()}"
            try:
                status = await self._coordinator.status()
            except CallError as error:
                # A launcher that ends removes its record; even a killed one no longer holds the run directory.
                if not (self._run_dir.rdzv.exists() and self._run_dir.is_held):
                    return "the run is over"
                if clock.monotonic() - heard_s > LOST_S:
                    return f"no word from the run for {LOST_S:g} s ({error})"
            else:
                heard_s = clock.monotonic()
                if end := _end_of(status):
                    return end

    async def _hand_back(self) -> None:
        try:
            if (await self._rollout.status()).version == NO_VERSION:
                return  # it was never given work
            _log.info("%s hands back %d groups", self.name, await self.drain())
        except MyxaError as error:
            _log.warning("%s: groups were not handed back, they start again from their prompts: %s", self.name, error)


@contextlib.asynccontextmanager
async def rollout_in(run_dir: str | Path, *, timeout_s: float = 60.0) -> AsyncGenerator[EmbeddedRollout]:
    """Host a rollout actor of the run in `run_dir` on the running loop, until the block is left.

    `run_dir`: as `myxa up` printed it, on the same host and of the same user. `timeout_s`: for the run's processes to
    answer; a run that is just being started is waited for. Building the actor (importing torch, reading the tokenizer)
    happens in a thread, and the engine continues to load after this returned: see `status().phase`.

    If the run ends or the actor fails, the actor leaves by itself and the block continues (`ended()`,
    `status().reason`).

    Raises LaunchError for a run that is over, does not answer or was started by another version of myxa; ConfigError,
    ModelError or UserCodeError for what the run file names and this program cannot load.
    """
    place = RunDir(Path(run_dir).resolve())  # runs/latest may point elsewhere later
    node = await attach_to(place, timeout_s)
    try:
        await _check_run(node, place, timeout_s)
        config = cached(load_config(place.config))
        if takes_turns(config):
            raise LaunchError(
                f"the run in {place.path} gives its devices to its trainer and its own engines in turns",
                remedy='embed into a run with memory.share = "none"',
            )
        rollout = EmbeddedRollout(node, await _start(node, place, config), place)
    except BaseException:
        await node.close(grace_s=0.0)
        raise
    _log.info("%s joined the run in %s", rollout.name, place.path)
    try:
        yield rollout
    finally:
        await rollout.leave()


async def _check_run(node: Node, place: RunDir, timeout_s: float) -> None:
    """The run is there, and not over."""
    await node.wait_for("coordinator", "buffer", timeout_s=timeout_s)
    coordinator = with_deadline(node.ref(CoordinatorContract, "coordinator"), timeout_s)
    with raised_as(LaunchError, f"the run in {place.path} does not answer", CallError, remedy="see its logs"):
        status = await coordinator.status()
    if end := _end_of(status):
        raise LaunchError(f"the run in {place.path} is over: {end}", remedy="start another one")


def _end_of(status: RunStatus) -> str:
    """Why the run is over; empty while it is not."""
    return f"the run {status.phase}: {status.reason}" if status.phase in ("finished", "failed") else ""


# -- the actor -------------------------------------------------------------------------------------------------------


async def _start(node: Node, place: RunDir, config: RunConfig) -> str:
    """Build the actor and have it registered; returns its name. Its number is drawn, so programs need not agree."""
    check_has_rollouts(config)
    number = FIRST_EMBEDDED + secrets.randbelow(NUM_NAMES)
    spec = make_spec("rollout", config.roles.rollout, number, 0, ())
    with raised_as(LaunchError, f"{spec.name} could not join the run", CallError, remedy="see the launcher's log"):
        remedy = "install what the run uses here too, e.g. `pip install 'myxa[cpu]'`"
        with raised_as(LaunchError, f"{spec.name} cannot be built in this program", ImportError, remedy=remedy):
            # In its own thread: the first import of torch takes seconds, in which the host's loop has to answer.
            build = partial(build_actor, spec, config, place.path)
            actor = await in_daemon_thread(build, name=f"{spec.name} build")
        await node.start(actor, spec.name)
    return spec.name
