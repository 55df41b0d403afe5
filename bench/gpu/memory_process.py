"""A process of the switching benchmark: one actor on a node, until its parent closes the pipe. No torch."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from memory_stages import answer

from myxa.core.actor import Actor
from myxa.transport.address import Rendezvous
from myxa.transport.node import Node

Build = Callable[[argparse.Namespace], Actor]


async def serve(options: argparse.Namespace, build: Build) -> None:
    node = await Node.attach(name=f"{options.name}-node", rdzv=Rendezvous.load(Path(options.rdzv)))
    try:
        await node.start(build(options), name=options.name)
        answer("ready")
        over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)  # the parent closed it, or died
        await asyncio.wait({node.failed, over}, return_when=asyncio.FIRST_COMPLETED)
        if node.failed.done():
            raise node.failed.result()
    finally:
        with contextlib.suppress(Exception):
            await node.close(grace_s=0.5)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What all of them are told."""
    args = argparse.ArgumentParser(description=doc)
    args.add_argument("name")
    args.add_argument("--rdzv", required=True)
    args.add_argument("--device", default="cuda")
    args.add_argument("--way", choices=("ours", "saver"), default="ours")
    args.add_argument("--first-device", type=int, default=0)
    args.add_argument("--gpus", type=int, default=1)
    args.add_argument("--scale", type=float, default=1.0)
    args.add_argument("--matrix", type=int, default=8192)
    args.add_argument("--tokens", type=int, default=4096)
    args.add_argument("--mem-fraction", type=float, default=0.9)
    args.add_argument("--capacity-mib", type=int, default=0)
    args.add_argument("--plain-mib", type=int, default=4096)
    return args


def run(doc: str | None, build: Build) -> None:
    """The process; out as a stage is, without destructors of libraries that hold device memory."""
    options = arguments(doc).parse_args()
    status = 0
    try:
        asyncio.run(serve(options, build))
    except Exception:  # noqa: BLE001 - told by the exit status and the log
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)
