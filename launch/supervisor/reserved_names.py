"""Names of rollout actors that other programs host (see embed.py): no late actor of the run may get one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..contracts import NameReply

HELD_S = 600.0
"""How long a name is kept for a program that asked for it and has not joined yet: it loads torch and a model."""

_NAME = re.compile(r"rollout/(0|[1-9]\d{0,5})")


class ReservedNames:
    """Pure: who is there is passed in. `num_own`: so many names, from rollout/0, are always the run's own."""

    def __init__(self, num_own: int) -> None:
        self._num_own = num_own
        self._held: dict[str, float] = {}

    def ask(self, wanted: str, own: Iterable[str], there: Iterable[str], now: float) -> NameReply:
        """The answer to a program that wants a name. `own`: the run's; `there`: everybody who is registered."""
        taken = {*there, *self.held(now)}
        if wanted:
            number = number_of(wanted)
            if wanted in own or (number is not None and number < self._num_own):
                return NameReply(refused="own")
            if wanted in taken or number is None:
                return NameReply(refused="taken")
            name = wanted
        else:
            numbers = [number_of(name) for name in {*own, *taken}]
            name = f"rollout/{max(self._num_own - 1, *(n for n in numbers if n is not None), -1) + 1}"
        self._held[name] = now
        return NameReply(name=name)

    def held(self, now: float) -> frozenset[str]:
        """Names that somebody asked for and may still use."""
        self._held = {name: at for name, at in self._held.items() if now - at < HELD_S}
        return frozenset(self._held)

    def left(self, name: str) -> None:
        """Whoever used it is gone."""
        self._held.pop(name, None)


def number_of(name: str) -> int | None:
    """7 for "rollout/7"; None: it names no rollout actor."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])
