"""What is promised: fault x operation -> how it ends, how often it took effect, by when. The tests hold the runtime to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.faults.operations import Plan

OPERATIONS = ("call", "put", "bulk", "join")
SLACK_S = 8.0
"""A busy machine may be that much later than the bound says; the bound itself is in the table."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One operation under one fault."""

    outcomes: tuple[str, ...]
    within_s: float
    """After the operation began, or after the fault struck if it was under way then."""
    num_effects: tuple[int, int] = (0, 1)
    """How often the handler may have run (puts: how often it may have taken effect), at least and at most."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row."""

    what: str
    cells: dict[str, Cell]
    plan: Plan = field(default_factory=Plan)
    strikes: bool = False
    """It strikes operations that are under way; else it acts already when they begin."""
    lasts_s: float = 0.0
    """Then it is over; 0: it is over when the operations are."""
    is_soak: bool = False


def cells(within_s: float, **special: Cell | None) -> dict[str, Cell]:
    """All operations are done within that time and exactly once, but for the special ones (None: does not apply)."""
    found: dict[str, Cell] = {}
    for operation in OPERATIONS:
        cell = special.get(operation, Cell(("done",), within_s, (1, 1)))
        if cell is not None:
            found[operation] = cell
    return found


def once(*outcomes: str, within_s: float) -> Cell:
    return Cell(outcomes, within_s, (1, 1))


def maybe(*outcomes: str, within_s: float) -> Cell:
    return Cell(outcomes, within_s, (0, 1))


def never(*outcomes: str, within_s: float) -> Cell:
    return Cell(outcomes, within_s, (0, 0))


HASTY = Plan(deadline_s=1.2, bulk_s=1.2, patient_s=8.0, join_s=1.2)
"""Calls give up while the hole is open; a put, which is repeated, outlives it."""
UNDER_WAY = Plan(busy_s=0.6, join_s=10.0)
BULK_LATE = replace(UNDER_WAY, bulk_s=2.5)
"""Of rows in which an array that is under way is not answered."""

_HOLE_S = 2.0
_BULK_LATE = never("DeadlineExceeded", within_s=3.0)
_NO_JOIN = never("LaunchError", within_s=2.0)
_BROKEN = cells(3.0, bulk=_BULK_LATE, join=once("done", within_s=6.0))
_LATE, _LATE_ONCE = (Cell(("DeadlineExceeded",), 1.5, (least, 1)) for least in (0, 1))
_HOLE = cells(4.0, call=_LATE, bulk=_LATE, join=_NO_JOIN)
_ANSWERS_LATE = cells(4.0, call=_LATE_ONCE, bulk=_LATE_ONCE, join=None)

_PATIENT = Plan(deadline_s=60.0, bulk_s=60.0, patient_s=60.0, join_s=10.0)
_GONE, _NO_LATE_JOIN = maybe("PeerDied", within_s=12.0), never("LaunchError", within_s=12.0)
_GIVEN_UP = cells(35.0, call=_GONE, bulk=_GONE, join=_NO_LATE_JOIN)

NETWORK: dict[str, Fault] = {
    "latency": Fault("150 ms of latency each way", cells(3.0)),
    "bandwidth": Fault("bandwidth of 1 MB/s", cells(4.0), Plan(bulk_s=20.0)),
    "slicer": Fault("TCP segments of 1 to 1000 bytes", cells(3.0)),
    "cut": Fault("connections reset after 200 kB each", cells(3.0, bulk=_BULK_LATE), Plan(bulk_s=2.5)),
    "reset of requests": Fault("RST on the connection that carries requests", _BROKEN, BULK_LATE, strikes=True),
    "reset of answers": Fault(
        "RST on the connection that carries answers", cells(3.0, join=None), UNDER_WAY, strikes=True
    ),
    **{
        f"half-close, {side}": Fault(
            f"FIN towards the {side}, the other direction stays open", _BROKEN, BULK_LATE, strikes=True
        )
        for side in ("callee", "caller")
    },
    "hole for requests": Fault("black hole for requests, 2 s", _HOLE, HASTY, lasts_s=_HOLE_S),
    "hole for answers": Fault("black hole for answers, 2 s", _ANSWERS_LATE, HASTY, lasts_s=_HOLE_S),
    "hole": Fault("black hole both ways, 2 s", _HOLE, HASTY, lasts_s=_HOLE_S),
    "long hole for requests": Fault("black hole for requests, 15 s", _GIVEN_UP, _PATIENT, lasts_s=15.0, is_soak=True),
    "long hole": Fault("black hole both ways, 25 s", _GIVEN_UP, _PATIENT, lasts_s=25.0, is_soak=True),
}

_LOST_S = 0.6
_LOST = Plan(deadline_s=1.2, bulk_s=1.2, patient_s=8.0)
_NEVER = never("DeadlineExceeded", within_s=1.5)
_REQUEST_LOST = cells(4.0, call=_NEVER, bulk=_NEVER, join=None)
_SLOW = once("DeadlineExceeded", within_s=0.8)

RPC: dict[str, Fault] = {
    "request lost": Fault("the request is lost and its connection breaks", _REQUEST_LOST, _LOST, lasts_s=_LOST_S),
    "answer lost": Fault("the answer is lost and its connection breaks", _ANSWERS_LATE, _LOST, lasts_s=_LOST_S),
    "slow": Fault(
        "it is executed, but slower than the deadline",
        cells(0.8, call=_SLOW, put=once("CallError", within_s=0.8), bulk=_SLOW, join=None),
        Plan(busy_s=1.5, deadline_s=0.6, bulk_s=0.6, patient_s=0.6),
    ),
}

DYING = Plan(busy_s=6.0, deadline_s=20.0, patient_s=30.0, bulk_s=20.0, join_s=1.5)
FROZEN = Plan(busy_s=1.0, deadline_s=20.0, patient_s=20.0, bulk_s=20.0, join_s=20.0)

_DIED = once("PeerDied", within_s=2.0)
_DIES = cells(20.0, call=_DIED, bulk=_DIED, join=_NO_JOIN)
_NOT_KEPT = once("LedgerError", within_s=2.0)
_MAYBE_LATE = maybe("DeadlineExceeded", within_s=15.5)

PROCESS: dict[str, Fault] = {
    "SIGKILL": Fault("SIGKILL; the launcher reports it and starts the process again", _DIES, DYING, strikes=True),
    "exit": Fault(
        "`os._exit` in a handler; the same",
        # The order to exit is small: on its own lane it may overtake the array.
        {k: v for k, v in _DIES.items() if k != "join"} | {"bulk": maybe("PeerDied", within_s=2.0)},
        DYING,
        strikes=True,
    ),
    "SIGSTOP": Fault("SIGSTOP, 2.5 s later SIGCONT", cells(5.0), FROZEN, strikes=True, lasts_s=2.5),
    "interpreter lock": Fault(
        "a handler holds the interpreter lock for 5 s", cells(8.0), FROZEN, strikes=True, lasts_s=5.0
    ),
    "descriptors": Fault(
        "no file descriptor is left in the callee's process",
        cells(2.0, put=_NOT_KEPT, join=never("LaunchError", within_s=3.0)),
        Plan(join_s=2.0),
    ),
    "memory": Fault(
        "the callee's process may take 24 MiB more; a peer sends 64 MiB",
        cells(2.0, bulk=never("Overloaded", "PeerDied", within_s=4.0), join=None),
        Plan(bulk_s=20.0),
    ),
    "disk": Fault("no space on the device that the callee writes puts to", cells(2.0, put=_NOT_KEPT, join=None)),
    "long SIGSTOP": Fault(
        "SIGSTOP, 30 s later SIGCONT", cells(35.0, call=_MAYBE_LATE, bulk=_MAYBE_LATE, join=_NO_LATE_JOIN),
        Plan(busy_s=1.0, deadline_s=15.0, bulk_s=15.0, patient_s=60.0, join_s=10.0),
        strikes=True, lasts_s=30.0, is_soak=True,
    ),
    "long interpreter lock": Fault(
        "a handler holds the interpreter lock for 30 s", cells(35.0, join=None),
        Plan(busy_s=1.0, deadline_s=60.0, bulk_s=60.0, patient_s=60.0), strikes=True, lasts_s=30.0, is_soak=True,
    ),
}  # fmt: skip
