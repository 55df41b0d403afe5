"""Tellers and customers: every kind of message between a few nodes, and the books against which all of it is checked.

The books are the world's view: what was asked, how it ended, what was executed where. Nobody in the simulation reads
them.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.simulation.sim_loop import Process, ProcessState, current_process
from tests.simulation.sim_network import Net
from tests.simulation.simulator import Nemesis, Sim, carry_out

from myxa.core.actor import Actor
from myxa.core.errors import CallError, NotExecuted, NotSent, OutcomeUnknown, RemoteError
from myxa.core.handlers import call
from myxa.core.refs import with_deadline
from myxa.transport.session import pending

SLACK_S = 0.25
BULK = "x" * 300_000


class Receipt(msgspec.Struct, frozen=True):
    token: str
    who: str
    epoch: int


class TellerContract(Actor):
    @call(deadline=3)
    async def once(self, token: str, work_s: float) -> Receipt:
        raise NotImplementedError

    @call(deadline=3)
    async def relay(self, token: str, to: str) -> Receipt:
        raise NotImplementedError

    @call(deadline=3)
    async def note(self, sender: str, lane: str, number: int, pad: str) -> None:
        raise NotImplementedError


@dataclass
class Op:
    """One thing that a customer asked for."""

    kind: str
    token: str
    target: str
    process: Process
    epoch: int
    started_s: float
    deadline_s: float | None
    paused_s: float
    ended_s: float | None = None
    outcome: Any = None
    num_ends: int = 0


@dataclass
class Books:
    ops: list[Op] = field(default_factory=list)
    executed: defaultdict[str, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    heard: dict[tuple[str, str, str], int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Teller(TellerContract):
    """Writes down what it executes."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def _receipt(self, token: str) -> Receipt:
        self._books.executed[token].append((self.ctx.name, self.ctx.epoch))
        return Receipt(token=token, who=self.ctx.name, epoch=self.ctx.epoch)

    async def once(self, token: str, work_s: float) -> Receipt:
        receipt = self._receipt(token)
        await asyncio.sleep(work_s)
        return receipt

    async def relay(self, token: str, to: str) -> Receipt:
        self._receipt(token)
        return await self.ctx.ref(TellerContract, to).once(f"{token}'", 0.01)

    async def note(self, sender: str, lane: str, number: int, pad: str) -> None:
        key = (sender, f"{self.ctx.name}@{self.ctx.epoch}", lane)
        if number <= self._books.heard.get(key, -1):
            self._books.wrong.append(f"{key}: {number} came after {self._books.heard[key]}")
        self._books.heard[key] = number


class Customer(Actor):
    """Asks every teller for all kinds of things, in one task per teller, until told to stop."""

    def __init__(self, books: Books, sim: Sim, tellers: list[str], until_s: float) -> None:
        self._books = books
        self._rng = sim.rng(f"{until_s}")
        self._tellers = tellers
        self._until_s = until_s
        self._sent: Counter[tuple[str, str]] = Counter()
        self._num_ops = 0
        self.num_busy = 0

    async def on_start(self) -> None:
        self._rng.seed(f"{self.ctx.name} {self.ctx.epoch} {self._rng.random()}")
        for target in self._tellers:
            self.ctx.spawn(self._visit(target), name=f"visit {target}")

    async def _visit(self, target: str) -> None:
        self.num_busy += 1
        while target not in self.ctx.peers("teller/"):  # from then on it may be away, but is never unheard of
            await asyncio.sleep(0.1)
        loop, rng = asyncio.get_running_loop(), self._rng
        while loop.time() < self._until_s:
            await asyncio.sleep(rng.random() ** 2 * 0.6)
            kind = rng.choice(("once", "once", "once", "relay", "note", "note", "hurried"))
            await getattr(self, f"_{kind}")(target)
        self.num_busy -= 1

    def _begin(self, kind: str, target: str, deadline_s: float | None) -> Op:
        self._num_ops += 1
        process = current_process()
        assert process is not None
        op = Op(
            kind, f"{self.ctx.name}@{self.ctx.epoch}.{self._num_ops}", target, process, self.ctx.epoch,
            asyncio.get_running_loop().time(), deadline_s, process.paused_s,
        )  # fmt: skip
        self._books.ops.append(op)
        return op

    def _end(self, op: Op, outcome: Any) -> None:
        op.num_ends += 1
        op.ended_s = asyncio.get_running_loop().time()
        op.outcome = outcome

    async def _ended(self, op: Op, work: Any) -> None:
        try:
            self._end(op, await work)
        except CallError as error:
            self._end(op, error)

    def _ref(self, target: str) -> TellerContract:
        return self.ctx.ref(TellerContract, target)

    async def _once(self, target: str) -> None:
        deadline_s = self._rng.uniform(0.3, 3.0)
        op = self._begin("once", target, deadline_s)
        await self._ended(op, with_deadline(self._ref(target), deadline_s).once(op.token, self._rng.random() * 0.1))

    async def _hurried(self, target: str) -> None:
        """Several at once, some of them given up by their caller."""

        async def one() -> None:
            op = self._begin("once", target, 2.0)
            try:
                async with asyncio.timeout(0.15):
                    self._end(op, await with_deadline(self._ref(target), 2.0).once(op.token, 0.02))
            except TimeoutError as error:
                self._end(op, error)
            except CallError as error:
                self._end(op, error)

        for task in [self.ctx.spawn(one(), name="hurried") for _ in range(4)]:
            await task

    async def _relay(self, target: str) -> None:
        op = self._begin("relay", target, 3.0)
        await self._ended(op, self._ref(target).relay(op.token, self._rng.choice(self._tellers)))

    async def _note(self, target: str) -> None:
        sender = f"{self.ctx.name}@{self.ctx.epoch}"
        for _ in range(self._rng.randint(1, 6)):
            is_bulk = self._rng.random() < 0.1
            lane = "bulk" if is_bulk else "control"
            self._sent[target, lane] += 1
            try:
                await self._ref(target).note(sender, lane, self._sent[target, lane], BULK if is_bulk else "")
            except CallError:
                return


def check(books: Books) -> list[str]:
    """What is wrong, by the books."""
    wrong = list(books.wrong)
    for op in books.ops:
        name = f"{op.kind} {op.token} of {op.target}"
        runs = books.executed.get(op.token, [])
        if op.num_ends != 1:
            if op.num_ends or op.process.state not in (ProcessState.DEAD, ProcessState.ENDING):
                wrong.append(f"{name} ended {op.num_ends} times")
            continue
        assert op.ended_s is not None
        took_s = op.ended_s - op.started_s - (op.process.paused_s - op.paused_s)
        if op.deadline_s is not None and took_s > op.deadline_s + SLACK_S:
            wrong.append(f"{name} took {took_s:.3f} s, its deadline was {op.deadline_s:.3f} s: {op.outcome!r}")
        found = _check_relay(op, runs, books) if op.kind == "relay" else _check_once(op, runs)
        wrong += [f"{name}: {text}" for text in found]
    return wrong


def _check_once(op: Op, runs: list[tuple[str, int]]) -> list[str]:
    wrong: list[str] = []
    if len(runs) > 1:
        wrong.append(f"executed {len(runs)} times: {runs}")
    if isinstance(op.outcome, Receipt):
        receipt = op.outcome
        if receipt.token != op.token or receipt.who != op.target or (receipt.who, receipt.epoch) not in runs:
            wrong.append(f"got {receipt}")
    if isinstance(op.outcome, NotSent | NotExecuted) and runs:
        wrong.append(f"ended with {op.outcome!r}, but was executed")
    if not isinstance(op.outcome, Receipt | NotSent | NotExecuted | OutcomeUnknown | TimeoutError):
        wrong.append(f"ended with {op.outcome!r}")
    return wrong


def _check_relay(op: Op, runs: list[tuple[str, int]], books: Books) -> list[str]:
    wrong = [f"executed {len(runs)} times"] if len(runs) > 1 else []
    inner = books.executed.get(f"{op.token}'", [])
    if len(inner) > 1:
        wrong.append(f"what it relays was executed {len(inner)} times")
    if isinstance(op.outcome, Receipt):
        if op.outcome.token != f"{op.token}'" or (op.outcome.who, op.outcome.epoch) not in inner:
            wrong.append(f"got {op.outcome}")
    elif not isinstance(op.outcome, NotSent | NotExecuted | OutcomeUnknown | RemoteError):
        wrong.append(f"ended with {op.outcome!r}")
    return wrong


@contextmanager
def credit_of(num_units: int) -> Iterator[None]:
    """In this block links have windows of that size."""
    before, pending.WINDOW_UNITS = pending.WINDOW_UNITS, num_units
    try:
        yield
    finally:
        pending.WINDOW_UNITS = before


async def scenario(seed: int) -> Sim:
    """2 to 4 nodes, each a teller and a customer, a few seconds of trouble, then everything has to work again."""
    rng = random.Random(f"{seed}/workload")
    with credit_of(rng.choice((6, 20, 1024))):
        return await _scenario(seed, rng)


async def _scenario(seed: int, rng: random.Random) -> Sim:
    net = Net(
        drop=rng.choice((0.0, 0.0, 0.003, 0.02)),
        duplicate=rng.choice((0.0, 0.0, 0.01, 0.1)),
        delay_s=rng.choice(((0.0, 0.002), (0.001, 0.05), (0.0, 0.2))),
    )
    names = [f"n{i}" for i in range(rng.choice((2, 2, 3, 4)))]
    chaos_s = rng.choice((0.0, 2.0, 3.0, 5.0))
    books = Books()
    async with Sim(seed, Net(delay_s=net.delay_s)) as sim:
        tellers = [f"teller/{name}" for name in names]
        customers: dict[str, Customer] = {}
        until_s = asyncio.get_running_loop().time() + chaos_s + 1.0

        for name in names:

            async def boot(node: Any, name: str = name) -> None:
                await node.start(Teller(books), f"teller/{name}")
                customers[name] = Customer(books, sim, tellers, until_s)
                await node.start(customers[name], f"customer/{name}")

            await sim.node(name, boot, clock_offset_s=rng.choice((0.0, 3600.0, -500.0)))
        sim.degrade(net)
        nemesis = Nemesis()
        await carry_out(sim, nemesis.schedule(rng, names, chaos_s))
        async with asyncio.timeout(200):
            while any(customer.num_busy for customer in customers.values()):
                await asyncio.sleep(0.2)
        for name in names:
            for target in tellers:
                await prove(sim, name, target)
        await sim.quiet()
        for text in check(books):
            sim.audit.find(text)
        for who, error in sim.failures:
            sim.audit.find(f"{who} failed: {error!r}")
    return sim


async def prove(sim: Sim, name: str, target: str) -> None:
    """After the trouble a call succeeds, though perhaps not at the first attempt."""
    last: CallError | None = None
    for attempt in range(40):
        ref = with_deadline(sim.nodes[name].node.ref(TellerContract, target), 5.0)
        token = f"proof {name} {target} {attempt}"
        try:
            await sim.spawn(name, ref.once(token, 0.0))
        except CallError as error:
            last = error
            await asyncio.sleep(1.0)
        else:
            return
    raise AssertionError(f"{name} cannot reach {target} although all is well: {last!r}")
