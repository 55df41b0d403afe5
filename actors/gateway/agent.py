"""The workflow `agent`: a rollout is what a program, or a service elsewhere, does with the policy through the gateway.

A program is started for each rollout and has ended when its process has. A service gets each task by HTTP, or polls for
tasks, and says when one is over; programs that poll may be started here. Where neither says a reward, the reward
function of the run judges. What fails is tried again, then masked.

    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY    the policy
    MYXA_BASE_URL    of the gateway: /v1/session, /v1/session/reward, /v1/session/end
    MYXA_TASK_FILE   JSON: messages, tools, label, metadata, is_replay, session_id, attempt
    MYXA_REWARD_FILE a number, or {"reward": ..., "answers": {id: ...}}, written by a program whose reward is "file"
    MYXA_SCRATCH     a folder of its own; also HOME and TMPDIR
    MYXA_TASKS_KEY   the key for /v1/tasks/next, for programs that poll
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shlex
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ...core.config.run import AgentSettings
from ...core.errors import FailureKind, MemberFailed
from ...core.process import past_proxies
from ...core.samples import Prompt, Sample
from ...transport.address import LOOPBACK
from ..http_client import AnswerTooLong, NoAnswer, client_session, post_bounded
from ..user_code.sandbox import Job, Limits, Sandbox, file_out, sandbox, scratch_folder
from ..workflows.episode import Episode, ReachedModel, WorkflowContext
from .clients import models_of_rollout
from .exchange import MODEL
from .server import Gateway, OpenSession
from .session import AgentSession, RequestFault, checked_reward, task_of

TAIL_CHARS = 2000
"""Of a program's output, in errors."""
RETRY_S = 1.0
"""Between two offers of a task to a service that does not answer."""
MAX_FRUITLESS = 5
"""Programs that poll and end without a task, one after the other, until tasks are refused."""
OFFER_S = 30.0
"""For a service to take a task."""
MAX_REPLY_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class FileReward(msgspec.Struct):
    """What a program writes into its reward file, where it writes more than a number."""

    reward: float
    answers: dict[str, float] = {}


@dataclass(eq=False)
class AgentWorkflow:
    """One per rollout actor: what is started for each rollout."""

    settings: AgentSettings
    gateway: Gateway
    """Of this actor, its owner's."""
    models: Mapping[str, ReachedModel] = field(default_factory=dict[str, "ReachedModel"])
    """The run's own."""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """What programs get besides."""

    def __post_init__(self) -> None:
        self._sandbox: Sandbox | None = None
        self._http: aiohttp.ClientSession | None = None
        self._workers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start what polls. Raises ConfigError where the sandbox is not there."""
        settings = self.settings
        self._sandbox = await asyncio.to_thread(sandbox, settings.sandbox, settings.image)
        if settings.polls and settings.command:
            self._workers = [asyncio.ensure_future(self._keep_running()) for _ in range(settings.workers)]  # noqa: TID251 -- see close

    async def close(self) -> None:
        """End what polls. Rollouts have ended before."""
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers)
        if self._http is not None:
            await self._http.close()

    async def __call__(self, ctx: WorkflowContext, prompt: Prompt) -> tuple[Sample, ...]:
        """One rollout: its samples. Raises what the engine raised, MemberFailed for a fault of the agent."""
        session = AgentSession(ctx.episode, ctx.tokenizer)
        models = models_of_rollout(ctx.episode, self.models, asyncio.get_running_loop())
        rollout = OpenSession(session, prompt, models, is_replay=ctx.is_replay)
        key = self.gateway.open(rollout)
        interrupted = asyncio.ensure_future(session.interrupted.wait())  # noqa: TID251 -- ended below
        acting = asyncio.ensure_future(self._act(ctx, prompt, rollout, key))  # noqa: TID251 -- ended below
        try:
            done, _ = await asyncio.wait(
                (interrupted, acting),
                timeout=None if ctx.run_s == math.inf else ctx.run_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if session.fault is not None:
                raise session.fault
            if not done:
                raise _failed(f"the agent did not finish within {ctx.run_s:g} s (rollout.timeout_s)")
            await acting
        finally:
            for task in (interrupted, acting):
                task.cancel()
            try:
                await asyncio.wait((interrupted, acting))
            finally:
                await self.gateway.close(key)
        samples = session.samples(rollout.reward)
        if not samples:
            raise _failed("the agent ended without a turn of the model")
        return samples

    async def _act(self, ctx: WorkflowContext, prompt: Prompt, rollout: OpenSession, key: str) -> None:
        task = {**task_of(prompt), **ctx.facts}
        if self.settings.command and not self.settings.polls:
            with ctx.episode.waits_for("agent"):
                await self._run_program(task, rollout, key)
        else:
            await self._serve(ctx.episode, task, rollout, key)
        if rollout.end is not None and rollout.end.failure is not None:
            raise _failed(rollout.end.failure, rollout.end.kind)

    # -- a program

    async def _run_program(self, task: dict[str, Any], rollout: OpenSession, key: str) -> None:
        settings = self.settings
        async with _scratch() as scratch:
            (scratch / "task.json").write_bytes(msgspec.json.encode(task))
            status, ending = await self._run(scratch, key)
            was_killed = status < 0 and not settings.cpu_s  # by whom, is not known: not the policy's fault
            if settings.reward == "exit" and not was_killed:
                rollout.reward = float(status == 0) if rollout.reward is None else rollout.reward
                return
            if status != 0 and (rollout.end is None or rollout.end.failure is None):
                raise _failed(ending)
            if settings.reward == "file":
                self._read_reward(scratch / "reward.json", rollout)

    async def _run(self, scratch: Path, key: str) -> tuple[int, str]:
        """The program's exit status, negative for a signal, and how it ended, in words with the end of its output. It
        ends with this call, and all that it started. Raises OSError if it cannot be started."""
        settings = self.settings
        folder = str(Path(settings.dir or ".").resolve())
        is_inside = settings.sandbox != "none" and settings.network == "gateway"
        port = (await self.gateway.served()).port
        url = f"http://{LOOPBACK}:{port}" if is_inside else await self.gateway.address()
        job = Job(
            command=tuple(shlex.split(settings.command)), scratch=scratch, folder=folder, visible=("/", folder),
            environ=self.environ,
            env={**settings.env, **self._environment(key, str(scratch), url), "PYTHONUNBUFFERED": "1"},
            limits=Limits(cpu_s=settings.cpu_s, memory_gb=settings.memory_gb),
            has_network=not is_inside, port=port, serve=self.gateway.serving,
        )  # fmt: skip
        assert self._sandbox is not None
        end = await self._sandbox.run(job)
        tail = end.output[-TAIL_CHARS:].replace(key, "<its key>").strip()
        return end.status, f"the agent's program ended with {end.words}: {tail or '(no output)'}"

    def _environment(self, key: str, scratch: str, url: str) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key),
            **dict.fromkeys(("OPENAI_MODEL", "ANTHROPIC_MODEL"), MODEL),
            **dict.fromkeys(("ANTHROPIC_BASE_URL", "MYXA_BASE_URL"), url),
            "MYXA_TASK_FILE": f"{scratch}/task.json",
            "MYXA_REWARD_FILE": f"{scratch}/reward.json",
            "MYXA_SCRATCH": scratch,
            **({"MYXA_TASKS_KEY": key} if self.settings.polls else {}),
            **past_proxies({**self.environ, **self.settings.env}, urlsplit(url).hostname or ""),
            "HOME": scratch,
            "TMPDIR": scratch,
        }

    def _read_reward(self, path: Path, rollout: OpenSession) -> None:
        if rollout.reward is not None:
            return
        try:
            written = msgspec.json.decode(file_out(path), type=float | FileReward)
        except FileNotFoundError:
            raise _failed("the agent's program wrote no reward into $MYXA_REWARD_FILE") from None
        except (OSError, msgspec.MsgspecError) as error:
            raise _failed(f"the agent's reward file cannot be read: {error}") from error
        rewards = FileReward(written) if isinstance(written, float) else written
        try:
            rollout.reward = checked_reward(rewards.reward)
            for answer, reward in rewards.answers.items():
                rollout.session.reward_turn(answer, reward)
        except RequestFault as fault:
            raise _failed(f"the agent's reward file cannot be read: {fault.text}") from fault

    # -- a service

    async def _serve(self, episode: Episode, task: dict[str, Any], rollout: OpenSession, key: str) -> None:
        """Offer the task until it is taken, then wait for its end."""
        url = await self.gateway.address()
        offered = {**task, "key": key, "base_url": url, "openai_base_url": f"{url}/v1", "model": MODEL}
        with episode.waits_for("agent", "to take its task"):
            if self.settings.polls:
                await self.gateway.offer(offered, key).taken.wait()
            else:
                await self._push(offered, rollout, key)
        with episode.waits_for("agent"):
            await self._until_ended(rollout)

    async def _until_ended(self, rollout: OpenSession) -> None:
        loop, silence_s = asyncio.get_running_loop(), self.settings.silence_s
        rollout.heard_s = loop.time()
        while not rollout.ended.is_set():
            silent_s = 0.0 if rollout.num_under_way else loop.time() - rollout.heard_s
            if silent_s >= silence_s:
                raise _failed(f"nothing was heard of the agent for {silence_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence_s - silent_s):
                    await rollout.ended.wait()

    async def _push(self, task: dict[str, Any], rollout: OpenSession, key: str) -> None:
        once = blake2b(key.encode(), digest_size=16).hexdigest()  # such headers are logged, keys are not to be
        headers = {"Content-Type": "application/json", "Idempotency-Key": once}
        self._http = self._http or client_session(keepalive_s=15.0)
        body = msgspec.json.encode(task)
        while not rollout.ended.is_set():
            try:
                status, reply, _ = await post_bounded(
                    self._http, self.settings.url, body, headers,
                    within_s=OFFER_S, max_bytes=MAX_REPLY_BYTES, name=f"the agent service at {self.settings.url}",
                )  # fmt: skip
            except NoAnswer:
                await asyncio.sleep(RETRY_S)  # it is absent: rollout.timeout_s bounds how long
                continue
            except AnswerTooLong as long:
                raise _failed(str(long), "network") from long
            if 200 <= status < 300:
                return
            if status not in (429, 502, 503, 504):
                answer = reply[-TAIL_CHARS:].decode(errors="replace").replace(key, "<its key>")
                raise _failed(f"the agent service refused the task with status {status}: {answer}", "network")
            await asyncio.sleep(RETRY_S)

    async def _keep_running(self) -> None:
        """A program that polls, started again whenever it ends."""
        num_fruitless = 0
        while True:
            key, num_taken = self.gateway.add_service(), self.gateway.num_taken
            try:
                async with _scratch() as scratch:
                    _, why = await self._run(scratch, key)
            except MemberFailed as failed:
                why = failed.message
            _log.warning("%s; it is started again", why)
            self.gateway.drop_service(key, why)
            num_fruitless = 0 if self.gateway.num_taken > num_taken else num_fruitless + 1
            if num_fruitless >= MAX_FRUITLESS:
                self.gateway.refuse_offers(f"programs end before they take a task: {why}")
            await asyncio.sleep(RETRY_S)


@contextlib.asynccontextmanager
async def _scratch() -> AsyncGenerator[Path]:
    """A folder for a program. Raises MemberFailed where it cannot be made or filled, or the program not be started."""
    try:
        async with scratch_folder() as scratch:
            yield scratch
    except OSError as error:
        raise _failed(f"the agent's program cannot be started: {error}", "sandbox") from error


def _failed(fault: str, kind: FailureKind = "environment") -> MemberFailed:
    return MemberFailed(fault, kind=kind, remedy="see what the agent does; docs/agents.md")
