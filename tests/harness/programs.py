"""A program of the tests in a process of its own, as asyncio's are, but forked from one that has its imports."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.harness.commands import Command

LOOK_S = 0.01
MAX_LINE = 1 << 26


class Program:
    """The part of asyncio.subprocess.Process that is needed."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self.pid = command.pid
        self.send_signal, self.kill = command.send_signal, command.kill
        self.stdin: asyncio.StreamWriter
        self.stdout = asyncio.StreamReader(limit=MAX_LINE)

    @property
    def returncode(self) -> int | None:
        return self._command.poll()

    async def wait(self) -> int:
        """Exit status."""
        while (status := self._command.poll()) is None:
            await asyncio.sleep(LOOK_S)
        self.stdin.close()
        return status


async def start_program(script: Path, *words: str) -> Program:
    """We write what it reads, and read what it prints."""
    loop = asyncio.get_running_loop()
    its_input, our_output = os.pipe()
    our_input, its_output = os.pipe()
    streams = (its_input, its_output, 2)
    made = Program(await asyncio.to_thread(Command, words, Path.cwd(), program=script, streams=streams))
    os.close(its_input)
    os.close(its_output)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(made.stdout), os.fdopen(our_input, "rb", buffering=0)
    )
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(our_output, "wb", buffering=0)
    )
    made.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
    return made
