"""An actor in small, to be killed: launches a server, says which, and waits. See test_launched.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import uvloop

from myxa.actors.engines.sglang.engine import SglangOptions
from myxa.actors.engines.sglang.launch import LaunchedSglang, SglangLaunch


async def main(folder: str, log_path: str) -> None:
    launch = SglangLaunch(
        python=sys.executable, model_path=folder, table={}, env=os.environ, log_path=Path(log_path), dtype="float32",
        seed=1, num_devices=0, max_running=8,
    )  # fmt: skip
    engine = LaunchedSglang(launch, SglangOptions(vocab_size=320, start_s=60, name="rollout/0"))
    await engine.start()
    print(json.dumps({"server": engine.memory_pids()[0]}), flush=True)
    await engine.until_lost()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
