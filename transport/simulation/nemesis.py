"""Who makes things go wrong: draws a schedule of faults from a seed, and carries it out.

A schedule is a value: it can be printed, shortened by hand and carried out again. Every fault ends by itself, so after
a schedule the system is whole again and may be asked to prove it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .sim import Sim

Verb = Literal["crash", "pause", "partition", "one-way", "reset", "slow", "clock"]
VERBS: tuple[Verb, ...] = get_args(Verb)


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault."""

    at_s: float
    """After the beginning of the schedule."""
    lasts_s: float
    verb: Verb
    targets: tuple[str, ...]
    """crash, pause, slow, clock: the node. Else the nodes of one side; the other side is everybody else."""
    strength: float = 0.0
    """slow: envelopes per second; clock: seconds."""


@dataclass(frozen=True, slots=True)
class Nemesis:
    """What to draw from, and how often."""

    verbs: tuple[Verb, ...] = VERBS
    every_s: tuple[float, float] = (0.2, 2.0)
    """Least and most time between two strikes."""
    lasts_s: tuple[float, float] = (0.05, 3.0)
    """Least and most time until it is over (crash: until it is started again)."""
    slow_per_s: tuple[float, float] = (20.0, 400.0)
    clock_s: tuple[float, float] = (-3600.0, 3600.0)

    def schedule(self, rng: random.Random, names: Sequence[str], for_s: float) -> tuple[Strike, ...]:
        """Strikes against the nodes `names` (resets and partitions: from each other and from the rest)."""
        strikes: list[Strike] = []
        at_s = rng.uniform(*self.every_s)
        while at_s < for_s and names and self.verbs:
            verb = rng.choice(self.verbs)
            strength = 0.0
            if verb == "slow":
                strength = rng.uniform(*self.slow_per_s)
            elif verb == "clock":
                strength = rng.uniform(*self.clock_s)
            num_targets = rng.randint(1, max(1, len(names) // 2)) if verb in ("partition", "one-way") else 1
            targets = tuple(sorted(rng.sample(list(names), num_targets)))
            strikes.append(Strike(at_s, rng.uniform(*self.lasts_s), verb, targets, strength))
            at_s += rng.uniform(*self.every_s)
        return tuple(strikes)


async def carry_out(sim: Sim, schedule: Sequence[Strike]) -> None:
    """All strikes at their times; returns when the last is over and every node is up again."""
    deeds = [asyncio.get_running_loop().create_task(_strike(sim, strike), name=str(strike)) for strike in schedule]
    try:
        for deed in deeds:
            await deed
    finally:
        for deed in deeds:
            deed.cancel()
    sim.heal()
    for node in sim.nodes.values():
        if not node.is_wanted:
            await sim.restart(node.name)
        await node.is_up.wait()


async def _strike(sim: Sim, strike: Strike) -> None:
    await asyncio.sleep(strike.at_s)
    await _DEEDS[strike.verb](sim, strike)


async def _crash(sim: Sim, strike: Strike) -> None:
    (name,) = strike.targets
    await sim.crash(name)
    await asyncio.sleep(strike.lasts_s)
    if not sim.nodes[name].is_wanted:  # nobody else started it meanwhile
        await sim.restart(name)


async def _pause(sim: Sim, strike: Strike) -> None:
    (name,) = strike.targets
    sim.pause(name)
    await asyncio.sleep(strike.lasts_s)
    sim.resume(name)


async def _partition(sim: Sim, strike: Strike) -> None:
    others = [name for name in sim.nodes if name not in strike.targets]
    sim.partition(strike.targets, others, one_way=strike.verb == "one-way")
    await asyncio.sleep(strike.lasts_s)
    sim.heal()


async def _reset(sim: Sim, strike: Strike) -> None:
    (name,) = strike.targets
    for other in sim.nodes:
        if other != name:
            sim.reset(name, other)


async def _slow(sim: Sim, strike: Strike) -> None:
    (name,) = strike.targets
    sim.slow(name, strike.strength)
    await asyncio.sleep(strike.lasts_s)
    sim.slow(name, 0)


async def _clock(sim: Sim, strike: Strike) -> None:
    sim.step_clock(strike.targets[0], strike.strength)


_DEEDS: dict[str, Callable[[Sim, Strike], Awaitable[None]]] = {
    "crash": _crash,
    "pause": _pause,
    "partition": _partition,
    "one-way": _partition,
    "reset": _reset,
    "slow": _slow,
    "clock": _clock,
}
