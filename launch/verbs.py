"""Every verb of a run, declared once: name, effect, help, and arguments as a struct whose fields have their own help.

Flags of the command line, checks of the HTTP door, `myxa completion` and the table in docs/control.md are made from
these declarations. Handlers (`handlers.py`) and pages (`commands/`) refer to them. Light to import: every command does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec

from ..core.errors import ConfigError
from ..core.knobs import MAX_KNOB_VALUES, ChangeRequest, KnobName, Reason
from ..core.record import Record, argument
from ..core.suggestion import nearest

Effect = Literal["read", "change"]
"""read: also by GET; change: by POST alone, and audited."""

HOST = "myxa"
"""Of requests. Any name would do on a Unix socket; web pages cannot have this one."""


class Arguments(Record, frozen=True, kw_only=True):
    """Base of the verbs' arguments, and those of a verb that takes none."""


COORDINATOR = "coordinator"
A = TypeVar("A", bound=Record)


@dataclass(frozen=True, slots=True)
class Verb(Generic[A]):
    """One verb."""

    name: str
    effect: Effect
    arguments: type[A]
    help: str
    ask_s: float = 15.0
    lasts: str = ""
    """The argument, in seconds, by which it takes longer."""
    by: str = ""
    """Who carries a change out and writes it into the audit log; empty: the control server."""
    is_secret: bool = False
    """Its answer stays out of the audit log."""

    def __hash__(self) -> int:
        return hash(self.name)

    def patience_s(self, arguments: dict[str, Any]) -> float:
        """How long a caller waits: longer than the run, whose own error names the actor that did not answer."""
        return self.ask_s + float(arguments.get(self.lasts, 0.0)) + SPARE_S


SPARE_S = 15.0

Target = Annotated[
    str, argument("rollout/1, rollout, rollout/*, node:1, all", "TARGET", is_word=True, min_length=1, max_length=200)
]
Wait = Annotated[
    float,
    argument("seconds to wait until it is done (0)", "S", flag="--wait", ge=0, le=3600),
]


class WithReason(Arguments, frozen=True, kw_only=True):
    """Arguments of a verb that takes only a reason."""

    reason: Reason = ""


class StepArguments(WithReason, frozen=True, kw_only=True):
    """Of `step`."""

    num_steps: Annotated[int, argument("how many (1)", "N", is_word=True, ge=1, le=1_000_000)] = 1


class CheckpointArguments(WithReason, frozen=True, kw_only=True):
    """Of `ckpt`."""

    export: Annotated[bool, argument("write a HuggingFace folder instead of a checkpoint")] = False


class EvalArguments(WithReason, frozen=True, kw_only=True):
    """Of `eval`."""

    name: Annotated[str, argument("one of [eval.sets] (left out: all of them)", "SET", is_word=True, max_length=64)] = (
        ""
    )


VERBS = Verb("verbs", "read", Arguments, "every verb with a JSON schema of its arguments")
MEM = Verb("mem", "read", Arguments, "which actor holds which device memory")
PAUSE = Verb("pause", "change", WithReason, "no new work and no new step; the current step ends", 60.0, by=COORDINATOR)
RESUME = Verb("resume", "change", WithReason, "continue after a pause", 60.0, by=COORDINATOR)
STEP = Verb("step", "change", StepArguments, "so many training steps, then pause", 60.0, by=COORDINATOR)
CKPT = Verb("ckpt", "change", CheckpointArguments, "a checkpoint at the next step boundary", 1800.0)
EVAL = Verb("eval", "change", EvalArguments, "held-out reward now, beside training", 600.0)
DOWN = Verb("down", "change", WithReason, "end the run cleanly, as Ctrl-C does")


class GetArguments(Arguments, frozen=True, kw_only=True):
    """Of `get`."""

    names: Annotated[
        tuple[KnobName, ...],
        argument("knobs; none: all but those of every process", "NAME", is_word=True, max_length=MAX_KNOB_VALUES),
    ] = ()


class UndoArguments(WithReason, frozen=True, kw_only=True):
    """Of `undo`."""

    epoch: Annotated[int, argument("which change (the newest)", "N", ge=0)] = 0


class HistoryArguments(Arguments, frozen=True, kw_only=True):
    """Of `history`."""

    limit: Annotated[int, argument("newest N records (50)", "N", short="-n", ge=1, le=10_000)] = 50


GET = Verb("get", "read", GetArguments, "knobs with their values, limits and owners", 20.0)
SET = Verb("set", "change", ChangeRequest, "change knobs, all or none", 60.0, by=COORDINATOR)
UNDO = Verb(
    "undo", "change", UndoArguments, "take the newest change of knobs back, or that of an epoch", 60.0, by=COORDINATOR
)
HISTORY = Verb("history", "read", HistoryArguments, "what was changed, by whom and why")


class ScaleArguments(WithReason, frozen=True, kw_only=True):
    """Of `scale`."""

    role: Annotated[str, argument("role to scale", flag="", max_length=64)]
    count: Annotated[int, argument("how many actors of it", flag="", ge=0, le=4096)]
    devices: Annotated[str, argument("unused GPUs of each node for new actors, e.g. 4-7", "GPUS", max_length=200)] = ""
    attach: Annotated[
        str, argument("an attached server for each new actor, http://host:port,...", "URLS", max_length=10_000)
    ] = ""
    wait_s: Wait = 0.0


class DrainArguments(WithReason, frozen=True, kw_only=True):
    """Of `drain`."""

    target: Target
    wait_s: Wait = 0.0


class KillArguments(WithReason, frozen=True, kw_only=True):
    """Of `kill`."""

    target: Target


SCALE = Verb("scale", "change", ScaleArguments, "more or fewer rollout actors", lasts="wait_s")
DRAIN = Verb("drain", "change", DrainArguments, "hand a rollout actor's work back and end it for good", lasts="wait_s")
RESTART = Verb("restart", "change", DrainArguments, "end an actor cleanly and start it again", lasts="wait_s")
KILL = Verb("kill", "change", KillArguments, "SIGKILL to an actor and all that it started")


class DashboardArguments(Arguments, frozen=True, kw_only=True):
    """Of `dashboard`."""

    port: Annotated[int, argument("port on 127.0.0.1 (any free one)", "PORT", ge=0, le=65535)] = 0
    operate: Annotated[bool, argument("let everyone who has the URL change the run, too")] = False


DASHBOARD = Verb("dashboard", "change", DashboardArguments, "the run in a browser of this machine", is_secret=True)


class TargetArguments(Arguments, frozen=True, kw_only=True):
    """Of `stack`."""

    target: Target


class WhyArguments(Arguments, frozen=True, kw_only=True):
    """Of `why`."""

    target: Annotated[
        str, argument("an actor or a role: rollout/1, rollout (the whole run)", "TARGET", is_word=True, max_length=200)
    ] = ""
    window_s: Annotated[
        float,
        argument("look at the last 30s, 5min; at most 10min (60s)", "T", flag="--window", is_time=True, ge=1, le=600),
    ] = 60.0


LogFile = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]


class LogsArguments(TargetArguments, frozen=True, kw_only=True):
    """Of `logs`. Targets are also "launcher" and "launcher/1"."""

    num_lines: Annotated[
        int, argument("so many of the last lines (100)", "N", flag="--lines", short="-n", ge=0, le=10_000)
    ] = 100
    grep: Annotated[str, argument("only lines that hold this text", "TEXT", max_length=200)] = ""
    engine: Annotated[bool, argument("log of the server that the actor launched")] = False
    after: Annotated[
        dict[str, tuple[LogFile, Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]]],
        argument("name -> `file` and `offset` of an earlier answer: of that log what was added since", flag=""),
    ] = {}


class ProfileArguments(TargetArguments, frozen=True, kw_only=True):
    """Of `profile`."""

    for_s: Annotated[
        float, argument("how long: 10s, 2min; at most 10min (10s)", "TIME", flag="--for", is_time=True, gt=0, le=600)
    ] = 10.0


class StatusArguments(Arguments, frozen=True, kw_only=True):
    """Of `status`."""

    whole: Annotated[bool, argument("also actors, knobs, the newest changes and what holds the run back")] = False


PS = Verb("ps", "read", Arguments, "every actor, where it runs and what it does")
STATUS = Verb("status", "read", StatusArguments, "phase, step, engines, buffer and newest metrics in one answer")
WHY = Verb("why", "read", WhyArguments, "what holds the run back, and the knob to turn")
LOGS = Verb("logs", "read", LogsArguments, "an actor's log, on whatever node it is")
STACK = Verb("stack", "read", TargetArguments, "where an actor's process is, also of one that hangs", 45.0)
PROFILE = Verb("profile", "change", ProfileArguments, "what an actor's process does in torch", 75.0, "for_s")


ALL: tuple[Verb[Any], ...] = (
    PS, STATUS, WHY, GET, SET, UNDO, HISTORY, PAUSE, RESUME, STEP, CKPT, EVAL, DOWN, SCALE, DRAIN, RESTART,
    KILL, DASHBOARD, LOGS, STACK, PROFILE, MEM, VERBS,
)  # fmt: skip
BY_NAME: dict[str, Verb[Any]] = {verb.name: verb for verb in ALL}


def find_verb(name: str, verbs: dict[str, Verb[Any]]) -> Verb[Any]:
    """Raises ConfigError for an unknown name, with the nearest one."""
    if name in verbs:
        return verbs[name]
    near = nearest(name, tuple(verbs))
    raise ConfigError(
        f"{name[:64]!r} is no verb", remedy=f"did you mean {near!r}?" if near else "ask for the verb `verbs`"
    )


WHO = "who"
"""The field of arguments that the control server fills in: the user that the kernel names."""


def argument_names(verb: Verb[Any]) -> list[str]:
    return [name for name in verb.arguments.__struct_fields__ if name != WHO]


def describe(verb: Verb[Any]) -> dict[str, Any]:
    """For people and programs: name, effect, help, arguments as a JSON schema."""
    schema = msgspec.json.schema(verb.arguments)["$defs"][verb.arguments.__name__]
    return {
        "name": verb.name,
        "effect": verb.effect,
        "help": verb.help,
        "arguments": {name: facts for name, facts in schema.get("properties", {}).items() if name != WHO},
        "required": [name for name in schema.get("required", []) if name != WHO],
    }
