"""One real coordinator, buffer, monitor and registry against many light rollout actors: what grows with their number.

    python bench/scale.py [--actors 100 300] [--step-s 5] [--steps 4] [--tokens 256] [--at-once 0]
    python bench/scale.py --paper

Coordinator, buffer (with its SQLite ledger), monitor and registry are those of a run, each in a process of its own,
over loopback. The rollout actors are the real role with our transport, each a node with own sockets and identity, 125
in a process. Their engine is a stub: it stands for what an engine would do, answers a sample after a lognormal time
and takes weights at once. The trainer is light: it claims, fetches, waits `--step-s` and publishes versions without
bytes. A batch has one group for each rollout actor. After the steps a tenth of the rollout actors is killed at once.
Answers are those that another process gets, which has nothing else to do. Prints markdown.
`--paper`: steps of 1k to 10k GPUs by a model of calls and bytes; rate of the store and size of a record as measured.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from myxa.actors.contracts import BufferContract, CoordinatorContract, MonitorContract, RolloutContract, TrainerContract
from myxa.actors.knobs.owner import LOG_LEVEL, KnobOwner, OwnsKnobs
from myxa.core.config import load_config
from myxa.core.messages import DrawRequest, StepReport, WeightManifest
from myxa.core.process import die_with_parent
from myxa.core.protocols import Delta, EngineInfo
from myxa.core.weight_channel import WeightProgress
from myxa.launch.worker import set_up_interpreter
from myxa.transport.address import Rendezvous
from myxa.transport.descriptors import raise_limit
from myxa.transport.node import Node
from myxa.transport.session.links import Links
from myxa.transport.session.session import Session

REAL = ("registry", "coordinator", "buffer", "monitor")
ACTORS_A_PROCESS = 125
MEDIAN = 0.25
"""Time of an engine's answer, in steps."""
RUN = """
run = {{ name = "scale", dir = "{folder}", num_steps = 1000, seed = 0 }}
model = {{ path = "{folder}/model" }}
data = {{ train = "{folder}/prompts.jsonl" }}
rollout = {{ num_samples = 4, max_new_tokens = {tokens}, max_groups = 8 }}
algo = {{ batch_size = {num}, group_filter = "none" }}
async = {{ max_staleness = 2 }}
weights = {{ adopt_at_once = {at_once} }}
"""
now = time.monotonic


# -- parts, each in its own process


async def attach(name: str, folder: Path) -> Node:
    while not (folder / "rdzv.json").exists():
        await asyncio.sleep(0.05)
    return await Node.attach(name=name, rdzv=Rendezvous.load(folder / "rdzv.json"), timeout_s=120)


class StubEngine:
    """See the module's head."""

    pause_mode = "in_place"

    def __init__(self, index: int, commits: Any, median_s: float, tokens: int) -> None:
        self.version, self._random, self._median_s = -1, random.Random(index), median_s
        self._index, self._commits = index, commits
        self._ids, self._logprobs = np.full(tokens, 7, np.int32), np.full(tokens, -0.5, np.float32)

    async def info(self) -> EngineInfo:
        return EngineInfo(kind="stub", vocab_size=1024, context_length=1 << 16, max_running=64, version=self.version)

    start = info

    async def generate(self, request: Any) -> AsyncIterator[Delta]:
        await asyncio.sleep(self._median_s * self._random.lognormvariate(0.0, 0.6))
        versions = self._ids * 0 + self.version
        yield Delta(output_ids=self._ids, logprobs=self._logprobs, versions=versions, finish="length")

    async def prepare_weights(self, manifest: Any) -> None: ...

    async def commit_weights(self, version: int) -> None:
        self.version = version
        self._commits.write(f"{self._index} {version} {now()!r}\n")

    async def abort(self, request_id: str | None = None) -> None: ...

    close = abort

    def weight_progress(self) -> WeightProgress:
        return WeightProgress(at="stub")

    async def until_lost(self) -> None:
        await asyncio.Event().wait()


async def fleet(folder: Path, options: Any, first: int, end: int) -> None:
    from myxa.actors.models.tokenizer import load_tokenizer
    from myxa.actors.rewards.rewarder import FixedReward
    from myxa.actors.rollout.group_runner import RolloutOptions
    from myxa.actors.rollout.rollout import Rollout
    from myxa.actors.workflows.named import BUILTINS

    config = load_config(folder / "run.toml")
    tokenizer = load_tokenizer(config.model.path, config.data)
    commits, puts = ((folder / f"{file}-{first}.txt").open("a", buffering=1) for file in ("commits", "puts"))

    class Light(Rollout):
        async def _deliver(self, group: Any, attempt: int) -> None:
            began = now()
            await super()._deliver(group, attempt)
            puts.write(f"{began!r} {now() - began!r}\n")

    async def begin_actor(index: int) -> None:
        node = await attach(f"rollout/{index}", folder)
        engine: Any = StubEngine(index, commits, options.step_s * MEDIAN, options.tokens)
        rollout = Light(
            engine=engine, workflow=BUILTINS["single_turn"], scorer=FixedReward(), tokenizer=tokenizer,
            options=RolloutOptions(rollout=config.rollout, run_dir=str(folder)),
        )  # fmt: skip
        await node.start(rollout, f"rollout/{index}")

    await asyncio.gather(*map(begin_actor, range(first, end)))
    await asyncio.Event().wait()


class LightTrainer(OwnsKnobs, TrainerContract):
    """See the module's head."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self._folder, self._step_s = folder, step_s
        self._log = (folder / "steps.jsonl").open("a", buffering=1)

    async def on_start(self) -> None:
        self.knob_owner = KnobOwner(self.ctx.name, (LOG_LEVEL,))
        self._coordinator = self.ctx.ref(CoordinatorContract, "coordinator")
        self._buffer = self.ctx.ref(BufferContract, "buffer")
        self.ctx.spawn(self._coordinator.trainer_ready(0, self._made(0), {}), name="report in")

    def _made(self, version: int) -> WeightManifest:
        return WeightManifest(version=version, channel="disk", location=str(self._folder), num_bytes=0, tensors=(),
                              digest="", host="", lineage=self.ctx.epoch)  # fmt: skip

    async def release_weights(self, version: int) -> None: ...

    async def run_leader(self, start_version: int) -> None:
        self.ctx.spawn(self._train(start_version), name="train")

    async def _train(self, step: int) -> None:
        while not (self._folder / "go").exists():
            await asyncio.sleep(0.05)
        while True:
            asked_s = now()
            while not (claim := await self._buffer.claim(step, 2.0)).groups:
                pass
            claimed, ids = now(), tuple(claim.groups)
            for first in range(0, len(ids), 256):
                await self._buffer.fetch(ids[first : first + 256])
            fetched = now()
            await asyncio.sleep(max(0.0, self._step_s - (fetched - claimed)))
            await self._buffer.trained(step)
            step += 1
            line = {"step": step, "at": now(), "wait": claimed - asked_s, "fetch": fetched - claimed}
            self._log.write(json.dumps(line) + "\n")
            await self._coordinator.version_made(self._made(step), StepReport(step=step - 1, version=step, metrics={}))


async def real(role: Any, folder: Path) -> None:
    """That actor as in a run, in a process that counts."""
    from myxa.launch.actor_spec import ActorSpec
    from myxa.launch.program import build_actor

    counts: Counter[str] = Counter()
    counted(Node, "deliver", lambda *_: counts.update({"calls": 1}))
    counted(Session, "received", lambda _, source, lane, data: counts.update({"messages": 1, "bytes": len(data)}))
    counted(Links, "hand_over", lambda _, link, lane, envelope, *rest, **more: counts.update(
        {"messages": 1, "bytes": len(envelope.body) + sum(map(len, envelope.frames))}))  # fmt: skip
    if role == "registry":
        node = await Node.attach(name="launcher/0", run_dir=folder)
        node.rendezvous.save(folder / "rdzv.json")
    else:
        node = await attach(role, folder)
        spec = ActorSpec(name=role, role=role, kind="", index=0, node=0)
        await node.start(build_actor(spec, load_config(folder / "run.toml"), folder), name=role)
    log, lag, waiting, written = (folder / f"{role}.jsonl").open("a", buffering=1), 0.0, 0, now()
    while not node.failed.done():
        began = now()
        await asyncio.sleep(0.05)
        lag, waiting = max(lag, now() - began - 0.05), max(waiting, node.num_waiting())
        if now() - written > 0.5:
            suspects = node.counters().get("suspect", 0)
            log.write(json.dumps({"at": now(), "lag": lag, "waiting": waiting, "suspects": suspects, **counts}) + "\n")
            lag, waiting, written = 0.0, 0, now()
    raise node.failed.result()


def counted(owner: type, name: str, note: Callable[..., None]) -> None:
    inner = getattr(owner, name)

    def outer(*args: Any, **more: Any) -> Any:
        note(*args, **more)
        return inner(*args, **more)

    setattr(owner, name, outer)


# -- the process that directs and asks


class World:
    """The processes of one run, and what their files say."""

    def __init__(self, folder: Path, options: Any, num: int) -> None:
        self.folder, self.options, self.num, self.num_left = folder, options, num, num - max(1, num // 10)
        self.parts: dict[str, subprocess.Popen[bytes]] = {}
        ends = [*range(0, self.num_left, ACTORS_A_PROCESS), self.num_left, num]
        self.fleets = [f"fleet {first} {end}" for first, end in itertools.pairwise(ends)]

    def start(self, *names: str) -> None:
        for name in names:
            log = (self.folder / f"{name}.log").open("wb")
            command = [sys.executable, __file__, "--part", name, "--folder", str(self.folder), *sys.argv[1:]]
            self.parts[name] = subprocess.Popen(command, stderr=log, stdout=log)

    def cpu(self) -> Counter[str]:
        """Seconds so far, IO threads too; light actors and light trainer together as "light"."""
        used: Any = Counter()
        for name, part in self.parts.items():
            text = Path(f"/proc/{part.pid}/stat").read_text().rpartition(")")[2].split()
            used[name if name in REAL else "light"] += (int(text[11]) + int(text[12])) / os.sysconf("SC_CLK_TCK")
        return used

    def rss_kb(self, name: str) -> float:
        return int(Path(f"/proc/{self.parts[name].pid}/statm").read_text().split()[1]) * 4.096

    def numbers(self, pattern: str) -> list[list[float]]:
        lines = (line for file in self.folder.glob(pattern) for line in file.read_text().splitlines())
        return [[float(number) for number in line.split()] for line in lines]

    def log(self, name: str, since: float = 0.0, until: float = 1e18) -> list[dict[str, float]]:
        file = self.folder / f"{name}.jsonl"
        lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return [line for line in lines if since <= line["at"] <= until]

    def adopted_by_all(self, version: int) -> float:
        """When the last actor began to serve that version or a newer one; 0: not all do."""
        first: dict[float, float] = {}
        for index, at_version, at in self.numbers("commits-*.txt"):
            if at_version >= version:
                first[index] = min(at, first.get(index, at))
        return max(first.values()) if len(first) == self.num else 0.0

    def query(self, text: str) -> list[Any]:
        with sqlite3.connect(f"file:{self.folder}/ledger.sqlite?mode=ro", uri=True, timeout=30) as db:
            return db.execute(text).fetchall()

    async def until(self, is_met: Callable[[], Any], goal: str, every_s: float = 0.1) -> float:
        """Seconds waited."""
        began = now()
        while not is_met():
            dead = [name for name, part in self.parts.items() if part.poll() is not None]
            if dead or now() > began + 600:
                log_lines = (self.folder / f"{dead[0]}.log").read_text().splitlines()[-30:] if dead else ()
                sys.exit("\n".join([f"{self.num} actors: no {goal}", *dead, *log_lines]))
            await asyncio.sleep(every_s)
        return now() - began


def share(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))] if values else float("nan")


def p50_p99(seconds: list[float]) -> str:
    return f"{1e3 * share(seconds, 0.5):.1f}, {1e3 * share(seconds, 0.99):.0f}"


async def simulate(world: World) -> dict[str, str]:
    num, step_s, row = world.num, world.options.step_s, dict[str, str]()
    world.start(*REAL)
    node = await attach("probe", world.folder)
    await world.until(lambda: set(REAL[1:]) <= set(node.peers("")), "coordinator, buffer, monitor")
    empty, idle = {name: world.rss_kb(name) for name in REAL}, world.cpu()
    world.start(*world.fleets)
    joined_s = await world.until(lambda: len(node.peers("rollout/")) == num, "actors")
    row["all have joined, s (CPU s of registry)"] = f"{joined_s:.1f} ({world.cpu()['registry'] - idle['registry']:.1f})"
    await asyncio.sleep(2.0)
    world.start("trainer")
    await world.until(lambda: node.peers("trainer/"), "trainer")
    began = now()
    await world.until(lambda: world.adopted_by_all(0), "first weights")
    row["first weights at all, s"] = f"{world.adopted_by_all(0) - began:.1f}"
    (world.folder / "go").touch()
    await world.until(lambda: len(world.log("steps")) >= 2, "steps")
    before, began = world.cpu(), now()
    answers: dict[str, list[float]] = {"draw": [], "coordinator": [], "monitor": [], "registry": []}
    probing = asyncio.create_task(probe(node, answers))
    await world.until(lambda: len(world.log("steps")) >= world.options.steps + 2, "steps")
    ended, after = now(), world.cpu()
    probing.cancel()
    steps = world.log("steps", began, ended)
    row["steps/s, of those asked for"] = f"{len(steps) / (ended - began):.3f} of {1 / step_s:.3f}"
    spread = [adopted_s - x["at"] for x in steps[:-1] if (adopted_s := world.adopted_by_all(int(x["step"])))]
    row["a version is adopted by all after, s"] = f"{max(spread, default=float('nan')):.1f}"
    row["fetch of a batch, s"] = f"{max(x['fetch'] for x in steps):.2f}"
    for name, took in answers.items():
        row[f"answer p50, p99 ms: {name}"] = p50_p99(took)
    row["put p50, p99 ms"] = p50_p99([took for start, took in world.numbers("puts-*.txt") if began <= start <= ended])
    for name in REAL:
        logs = world.log(name, began, ended)
        a_step = {key: (logs[-1][key] - logs[0][key]) / len(steps) for key in ("calls", "messages", "bytes")}
        row[f"{name}: calls, messages, kB a step"] = (
            f"{a_step['calls']:,.0f}, {a_step['messages']:,.0f}, {a_step['bytes'] / 1e3:,.0f}"
        )
        row[f"{name}: most calls in hand, longest hold-up ms"] = (
            f"{max(x['waiting'] for x in logs):.0f}, {1e3 * max(x['lag'] for x in logs):.0f}"
        )
        row[f"{name}: kB an actor"] = f"{(world.rss_kb(name) - empty[name]) / num:.0f}"
    for name in (*REAL, "light"):
        row[f"{name}: cores"] = f"{(after[name] - before[name]) / (ended - began):.3f}"
    row["times a peer seemed silent"] = f"{sum(world.log(name)[-1]['suspects'] for name in REAL):.0f}"
    await kill_some(world, node, row)
    await node.close(grace_s=0.0)
    return row


async def probe(node: Node, answers: dict[str, list[float]]) -> None:
    nothing = DrawRequest(rollout="probe", epoch=1, version=0, max_groups=0, wait_s=0.0)
    buffer, coordinator = node.ref(BufferContract, "buffer"), node.ref(CoordinatorContract, "coordinator")
    monitor, registry = node.ref(MonitorContract, "monitor"), node.registry
    asks: dict[str, Callable[[], Any]] = {
        "draw": lambda: buffer.draw(nothing), "coordinator": coordinator.knobs, "monitor": lambda: monitor.shares(1.0),
        "registry": lambda: registry.process_exited("nobody", 1, 0),
    }  # fmt: skip
    while True:
        for name, ask in asks.items():
            asked_s = now()
            await ask()
            answers[name].append(now() - asked_s)
        await asyncio.sleep(0.05)


async def kill_some(world: World, node: Node, row: dict[str, str]) -> None:
    first = world.num_left
    held = f"SELECT COUNT(*) FROM groups WHERE state = 'DISPATCHED' AND CAST(SUBSTR(rollout, 9) AS INT) >= {first}"
    await world.until(lambda: world.query(held)[0][0] >= world.num - first, "groups at those that are to die", 0.02)
    part = world.parts.pop(world.fleets[-1])
    part.kill()
    part.wait()
    began, num_groups = now(), world.query(held)[0][0]
    await asyncio.gather(*(
        node.registry.process_exited(f"rollout/{i}", 0, -signal.SIGKILL, part.pid) for i in range(first, world.num)
    ))  # fmt: skip
    await world.until(lambda: not world.query(held)[0][0], "groups given back", 0.02)
    row["actors killed, their groups requeued after s"] = f"{world.num - first}, {num_groups} in {now() - began:.2f}"
    number = len(world.log("steps")) + 3
    await world.until(lambda: len(world.log("steps")) >= number, "steps after it")
    world.parts["trainer"].send_signal(signal.SIGSTOP)
    done = "state IN ('TRAINED', 'DURABLE')"
    trained = world.query(f"SELECT step, COUNT(*), COUNT(DISTINCT draw) FROM groups WHERE {done} GROUP BY step")
    num_draws, end = world.query("SELECT COUNT(DISTINCT draw), MAX(draw) + 1 FROM groups")[0]
    is_exact = num_draws == end and all(count == different == world.num for _, count, different in trained)
    row["ledger: draws, trained"] = f"{num_draws}, {sum(x[1] for x in trained)}{'' if is_exact else ' WRONG'}"


# -- on paper

CALL_S, PING_S = 45e-6, 15e-6
"""Processor time of a typed call with both ends (`bench/calls.py`), and of a message of the heartbeat."""
BULK_BYTES_S = 1e9
"""Large arrays between two processes, with encoding and decoding."""
RETURNED_STEPS = 10
"""Steps between two durable checkpoints: so long the ledger keeps payloads."""


def paper() -> dict[str, dict[str, str]]:
    tokens_s, token_bytes, record_bytes = store_rate()
    rows: dict[str, dict[str, str]] = {}
    for gpus, engines, ranks, groups, tokens, step_s in (
        (1_000, 96, 232, 512, 8_192, 120), (4_000, 400, 800, 1_024, 16_384, 240),
        (10_000, 1_000, 2_000, 2_048, 16_384, 300), (10_000, 8_000, 2_000, 2_048, 16_384, 300),
    ):  # fmt: skip
        in_none = 4  # coordinator, buffer, monitor, leader: told of all, and all of them
        processes = engines + ranks - 1 + gpus // 8 + in_none
        step_tokens, step_bytes = groups * 16 * tokens, groups * 16 * tokens * token_bytes
        calls = 2 * groups + engines * step_s / 5 + engines + step_s / 2
        busy_s = calls * CALL_S + 2 * engines * step_s * PING_S + step_tokens / tokens_s + 2 * step_bytes / BULK_BYTES_S
        column = f"{gpus:,} GPUs, {engines:,} engines"
        rows[column] = {
            "trainer ranks, prompts x samples of tokens, step s": f"{ranks:,}, {groups:,} x 16 x {tokens:,}, {step_s}",
            "buffer: calls a step, GB in and out": f"{calls:,.0f}, {step_bytes / 1e9:.1f} each",
            "buffer: share of its loop": f"{busy_s / step_s:.0%}",
            "buffer: ledger with 10 steps' payloads, GB": f"{RETURNED_STEPS * step_bytes / 1e9:.0f}",
            "leader: GB fetched and sent on to ranks": f"{step_bytes / 1e9:.1f}, {step_bytes / 1e9:.1f}",
            "coordinator: calls a step": f"{3 * engines:,}",
            "coordinator: s until all have adopted, 2 s each, 1 or 16 at once": f"{2 * engines:,}, {engines / 8:,.0f}",
            "monitor: calls/s": f"{engines + ranks + 3:,}",
            "registry: calls/s, heartbeats/s": f"{processes / 3:,.0f}, {2 * processes:,}",
            "registry: GB sent until all have joined": f"{2 * in_none * processes * 2 * record_bytes / 1e9:.2f}",
            "directory of a rollout actor, of the buffer, MB": (
                f"{in_none * record_bytes / 1e6:.3f}, {processes * record_bytes / 1e6:.1f}"
            ),
        }
    return rows


def store_rate() -> tuple[float, float, float]:
    """Tokens/s of the store for groups of 16 x 16,384, bytes of a token in it; bytes of an actor in the directory."""
    import buffer as store
    import msgspec

    from myxa.core.handlers import handlers_of
    from myxa.transport.registry.directory import HostedActor, NodeRecord
    from myxa.transport.wire import Endpoints

    store.NUM_SAMPLES, store.RESPONSE_TOKENS = 16, 16_384
    store._TOKENS = np.random.default_rng(0).integers(0, 150_000, 16_384, dtype=np.int32)
    store._LOGPROBS = -np.random.default_rng(1).random(16_384, dtype=np.float32)
    num = 2 * store.BATCH
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        took_s = store.Store(path).train(num)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    actor = HostedActor(name="rollout/0", index=0, handlers=handlers_of(RolloutContract).names)
    ipc, tcp = "ipc:///run/user/1000/myxa/00000000000.c", "tcp://10.0.0.1:40000"
    endpoints = Endpoints(node_rank=1, ipc=(ipc, ipc), tcp=(tcp, tcp), curve="x" * 40)
    record = NodeRecord(name="rollout/0", node_id=9, epoch=1, endpoints=endpoints, actors=(actor,))
    num_tokens = num * 16 * 16_384
    return num_tokens / took_s, size / num_tokens, len(msgspec.json.encode(record))


def table(columns: dict[str, dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {name} | {' | '.join(column.get(name, '') for column in columns.values())} |" for name in names]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--step-s", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=0, help="engines that adopt at once; 0: by itself")
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    raise_limit()
    set_up_interpreter()
    if options.part:
        die_with_parent(os.getppid())
        part(options.part, options)
    elif options.paper:
        print(table(paper()))
    else:
        print(table({f"{num} actors": run(num, options) for num in options.actors}))


def part(name: str, options: Any) -> None:
    kind, *ends = name.split()
    if kind == "fleet":
        work = fleet(options.folder, options, *map(int, ends))
    else:
        work = trainer(options) if kind == "trainer" else real(kind, options.folder)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def trainer(options: Any) -> None:
    node = await attach("trainer/0", options.folder)
    await node.start(LightTrainer(options.folder, options.step_s), "trainer/0")
    await asyncio.Event().wait()


def run(num: int, options: Any) -> dict[str, str]:
    from myxa.actors.models.tiny import make_tiny_model
    from myxa.launch.demo.run import write_rows

    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        make_tiny_model(folder / "model", preset="0p5m", seed=0)
        write_rows(folder / "prompts.jsonl", 4 * num, seed=0)
        text = RUN.format(folder=folder, tokens=options.tokens, num=num, at_once=options.at_once)
        (folder / "run.toml").write_text(text)
        world = World(folder, options, num)
        try:
            return asyncio.run(simulate(world))
        finally:
            for process in world.parts.values():
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
