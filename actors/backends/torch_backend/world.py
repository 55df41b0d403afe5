"""The ranks of one trainer gang: rendezvous, small reductions, and which rank is missing when a collective fails.

Alone (`size == 1`) there is no process group and no address is needed; everything else is the same code.

A collective cannot say who failed it, so every rank notes in the store which phase it enters and, when it fails, why.
A rank that fails by itself leaves the process group at once: that closes its connections, and the others fail within
moments instead of waiting for the timeout. After that the gang has to be restarted; only errors that all ranks agreed
on leave it whole.

Library considered: torchrun's elastic agent and `torch.distributed.monitored_barrier`. The launcher is the agent here,
and monitored_barrier names missing ranks for barriers over gloo alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from ....core.errors import DiskRefused, LaunchError, MyxaError, TrainError, first_line
from ....core.files import refusal
from ...torch_store import find_store, host_store, keep_gloo_within
from .tensors import integers

_FINE, _FAILED, _DISK = range(3)
GRACE_S = 2.0
"""How long the others may take to report the failure that this rank has just seen."""

_COLLECTIVE_FAILURE = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|broken pipe|socket|process group|store", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Gang:
    """Which rank this is, and where the ranks meet."""

    rank: int = 0
    world_size: int = 1
    master_addr: str = ""
    """Host of rank 0; unused when alone."""
    master_port: int = 0
    local_rank: int = 0
    """Number among the ranks on this host: which of the visible GPUs is ours."""
    timeout_s: float = 300.0
    collective_s: float = 0.0
    """Bound on every collective; 0: as long."""
    backend: str = ""
    """torch's name of a registered backend whose groups can leave their devices; empty: nccl on GPUs, else gloo."""

    @staticmethod
    def from_environment(
        environment: Mapping[str, str], timeout_s: float = 300.0, *, collective_s: float = 0.0
    ) -> Gang:
        """From RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK as torchrun sets them; none set: alone. Raises
        LaunchError for a value that is not a number."""
        numbers = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0, "LOCAL_RANK": 0}
        for name in numbers:
            text = environment.get(name, "")
            if text:
                if not text.isdigit():
                    raise LaunchError(f"{name}={text!r} in the environment is no number", remedy="see torchrun")
                numbers[name] = int(text)
        rank, world_size, port, local_rank = numbers.values()
        return Gang(rank, world_size, environment.get("MASTER_ADDR", ""), port, local_rank, timeout_s, collective_s)


class RankGroup:
    """Some ranks, over which tensors are added up. Collective."""

    def __init__(self, size: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """`group` None: all ranks."""
        self.size, self.device, self._group = size, device, group

    def sum(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        total = values.detach().to(self.device, copy=True)
        if self.size > 1:
            dist.all_reduce(total, op=op, group=self._group)  # pyright: ignore[reportUnknownMemberType]  # torch says nothing
        return total


class World(RankGroup):
    """This rank's place in the gang. Use `World.join`."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store | None) -> None:
        super().__init__(size, device)
        self.rank = rank
        self._store = store
        self._broken = ""
        self._agreed: Exception | None = None

    @staticmethod
    def join(gang: Gang, device: torch.device) -> World:
        """Meet the other ranks and form the process group. Raises LaunchError naming the ranks that did not come, or
        what is wrong with the address."""
        rank, size = gang.rank, gang.world_size
        if not 0 <= rank < size:
            raise LaunchError(f"trainer rank {rank} is outside a gang of {size}", remedy="check RANK and WORLD_SIZE")
        keep_gloo_within(gang.master_addr)
        if size == 1:
            return World(rank, size, device, None)
        store = _meet(gang)
        dist.init_process_group(
            gang.backend or ("nccl" if device.type == "cuda" else "gloo"),
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=gang.collective_s or gang.timeout_s),
            device_id=device if device.type == "cuda" and not gang.backend else None,
        )
        return World(rank, size, device, store)

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Run a stretch that holds collectives. A failing collective becomes a TrainError that names the ranks."""
        if self._broken:
            raise TrainError(f"rank {self.rank} cannot {name}: {self._broken}", remedy="restart the trainer gang")
        self._note("phase", name)
        try:
            yield
        except RuntimeError as error:
            if self.size == 1:
                raise
            if not _COLLECTIVE_FAILURE.search(str(error)):
                self._leave(f"{type(error).__name__}: {error}")
                raise
            self._leave("a collective failed")
            raise TrainError(
                f"rank {self.rank} of {self.size} failed to {name}: {self._culprits()}; {first_line(error)}",
                remedy="see the logs of the ranks named; the gang restarts from its checkpoint",
            ) from error
        except BaseException as error:
            if error is not self._agreed:
                self._leave(f"{type(error).__name__}: {error}")
            raise

    def gather(self, values: Tensor) -> Tensor:
        """[size, *shape]: every rank's tensor (same shape and dtype everywhere)."""
        values = values.to(self.device)
        if self.size == 1:
            return values.unsqueeze(0)
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous())  # pyright: ignore[reportUnknownMemberType]  # torch says nothing
        return torch.stack(parts)

    def exchange(self, text: str) -> tuple[str, ...]:
        """What every rank says, in the order of ranks, on every rank. Collective."""
        encoded = text.encode()
        sizes = integers(self.gather(torch.tensor([len(encoded)])).flatten())
        box = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        if encoded:
            box[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        rows = self.gather(box).cpu()
        return tuple(bytes(integers(row[:size])).decode() for row, size in zip(rows, sizes, strict=True))

    def agree(self, error: Exception | None, action: str) -> None:
        """End together after something that any rank may have failed alone: raises its own error there, and a
        TrainError naming these ranks on the others (DiskRefused, if disks are all that failed). Collective."""
        status = _FINE if error is None else _FAILED if refusal(error) is None else _DISK
        failed = integers(self.gather(torch.tensor([status])).flatten())
        if error is not None:
            raise self.agreed(error)
        if any(failed):
            ranks = ", ".join(str(rank) for rank, has_failed in enumerate(failed) if has_failed)
            kind = TrainError if _FAILED in failed else DiskRefused
            raise self.agreed(kind(f"{action} failed on rank {ranks}", remedy="see the logs of the ranks named"))

    @contextlib.contextmanager
    def together(self, action: str) -> Generator[None]:
        """Run a stretch in which any rank may fail alone, and end it together; see `agree`."""
        failure: Exception | None = None
        try:
            yield
        except (MyxaError, OSError) as error:
            failure = error
        self.agree(failure, action)

    def agreed(self, error: Exception) -> Exception:
        """Mark an error as one that every rank raises at this same place, so that the process group stays whole."""
        self._agreed = error
        return error

    def close(self) -> None:
        self._leave("closed")
        self._store = None

    def _leave(self, reason: str) -> None:
        if self.size == 1 or self._broken:
            return
        self._broken = f"it left the process group ({reason})"
        self._note("left", reason)
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # half-built or already torn down
            dist.destroy_process_group()

    def _note(self, kind: str, text: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store's host died; the collective will say so
                self._store.set(f"{kind}/{self.rank}", text)

    def _culprits(self) -> str:
        if self._store is None:
            return "alone"
        peers = [r for r in range(self.size) if r != self.rank]
        with contextlib.suppress(RuntimeError):  # then a rank is silent, which the error below says
            self._store.wait([f"left/{r}" for r in peers], timedelta(seconds=GRACE_S))
        try:
            return "; ".join(self._clause(r) for r in peers)
        except RuntimeError:
            return "rank 0, which hosts the store, does not answer"

    def _clause(self, rank: int) -> str:
        if self._store is None:
            return ""
        if self._store.check([f"left/{rank}"]):
            return f"rank {rank}: {self._store.get(f'left/{rank}').decode(errors='replace')}"
        last = self._store.get(f"phase/{rank}").decode(errors="replace")  # every rank has noted "join" at least
        return f"rank {rank}: silent, last seen at {last!r}"


def _meet(gang: Gang) -> Store:
    """Open the store at the meeting place and wait until all ranks are in it."""
    rank_text, place = f"trainer rank {gang.rank} of {gang.world_size}", f"{gang.master_addr}:{gang.master_port}"
    if not gang.master_addr or not 0 < gang.master_port < 65536:
        raise LaunchError(
            f"{rank_text}: {place!r} is no meeting place",
            remedy="the launcher sets MASTER_ADDR and MASTER_PORT; by hand: 127.0.0.1 and a free port",
        )
    timeout = timedelta(seconds=gang.timeout_s)
    try:
        opened = host_store if gang.rank == 0 else find_store
        store = opened(gang.master_addr, gang.master_port, gang.world_size, gang.timeout_s)
        store.set(f"phase/{gang.rank}", "join")
    except (RuntimeError, OSError) as error:
        fault = "cannot listen" if gang.rank == 0 else "does not reach rank 0"
        raise LaunchError(
            f"{rank_text} {fault} at {place}: {first_line(error)}",
            remedy="check that the port is free and that rank 0 is running",
        ) from error
    keys = [f"phase/{r}" for r in range(gang.world_size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        raise LaunchError(
            f"{rank_text} waited up to {gang.timeout_s:.0f} s at {place}; {_not_there(store, keys)}",
            remedy="see the logs of the ranks named",
        ) from error
    return store


def _not_there(store: Store, keys: list[str]) -> str:
    try:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return "rank 0 has given up and left it"
    return f"not there: rank {', '.join(missing)}"
