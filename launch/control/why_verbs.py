"""Verbs that say what holds the run back and which knob may help: `why`, `suggest`, `suggest-decide`.

`gather_evidence` asks the run for shares, gauges and knobs. An actor that does not answer is left out: without the
coordinator there is still a verdict, only no knob to turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from ...actors.contracts import BufferContract, CoordinatorContract, MonitorContract
from ...actors.monitor.latest import LONGEST_WINDOW_S
from ...core.config import RoleName, RunConfig
from ...core.errors import CallError, ConfigError, LaunchError
from ...core.knobs import ChangeReply, ChangeRequest, KnobState, KnobTable, Operator
from ...core.messages import BufferStats, Record, RunStatus
from ...core.refs import with_deadline
from ..preflight.machine import look_at_gpus
from ..supervisor.placement import Present, staff
from ..views.advice import Facts, all_advice, most_on_cores, num_cores
from ..views.bottleneck import Bottleneck, Filtered, engines_look_full, judge
from ..views.why import Reason, actors_of, explain, explain_actors
from .run_verbs import Reason as OwnWords
from .suggestions import Forbidden, Suggestion, SuggestionBook
from .verb import Arguments, Verb, VerbContext, coordinator_call

T = TypeVar("T")
ASK_S = 5.0
_LOOK_UP_TO = 4
"""No move makes a number more than so many times what it was."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One look at a run."""

    shares: Mapping[str, Mapping[str, float]]
    facts: Facts
    engines_are_full: bool
    filtered: Filtered
    version: int
    """Weight version of the run; -1: not known."""
    is_running: bool
    """Neither starting nor ending nor paused."""
    disk: str = ""
    """Why the ledger cannot be written."""

    def verdict(self) -> Bottleneck:
        """What holds the run back."""
        return judge(self.shares, engines_are_full=self.engines_are_full, filtered=self.filtered, disk=self.disk)


async def gather_evidence(context: VerbContext, window_s: float) -> Evidence:
    """Ask monitor, coordinator and buffer at the same time. Raises LaunchError when the monitor does not answer."""
    node = context.node
    monitor = with_deadline(node.ref(MonitorContract, "monitor"), ASK_S)
    coordinator = with_deadline(node.ref(CoordinatorContract, "coordinator"), ASK_S)
    buffer = with_deadline(node.ref(BufferContract, "buffer"), ASK_S)
    shares, snapshot, table, status, stats = await asyncio.gather(
        _answer(monitor.shares(window_s)),
        _answer(monitor.snapshot()),
        _answer(coordinator.knob_table()),
        _answer(coordinator.status()),
        _answer(buffer.stats()),
    )
    if shares is None or snapshot is None:
        raise LaunchError("the monitor does not answer: the time shares are not known", remedy="`myxa ps`")
    facts = facts_of(context, table, stats, num_rollouts=sum(name.startswith("rollout/") for name in shares))
    return Evidence(
        shares=shares,
        facts=facts,
        engines_are_full=are_full(snapshot, facts),
        filtered=Filtered.of(snapshot),
        version=status.version if status is not None else -1,
        is_running=_is_running(status),
        disk=stats.disk if stats is not None else "",
    )


def facts_of(context: VerbContext, table: KnobTable | None, stats: BufferStats | None, *, num_rollouts: int) -> Facts:
    """Numbers of the run as they are now; where an answer is missing, as the run file has them."""
    config = context.config
    knobs = first_states(table) if table is not None else {}
    samples = knobs.get("num_samples")
    cores = num_cores()
    most, devices = room_for_rollouts(config, context.supervisor.present(), max(num_rollouts, 1), cores)
    return Facts(
        cores=cores,
        most_rollouts=most,
        more_devices=devices,
        knobs=knobs,
        num_rollouts=max(num_rollouts, 1),
        num_samples=int(samples.value) if samples is not None else config.rollout.num_samples,
        max_running=config.engine.max_running,
        slots_total=stats.slots_total if stats is not None else 0,
        reward_workers=config.reward.workers,
        is_data_endless=not any(part.max_passes for part in config.data.parts().values()),
    )


def room_for_rollouts(config: RunConfig, present: Present, num_there: int, cores: int) -> tuple[int, str]:
    """How many rollout actors there may be, and the GPUs that more of them would need beside the role's own. 0: not
    known, since other machines take part."""
    role = config.roles.rollout
    if not role.device_ids:
        is_alone = len(present.nodes) <= 1 and not config.engine.attach
        return (max(num_there, most_on_cores(cores, role.threads)) if is_alone else 0), ""
    for devices in ("", _idle_gpus(config) if len(present.nodes) <= 1 else ""):
        most = num_there
        while most < _LOOK_UP_TO * num_there and _is_possible(config, present, most + 1, devices):
            most += 1
        if most > num_there:
            return most, devices
    return num_there, ""


def _is_possible(config: RunConfig, present: Present, count: int, devices: str) -> bool:
    try:
        staff(config, "rollout", count, present, devices)
    except ConfigError:
        return False
    return True


def _idle_gpus(config: RunConfig) -> str:
    """Numbers of this machine's GPUs that no role of the run names."""
    named = {device for role in get_args(RoleName) for device in config.roles[role].device_ids}
    return ",".join(str(number) for number in range(len(look_at_gpus().found)) if number not in named)


def first_states(table: KnobTable) -> dict[str, KnobState]:
    """Knob -> its state at its first owner."""
    states: dict[str, KnobState] = {}
    for sheet in table.sheets:
        for state in sheet.knobs:
            states.setdefault(state.tunable.name, state)
    return states


def are_full(snapshot: Mapping[str, Mapping[str, float]], facts: Facts) -> bool:
    """Whether engines have all the requests they can compute at once: by their gauges, or because what concurrency
    allows would fill them."""
    if engines_look_full(snapshot):
        return True
    limits = [
        values.get("rollout/max_running", 0.0) for name, values in snapshot.items() if name.startswith("rollout/")
    ]
    context = min((value for value in limits if value > 0), default=float(facts.max_running))
    concurrency = facts.knobs.get("concurrency")
    if concurrency is None or context <= 0:
        return False
    return int(concurrency.value) * facts.num_samples >= context


def _is_running(status: RunStatus | None) -> bool:
    return status is not None and status.phase == "running" and not status.paused


async def _answer(question: Awaitable[T]) -> T | None:
    try:
        return await question
    except CallError:
        return None


CHANGE_S = 60.0
SHORTEST_WINDOW_S = 1.0
MAX_CHARS = 128

Window = Annotated[float, msgspec.Meta(ge=SHORTEST_WINDOW_S, le=LONGEST_WINDOW_S)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_CHARS)]


class WhyArguments(Arguments, frozen=True, kw_only=True):
    """Of `why`."""

    target: Name = ""
    """`role`, `role/3`, `role/*`; empty: the run."""
    window_s: Window = 60.0


class SuggestArguments(Arguments, frozen=True, kw_only=True):
    """Of `suggest`."""

    window_s: Window = 60.0


class DecideArguments(Arguments, frozen=True, kw_only=True):
    """Of `suggest-decide`."""

    action: Literal["approve", "forbid", "allow", "pin", "unpin"]
    what: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CHARS)]
    """approve, forbid: name of a suggestion; pin, unpin, allow: a knob."""
    reason: OwnWords = ""


class Suggestions(Record, frozen=True):
    """The answer of `suggest`."""

    sentence: str
    """The verdict they are made from."""
    open: tuple[Suggestion, ...]
    pins: tuple[str, ...]
    forbidden: tuple[Forbidden, ...]
    autopilot: bool
    """Whether they are approved by themselves."""


async def _why(context: VerbContext, arguments: WhyArguments, who: Operator) -> Reason:
    evidence = await gather_evidence(context, arguments.window_s)
    window_s, full, filtered = arguments.window_s, evidence.engines_are_full, evidence.filtered
    shares, facts, disk = evidence.shares, evidence.facts, evidence.disk
    if not arguments.target:
        return explain(shares, facts, window_s=window_s, engines_are_full=full, filtered=filtered, disk=disk)
    names = actors_of(arguments.target, shares)
    return explain_actors(names, shares, facts, window_s=window_s, engines_are_full=full, filtered=filtered, disk=disk)


async def _suggest(context: VerbContext, arguments: SuggestArguments, who: Operator) -> Suggestions:
    evidence = await gather_evidence(context, arguments.window_s)
    verdict = evidence.verdict()
    book = SuggestionBook(context.run_dir.path)
    found = book.propose(all_advice(verdict, evidence.facts))
    context.proposals.show(found)
    return Suggestions(
        sentence=verdict.sentence,
        open=found,
        pins=book.state.pins,
        forbidden=book.state.forbidden,
        autopilot=context.config.control.autopilot,
    )


async def _decide(context: VerbContext, arguments: DecideArguments, who: Operator) -> dict[str, Any]:
    book, what = SuggestionBook(context.run_dir.path), arguments.what
    match arguments.action:
        case "approve":
            return msgspec.to_builtins(await _approve(context, _open_one(context, book, what), who, arguments.reason))
        case "forbid":
            forbidden = book.forbid(context.proposals.find(what))
            context.proposals.close(what)
            return {"forbidden": msgspec.to_builtins(forbidden)}
        case "allow":
            return {"allowed": what, "rules": book.allow(what)}
        case "pin":
            await _check_knob(context, what)
            book.pin(what)
            return {"pinned": what}
        case "unpin":
            book.unpin(what)
            return {"unpinned": what}


def _open_one(context: VerbContext, book: SuggestionBook, name: str) -> Suggestion:
    """The suggestion, as it was shown. Raises ConfigError, also if a person decided against it since."""
    found = context.proposals.find(name)
    if not book.allows(found):
        what = found.knob or found.key
        raise ConfigError(
            f"there is no open suggestion {name!r} any more: {what} is pinned, or that was forbidden",
            remedy=f"`myxa suggest unpin {what}` or `myxa suggest allow {what}`",
        )
    return found


async def _approve(context: VerbContext, suggestion: Suggestion, who: Operator, reason: str) -> ChangeReply:
    """In the name of the approving person, and only if the knob still has the value that the suggestion saw."""
    if not suggestion.knob:
        raise ConfigError(
            f"{suggestion.id} changes no live knob",
            remedy=suggestion.command or f"in the run file: {suggestion.key} = {suggestion.new}",
        )
    request = ChangeRequest(
        values={suggestion.knob: suggestion.new},
        expect={suggestion.knob: suggestion.old},
        who=msgspec.structs.replace(who, via="auto"),
        reason=reason or f"suggestion {suggestion.id}: {suggestion.why}",
    )
    async with coordinator_call(context, CHANGE_S) as coordinator:
        reply = await coordinator.change_knobs(request)
    if not reply.refused:
        context.proposals.close(suggestion.id)
    return reply


async def _check_knob(context: VerbContext, name: str) -> None:
    from .knob_verbs import check_names, knob_table

    check_names((name,), await knob_table(context), context)


WHY_VERBS: tuple[Verb[Any], ...] = (
    Verb("why", "view", WhyArguments, "what holds the run back, and the knob to turn", run=_why),
    Verb("suggest", "view", SuggestArguments, "what could be turned now, what is pinned or forbidden", run=_suggest),
    Verb(
        "suggest-decide", "operate", DecideArguments, "approve, forbid or allow a suggestion, pin a knob", run=_decide
    ),
)
