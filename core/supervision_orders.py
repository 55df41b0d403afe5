"""What the supervisor of a run asks its launcher to do: plain records, carried out in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GangRound:
    """One common attempt of a gang: its ranks meet under a name that no other attempt has."""

    gang: str
    attempt: int
    rendezvous: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start these children after `delay_s`, in this order, each as its attempt (0 was the first start). Void for a
    child for which `may_launch` says no by then: another instruction has overtaken it."""

    children: tuple[str, ...]
    attempts: tuple[int, ...]
    delay_s: float
    reason: str
    branch: str
    """Whose budget this restart was taken from; empty: somebody wished it, it costs nothing."""
    rounds: tuple[GangRound, ...] = ()


@dataclass(frozen=True, slots=True)
class Drain:
    """Have these hand their work back, then say `on_drained` of each, whether or not it could."""

    children: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Tell these children to end, at the same time, and kill those that are still there after their grace."""

    children: tuple[str, ...]
    graces_s: tuple[float, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Kill:
    """These hang: being told would not help."""

    children: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run goes on without this member; its branch has a quorum."""

    member: str
    reason: str
    num_left: int
    quorum: int


@dataclass(frozen=True, slots=True)
class Retired:
    """They left for good, as somebody wished: they are no children of the run any more."""

    children: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run is over: `culprit` may not be started again."""

    culprit: str
    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Done:
    """No process is left and none will be started."""


Instruction = Restart | Drain | End | Kill | GiveUp | Retired | FailRun | Done
