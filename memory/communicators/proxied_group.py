"""One process group behind a proxy: makes its inner backend under the epoch of the day, once all members have come.

An inner backend is made by the first operation, or by a restore, out of the group's own store under a prefix of the
epoch: old keys of another life of the group cannot be met. All members (two, for a send or a receive over NCCL) first
say that they came, because NCCL's own way of meeting has no deadline and gloo's does not say who was missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ...core.clock import Clock
from ...core.errors import MemoryFault
from .roll_call import Absent, RollCall

Native = Literal["gloo", "nccl"]
KEYS = "myxa"


class Proxy(Protocol):
    """What `proxy_backend.cpp` gives to Python, beside what every torch backend has."""

    is_live: bool

    def build(self) -> None: ...
    def drop(self, how: str) -> bool: ...
    def inner(self) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """What torch told when the group was made."""

    name: str
    native: Native
    store: Any
    rank: int
    """Of this process, inside the group."""
    ranks: tuple[int, ...]
    """All members, as ranks of WORLD."""
    timeout: timedelta
    options: Any = None
    """ProcessGroupNCCL.Options that the caller gave."""


class ProxiedGroup:
    """The owner that the proxy calls. `closed` means: out of the registry."""

    def __init__(
        self,
        facts: GroupFacts,
        clock: Clock,
        allowance: Callable[[str], tuple[int, float]],
        on_closed: Callable[[str], None],
    ) -> None:
        self.facts = facts
        self.proxy: Proxy | None = None
        self.failed_epoch: int = -1
        """Its members did not meet under it: what some of them left in the store would confuse a second try."""
        self._clock = clock
        self._allowance = allowance
        self._on_closed = on_closed
        self._roll_call = RollCall(PrefixStore(f"{KEYS}-roll", facts.store), facts.ranks[facts.rank], clock)

    # -- called by the proxy -------------------------------------------------------------------------------------------

    def make(self, is_pair: bool) -> object:
        """The inner backend; MemoryFault when communicators are released, or who did not come."""
        epoch, timeout_s = self._allowance(self.facts.name)
        if epoch == self.failed_epoch:
            raise MemoryFault(
                f"group {self.facts.name} could not be built under epoch {epoch}", remedy="restore under a newer epoch"
            )
        try:
            if is_pair and self.facts.native == "nccl":
                self._roll_call.arrive(f"epoch {epoch}")  # NCCL joins the two; the others may come later or never
            elif len(self.facts.ranks) > 1:
                self._meet(epoch, timeout_s)
            return self._make(epoch, timeout_s)
        except MemoryFault:
            self.failed_epoch = epoch
            raise
        except RuntimeError as error:
            self.failed_epoch = epoch
            raise MemoryFault(
                f"rank {self._rank}: {self._words} could not be built under epoch {epoch}: {_first_line(error)}",
                remedy="a member ended meanwhile, or the network is broken; restore under a newer epoch without it",
            ) from error

    def closed(self) -> None:
        self.proxy = None  # else proxy and owner would hold each other for ever
        self._on_closed(self.facts.name)

    # -- called by the residency ---------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        return self.proxy is not None and self.proxy.is_live

    def drop(self, how: str) -> None:
        if self.proxy is not None:
            self.proxy.drop(how)

    def build(self) -> None:
        """Everything that a first operation would wait for."""
        if self.proxy is None:
            return
        self.proxy.build()
        if self.facts.native == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
            self.proxy.inner().eager_connect_single_device(device)

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self.facts.ranks[self.facts.rank]

    @property
    def _words(self) -> str:
        return f"{self.facts.native} group {self.facts.name} of ranks {list(self.facts.ranks)}"

    def _meet(self, epoch: int, timeout_s: float) -> None:
        self._roll_call.tell(f"at epoch {epoch}")
        try:
            self._roll_call.meet(f"epoch {epoch}", self.facts.ranks, self._clock.monotonic() + timeout_s)
        except Absent as error:
            raise Absent(
                f"rank {self._rank}: {self._words} could not be built under epoch {epoch} within {timeout_s:.1f} s: "
                f"{error.message}",
                error.ranks,
                remedy="those ranks ended, or did not get the order; restore under a newer epoch",
            ) from None

    def _make(self, epoch: int, timeout_s: float) -> object:
        store = PrefixStore(f"{KEYS}-epoch-{epoch}", self.facts.store)
        size = len(self.facts.ranks)
        if self.facts.native == "gloo":
            meeting = min(timedelta(seconds=timeout_s), self.facts.timeout)
            gloo: Any = cast(Any, dist).ProcessGroupGloo(store, self.facts.rank, size, timeout=meeting)
            gloo._set_default_timeout(self.facts.timeout)
            return gloo
        nccl = cast(Any, dist).ProcessGroupNCCL
        options = nccl.Options() if self.facts.options is None else self.facts.options
        options._timeout = self.facts.timeout
        options.global_ranks_in_group = list(self.facts.ranks)
        options.group_name = self.facts.name
        return nccl(store, self.facts.rank, size, options)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]
