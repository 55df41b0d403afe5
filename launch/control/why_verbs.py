"""Verbs that say what holds the run back and what could be turned: why, suggest, and what a person decides about it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...actors.monitor.latest import LONGEST_WINDOW_S
from ...core.errors import ConfigError
from ...core.knobs import ChangeReply, ChangeRequest, Operator
from ...core.messages import Record
from ..views.advice import all_advice
from ..views.why import Reason, actors_of, explain, explain_actors
from .coordinator_call import coordinator_call
from .evidence import gather_evidence
from .run_verbs import Reason as OwnWords
from .suggestion_book import Forbidden, Suggestion, SuggestionBook
from .verb import Arguments, Room, Verb

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


async def _why(room: Room, arguments: WhyArguments, who: Operator) -> Reason:
    evidence = await gather_evidence(room, arguments.window_s)
    window_s, full, filtered = arguments.window_s, evidence.engines_are_full, evidence.filtered
    shares, facts, disk = evidence.shares, evidence.facts, evidence.disk
    if not arguments.target:
        return explain(shares, facts, window_s=window_s, engines_are_full=full, filtered=filtered, disk=disk)
    names = actors_of(arguments.target, shares)
    return explain_actors(names, shares, facts, window_s=window_s, engines_are_full=full, filtered=filtered, disk=disk)


async def _suggest(room: Room, arguments: SuggestArguments, who: Operator) -> Suggestions:
    evidence = await gather_evidence(room, arguments.window_s)
    verdict = evidence.verdict()
    book = SuggestionBook(room.run_dir.path)
    found = book.propose(all_advice(verdict, evidence.facts))
    room.proposals.show(found)
    return Suggestions(
        sentence=verdict.sentence,
        open=found,
        pins=book.state.pins,
        forbidden=book.state.forbidden,
        autopilot=room.config.control.autopilot,
    )


async def _decide(room: Room, arguments: DecideArguments, who: Operator) -> dict[str, Any]:
    book, what = SuggestionBook(room.run_dir.path), arguments.what
    match arguments.action:
        case "approve":
            return msgspec.to_builtins(await _approve(room, _open_one(room, book, what), who, arguments.reason))
        case "forbid":
            forbidden = book.forbid(room.proposals.find(what))
            room.proposals.close(what)
            return {"forbidden": msgspec.to_builtins(forbidden)}
        case "allow":
            return {"allowed": what, "rules": book.allow(what)}
        case "pin":
            await _check_knob(room, what)
            book.pin(what)
            return {"pinned": what}
        case "unpin":
            book.unpin(what)
            return {"unpinned": what}


def _open_one(room: Room, book: SuggestionBook, name: str) -> Suggestion:
    """The suggestion, as it was shown. Raises ConfigError, also if a person decided against it since."""
    found = room.proposals.find(name)
    if not book.allows(found):
        what = found.knob or found.key
        raise ConfigError(
            f"there is no open suggestion {name!r} any more: {what} is pinned, or that was forbidden",
            remedy=f"`myxa suggest unpin {what}` or `myxa suggest allow {what}`",
        )
    return found


async def _approve(room: Room, suggestion: Suggestion, who: Operator, reason: str) -> ChangeReply:
    """By the person who approves it, and only if the knob still stands where the suggestion saw it."""
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
    async with coordinator_call(room, CHANGE_S) as coordinator:
        reply = await coordinator.change_knobs(request)
    if not reply.refused:
        room.proposals.close(suggestion.id)
    return reply


async def _check_knob(room: Room, name: str) -> None:
    from .knob_verbs import check_names, knob_table

    check_names((name,), await knob_table(room), room)


VERBS: tuple[Verb[Any], ...] = (
    Verb("why", "view", WhyArguments, "what holds the run back, and the knob to turn", run=_why),
    Verb("suggest", "view", SuggestArguments, "what could be turned now, what is pinned or forbidden", run=_suggest),
    Verb(
        "suggest-decide", "operate", DecideArguments, "approve, forbid or allow a suggestion, pin a knob", run=_decide
    ),
)
