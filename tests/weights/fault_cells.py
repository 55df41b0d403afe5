"""The weight update's fault matrix: what is tried, and how each cell ends. `docs/walk-weights.md` shows these tables; the
tests assert them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Channel = Literal["shm", "disk", "tcp", "nccl"]

OUTCOMES = {
    "adopted": "the engine adopts the version as if nothing had been",
    "asked again": "it refuses, serves on what it had, whole, and adopts when it is asked again, or the next version",
    "fenced": "it is named and rebuilt; until then it serves nothing, or a whole version that it announces",
    "replaced": "its actor ends by itself and is rebuilt",
}
SIGNALS = ("kill sender", "stop sender", "kill engine", "stop engine")
BYTES = ("drop every third chunk", "corrupt a byte", "slow")
A, Q, F, R = OUTCOMES
EITHER = f"{A} or {Q}"
"""Whether the sender was still needed at that moment."""

BY_SIGNAL: dict[tuple[Channel, str], tuple[str, str, str, str]] = {
    ("shm", "prepare"): (EITHER, EITHER, R, F),
    ("shm", "transfer"): (A, A, R, F),
    ("shm", "before commit"): (A, A, R, F),
    ("shm", "commit"): (A, A, R, F),
    ("shm", "after commit"): (A, A, R, A),
    ("disk", "transfer"): (A, A, R, F),
    ("tcp", "fetch"): (Q, Q, R, F),
    ("tcp", "transfer"): (A, A, R, F),
    ("nccl", "plan"): (Q, Q, R, F),
    ("nccl", "join"): (Q, Q, R, F),
    ("nccl", "transfer"): (F, F, R, F),
    ("nccl", "before commit"): (F, F, R, F),
    ("nccl", "commit"): (F, F, R, F),
    ("nccl", "after commit"): (A, A, R, A),
}
BY_BYTES: dict[Channel, tuple[str, str, str]] = {
    "shm": (Q, Q, A),
    "disk": (Q, Q, A),
    "tcp": (Q, Q, A),
    "nccl": (F, A, A),
}
CHEAP = frozenset(
    {
        ("shm", "transfer", "kill engine"),
        ("shm", "transfer", "corrupt a byte"),
        ("shm", "prepare", "kill sender"),
        ("disk", "transfer", "drop every third chunk"),
    }
)
"""Tried in every run of the tests; the others by `make soak`. A server takes seconds to start, so none of nccl's."""


@dataclass(frozen=True)
class Cell:
    """One fault at one moment of one channel."""

    channel: Channel
    phase: str
    fault: str
    outcome: str
    """One of OUTCOMES, or two with "or"."""

    @property
    def name(self) -> str:
        return f"{self.channel}-{self.phase}-{self.fault}".replace(" ", "_")

    @property
    def is_cheap(self) -> bool:
        return (self.channel, self.phase, self.fault) in CHEAP

    @property
    def culprit(self) -> str:
        """What must be named, as a pattern: the engine always, and the sender where it is the one who failed."""
        if self.phase == "after commit":
            return ""
        return "rollout/0.*trainer/0" if self.channel == "nccl" and "sender" in self.fault else "rollout/0"


CELLS = [
    *(
        Cell(channel, phase, fault, outcome)
        for (channel, phase), outcomes in BY_SIGNAL.items()
        for fault, outcome in zip(SIGNALS, outcomes, strict=True)
    ),
    *(
        Cell(channel, "transfer", fault, outcome)
        for channel, outcomes in BY_BYTES.items()
        for fault, outcome in zip(BYTES, outcomes, strict=True)
    ),
]


def tables() -> str:
    """Both tables as the page shows them."""
    lines = [f"| channel | moment | {' | '.join(SIGNALS)} |", "|" + "---|" * (2 + len(SIGNALS))]
    lines += [f"| `{channel}` | {phase} | {' | '.join(found)} |" for (channel, phase), found in BY_SIGNAL.items()]
    lines += ["", f"| channel, in the middle of the bytes | {' | '.join(BYTES)} |", "|" + "---|" * (1 + len(BYTES))]
    lines += [f"| `{channel}` | {' | '.join(found)} |" for channel, found in BY_BYTES.items()]
    lines += [""] + [f"* *{name}*: {what}." for name, what in OUTCOMES.items()]
    return "\n".join(lines)
