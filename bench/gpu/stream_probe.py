"""A client that reads one endless stream of a server, token by token, and notes when each came and of which version.

    python stream_probe.py URL FILE VOCAB_SIZE

Writes lines `wall seconds, version, new tokens`, and a blank line where a stream ended and the next began. Runs until
its standard input is closed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

import aiohttp
import orjson
import uvloop

NUM_NEW = 4000
"""Tokens of one stream; the server may be told a shorter context, then it is half of that."""


async def one_stream(session: aiohttp.ClientSession, url: str, vocab_size: int, num_new: int, notes: list[str]) -> None:
    ids = [random.randrange(min(vocab_size, 256)) for _ in range(16)]
    params = {"temperature": 1.0, "max_new_tokens": num_new, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": True}
    rest, num_seen = b"", 0
    async with session.post(
        f"{url}/generate", data=orjson.dumps(body), headers={"Content-Type": "application/json"}
    ) as r:
        r.raise_for_status()
        async for data in r.content.iter_any():
            now_s = time.time()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    meta = orjson.loads(line[5:])["meta_info"]
                    total = int(meta["completion_tokens"])
                    notes.append(f"{now_s:.6f},{meta.get('weight_version', '')},{total - num_seen}")
                    num_seen = total
    notes.append("")


async def probe(url: str, path: Path, vocab_size: int, num_new: int) -> None:
    """Stream after stream."""
    notes: list[str] = []
    timeout = aiohttp.ClientTimeout(total=None)
    loop = asyncio.get_running_loop()
    told_to_stop = loop.run_in_executor(None, sys.stdin.read)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while not told_to_stop.done():
            stream = asyncio.ensure_future(one_stream(session, url, vocab_size, num_new, notes))
            await asyncio.wait({stream, told_to_stop}, return_when=asyncio.FIRST_COMPLETED)
            if not stream.done():
                stream.cancel()
            elif stream.exception() is not None:  # refused, or the server is gone
                notes.append("")
                print(f"probe: {stream.exception()}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.2)
            with path.open("a", encoding="utf-8") as file:
                file.writelines(note + "\n" for note in notes)
            notes.clear()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(probe(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
