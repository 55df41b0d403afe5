"""Weight updates under faults: moment x {kill, stop, drop, corrupt, slow} over every channel that runs on a CPU.

Proved of each cell: the engines adopt again within 15 s of the fault, by the real adopter; whoever is at fault is named;
no engine ever serves a mixture or weights other than it announces (its answers are those of the announced version, to
1e-5); and no process, channel or version is left over.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio
from tests.weights.adoption_lab import VICTIM, WITNESS, Answer, FaultLab, LabEngine, PipeEngine, ServerEngine, fault_lab
from tests.weights.fault_cells import CELLS, Cell, Channel, tables
from tests.weights.weight_lab import CONTEXT, VOCAB, own_answer

from myxa.actors.models.tiny import make_tiny_model
from myxa.core.errors import MyxaError

pytestmark = pytest.mark.timeout(180)
CONTINUES_S = 15.0
SENDER_BACK_S = 1.5
"""A trainer that died or stands still is replaced so soon; in a run the launcher does that."""
LOOK_S = 8.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp(f"version{n}") for n in range(3)]
    for seed, folder in enumerate(made):
        make_tiny_model(folder, "0p5m", seed=seed, vocab_size=VOCAB, context_length=CONTEXT)
    return made


@pytest.fixture(scope="module")
def fingerprints(folders: list[Path]) -> dict[Path, Answer]:
    return {folder: asyncio.run(own_answer(folder)) for folder in folders}


async def kill_sender(lab: FaultLab, engine: LabEngine) -> None:
    os.kill(lab.sender.process.pid, signal.SIGKILL)
    await lab.sender.process.wait()


async def stop_sender(lab: FaultLab, engine: LabEngine) -> None:
    lab.sender.process.send_signal(signal.SIGSTOP)


async def kill_engine(lab: FaultLab, engine: LabEngine) -> None:
    engine.signal(signal.SIGKILL)
    asyncio.get_running_loop().call_later(0.2, lambda: lab.begin(lab.leave(VICTIM)))


async def stop_engine(lab: FaultLab, engine: LabEngine) -> None:
    engine.signal(signal.SIGSTOP)


async def harm(lab: FaultLab, engine: LabEngine, how: str) -> None:
    """What is published is damaged; but chunks that are dropped on the way from device to device are so by `arm`."""
    if how == "corrupt" or not isinstance(engine, ServerEngine):
        await lab.sender.do("harm", (lab.newest, how))


async def slow(lab: FaultLab, engine: LabEngine) -> None:
    """It was slow from the beginning; this only marks the moment."""


FAULTS: dict[str, Callable[[FaultLab, LabEngine], Awaitable[None]]] = {
    "kill sender": kill_sender, "stop sender": stop_sender, "kill engine": kill_engine, "stop engine": stop_engine,
    "slow": slow,
}  # fmt: skip
HARMS = {"drop every third chunk": "drop", "corrupt a byte": "corrupt"}


async def arm(lab: FaultLab, cell: Cell) -> list[float]:
    """Have the fault strike once, at the cell's moment; the list then holds when."""
    engine = lab.rollouts[VICTIM].engine
    struck: list[float] = []

    async def strike(point: str) -> None:
        if point == cell.phase and len(struck) == 1 and cell.fault == "corrupt a byte" and cell.channel == "nccl":
            struck.append(time.monotonic())
            await harm(lab, engine, "corrupt")  # a bit that flipped on the way is right again when it is sent again
        if point == cell.phase and not struck:
            struck.append(time.monotonic())
            if cell.fault in HARMS:
                await harm(lab, engine, HARMS[cell.fault])
            else:
                await FAULTS[cell.fault](lab, engine)

    engine.hook = strike
    if isinstance(engine, PipeEngine):
        await engine.hold("prepare" if cell.fault in HARMS else cell.phase)
        if cell.fault in HARMS:  # before it is read: what was copied already cannot be damaged any more
            engine.hook = lambda point: strike(cell.phase)
    if cell.fault == "slow":
        await engine.slow()
    if isinstance(engine, ServerEngine) and cell.fault == "drop every third chunk":
        engine.drops = True
    return struck


async def is_whole(lab: FaultLab, engine: LabEngine, fingerprints: dict[Path, Answer]) -> str:
    """Fails if it answers with anything but a whole announced version; says what it serves."""
    engine.signal(signal.SIGCONT)
    if any(rollout.engine is engine and rollout.version < 0 for rollout in lab.rollouts.values()):
        return "nothing yet"
    try:
        async with asyncio.timeout(LOOK_S):
            ids, logprobs, versions = await engine.answer()
            if len(versions) == 2:  # one that stood in its commit made it in the middle of the answer, as it may
                assert set(versions) <= lab.announced.keys(), f"it stamps {versions}"
                ids, logprobs, versions = await engine.answer()
    except (MyxaError, TimeoutError, OSError):
        return "nothing"
    assert len(versions) == 1 and versions[0] in lab.announced, f"it stamps {versions}"
    expected_ids, expected_logprobs, _ = fingerprints[lab.announced[versions[0]]]
    assert ids == expected_ids and logprobs == pytest.approx(expected_logprobs, abs=1e-5), "a mixture"
    return f"version {versions[0]}"


async def run(lab: FaultLab, cell: Cell, fingerprints: dict[Path, Answer]) -> tuple[str, str, float]:
    """Outcome, what was said, and how long after the fault (or, had the trainer to come back, after that) the other
    engine served the newest version."""
    before = lab.newest
    assert lab.adoption.serving == {VICTIM: before, WITNESS: before}
    if cell.phase == "join":  # which a server does once
        await lab.add(VICTIM)
    lab.told()
    for rollout in lab.rollouts.values():
        rollout.refused.clear()
    victim = lab.rollouts[VICTIM]
    struck = await arm(lab, cell)
    await lab.publish(before + 1)
    adopting = lab.begin(lab.adopter.adopt_pending())
    back_s = 0.0
    if "sender" in cell.fault:
        async with asyncio.timeout(LOOK_S):
            while not struck:
                await asyncio.sleep(0.02)
        await asyncio.sleep(SENDER_BACK_S)
        await lab.replace_sender()
        await lab.publish(before + 1)
        back_s = time.monotonic()
    if HARMS.get(cell.fault) and cell.channel != "nccl":
        async with asyncio.timeout(LOOK_S):
            while not victim.refused:
                await asyncio.sleep(0.02)
        await lab.publish(before + 2)  # the next training step's
    async with asyncio.timeout(90):
        await adopting
        await lab.adopter.adopt_pending()
    if cell.fault == "kill engine":
        while victim.is_there:
            await asyncio.sleep(0.02)
    assert struck, f"the fault never struck: {cell.phase} was not reached"
    said = "; ".join([*victim.fenced, *victim.refused, *lab.told()])
    serves = await is_whole(lab, victim.engine, fingerprints)
    outcome = "replaced" if not victim.is_there else "fenced" if victim.fenced else "adopted"
    if outcome == "adopted" and victim.refused:
        outcome = "asked again"
    print(f"{cell.name}: {outcome}, its engine serves {serves}; said: {said}")
    assert lab.adoption.serving[WITNESS] == lab.newest
    continues_s = lab.adoption.adopted_s[WITNESS] - max(struck[0], back_s)
    if outcome in ("fenced", "replaced"):
        await lab.add(VICTIM)
        await lab.adopter.adopt_pending()
    return outcome, said, continues_s


class Labs:
    """One lab at a time, for the cells of a channel; a cell that failed leaves none for the next."""

    def __init__(self, folders: list[Path], scratch: Path) -> None:
        self._folders, self._scratch = folders, scratch
        self._stack = AsyncExitStack()
        self._lab: FaultLab | None = None

    async def close(self) -> None:
        self._lab = None
        await self._stack.aclose()

    async def of(self, channel: Channel) -> FaultLab:
        if self._lab is None or self._lab.channel != channel:
            await self.close()
            scratch = self._scratch / f"{channel}{time.monotonic()}"
            self._lab = await self._stack.enter_async_context(fault_lab(channel, self._folders, scratch))
            await self._lab.publish(1)
            await self._lab.adopter.adopt_pending()
        return self._lab


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def labs(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Labs]:
    made = Labs(folders, tmp_path_factory.mktemp("published"))
    yield made
    await made.close()  # that no process is left is looked at after each module


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=c.name, marks=() if c.is_cheap else pytest.mark.soak) for c in CELLS]
)
async def test_a_fault_in_a_weight_update(cell: Cell, labs: Labs, fingerprints: dict[Path, Answer]) -> None:
    lab = await labs.of(cell.channel)
    try:
        outcome, said, continues_s = await run(lab, cell, fingerprints)
        print(f"| {cell.channel} | {cell.phase} | {cell.fault} | {outcome} | {continues_s:.1f} s |")
        assert lab.adoption.serving == {VICTIM: lab.newest, WITNESS: lab.newest}
        for name in (VICTIM, WITNESS):
            assert await is_whole(lab, lab.rollouts[name].engine, fingerprints) == f"version {lab.newest}"
        if cell.channel == "nccl":
            assert len(await lab.sender.do("progress", None)) <= 2, "channels that nobody uses are left"
        assert continues_s < CONTINUES_S
        assert outcome in cell.outcome.split(" or ")
        assert outcome == "adopted" or re.search(cell.culprit, said), f"nobody was named: {said}"
    except BaseException as err:
        print("FAILED", repr(err))
        await labs.close()
        raise


def test_the_page_shows_these_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "walk-weights.md").read_text()
    shown = page.partition("<!-- begin faults -->\n")[2].partition("\n<!-- end faults -->")[0]
    assert shown == tables(), "copy what fault_cells.tables() says"
