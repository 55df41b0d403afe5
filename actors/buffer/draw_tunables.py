"""Declarations of the knobs that say which prompts are drawn: the ratios of sources, and the difficulty window."""

from __future__ import annotations

from ...core.config.data import MAX_SKIPS
from ...core.knobs import Tunable

_OWNER = "buffer"


def draw_tunables(*, is_mixed: bool, has_rewards: bool) -> tuple[Tunable, ...]:
    """`is_mixed`: there are several sources. `has_rewards`: prompts can be judged by them."""
    return (*((_mix(),) if is_mixed else ()), *(_window() if has_rewards else ()))


def _mix() -> Tunable:
    return Tunable(  # without a key: there each source has its own
        name="mix",
        kind="text",
        boundary="request",
        owner=_OWNER,
        help="Shares of the sources among the prompts that are drawn from now on: math:0.7,code:0.3, every source "
        "named, 0 = none for now; in the run file data.sources.NAME.weight.",
    )


def _window() -> tuple[Tunable, ...]:
    return (
        Tunable(
            name="difficulty_low",
            kind="float",
            boundary="request",
            owner=_OWNER,
            key="data.difficulty_low",
            help="A prompt whose newest finished group has a mean reward below this is passed over when it comes up "
            "again; equal to difficulty_high = no window. Set both where one does not fit the other.",
        ),
        Tunable(
            name="difficulty_high",
            kind="float",
            boundary="request",
            owner=_OWNER,
            key="data.difficulty_high",
            help="The same for mean rewards above this. Both ends are inside the window.",
        ),
        Tunable(
            name="difficulty_skips",
            kind="int",
            boundary="request",
            owner=_OWNER,
            key="data.difficulty_skips",
            low=0,
            high=MAX_SKIPS,
            unit="passes",
            help="Passes in a row that a prompt outside the window is passed over at most, after which it is tried "
            "again; 0 = never again.",
        ),
    )
