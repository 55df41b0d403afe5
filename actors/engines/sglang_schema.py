"""Which arguments the installed SGLang takes: asked of the interpreter that will run the server.

Knows one child process and the JSON it prints (`sglang_probe.py`); what is made of it is `sglang_args.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...core.errors import ConfigError, EngineError
from .sglang_args import ServerSchema
from .sglang_probe import MARK

PROBE_S = 180.0
"""A cold import of SGLang from a network file system takes that long."""
PROBE = Path(__file__).with_name("sglang_probe.py")


async def read_schema(name: str, python: str, env: Mapping[str, str]) -> ServerSchema:
    """The arguments that SGLang in interpreter `python` takes.

    Raises ConfigError, starting with `name`, when there is no SGLang or it cannot be imported; EngineError when it
    does not answer in time.
    """
    where = f"{name}: {python}"
    try:
        probe = await asyncio.create_subprocess_exec(
            python, str(PROBE), str(_cache_folder(env)), env=dict(env), stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
    except OSError as err:
        raise ConfigError(f"{where} cannot be run: {err.strerror}", remedy="check engine.python") from err
    out, told = await _answer(probe, where)
    line = next((line for line in out.splitlines() if line.startswith(MARK)), "")
    if not line:
        why = (told.strip().splitlines() or [f"exit status {probe.returncode}"])[-1]
        raise ConfigError(
            f"{where} cannot import sglang.srt.server_args: {why}",
            remedy="install SGLang 0.5.17 or later there, or name an interpreter that has it with engine.python",
        )
    found = _decode(line)
    if found is None:
        raise ConfigError(
            f"{where} has no SGLang", remedy="install it there, or name an interpreter that has it with engine.python"
        )
    return found


async def _answer(probe: Process, where: str) -> tuple[str, str]:
    try:
        async with asyncio.timeout(PROBE_S):
            out, told = await probe.communicate()
    except BaseException as err:
        with contextlib.suppress(ProcessLookupError):
            probe.kill()
        await probe.wait()
        if isinstance(err, TimeoutError):
            raise EngineError(f"{where} did not import sglang within {PROBE_S:g} s", remedy="try it by hand") from err
        raise
    return out.decode(errors="replace"), told.decode(errors="replace")


def _decode(line: str) -> ServerSchema | None:
    text = line.removeprefix(MARK)
    if msgspec.json.decode(text).get("missing"):
        return None
    return msgspec.json.decode(text, type=ServerSchema)


def _cache_folder(env: Mapping[str, str]) -> Path:
    home = env.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "myxa"
