"""Verbs about knobs: read, explain, change, take back, history. The coordinator carries them out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

import msgspec
from pydantic import BaseModel

from ...actors.coordinator.audit import AUDIT_FILE, read_audit
from ...core.config import RunConfig
from ...core.errors import ConfigError
from ...core.knobs import (
    AuditRecord,
    ChangeReply,
    ChangeRequest,
    KnobSheet,
    KnobState,
    KnobTable,
    KnobValue,
    Operator,
)
from ...core.suggestion import nearest, suggest
from ..supervisor.run_actors import ActorStatus
from .run_verbs import Reason
from .verb import Arguments, Verb, VerbContext, coordinator_call, find_targets


def value_at(config: RunConfig, key: str) -> Any:
    """The value at "section.key"; None where there is none. Names are the file's ("async"), not the attributes'."""
    place: Any = config
    for name in key.split("."):
        if isinstance(place, BaseModel):
            fields = type(place).model_fields
            found = next((f for f, info in fields.items() if name in (f, info.alias)), None)
            place = getattr(place, found) if found is not None else None
        elif isinstance(place, dict):
            place = cast(dict[str, Any], place).get(name)
        else:
            return None
    return place


def default_at(kind: type[BaseModel], key: str) -> Any:
    """What a run file means that leaves "section.key" out; None where there is no such key, or it has to be given."""
    name, _, rest = key.partition(".")
    info = next((info for field, info in kind.model_fields.items() if name in (field, info.alias)), None)
    if info is None:
        return None
    inner = info.annotation
    if rest:
        return default_at(inner, rest) if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return None if info.is_required() else info.get_default(call_default_factory=True)


def flat(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """("optimizer.lr", 1e-4) for every leaf of nested tables."""
    for name, value in table.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, dict):
            yield from flat(cast(dict[str, Any], value), key)
        else:
            yield key, value


ASK_S = 20.0
"""Less than callers wait, so that their error names the owner that did not answer."""
CHANGE_S = 60.0
MAX_VALUES = 64
MAX_NAME_CHARS = 128
MAX_TEXT_CHARS = 4096
MAX_STEPS = 10_000_000
MAX_SECONDS = 30 * 86400.0
MAX_HISTORY = 10_000
MAX_INT = 2**63 - 1

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Number = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
Values = Annotated[dict[Name, bool | Number | float | Text], msgspec.Meta(max_length=MAX_VALUES)]


class GetArguments(Arguments, frozen=True, kw_only=True):
    """Of `get`."""

    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_VALUES)] = ()
    """Empty: all."""


class ExplainArguments(Arguments, frozen=True, kw_only=True):
    """Of `explain`."""

    name: Name


class SetArguments(Arguments, frozen=True, kw_only=True):
    """Of `set`."""

    values: Annotated[Values, msgspec.Meta(min_length=1)]
    reason: Reason = ""
    target: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    """Only these owners: `role`, `role/3`, `role/*`, `node:1`."""
    expect: Values = {}
    """Refuse unless these knobs have these values."""
    for_steps: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEPS)] = 0
    for_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = 0.0
    not_before: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)] = 0
    """Number of the boundary from which on the values may be used."""
    dry_run: bool = False
    force: bool = False


class UndoArguments(Arguments, frozen=True, kw_only=True):
    """Of `undo`."""

    reason: Reason = ""
    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)] = 0
    """Which change; 0: the newest."""


class HistoryArguments(Arguments, frozen=True, kw_only=True):
    """Of `history`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_HISTORY)] = 100


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one knob."""

    knob: KnobState
    """As its first owner has it."""
    owners: dict[str, KnobState]
    """Actor -> its state there."""
    file_value: Any
    """What the run file says, if the knob has a key there."""
    is_default: bool
    """Whether that is what every run file says that leaves the key out."""
    reverts: str
    """When it goes back by itself; empty: it stays."""
    history: tuple[AuditRecord, ...]
    """What became of it, oldest first."""


async def knob_table(context: VerbContext) -> KnobTable:
    """All knobs of the run. Raises CallError while there is no coordinator."""
    async with coordinator_call(context, ASK_S) as coordinator:
        return await coordinator.knob_table()


def known_names(table: KnobTable) -> set[str]:
    """Names of all knobs."""
    return {state.tunable.name for sheet in table.sheets for state in sheet.knobs}


def check_names(names: Sequence[str], table: KnobTable, context: VerbContext) -> None:
    """Raises ConfigError for a knob that does not exist, with what may be meant: another name, or a key of the file."""
    known = known_names(table)
    keys = {state.tunable.key: state.tunable.name for sheet in table.sheets for state in sheet.knobs}
    for name in names:
        if name in known:
            continue
        if name in keys:
            raise ConfigError(f"{name!r} is a key of the run file", remedy=f"the knob is {keys[name]!r}")
        if table.silent:  # it may be theirs
            text = f"{name[:MAX_NAME_CHARS]!r} is no knob of any actor that answers"
            raise ConfigError(text, remedy=f"no answer from {', '.join(table.silent)}")
        fixed = _keys_of_file(name, context.config)
        if live := [keys[key] for key in fixed if key in keys]:
            raise ConfigError(f"{name!r} is a key of the run file", remedy=f"the knob is {live[0]!r}")
        if fixed:
            raise ConfigError(
                f"{name!r} is no knob: it is {' or '.join(fixed)} of the run file, and fixed while a run works",
                remedy=f"`myxa down`, then `myxa resume {context.run_dir.path} --set {fixed[0]}=...`; or `myxa fork`",
            )
        raise ConfigError(f"{name[:MAX_NAME_CHARS]!r} is no knob", remedy=_hint(name, table))


def _keys_of_file(name: str, config: RunConfig) -> list[str]:
    """Keys of the run file that a person may mean: "batch_size", or "algo.batch_size"."""
    keys = (key for key, _ in flat(config.model_dump(by_alias=True)))
    return [key for key in keys if name in (key, key.rpartition(".")[2])]


def _hint(name: str, table: KnobTable) -> str:
    known = known_names(table)
    if nearest(name, known):
        return suggest(name, known)
    words = name.replace("_", " ").replace("-", " ").lower()
    for state in (state for sheet in table.sheets for state in sheet.knobs):
        if len(words) > 2 and words in state.tunable.help.lower():
            return f'did you mean "{state.tunable.name}"? it is "{state.tunable.help}"'
    return "`myxa get --all` lists them all"


async def _get(context: VerbContext, arguments: GetArguments, who: Operator) -> KnobTable:
    table = await knob_table(context)
    if not arguments.names:
        return table
    check_names(arguments.names, table, context)
    sheets = (
        msgspec.structs.replace(sheet, knobs=tuple(s for s in sheet.knobs if s.tunable.name in arguments.names))
        for sheet in table.sheets
    )
    return msgspec.structs.replace(table, sheets=tuple(sheet for sheet in sheets if sheet.knobs))


async def _explain(context: VerbContext, arguments: ExplainArguments, who: Operator) -> Explanation:
    name = arguments.name
    table = await knob_table(context)
    check_names((name,), table, context)
    owners = {sheet.owner: state for sheet in table.sheets if (state := _state(sheet, name)) is not None}
    knob = next(iter(owners.values()))
    path = context.run_dir.path / AUDIT_FILE
    records = await asyncio.to_thread(read_audit, path, MAX_HISTORY)
    return Explanation(
        knob=knob,
        owners=owners,
        file_value=value_at(context.config, knob.tunable.key) if knob.tunable.key else None,
        is_default=bool(knob.tunable.key)
        and value_at(context.config, knob.tunable.key) == default_at(RunConfig, knob.tunable.key),
        reverts=table.reverts.get(name, ""),
        history=tuple(record for record in records if any(move.name == name for move in record.moves)),
    )


def _state(sheet: KnobSheet, name: str) -> KnobState | None:
    return next((state for state in sheet.knobs if state.tunable.name == name), None)


async def _set(context: VerbContext, arguments: SetArguments, who: Operator) -> ChangeReply:
    if arguments.for_steps and arguments.for_s:
        raise ConfigError("the change is to last for steps and for seconds", remedy="say one of them")
    names = (*arguments.values, *arguments.expect)
    target = arguments.target
    if target.startswith("node:"):
        target = owner_on_node(target, context.supervisor.statuses(), names, await knob_table(context))
    request = ChangeRequest(
        values=dict[str, KnobValue](arguments.values),
        who=who,
        reason=arguments.reason,
        target=target,
        expect=dict[str, KnobValue](arguments.expect),
        for_steps=arguments.for_steps,
        for_s=arguments.for_s,
        not_before=arguments.not_before,
        dry_run=arguments.dry_run,
        force=arguments.force,
    )
    async with coordinator_call(context, CHANGE_S) as coordinator:
        reply = await coordinator.change_knobs(request)
    if reply.refused:
        # says better what was meant; asked only now, a good change is fast
        check_names(names, await knob_table(context), context)
    return reply


def owner_on_node(target: str, roster: Sequence[ActorStatus], names: Sequence[str], table: KnobTable) -> str:
    """A target that the coordinator knows for "node:1": the one owner of these knobs there, or its whole role if all of
    it is there. Raises ConfigError when it is neither."""
    here = {record.name for record in find_targets(target, roster)}
    owners = {sheet.owner for sheet in table.sheets for state in sheet.knobs if state.tunable.name in names}
    meant = sorted(owners & here)
    if len(meant) == 1:
        return meant[0]
    roles = {owner.partition("/")[0] for owner in meant}
    if len(roles) == 1 and {owner for owner in owners if owner.partition("/")[0] in roles} <= here:
        return f"{roles.pop()}/*"
    found = (
        f"only {', '.join(meant)} of {', '.join(sorted(owners))} are on {target}" if meant else f"no owner on {target}"
    )
    raise ConfigError(
        f"{found}: a change is for one owner, a role, or all", remedy="name one owner: --target rollout/1"
    )


async def _undo(context: VerbContext, arguments: UndoArguments, who: Operator) -> ChangeReply:
    async with coordinator_call(context, CHANGE_S) as coordinator:
        return await coordinator.undo(who, arguments.reason, arguments.epoch)


async def _history(context: VerbContext, arguments: HistoryArguments, who: Operator) -> tuple[AuditRecord, ...]:
    """From the file: process verbs are in it too, and it can be read while the coordinator is away."""
    return await asyncio.to_thread(read_audit, context.run_dir.path / AUDIT_FILE, arguments.limit)


KNOB_VERBS: tuple[Verb[Any], ...] = (
    Verb("get", "view", GetArguments, "knobs with their values, limits and owners", run=_get),
    Verb("explain", "view", ExplainArguments, "everything about one knob, with its history", run=_explain),
    Verb("set", "operate", SetArguments, "change knobs, all or none", run=_set, is_noted_elsewhere=True),
    Verb("undo", "operate", UndoArguments, "take a change back", run=_undo, is_noted_elsewhere=True),
    Verb("history", "view", HistoryArguments, "the newest records of the audit log", run=_history),
)
