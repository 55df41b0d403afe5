"""The heartbeat of event loops: PING and PONG between processes that have business with each other. Sans-IO.

The loop asks the loop, so an answer proves that the other process's actors can act. Either counts as a sign of life.

    ok ──suspect_s of silence──> suspect ──hung_s──> hung          suspect, hung ──heard──> ok

A peer that said that it would be busy is not judged until then, and a pause of this process itself is no silence.
Suspicion informs; it never decides that a peer is dead.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Annotated, Literal

import msgspec

from ...core.clock import Clock
from ...core.errors import ConfigError
from ...core.ids import PeerKey
from ...core.timeouts import TIMEOUTS
from ..wire import Lane
from .frames import Envelope, Kind
from .links import Link, Links, SessionHost, Verdict

MAX_UNANSWERED = 10
"""After so many PINGs in vain they become rarer: what hangs shall not find an inbox full of them."""
RARER = 5
MAX_WORDS = 200
"""Characters of the reason for being busy that travel."""


NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]


class Vitals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a process is, as its PINGs and PONGs say it."""

    busy_s: NotNegative = 0.0
    """It may be silent for so long from now on."""
    why: str = ""
    num_waiting: int = 0


class _Heart:
    def __init__(self, now: float) -> None:
        self.state: Literal["ok", "suspect", "hung"] = "ok"
        self.vitals = Vitals()
        self.is_watched = False
        self.heard_at = self.silent_from = now
        self.asked_at = now - TIMEOUTS.wire.heartbeat_s
        self.num_unanswered = 0

    def silence_s(self, now: float) -> float:
        """How long it should have been heard and was not."""
        return max(0.0, now - self.silent_from)

    def excuse(self, until: float) -> None:
        """Its silence up to that moment means nothing."""
        self.silent_from = max(self.silent_from, until)

    def check(self, now: float) -> Iterator[Verdict]:
        """The states entered by its silence, in order."""
        silence_s, wire = self.silence_s(now), TIMEOUTS.wire
        if self.state == "ok" and silence_s >= wire.suspect_s:
            self.state = "suspect"
            yield self.state
        if self.state == "suspect" and silence_s >= wire.hung_s:
            self.state = "hung"
            yield self.state

    def heard(self, now: float, vitals: Vitals) -> bool:
        """True if it was suspect or hung until now."""
        was_ok, self.state = self.state == "ok", "ok"
        self.vitals, self.heard_at, self.num_unanswered = vitals, now, 0
        self.silent_from = now + min(TIMEOUTS.wire.max_busy_s, vitals.busy_s)
        return not was_ok


class Heartbeat:
    """The heartbeat of one process."""

    def __init__(self, links: Links, host: SessionHost, clock: Clock, counters: Counter[str]) -> None:
        self._links = links
        self._host = host
        self._clock = clock
        self._counters = counters
        self._hearts: dict[PeerKey, _Heart] = {}
        self.watches_all = False
        """Whether all peers are watched, as the registry's process does; else those that owe or await an answer."""
        self._busy: dict[int, tuple[float, str]] = {}
        self._numbers = itertools.count(1)
        self._looked_at = clock.monotonic()

    @contextlib.contextmanager
    def busy(self, actor: str, limit_s: float, why: str) -> Generator[None]:
        """While this lasts, at most `limit_s`, peers do not expect to hear of this process. They get it before this
        returns, so what blocks right afterwards was announced. Raises ConfigError for a limit that is none."""
        if not 0 < limit_s <= TIMEOUTS.wire.max_busy_s:
            remedy = f"a limit is more than 0 s, at most {TIMEOUTS.wire.max_busy_s:g} s"
            raise ConfigError(f"{actor}: busy for {limit_s} s", remedy=remedy)
        number = next(self._numbers)
        self._busy[number] = (self._clock.monotonic() + limit_s, f"{actor}: {why}"[:MAX_WORDS])
        self._tell_all()
        try:
            yield
        finally:
            del self._busy[number]
            self._tell_all()

    @property
    def busy_s(self) -> float:
        """For how long this process has declared to be busy from now on; 0: not at all."""
        until = max((entry[0] for entry in tuple(self._busy.values())), default=0.0)
        return max(0.0, until - self._clock.monotonic())

    def _tell_all(self) -> None:
        self._links.flush()  # who is just connecting shall hear it too
        for link in self._links.all():
            if self._can_hear(link):
                self._send(link, Kind.PING)
        self._links.flush()

    def _vitals(self) -> Vitals:
        until, why = max(self._busy.values(), default=(0.0, ""))
        busy_s = max(0.0, until - self._clock.monotonic())
        return Vitals(busy_s=round(busy_s, 3), why=why if busy_s else "", num_waiting=self._host.num_waiting())

    def tick(self) -> None:
        """Time has passed. Called every `tick_s`, as well as this process's loop can."""
        now = self._clock.monotonic()
        if now - self._looked_at >= TIMEOUTS.wire.look_s:
            pause_s = now - self._looked_at - TIMEOUTS.wire.look_s
            self._looked_at = now
            self._look(now, pause_s if pause_s > TIMEOUTS.wire.heartbeat_s else 0.0)

    def _look(self, now: float, pause_s: float) -> None:
        for link in self._links.all():
            if link is self._links.itself:
                continue
            is_watched = link.has_business or (self.watches_all and self._can_hear(link))
            if not is_watched and link.key not in self._hearts:
                continue
            heart = self._heart_of(link.key, now)
            if is_watched and not heart.is_watched:
                heart.excuse(now)
            heart.is_watched = is_watched
            if pause_s:
                heart.excuse(min(now, heart.silent_from + pause_s))
            if heart.is_watched:
                for state in heart.check(now):
                    self._counters[state] += 1
                    self._host.judged(link.key, state, self._silence(heart, now))
                self._ask(link, heart, now)

    def _ask(self, link: Link, heart: _Heart, now: float) -> None:
        pause_s = TIMEOUTS.wire.heartbeat_s * (RARER if heart.num_unanswered >= MAX_UNANSWERED else 1)
        if self._links.own > link.key:
            pause_s += TIMEOUTS.wire.look_s  # of two that would ask in the same moment, one waits and need not ask
        if self._can_hear(link) and now - max(heart.asked_at, heart.heard_at) >= pause_s - TIMEOUTS.wire.tick_s:
            heart.asked_at = now
            heart.num_unanswered += 1
            self._send(link, Kind.PING)

    @staticmethod
    def _silence(heart: _Heart, now: float) -> str:
        last = heart.vitals
        text = f"its event loop gave no sign of life for {heart.silence_s(now):.1f} s"
        details = [f"{last.num_waiting} messages were waiting"] if last.num_waiting else []
        if last.busy_s:
            details.append(f"it had declared {last.why}")
        return f"{text} ({', '.join(details)})" if details else text

    def on_ping(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        if self._take(link, envelope):
            self._send(link, Kind.PONG)

    def on_pong(self, link: Link, _lane: Lane, envelope: Envelope, _num_bytes: int) -> None:
        self._take(link, envelope)

    def _take(self, link: Link, envelope: Envelope) -> bool:
        try:
            vitals = msgspec.json.decode(envelope.body, type=Vitals) if envelope.body else Vitals()
        except (msgspec.DecodeError, ValueError):  # text that is no UTF-8 is not a DecodeError
            self._counters["malformed_vitals"] += 1
            return False
        now = self._clock.monotonic()
        heart = self._heart_of(link.key, now)
        silent_s = heart.silence_s(now)
        if heart.heard(now, vitals):
            self._counters["recovered"] += 1
            self._host.judged(link.key, "recovered", f"it answers again after {silent_s:.1f} s")
        return True

    def reconnected(self, link: Link) -> None:
        """What was asked on the connection before may be lost."""
        heart = self._hearts.get(link.key)
        if heart is not None:
            heart.num_unanswered = 0

    def forget(self, key: PeerKey) -> None:
        """That incarnation is over, or nothing to us any more."""
        self._hearts.pop(key, None)

    def silence_s(self, key: PeerKey) -> float:
        """How long a peer that is watched should have been heard and was not; 0 for one that is not watched."""
        heart = self._hearts.get(key)
        return heart.silence_s(self._clock.monotonic()) if heart is not None and heart.is_watched else 0.0

    def _heart_of(self, key: PeerKey, now: float) -> _Heart:
        return self._hearts.setdefault(key, _Heart(now))

    def _can_hear(self, link: Link) -> bool:
        return link.is_up and link is not self._links.itself

    def _send(self, link: Link, kind: Kind) -> None:
        self._links.send(link, kind, 0, msgspec.json.encode(self._vitals()))
