"""The columns of the fault matrix: what one node does to another, and how it ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass

import numpy as np
from tests.faults.depot import Crate, DepotContract

from myxa.core.clock import SystemClock
from myxa.core.errors import MyxaError
from myxa.core.refs import with_deadline
from myxa.core.retry import until_answered
from myxa.transport.node import Node

BULK_BYTES = 5 << 19
"""2.5 MiB: three chunks on the bulk lane."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long handlers take and how long callers wait. In seconds."""

    busy_s: float = 0.0
    deadline_s: float = 8.0
    patient_s: float = 8.0
    """A put, which is repeated until it is answered, is given up after so long."""
    bulk_s: float = 8.0
    join_s: float = 8.0


@dataclass(frozen=True, slots=True)
class Result:
    outcome: str
    """"done", the class of the error, or "HUNG"."""
    took_s: float
    token: str
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.outcome} after {self.took_s:.2f} s" + (f" ({self.error})" if self.error else "")


HUNG = "HUNG"
HANG_S = 45.0
"""Longer than any deadline of the matrix."""


async def judged(token: str, work: Coroutine[None, None, object]) -> Result:
    began = time.monotonic()
    outcome, cause = "done", None
    try:
        async with asyncio.timeout(HANG_S):
            await work
    except TimeoutError as error:
        outcome, cause = HUNG, error
    except MyxaError as error:
        outcome, cause = type(error).__name__, error
    return Result(outcome, time.monotonic() - began, token, cause)


async def _bulk(depot: DepotContract, token: str, plan: Plan) -> None:
    assert await depot.weigh(token, np.zeros(BULK_BYTES, np.uint8), plan.busy_s) == BULK_BYTES


async def _put(depot: DepotContract, token: str, plan: Plan) -> None:
    stored = await until_answered(
        lambda: depot.store(crate(token), plan.busy_s),
        who="depot", clock=SystemClock(), log=logging.getLogger("myxa.put"), give_up_s=plan.patient_s,
    )  # fmt: skip
    assert stored == crate(token).content.size


def crate(token: str) -> Crate:
    return Crate(name=token, content=np.full(1000, 7, np.uint8))


def begin(kind: str, node: Node, target: str, token: str, plan: Plan) -> asyncio.Task[Result]:
    """Start one operation of `node` on the depot `target`; the token tells its effects apart from others."""
    depot = node.ref(DepotContract, target)
    hasty = with_deadline(depot, plan.deadline_s)
    work: Coroutine[None, None, object]
    if kind == "call":
        work = hasty.work(token, plan.busy_s)
    elif kind == "put":
        work = _put(hasty, token, plan)
    else:
        work = _bulk(with_deadline(depot, plan.bulk_s), token, plan)
    return asyncio.get_running_loop().create_task(judged(token, work), name=f"{kind} {token}")


CALLING = ("call", "put", "bulk")
"""All columns but joining, which needs no depot."""
