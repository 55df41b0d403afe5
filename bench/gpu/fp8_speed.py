"""Servers of the 0.6B shape in bfloat16, in FP8, in FP8 with an FP8 KV cache: memory, and tokens a second.

    python fp8_speed.py [--device cpu]

All start at once, with few CUDA graphs: a start takes most of the time. Each may keep as many tokens as another, so
that their memory can be compared; they are asked one after the other, and end one after the other: what a server held
is what its end gives back. Random weights, the same requests. A server that does not start leaves the others.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp
from figures import Report, parser, part_seconds, work_folder
from make_model import make_apart
from servers import FP8_SERVER, Server, ServerDiedError, running

from myxa.actors.backends.convert import quantise_folder

VARIANTS = {"bfloat16": (), "FP8": FP8_SERVER, "FP8, KV cache too": (*FP8_SERVER, "--kv-cache-dtype", "fp8_e4m3")}
NUM_ROUNDS = 3
ROUNDS_S, MEASURING_S = 14.0, 60.0
"""For a server's rounds, after which none begins; for all servers together, once they serve."""


async def generated(
    url: str, vocab_size: int, num_requests: int, num_new: int, *, adapters: Sequence[str] = ()
) -> list[float]:
    """Tokens a second of all requests at once, a round each. `adapters`: names, which the requests take in turn."""
    params = {"temperature": 1.0, "max_new_tokens": num_new, "ignore_eos": True}

    async def one(session: aiohttp.ClientSession, number: int) -> int:
        ids = [(number * 131 + place * 7) % vocab_size for place in range(64)]
        named = {"lora_path": adapters[number % len(adapters)]} if adapters else {}
        body = {"input_ids": ids, "sampling_params": params, **named}
        async with session.post(f"{url}/generate", json=body) as reply:
            reply.raise_for_status()
            return int((await reply.json())["meta_info"]["completion_tokens"])

    rates: list[float] = []
    give_up_at = time.perf_counter() + ROUNDS_S
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        for turn in range(NUM_ROUNDS + 1):
            if turn > 1 and time.perf_counter() > give_up_at:
                break
            began = time.perf_counter()
            tokens = await asyncio.gather(*(one(session, 1000 * turn + number) for number in range(num_requests)))
            rates.append(sum(tokens) / (time.perf_counter() - began))
    return rates[1:]  # the first one warms up


def told_memory(url: str) -> tuple[str, str]:
    """GiB of the KV cache, and the tokens that it holds, as the server says."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=10) as answer:
        facts = json.loads(answer.read())
    usage = (facts.get("internal_states") or [{}])[0].get("memory_usage", {})
    return str(usage.get("kvcache", "-")), str(facts.get("max_total_num_tokens") or usage.get("token_capacity", "-"))


def used_gib() -> float:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout) / 1024


def file_gib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / (1 << 30)


def main() -> None:
    options = parser(__doc__).parse_args()
    is_dry = options.device == "cpu"
    num_requests, num_new = (4, 8) if is_dry else (256, 256)
    report = Report("fp8_speed", is_dry=is_dry)
    work = work_folder() / "fp8_speed"
    until = time.monotonic() + part_seconds(240.0) - (0.0 if is_dry else MEASURING_S)
    shape = make_apart(work / "bf16", "dry" if is_dry else "0.6b", options.device)
    rows: list[tuple[str, ...]] = []
    rates: dict[str, list[float]] = {}
    with ExitStack() as all_of_them:
        servers: dict[str, Server] = {}
        for name, extra in VARIANTS.items():
            if extra and not (work / "fp8").exists():
                quantise_folder(work / "bf16", work / "fp8")
            folder = work / ("fp8" if extra and not is_dry else "bf16")
            servers[name] = Server(
                folder=folder, log=work / f"{len(servers)}.log", is_sglang=not is_dry, mem_fraction=0.8,
                context_length=0 if is_dry else 1024, graph_sizes=(32, 128, 256),
                extra=(*extra, "--max-total-tokens", "100000"),
            )  # fmt: skip
            all_of_them.enter_context(running(servers[name]))
        for name, server in servers.items():  # all have allocated before the first is asked
            try:
                server.wait(max(until - time.monotonic(), 5.0))
            except ServerDiedError as error:
                rows.append((name, "-", "-", "-", "-", f"refused: {error!s:.600}"))
        for name, server in servers.items():
            if any(row[0] == name for row in rows):
                continue
            try:
                rates[name] = asyncio.run(generated(server.url, shape.vocab_size, num_requests, num_new))
                kv_gib, num_tokens = ("-", "-") if is_dry else told_memory(server.url)
                rate = f"{statistics.median(rates[name]):,.0f} ({min(rates[name]):,.0f}-{max(rates[name]):,.0f})"
                held = 0.0 if is_dry else used_gib()
                server.stop()
                held -= 0.0 if is_dry else used_gib()
                rows.append((name, f"{file_gib(server.folder):.2f}", kv_gib, num_tokens, f"{held:.2f}", rate))
            except (OSError, aiohttp.ClientError, TimeoutError) as error:
                rows.append((name, "-", "-", "-", "-", f"{error!r:.300}\n{server.last_words(600)}"))
    report.table(
        f"0.6B shape, {num_requests} requests of 64 + {num_new} tokens at once, {NUM_ROUNDS} rounds: median (range)",
        ("server", "weights in its folder, GiB", "KV cache, GiB", "its tokens", "GPU memory in all, GiB", "tokens/s"),
        rows,
    )  # fmt: skip
    report.keep("tokens_per_s", rates)
    report.goal("servers that answered", float(len(rates)), at_least=float(len(VARIANTS)))
    report.end()


if __name__ == "__main__":
    main()
