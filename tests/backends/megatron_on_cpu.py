"""Runs unmodified megatron-core on a machine without CUDA, for tests: `install()` before the first import of it.

megatron-core writes its device into its text (`torch.cuda.current_device()`, `device="cuda"`, `x.cuda()`, ...); no
setting changes that. So its modules are compiled here from a text in which those words mean the CPU. torch itself is
not patched, lines keep their numbers, and with a CUDA device `install` does nothing: the stock modules are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import re
import sys
import tokenize
import typing
from collections.abc import Callable, MutableSequence, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

RULES_VERSION = 2
"""Part of the names of the compiled files; to be raised when a rule below changes."""
STAND_IN = "__cuda_on_cpu__"
TRITON = "__triton_on_cpu__"
TARGET = "__target_on_cpu__"
PREFIX = "megatron.core"
MUON = "emerging_optimizers"
"""Megatron's Muon is built on this package, whose kernels need triton when it is imported."""

Token = tokenize.TokenInfo
Edit = tuple[tuple[int, int], tuple[int, int], str]
"""Replace what lies from (line, column) to (line, column), both in one line, by a text."""


# -- what stands for torch.cuda ------------------------------------------------------------------------------------


class Stream:
    """Everything submitted to it has already run."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class Generators:
    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


def _nothing(*_: Any, **__: Any) -> None: ...


def _no_context(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _zero(*_: Any, **__: Any) -> int:
    return 0


class CudaOnCpu(ModuleType):
    """The part of `torch.cuda` that training in megatron-core uses; the CPU's generator is the device's."""

    Stream, Event = Stream, Event
    default_generators = Generators()

    def __init__(self, name: str) -> None:
        super().__init__(name)
        stream = Stream()
        for what in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init"):
            setattr(self, what, _nothing)
        for what in ("device_count", "memory_allocated", "max_memory_allocated", "memory_reserved"):
            setattr(self, what, _zero)
        for what in ("current_stream", "default_stream"):
            setattr(self, what, lambda *_: stream)
        self.device = self.stream = _no_context
        self.is_available = self.is_current_stream_capturing = lambda: False
        self.current_device = lambda: torch.device("cpu")
        self.memory_stats = lambda *_: {}
        self.get_rng_state = lambda *_, **__: torch.get_rng_state()
        self.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        self.manual_seed = self.manual_seed_all = torch.default_generator.manual_seed
        self._lazy_call = lambda function, **_: function()
        self.random = self
        self.all_gather, self.reduce_scatter = all_gather, reduce_scatter
        self.nvtx = ModuleType("nvtx")
        self.nvtx.range_push = self.nvtx.range_pop = self.nvtx.mark = _nothing  # type: ignore[attr-defined]
        self.nvtx.range = _no_context  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name) if name.endswith("Tensor") else getattr(torch.cuda, name)


def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **options: Any) -> Any:
    """If parts differ in length: broadcasts, one from each rank."""
    if all(part.shape == parts[0].shape for part in parts):
        return dist.all_gather(parts, tensor, group=group, **options)
    for rank, part in enumerate(parts):
        if rank == dist.get_rank(group):
            part.copy_(tensor)
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return None


def reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None, **options: Any) -> Any:
    """If parts differ in length: sums, one for each rank."""
    if all(part.shape == parts[0].shape for part in parts):
        return dist.reduce_scatter(output, parts, group=group, **options)
    for rank, part in enumerate(parts):
        total = part.clone()
        dist.all_reduce(total, group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)
    return None


class TritonOnCpu(ModuleType):
    """Enough of triton for decorators and annotations at import time; no kernel of it ever runs here."""

    __path__: MutableSequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return TritonOnCpu(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function


# -- rules: each looks at the tokens from `i` on and says what to replace ------------------------------------------


def words(tokens: Sequence[Token], i: int, *wanted: str) -> bool:
    return all(i + n < len(tokens) and tokens[i + n].string == word for n, word in enumerate(wanted))


def device_names(tokens: Sequence[Token], i: int) -> list[Edit]:
    token = tokens[i]
    if token.type != tokenize.STRING or token.start[0] != token.end[0]:
        return []
    if token.string in ('"cuda"', "'cuda'"):
        return [(token.start, token.end, '"cpu"')]
    changed = re.sub(r"torch\.cuda\.(\w*Tensor)", r"torch.\1", token.string)
    return [(token.start, token.end, changed)] if changed != token.string else []


def namespace(tokens: Sequence[Token], i: int) -> list[Edit]:
    if not words(tokens, i, "torch", ".", "cuda") or tokens[i - 1].string in ("import", "."):
        return []
    return [(tokens[i].start, tokens[i + 2].end, STAND_IN)]


def moves(tokens: Sequence[Token], i: int) -> list[Edit]:
    """`x.cuda(anything)` becomes `x.to(*TARGET(anything))`, which forgets the arguments."""
    if not words(tokens, i, ".", "cuda", "(") or tokens[i - 1].string == "torch":
        return []
    depth, j = 0, i + 2
    while True:
        depth += {"(": 1, ")": -1}.get(tokens[j].string, 0)
        if not depth:
            break
        j += 1
    return [(tokens[i + 1].start, tokens[i + 2].end, f"to(*{TARGET}("), (tokens[j].start, tokens[j].end, "))")]


def attributes(tokens: Sequence[Token], i: int) -> list[Edit]:
    if tokens[i].string != "." or i + 1 >= len(tokens):
        return []
    name = tokens[i + 1]
    if name.string == "is_cuda":
        return [(name.start, name.end, "is_cpu")]
    if words(tokens, i + 1, "record_stream", "("):
        return [(name.start, name.end, "is_cpu and ")]  # x.record_stream(s) -> x.is_cpu and (s)
    if words(tokens, i + 1, "pin_memory", "(", ")"):
        return [(name.start, name.end, "contiguous")]
    return []


def uneven(tokens: Sequence[Token], i: int) -> list[Edit]:
    """`torch.distributed.all_gather(` and `.reduce_scatter(`: gloo refuses parts of unequal length, NCCL does not."""
    for name in ("all_gather", "reduce_scatter"):
        if words(tokens, i, "torch", ".", "distributed", ".", name, "("):
            return [(tokens[i].start, tokens[i + 4].end, f"{STAND_IN}.{name}")]
    return []


def pinning(tokens: Sequence[Token], i: int) -> list[Edit]:
    if not words(tokens, i, "pin_memory", "=", "True"):
        return []
    return [(tokens[i + 2].start, tokens[i + 2].end, "False")]


def triton(tokens: Sequence[Token], i: int) -> list[Edit]:
    if not words(tokens, i, "import", "triton") or tokens[i].start[1]:
        return []
    name = tokens[i + 1]
    return [(name.start, name.end, TRITON if words(tokens, i + 2, ".") else f"{TRITON} as triton")]


RULES: tuple[Callable[[Sequence[Token], int], list[Edit]], ...] = (
    device_names, namespace, moves, attributes, uneven, pinning, triton,
)  # fmt: skip


def retargeted(source: str) -> str:
    """The text with every device word turned; comments, docstrings and longer names are left alone."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    edits = [edit for i in range(len(tokens)) for rule in RULES for edit in rule(tokens, i)]
    lines = source.splitlines(keepends=True)
    for (line, first), (_, last), text in sorted(edits, reverse=True):
        old = lines[line - 1]
        lines[line - 1] = old[:first] + text + old[last:]
    return "".join(lines)


# -- the import hook -----------------------------------------------------------------------------------------------


class Loader(importlib.machinery.SourceFileLoader):
    """Compiles the turned text, and keeps what it compiled beside (never in place of) the stock files."""

    def source_to_code(self, data: Any, path: Any, **options: Any) -> Any:
        source = importlib.util.decode_source(data)
        if any(word in source for word in ("cuda", "pin_memory", "triton", "torch.distributed")):
            source = retargeted(source)
        if self.name == f"{PREFIX}.jit":
            source += "\ndisable_jit_fuser()\n"  # torch.compile would want a C++ compiler
        return super().source_to_code(source.encode(), path, **options)

    def get_code(self, fullname: str) -> Any:
        """Kept even where Python is told to write no bytecode: turning the text takes seconds, in every process."""
        told, sys.dont_write_bytecode = sys.dont_write_bytecode, False
        try:
            return super().get_code(fullname)
        finally:
            sys.dont_write_bytecode = told

    def get_data(self, path: str) -> bytes:
        return super().get_data(self._own(path))

    def set_data(self, path: str, data: Any, **options: Any) -> None:
        super().set_data(self._own(path), data, **options)

    @staticmethod
    def _own(path: str) -> str:
        return path.removesuffix(".pyc") + f".oncpu{RULES_VERSION}.pyc" if path.endswith(".pyc") else path

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, STAND_IN, sys.modules[STAND_IN])
        setattr(module, TARGET, lambda *_, **__: ("cpu",))
        super().exec_module(module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if not f"{fullname}.".startswith((f"{PREFIX}.", f"{MUON}.")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> bool:
    """Turn megatron-core to the CPU if there is no CUDA device. Returns whether it is turned."""
    if torch.cuda.is_available():
        return False
    if STAND_IN in sys.modules:
        return True
    early = [name for name in sys.modules if name.startswith(PREFIX)]
    if early:
        raise RuntimeError(f"install() must run before {early[0]} is imported")
    sys.modules[STAND_IN] = CudaOnCpu(STAND_IN)
    if importlib.util.find_spec("triton") is None:
        sys.modules[TRITON] = TritonOnCpu(TRITON)
        sys.modules[f"{TRITON}.language"] = TritonOnCpu("language")
    else:
        sys.modules[TRITON] = importlib.import_module("triton")
        sys.modules[f"{TRITON}.language"] = importlib.import_module("triton.language")
    if sys.version_info < (3, 12):
        typing.__dict__["override"] = typing_extensions.override  # all that MUON takes from Python 3.12
    sys.meta_path.insert(0, Finder())
    return True
