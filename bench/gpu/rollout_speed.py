"""Tokens a second of one SGLang server through our rollout actor, and through a bare asyncio client, pair by pair.

    python rollout_speed.py [--shape 0.6b] [--rounds 3] [--groups 160] [--device cpu]

Both sides run in processes of their own and send the same requests to the same server: groups of 8 of one prompt, at
most `--in-flight` groups at a time, as many new tokens as each group's prompt says, log-probs asked for, streamed. The
bare client parses nothing but each stream's last event. Ours does all that a run does: workflow, tokenizer, per-token
records, reward, delivery to the buffer in another process. Prompts differ from side to side, lengths do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import string
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop
from figures import Report, median, number, parser, work_folder
from make_model import make_apart
from rollout_peers import QuietCoordinator, QuietMonitor, RoundBuffer
from servers import Server, ServerDiedError, running
from trial_runs import attach_override, stage

from myxa.actors.contracts import RolloutContract
from myxa.core.config import load_config
from myxa.core.messages import Assignment, SamplingParams, WeightManifest
from myxa.core.samples import Message, Prompt
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.program import build_actor
from myxa.launch.worker import set_up_interpreter
from myxa.transport.node import Node, Rendezvous

GROUP = 8
PROMPT_LETTERS = 120
OURS, BARE, WHOLE = "our rollout actor", "bare client", "bare client, not streamed"
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Job:
    """One prompt, answered eight times."""

    text: str
    num_new: int


@dataclass(frozen=True)
class Round:
    """What one side did in one round."""

    num_tokens: int
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        return self.num_tokens / self.wall_s


def make_jobs(num: int, longest: int, seed: int, salt: str) -> list[Job]:
    """The same lengths for the same seed, other prompts for another salt: no side finds the other's in the cache."""
    lengths, letters = random.Random(seed), random.Random(f"{seed}{salt}")
    half = longest // 2
    return [
        Job("".join(letters.choices(string.ascii_letters, k=PROMPT_LETTERS)), lengths.randint(half, longest + half))
        for _ in range(num)
    ]


# -- the bare client ---------------------------------------------------------------------------------------------------


class BareClient:
    """aiohttp and a semaphore, in a process of its own."""

    def __init__(self, url: str, in_flight: int) -> None:
        self._url = url + "/generate"
        self._room = asyncio.Semaphore(in_flight)

    async def play(self, groups: Sequence[tuple[list[int], int]], *, streams: bool) -> Round:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            cpu_s, started_s = time.process_time(), time.monotonic()
            ask = self._streamed if streams else self._whole
            counts = await asyncio.gather(*(self._group(session, ask, ids, num) for ids, num in groups))
            return Round(sum(counts), time.monotonic() - started_s, time.process_time() - cpu_s)

    async def _group(
        self, session: aiohttp.ClientSession, ask: Callable[..., Awaitable[int]], ids: list[int], num_new: int
    ) -> int:
        async with self._room:
            return sum(await asyncio.gather(*(ask(session, self._body(ids, num_new)) for _ in range(GROUP))))

    def _body(self, ids: list[int], num_new: int) -> dict[str, object]:
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": num_new, "ignore_eos": True}
        return {"input_ids": ids, "sampling_params": params, "return_logprob": True}

    async def _streamed(self, session: aiohttp.ClientSession, body: dict[str, object]) -> int:
        headers = {"Content-Type": "application/json"}
        last, rest = b"", b""
        async with session.post(self._url, data=orjson.dumps({**body, "stream": True}), headers=headers) as answer:
            answer.raise_for_status()
            async for data in answer.content.iter_any():
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and b"[DONE]" not in line:
                        last = line
        return int(orjson.loads(last[5:])["meta_info"]["completion_tokens"])

    async def _whole(self, session: aiohttp.ClientSession, body: dict[str, object]) -> int:
        headers = {"Content-Type": "application/json"}
        async with session.post(self._url, data=orjson.dumps(body), headers=headers) as answer:
            answer.raise_for_status()
            return int(orjson.loads(await answer.read())["meta_info"]["completion_tokens"])


async def serve_bare(url: str, in_flight: int) -> None:
    """Rounds come as lines on stdin, figures go as lines to stdout."""
    client = BareClient(url, in_flight)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        found = await client.play(order["groups"], streams=order["streams"])
        print(json.dumps([found.num_tokens, found.wall_s, found.cpu_s]), flush=True)


# -- the rollout actor -------------------------------------------------------------------------------------------------


async def serve_actor(rendezvous: Path, run_file: Path, sets: Sequence[str]) -> None:
    """The rollout actor as a run's worker has it, until stdin is closed."""
    config = load_config(run_file, sets)
    kind = config.roles.rollout.kind
    spec = ActorSpec(name="rollout/0", role="rollout", kind=kind, index=0, node=0)
    node = await Node.attach(name="rollout/0", rdzv=Rendezvous.load(rendezvous))
    await node.start(build_actor(spec, config, run_file.parent), name="rollout/0")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await node.close(grace_s=2)


class Actors:
    """The rollout actor's process, and what surrounds it, here."""

    def __init__(self, node: Node, process: subprocess.Popen[str]) -> None:
        self.node = node
        self.process = process
        self.buffer = RoundBuffer()
        self.coordinator = QuietCoordinator()
        self._num_groups = 0

    async def start(self, model: Path) -> None:
        """All actors up, and the engine at version 1: the server's own weights, read again."""
        rollout = self.node.ref(RolloutContract, "rollout/0")
        await self._while_alive(self.coordinator.engine_up(PATIENCE_S))
        manifest = WeightManifest(
            version=1, channel="disk", location=str(model), num_bytes=0, tensors=(), digest="", host=""
        )
        for ack in (await rollout.prepare_weights(manifest), await rollout.commit_weights(1)):
            if not ack.accepted:
                raise RuntimeError(f"the engine refused its own weights: {ack.reason}")

    async def play(self, jobs: Sequence[Job], limit_s: float) -> Round:
        assignments = [self._assignment(job) for job in jobs]
        worker = psutil.Process(self.process.pid)
        before = worker.cpu_times()
        self.buffer.begin(assignments)
        await self._while_alive(self.buffer.finished(limit_s))
        after = worker.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        return Round(self.buffer.num_tokens, self.buffer.last_s - self.buffer.first_s, cpu_s)

    async def _while_alive(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Wait, but not for a process that is gone."""
        task = asyncio.ensure_future(waiting)
        while not task.done():
            if self.process.poll() is not None:
                task.cancel()
                raise RuntimeError(f"the rollout actor's process ended with {self.process.returncode}")
            await asyncio.wait({task}, timeout=0.2)
        task.result()

    def _assignment(self, job: Job) -> Assignment:
        number, self._num_groups = self._num_groups, self._num_groups + 1
        prompt = Prompt(group_id=number, row=number, pass_index=0, messages=(Message(role="user", content=job.text),))
        sampling = SamplingParams(max_new_tokens=job.num_new, ignore_eos=True)
        return Assignment(prompt=prompt, attempt=0, num_samples=GROUP, sampling=sampling)


# -- the comparison ----------------------------------------------------------------------------------------------------


def child(*args: str, stdout: int | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).resolve()), *args]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=stdout)


class Bare:
    """The bare client's process."""

    def __init__(self, url: str, in_flight: int, model: Path) -> None:
        from myxa.actors.models.tokenizer import load_tokenizer

        self._tokenizer = load_tokenizer(model)
        self.process = child("--role", "bare", "--url", url, "--in-flight", str(in_flight), stdout=subprocess.PIPE)

    async def play(self, jobs: Sequence[Job], limit_s: float, *, streams: bool = True) -> Round:
        groups = [
            (self._tokenizer.render([Message(role="user", content=job.text)], add_generation_prompt=True), job.num_new)
            for job in jobs
        ]
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"groups": groups, "streams": streams}) + "\n")
        self.process.stdin.flush()
        async with asyncio.timeout(limit_s):
            line = await asyncio.to_thread(self.process.stdout.readline)
        if not line:
            raise RuntimeError(f"the bare client ended with {self.process.wait(5)}")
        return Round(*json.loads(line))


async def compare(report: Report, options: argparse.Namespace, url: str, work: Path) -> dict[str, list[Round]]:
    """Rounds by side."""
    found: dict[str, list[Round]] = {OURS: [], BARE: [], WHOLE: []}
    node = await Node.attach(name="driver")
    rendezvous = work / "rendezvous.json"
    node.rendezvous.save(rendezvous)
    in_flight = options.in_flight
    process = child(
        *("--role", "actor", "--rendezvous", str(rendezvous), "--run-file", str(work / "async20.toml")),
        *("--sets", json.dumps([attach_override(url), f"rollout.max_groups={in_flight}", *engine_sets(options)])),
    )
    bare = Bare(url, in_flight, work / "model")
    try:
        actors = Actors(node, process)
        for actor, name in (
            (actors.buffer, "buffer"),
            (actors.coordinator, "coordinator"),
            (QuietMonitor(), "monitor"),
        ):
            await node.start(actor, name=name)
        await actors.start(work / "model")
        for number_ in range(-1, options.rounds):
            await one_round(found, actors, bare, options, number_)
            if number_ >= 0:
                told = ", ".join(f"{side} {number(rounds[-1].rate)}" for side, rounds in found.items() if rounds)
                report.say(f"- round {number_}: {told} tokens/s")
    finally:
        for one in (process, bare.process):
            assert one.stdin is not None
            one.stdin.close()
        await node.close(grace_s=2)
        for one in (process, bare.process):
            try:
                one.wait(8)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
    return found


def engine_sets(options: argparse.Namespace) -> list[str]:
    """Spans of the dry run are short, its numbers are float32."""
    return [] if options.device == "cuda" else ['engine.dtype="float32"', "engine.context_length=0"]


async def one_round(
    found: dict[str, list[Round]], actors: Actors, bare: Bare, options: argparse.Namespace, number_: int
) -> None:
    """Both sides, in turn one or the other first; round -1 warms up."""
    num_groups = options.groups if number_ >= 0 else min(options.groups, options.in_flight)

    def jobs(salt: str) -> list[Job]:
        return make_jobs(num_groups, options.longest, options.seed * 1000 + number_, salt)

    plays = [
        (OURS, lambda: actors.play(jobs("ours"), PATIENCE_S)),
        (BARE, lambda: bare.play(jobs("bare"), PATIENCE_S)),
    ]
    if number_ % 2:
        plays.reverse()
    if number_ <= 0:
        plays.append((WHOLE, lambda: bare.play(jobs("whole"), PATIENCE_S, streams=False)))
    for side, play in plays:
        figures = await play()
        if number_ >= 0:
            found[side].append(figures)


def tell(report: Report, found: dict[str, list[Round]]) -> None:
    pairs = [ours.rate / bare.rate for ours, bare in zip(found[OURS], found[BARE], strict=True)]
    rows = [
        (
            side,
            number(median([r.rate for r in rounds])),
            f"{number(min(r.rate for r in rounds))}-{number(max(r.rate for r in rounds))}",
            number(median([r.cpu_s / r.num_tokens * 1e6 for r in rounds])),
            number(median([r.num_tokens for r in rounds])),
        )
        for side, rounds in found.items()
        if rounds
    ]
    report.table(
        "Rollout speed", ("driven by", "tokens/s", "range", "client CPU s per million tokens", "tokens a round"), rows
    )
    report.say(f"Ratio pair by pair: {number(median(pairs))} ({number(min(pairs))}-{number(max(pairs))}).\n")
    report.keep("rounds", {side: [[r.num_tokens, r.wall_s, r.cpu_s] for r in rounds] for side, rounds in found.items()})
    report.goal("rollout actor / bare client, tokens/s", median(pairs), at_least=0.97)


def measure(options: argparse.Namespace) -> None:
    report = Report("rollout", is_dry=options.device == "cpu")
    work = work_folder() / "rollout"
    stage(work, "async20.toml", "spread_reward.py")
    shape = options.shape if options.device == "cuda" else "dry"
    config = make_apart(work / "model", shape, options.device)
    extra = ["--incremental-streaming-output"]
    if options.stream_interval > 1:
        extra += ["--stream-interval", str(options.stream_interval)]
    server = Server(
        folder=work / "model", log=work / "server.log", is_sglang=options.device == "cuda", mem_fraction=0.5,
        max_running=options.in_flight * GROUP, context_length=1024, extra=tuple(extra),
    )  # fmt: skip
    started_s = time.monotonic()
    with running(server):
        try:
            url = server.wait()
            report.say(f"- {config.num_parameters:,} parameters, served after {time.monotonic() - started_s:.0f} s")
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                found = runner.run(compare(report, options, url, work))
        except (ServerDiedError, RuntimeError, TimeoutError) as error:
            report.failed(f"{type(error).__name__}: {error}\n{server.last_words()}")
    tell(report, found)
    report.end()


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--shape", default="0.6b")
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--groups", type=int, default=160, help="groups of 8 in a round")
    args.add_argument("--in-flight", type=int, default=32, help="groups at a time")
    args.add_argument("--longest", type=int, default=256, help="mean of the new tokens of an answer")
    args.add_argument("--stream-interval", type=int, default=32, help="as launched servers have it")
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--role", choices=("measure", "bare", "actor"), default="measure", help=argparse.SUPPRESS)
    args.add_argument("--url", help=argparse.SUPPRESS)
    args.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    args.add_argument("--run-file", type=Path, help=argparse.SUPPRESS)
    args.add_argument("--sets", default="[]", help=argparse.SUPPRESS)
    options = args.parse_args()
    if options.role == "measure":
        measure(options)
        return
    set_up_interpreter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.role == "bare":
            runner.run(serve_bare(options.url, options.in_flight))
        else:
            runner.run(serve_actor(options.rendezvous, options.run_file, json.loads(options.sets)))


if __name__ == "__main__":
    main()
