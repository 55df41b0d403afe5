"""`python -m sglang.launch_server` for tests that launch servers: SGLang's name, flags, config file and routes.

STAND_IN_FAULT, words between spaces: "crash" (while loading), "child" (leaves a process of its own behind that knows
nothing of its parent's end), "spans" (without an engine inside: it tells which version each token is of at once).
STAND_IN_LIGHT=1: no engine inside, see tests/harness/fake_sglang.py.
STAND_IN_ACCESS_LOG=1: every answered request is noted, as by the real one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from sglang.srt.server_args import prepare_server_args

ROOT = Path(__file__).parents[4]


def misbehave(faults: str) -> None:
    for kind in faults.split():
        if kind == "crash":
            print("loading the model")
            sys.exit("RuntimeError: CUDA out of memory (stand-in)")
        if kind == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            print(f"helper {child.pid}", flush=True)


async def run_light(args: argparse.Namespace, stopped: asyncio.Event) -> None:
    from tests.harness.fake_sglang import FakeSglang, serving

    facts = {"context_length": args.context_length or 128, "max_running_requests": args.max_running_requests}
    mode = args.disaggregation_mode if args.disaggregation_mode != "null" else ""
    fake = FakeSglang(key=args.admin_api_key or "", facts=facts, mode=mode)
    fake.tells_spans = "spans" in os.environ.get("STAND_IN_FAULT", "")
    async with serving(fake.handle, args.port), serving(fake.rooms, args.disaggregation_bootstrap_port or 0):
        print("the server is fired up", flush=True)
        await stopped.wait()


async def run(argv: list[str]) -> None:
    args = prepare_server_args(argv)
    if not (args.skip_tokenizer_init and args.incremental_streaming_output and args.api_key == args.admin_api_key):
        sys.exit("the stand-in wants what myxa always says")
    misbehave(os.environ.get("STAND_IN_FAULT", ""))
    sys.path.append(str(ROOT))
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    if os.environ.get("STAND_IN_LIGHT") or args.disaggregation_mode == "prefill":  # which draws what nobody looks at
        await run_light(args, stopped)
    else:
        from sglang.computing import run_computing

        await run_computing(args, stopped)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))
