"""Runs scenarios on simulated loops, one seed after another; a seed that fails says how to run it alone."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from ...core.errors import ConfigError, SimulationError
from .loop import LIMIT_S, SimLoop

T = TypeVar("T")

SEED_VARIABLE = "SIM_SEED"
COLLECT_EVERY = 50
"""Seeds between two rounds of the garbage collector, which rests within a run: its moments are not the seed's."""


def run(scenario: Callable[[int], Coroutine[Any, Any, T]], seed: int, *, limit_s: float = LIMIT_S) -> T:
    """The result of `scenario(seed)` on a fresh simulated loop.

    Raises what it raises, and SimulationError if the run stands still, does not end within `limit_s` virtual seconds,
    leaves tasks behind, or an exception was seen by nobody.
    """
    loop = SimLoop(seed, limit_s=limit_s)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        result = loop.run_until_complete(scenario(seed))
        left = sorted(task.get_name() for task in asyncio.all_tasks(loop))
        if left:
            raise SimulationError(f"tasks are left: {', '.join(left)}")
        if loop.errors:
            first = loop.errors[0]
            raise SimulationError(f"seen by nobody: {first.get('message')}") from first.get("exception")
    except BaseException as error:
        for context in loop.errors[:3]:
            error.add_note(f"and seen by nobody: {context.get('message')}: {context.get('exception')!r}")
        raise
    else:
        return result
    finally:
        _clear(loop)
        if was_enabled:
            gc.enable()


def _clear(loop: SimLoop) -> None:
    """End what a failed run left, without a word: its error is on its way already."""
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    for task in tasks:
        task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]  # as asyncio does in run_until_complete
        task.cancel()
    if tasks:
        try:
            loop.run_until_complete(asyncio.wait(tasks, timeout=60.0))
        except SimulationError:
            pass  # they wait for a process that will not run any more
    loop.close()


def sweep(
    scenario: Callable[[int], Coroutine[Any, Any, Any]], seeds: Iterable[int], *, repro: str, limit_s: float = LIMIT_S
) -> int:
    """Run every seed and return how many there were; the first failure carries the line that repeats it alone.

    `repro`: the command that runs this scenario, e.g. "python -m pytest tests/simulation -k durable".
    """
    count = 0
    for seed in seeds:
        try:
            run(scenario, seed, limit_s=limit_s)
        except BaseException as error:
            error.add_note(f"{SEED_VARIABLE}={seed} {repro}")
            raise
        count += 1
        if count % COLLECT_EVERY == 0:
            gc.collect()
    return count


def seeds(count: int, environ: Mapping[str, str], *, first: int = 0) -> range:
    """`count` seeds from `first` on, or only the one that the environment names. Raises ConfigError for nonsense."""
    chosen = environ.get(SEED_VARIABLE, "")
    if not chosen:
        return range(first, first + count)
    if not chosen.isdecimal():
        raise ConfigError(f"{SEED_VARIABLE}={chosen!r} is no seed", remedy="give a whole number, 0 or more")
    return range(int(chosen), int(chosen) + 1)
