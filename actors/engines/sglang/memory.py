"""A server's memory by tag, through SGLang's `/release_memory_occupation` and `/resume_memory_occupation`.

What SGLang 0.5.17 does with the two routes:

    released while anything runs    an assertion that ends the server: it is asked to flush its cache first, which it
                                    refuses while it is not idle
    a tag that is off released      ends the server (torch-memory-saver exits); so does resuming one that is on
    weights after a resume          whatever the memory held: nothing may be generated before an update

So the tags that are off are counted here, and only the others are asked for. After an answer that leaves open what was
done the server counts as lost: no call is repeated in the hope that it did not arrive.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from ....core.device_memory import Tag, TagReport
from ....core.errors import ConfigError, EngineError, RequestRefused
from .http_client import SglangHttp

ENGINE_TAGS: tuple[Tag, ...] = ("kv_cache", "weights", "cuda_graph")
"""In the order in which they are released; they are resumed in the opposite one: SGLang's own inside a call."""
SAVER_FIELDS: Mapping[str, Any] = {"enable_memory_saver": True}
"""ServerArgs of servers whose memory can be taken back."""
SAVER_ENV: Mapping[str, str] = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "NCCL_GRAPH_REGISTER": "0"}
"""Without the first, captured graphs keep their memory. Without the second, NCCL may register what captured collectives
of a server over several GPUs work on, and that memory leaves."""
IDLE_EVERY_S = 0.05
GIB = 1 << 30
_USAGE_KEYS: Mapping[Tag, tuple[str, ...]] = {
    "weights": ("weight",),
    "kv_cache": ("kvcache",),
    "cuda_graph": ("graph",),
}
"""Tag -> its name in `memory_usage` of `/server_info` (GiB)."""


class SglangMemory:
    """One server. Calls must not overlap."""

    def __init__(self, http: SglangHttp, *, call_s: float) -> None:
        """`call_s`: how long one release or resume may take."""
        self._http = http
        self._call_s = call_s
        self._off: set[Tag] = set()
        self._bytes: dict[Tag, int] = {}
        self._unknown = ""
        """Why it is not known which tags are off; empty: it is known."""

    def check(self, facts: Mapping[str, Any]) -> None:
        """`facts`: of `/server_info`. Raises ConfigError for a server whose memory cannot be taken back."""
        if facts.get("enable_memory_saver") is not True:
            raise ConfigError(
                f"{self._http.place}: was started without --enable-memory-saver, so its memory cannot be taken back",
                remedy='start it with --enable-memory-saver, or set memory.share = "none"',
            )
        usage = _memory_usage(facts)
        self._bytes = {tag: _gib(usage, keys) for tag, keys in _USAGE_KEYS.items()}

    def reports(self) -> tuple[TagReport, ...]:
        """What the server holds, in its own numbers."""
        return tuple(
            TagReport(
                tag=tag,
                num_bytes=self._bytes.get(tag, 0),
                policy="discard",
                backing="discarded" if tag in self._off else "mapped_dirty",
            )
            for tag in ENGINE_TAGS
        )

    @property
    def is_whole(self) -> bool:
        """Whether nothing is off."""
        return not self._off and not self._unknown

    async def until_idle(self, within_s: float) -> None:
        """Wait until no request is left in the server, health checks included; its cache is flushed then.

        Raises EngineError when it is not idle in time: releasing would end it.
        """
        try:
            async with asyncio.timeout(within_s):
                while not await self._flushed():
                    await asyncio.sleep(IDLE_EVERY_S)
        except TimeoutError as err:
            raise EngineError(
                f"{self._http.place}: was not idle within {within_s:g} s after all requests were aborted",
                remedy="another client sends it requests; leave the server to this run",
            ) from err

    async def _flushed(self) -> bool:
        try:
            await self._http.post("/flush_cache", {})
        except RequestRefused:  # 400: not idle
            return False
        return True

    async def release(self, tags: Collection[Tag]) -> int:
        """Have the memory of these tags leave; returns the bytes that did. Tags that are off already are not asked for
        again. The server must be idle. Raises EngineError when it failed: the server is lost then."""
        leaving: list[Tag] = [tag for tag in ENGINE_TAGS if tag in tags and tag not in self._off]
        return await self._ask("/release_memory_occupation", leaving)

    async def resume(self, tags: Collection[Tag]) -> int:
        """Have it come back, contents undefined; else as `release`."""
        coming: list[Tag] = [tag for tag in reversed(ENGINE_TAGS) if tag in tags and tag in self._off]
        return await self._ask("/resume_memory_occupation", coming)

    async def _ask(self, path: str, tags: Sequence[Tag]) -> int:
        if self._unknown:
            raise EngineError(f"{self._http.place}: {self._unknown}", remedy="restart the server")
        if not tags:
            return 0
        self._unknown = f"{path} of {', '.join(tags)} did not end well"
        await self._http.post(path, {"tags": tags}, within_s=self._call_s)
        self._unknown = ""
        self._off = self._off | set(tags) if path.startswith("/release") else self._off - set(tags)
        return sum(self._bytes.get(tag, 0) for tag in tags)


def saver_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server whose memory is to be taken back. torch-memory-saver is preloaded and needs CUDA's
    runtime before Python can say where torch's own lies; if the loader does not find it, nothing is pausable."""
    folders = os.pathsep.join(filter(None, [env.get("LD_LIBRARY_PATH", ""), *_cuda_runtimes()]))
    return {**env, **SAVER_ENV, **({"LD_LIBRARY_PATH": folders} if folders else {})}


def hide_megatron(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of a server that cannot import megatron-core; `folder` must last until it serves.

    SGLang's dumper looks for megatron.core in whatever environment it is in, and importing that turns
    torch-memory-saver, in the whole process, to a mode in which captured graphs are not pausable: the server would end
    while it captures. Where both are installed in one environment this is the way around that patches neither.
    """
    text = 'raise ImportError("hidden from SGLang: megatron.core switches the mode of torch-memory-saver")\n'
    (folder / "megatron.py").write_text(text, encoding="ascii")
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH", "")]))}


def _cuda_runtimes() -> list[str]:
    """Folders of pip's CUDA runtime in this interpreter's installation."""
    spec = find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    return sorted({str(file.parent) for root in roots for file in root.glob("*/lib/libcudart.so.*")})


def _memory_usage(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the first scheduler; {} when the server does not report them."""
    states = facts.get("internal_states")
    first: object = cast("list[object]", states)[0] if isinstance(states, list) and states else facts
    usage = cast("Mapping[str, object]", first).get("memory_usage") if isinstance(first, dict) else None
    return cast("Mapping[str, Any]", usage) if isinstance(usage, dict) else {}


def _gib(usage: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The first of these numbers, which are GiB or tables of GiB, as bytes."""
    for key in keys:
        value: object = usage.get(key)
        if isinstance(value, dict):
            value = sum(v for v in cast("dict[str, object]", value).values() if isinstance(v, int | float))
        if isinstance(value, int | float):
            return int(value * GIB)
    return 0
