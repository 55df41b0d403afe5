"""Faults that a run brings about itself, to show that it outlives them."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from ..chaos import Plan, parse_strike
from ..suggestion import nearest
from .section import CountInt, NonNegativeFloat, Section, TextTuple

FaultName = Literal["kill", "stop", "delay", "partition"]
FAULTS: tuple[FaultName, ...] = get_args(FaultName)


class ChaosSettings(Section, frozen=True):
    """Faults that a run brings about itself; only with `run.chaos = true`. See `myxa chaos` in docs/control.md."""

    strikes: TextTuple = ()
    """Faults at points of an actor's life, each once, in this order: "point[@actor]:action[=seconds][:nth]", as in
    "buffer.put:kill:3"; actions are kill, stop, delay and raise, points are listed by `myxa chaos points`."""
    rest_s: NonNegativeFloat = 0.0
    """Seconds between one of these and the next."""
    every_s: NonNegativeFloat = 0.0
    """Seconds between faults at random moments, beginning when the run goes; 0 = none."""
    seed: CountInt = 1
    """Of the random faults: which actor, which fault."""
    faults: TextTuple = ("kill",)
    """What random faults do: "kill", "stop" (SIGSTOP, for good), "delay" (SIGSTOP, and SIGCONT after `delay_s`),
    "partition" (nothing passes between it and all others, launcher included, for `delay_s`)."""
    targets: TextTuple = ("rollout/*", "buffer", "coordinator", "monitor", "trainer/*")
    """Actors that random faults may strike; shell patterns."""
    delay_s: Annotated[float, Field(gt=0, le=600)] = 2.0
    """How long "delay" holds a process, and "partition" its connections."""

    @field_validator("strikes")
    @classmethod
    def _can_be_read(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_strike(text)
        return value

    @field_validator("faults")
    @classmethod
    def _are_known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in FAULTS:
                near = nearest(name, FAULTS)
                meant = f'; did you mean "{near}"?' if near else ""
                raise ValueError(f'"{name}" is not one of {", ".join(FAULTS)}{meant}')
        return value

    @property
    def plan(self) -> Plan:
        """The strikes, read."""
        return Plan(tuple(map(parse_strike, self.strikes)), self.rest_s)

    @property
    def faults_named(self) -> tuple[FaultName, ...]:
        """`faults`, by their type."""
        return tuple(name for name in FAULTS if name in self.faults)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to happen by itself."""
        return not self.strikes and not self.every_s
