"""What a turn costs more through the gateway than by a call: milliseconds alone, tokens a second with many sessions.

    python bench/gateway.py [--sessions 1000] [--turns 2] [--tokens 32] [--rounds 3] [--preset 1m]
                            [--attach URL --model FOLDER]

One embedded engine in one process that is set up as an actor's, or the client of an SGLang server that runs. Sessions
of `--turns` turns each, all begun at once: their turns asked for by calls in that process, then by HTTP from a client
process that keeps one connection for each session. Rounds alternate. Every session has to end with as many samples and
learnt tokens as were drawn: what is missing is lost. Goals: at most 3 ms a turn, throughput at least 0.97 of the engine
alone, nothing lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import aiohttp
import uvloop

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.engines.sglang.engine import SglangEngine, SglangOptions
from myxa.actors.gateway.server import Gateway, OpenSession
from myxa.actors.gateway.session import AgentSession
from myxa.actors.models.hf_folder import read_config
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.models.tokenizer import load_tokenizer
from myxa.actors.workflows.episode import Episode, ModelAccess
from myxa.core.messages import SamplingParams
from myxa.core.samples import Message, Prompt
from myxa.launch.worker import set_up_interpreter

ALONE_TURNS = 100


async def talk(url: str, key: str, turns: int, http: aiohttp.ClientSession) -> list[float]:
    """A session's turns; seconds of each."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    took: list[float] = []
    for _ in range(turns):
        began = time.perf_counter()
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{url}/v1/chat/completions", json={"messages": messages}, headers=headers) as answer:
            body = await answer.json()
        took.append(time.perf_counter() - began)
        if answer.status != 200:
            raise SystemExit(str(body))
        messages += [body["choices"][0]["message"], {"role": "user", "content": "more"}]
    return took


async def be_client() -> None:
    """In the client's process: a line of JSON asks for a round, a line answers."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as http:
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            began, began_cpu = time.perf_counter(), time.process_time()
            took = await asyncio.gather(*(talk(request["url"], key, request["turns"], http) for key in request["keys"]))
            spent = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - began_cpu}
            print(json.dumps({**spent, "turns": [seconds for times in took for seconds in times]}), flush=True)


class World:
    """The engine, and sessions before it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.tokenizer = load_tokenizer(folder)
        length = 2048
        if options.attach:
            config = read_config(folder)
            length = config.context_length
            self.engine = SglangEngine(
                options.attach, SglangOptions(vocab_size=config.vocab_size, context_length=length)
            )
        else:
            self.engine = EmbeddedEngine(str(folder), EmbeddedOptions(max_running=256, context_length=length))
        self.sampling = SamplingParams(max_new_tokens=options.tokens, ignore_eos=True)
        self.access = ModelAccess(generate=self.engine.generate, sampling=self.sampling, context_length=length)
        self.num = 0

    def session(self) -> OpenSession:
        self.num += 1
        prompt = Prompt(group_id=self.num, row=0, pass_index=0, messages=(Message(role="user", content="hello"),))
        episode = Episode(prompt=prompt, index=0, tokenizer=self.tokenizer, model=self.access)
        return OpenSession(AgentSession(episode, self.tokenizer), prompt)

    async def call(self, turns: int, opened: OpenSession | None = None) -> list[float]:
        """A rollout without the gateway."""
        episode, took = (opened or self.session()).session._root, []
        for _ in range(turns):
            began = time.perf_counter()
            await episode.generate()
            took.append(time.perf_counter() - began)
            episode.reply("user", "more")
        return took


async def asked(client: asyncio.subprocess.Process, **request: Any) -> dict[str, Any]:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(json.dumps(request).encode() + b"\n")
    return json.loads(await client.stdout.readline())


async def measure(options: argparse.Namespace, folder: Path) -> None:
    world, gateway = World(folder, options), Gateway()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[:1])  # threads that come later have it too
    await world.engine.start()
    await gateway.start()
    url = (await gateway.served()).base_url
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=-1, stdout=-1, limit=1 << 26
    )
    os.sched_setaffinity(client.pid, cores[1:2] or cores)
    lost = 0

    async def through(num: int, turns: int) -> dict[str, Any]:
        nonlocal lost
        opened = [world.session() for _ in range(num)]
        keys = [gateway.open(session) for session in opened]
        began_cpu = time.process_time()
        reply = await asked(client, url=url, keys=keys, turns=turns)
        reply["server_cpu_s"] = time.process_time() - began_cpu
        for session, key in zip(opened, keys, strict=True):
            samples = session.session.samples()
            lost += turns * options.tokens - sum(int(sample.loss_mask.sum()) for sample in samples)
            await gateway.close(key)
        return reply

    await world.call(5)
    await through(1, 5)
    alone, gated = [], []
    num_turns = min(ALONE_TURNS // options.rounds, world.access.context_length // (options.tokens + 16))
    for _ in range(options.rounds):
        alone += await world.call(num_turns)
        gated += (await through(1, num_turns))["turns"]
    rounds: list[dict[str, float]] = []
    total = options.sessions * options.turns * options.tokens
    for _ in range(options.rounds):
        waiting = [world.session() for _ in range(options.sessions)]
        began, began_cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(world.call(options.turns, session) for session in waiting))
        middle, middle_cpu = time.perf_counter(), time.process_time()
        through_http = await through(options.sessions, options.turns)
        rounds.append({
            "alone_s": middle - began, "gated_s": through_http["s"], "client_cpu_s": through_http["cpu_s"],
            "alone_cpu_s": middle_cpu - began_cpu, "gated_cpu_s": through_http["server_cpu_s"],
        })  # fmt: skip
    one_ms, gated_ms = statistics.median(alone) * 1e3, statistics.median(gated) * 1e3
    mid = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    ratio = statistics.median(row["alone_s"] / row["gated_s"] for row in rounds)
    cpu_ratio = statistics.median(row["alone_cpu_s"] / row["gated_cpu_s"] for row in rounds)
    cpu_ms = {name: mid[name] / (options.sessions * options.turns) * 1e3 for name in mid}
    print("| what | engine alone | through the gateway | |\n|---|---:|---:|---|")
    print(
        f"| a turn of one session, ms, median | {one_ms:.2f} | {gated_ms:.2f} | {gated_ms - one_ms:.2f} more (goal 3) |"
    )
    rates = f"{total / mid['alone_s']:,.0f} | {total / mid['gated_s']:,.0f}"
    print(f"| tokens/s, {options.sessions} sessions | {rates} | {ratio:.3f} (goal 0.97) |")
    server = f"{cpu_ms['alone_cpu_s']:.2f} | {cpu_ms['gated_cpu_s']:.2f}"
    print(f"| processor ms a turn, server | {server} | {cpu_ratio:.3f} |")
    print(f"| processor ms a turn, client | | {cpu_ms['client_cpu_s']:.2f} | |")
    print(f"| learnt tokens that are missing | | {lost} | |")
    assert client.stdin is not None
    client.stdin.close()
    await client.wait()
    await gateway.stop()
    await world.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preset", default="1m")
    parser.add_argument("--attach", default="", metavar="URL", help="of a server of SGLang")
    parser.add_argument("--model", type=Path, help="its folder")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        asyncio.run(be_client())
        return
    set_up_interpreter()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if not options.attach:
            make_tiny_model(Path(folder), preset=options.preset, seed=0)
        runner.run(measure(options, options.model if options.attach else Path(folder)))


if __name__ == "__main__":
    main()
