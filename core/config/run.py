"""Sections that describe the run: `[run]`, `[model]`, `[guard]`, `[monitor]`, `[control]`.

Every field's docstring says what it is, its unit and what the special values mean; `docs/config.md` is generated
from them. Checks inside one section are here, checks between sections in `root.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ..suggestion import nearest
from .section import Conflict, CountInt, NonNegativeFloat, PathText, PositiveInt, Section, Table, TextTuple

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RunSettings(Section, frozen=True):
    """The run as a whole: its name, its folder, when it ends."""

    name: str = "run"
    """Name of the run; letters, digits, `.`, `_`, `-`, at most 64. The run directory is `<dir>/<name>-<stamp>`."""
    dir: PathText = "runs"
    """Folder in which run directories are made; if left out, `runs` in the current folder."""
    seed: CountInt = 1
    """Seed of everything random: data order, sampling, initial value head."""
    num_steps: CountInt = 100
    """Training steps (weight versions made) after which the run ends; 0 = until the data or `max_wall_s` ends it."""
    stop_reward: float = 0.0
    """Mean evaluation reward at which the run ends early; 0 = off."""
    max_wall_s: NonNegativeFloat = 0.0
    """Seconds of wall time after which the run ends regularly; 0 = no limit."""
    preload: bool = True
    """Whether each node keeps a process with the imports done, from which its actors are forked: they start faster and
    share memory. A role with its own `python` or `env` always gets a fresh interpreter; false: every actor does."""

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not RUN_NAME.fullmatch(value):
            raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
        return value


class ModelSettings(Section, frozen=True):
    """The model that is trained."""

    path: Annotated[PathText, Field(min_length=1)]
    """HuggingFace folder: config.json, safetensors, tokenizer files."""


class GuardSettings(Section, frozen=True):
    """Does the engine compute what the trainer computes? A few prompts are answered by an engine and scored by the
    trainer under the same weight version; their log-probs must agree, or the run is paused."""

    every: CountInt = 20
    """Weight versions between two checks, after one at the start; 0 = never, the default where
    `roles.rollout.kind = "recorded"`."""
    prompts: Annotated[int, Field(ge=1, le=1024)] = 8
    """Prompts per check, taken from the start of the training data."""
    max_new_tokens: PositiveInt = 64
    """Tokens per answer at most."""
    above: Literal["pause", "fail"] = "pause"
    """What happens above the bound: pause (nothing is generated or trained until the run is resumed or stopped) or
    fail (the run ends)."""
    bound: Literal["auto"] | NonNegativeFloat = "auto"
    """Mean absolute difference of log-probs (nats) above which the run is paused; "auto" = by precision, see
    docs/engines.md."""


class MonitorSettings(Section, frozen=True):
    """Where metrics, events and traces go."""

    tensorboard: bool = True
    """Whether TensorBoard files are written (needs the `tensorboard` extra; left out if it is not installed)."""
    prometheus_port: Annotated[int, Field(ge=-1, le=65535)] = 0
    """Port of the Prometheus page; 0 = any free port (named in the log), -1 = off."""
    trace: bool = True
    """Whether a Chrome trace (`trace.json`) is written."""
    samples_per_step: Annotated[int, Field(ge=0, le=64)] = 8
    """Groups of each step, and prompts of each set of an evaluation, whose prompt and answers are kept in
    `samples.jsonl` for `myxa samples`, page and report: at most half of them from those that the filter left out;
    0 = none."""
    samples_mb: PositiveInt = 256
    """MiB that `samples.jsonl` and `samples.1.jsonl` may have together; the oldest groups go."""
    sinks: TextTuple = ()
    """Further sinks: wandb, mlflow, the name of an installed package's entry point `myxa.sinks`, or your own
    `module:Class`. A package that one needs and the monitor's interpreter lacks refuses the start."""
    options: Table = {}
    """Named arguments of these sinks, a table for each, for example `[monitor.options.wandb]` with `project = "x"`."""

    @field_validator("sinks")
    @classmethod
    def _sinks_are_named_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names a sink twice")
        return value

    def conflicts(self) -> Iterator[Conflict]:
        """Options without their sink, or not in a table."""
        for name, table in self.options.items():
            if name not in self.sinks:
                near = nearest(name, self.sinks)
                hint = f'; did you mean "{near}"?' if near else ""
                yield Conflict(("options", "sinks"), f'"{name}" is not among monitor.sinks{hint}')
            elif not isinstance(table, dict):
                yield Conflict(("options",), f'"{name}" must be a table of named arguments')


NO_DASHBOARD = -1


class ControlSettings(Section, frozen=True):
    """How a live run is watched and changed; see docs/control.md."""

    socket: bool = True
    """Whether the launcher of node 0 opens the control sockets that `myxa get`, `set`, `ps` and the others speak to."""
    view_group: str = ""
    """Group of this host whose members may use the socket that only shows; empty = only the user of the run."""
    dashboard_port: Annotated[int, Field(ge=NO_DASHBOARD, le=65535)] = NO_DASHBOARD
    """Port of the web dashboard on 127.0.0.1; 0 takes any free one, -1 = no dashboard."""
