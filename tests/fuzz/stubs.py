"""Actors that implement real contracts, execute nothing and count what reaches them."""

from __future__ import annotations

import functools
import inspect
import typing
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tests.fuzz.typed_values import fits, learn

from myxa.core.actor import Actor
from myxa.core.handlers import call, handlers_of

executed: Counter[str] = Counter()
"""Handler -> how often it ran."""
misfits: list[str] = []
"""Arguments that are not of the declared types: must stay empty."""


class Item(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    values: npt.NDArray[np.float32]
    extra: dict[str, Any] = {}


class MixedContract(Actor):
    """One handler of every kind, with arrays."""

    @call(deadline=10)
    async def echo(self, item: Item, times: int = 1) -> None:
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def size(self, data: npt.NDArray[np.uint8]) -> None:
        raise NotImplementedError

    @call(deadline=10)
    async def note(self, text: str) -> None:
        raise NotImplementedError

    @call(deadline=10, cancellable=False)
    async def put(self, item: Item, attempt: int) -> None:
        raise NotImplementedError


@functools.cache
def stub_of(contract: type[Actor]) -> type[Actor]:
    """A class whose handlers check their arguments, count and return nothing."""
    methods: dict[str, Any] = {"mailbox_size": 4096}
    for spec in handlers_of(contract).specs:
        declared = getattr(contract, spec.name)
        methods[spec.name] = _stub(f"{contract.__name__}.{spec.name}", declared)
    return type(f"Fuzzed{contract.__name__}", (contract,), methods)


def _stub(place: str, declared: Any) -> Any:
    hints = typing.get_type_hints(declared, include_extras=True)
    for kind in hints.values():
        learn(kind, set())
    kinds = [hints[name] for name in list(inspect.signature(declared).parameters)[1:]]

    async def called(self: Actor, *args: Any) -> None:
        executed[place] += 1
        if len(args) != len(kinds) or not all(map(fits, args, kinds)):
            misfits.append(f"{place}{args!r}"[:500])

    stub: Any = called
    stub.__signature__ = inspect.signature(declared)
    return stub
