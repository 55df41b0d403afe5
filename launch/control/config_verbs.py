"""The verb `config`: how knobs stand against the run file, and what of a patch may be changed while the run goes."""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.config import RunConfig
from ...core.config.fields import find
from ...core.errors import ConfigError
from ...core.knobs import KnobTable, KnobValue, Operator, Tunable
from ..config_keys import flat, value_at
from .knob_verbs import knob_table
from .verb import Arguments, Room, Verb

MAX_KEYS = 512


class ConfigArguments(Arguments, frozen=True, kw_only=True):
    """Of `config`."""

    patch: dict[str, Any] = {}
    """Sections as in the run file, to be sorted into what may be changed and what may not."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A knob that is not as the run file says."""

    knob: str
    owner: str
    """Actor name."""
    key: str
    """In the run file; empty: it has none there."""
    file: KnobValue
    live: KnobValue
    """In force, or decided and soon in force."""


class ConfigReply(msgspec.Struct, frozen=True, kw_only=True):
    """Of `config`."""

    differences: tuple[Difference, ...]
    values: dict[str, KnobValue]
    """The patch as knobs; those that the run has already are left out of `needs_restart`, not of this."""
    needs_restart: tuple[str, ...]
    """Keys of the patch that are no knobs and differ from the run's."""
    unknown: tuple[str, ...]
    """Keys of the patch that no run file has."""


async def _config(room: Room, arguments: ConfigArguments, who: Operator) -> ConfigReply:
    leaves = dict(flat(arguments.patch))
    if len(leaves) > MAX_KEYS:
        raise ConfigError(f"the patch has {len(leaves)} keys", remedy=f"at most {MAX_KEYS}")
    table = await knob_table(room)
    knobs = {state.tunable.key: state.tunable for sheet in table.sheets for state in sheet.knobs if state.tunable.key}
    known = {key for key in leaves if find(RunConfig, key.split("."))[1] is not None}
    needs_restart = [
        key for key, value in leaves.items()
        if key not in knobs and key in known and value_at(room.config, key) != value
    ]  # fmt: skip
    return ConfigReply(
        differences=tuple(differences(table)),
        values={knobs[key].name: _knob_value(knobs[key], value) for key, value in leaves.items() if key in knobs},
        needs_restart=tuple(needs_restart),
        unknown=tuple(key for key in leaves if key not in knobs and key not in known),
    )


def differences(table: KnobTable) -> list[Difference]:
    """Every knob, at every owner, that is not (or will soon not be) as the run file says."""
    return [
        Difference(
            knob=state.tunable.name,
            owner=sheet.owner,
            key=state.tunable.key,
            file=state.first,
            live=state.value if state.pending is None else state.pending,
        )
        for sheet in table.sheets
        for state in sheet.knobs
        if (state.value if state.pending is None else state.pending) != state.first
    ]


def _knob_value(knob: Tunable, value: Any) -> KnobValue:
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{knob.key}: is no single value", remedy=f"{knob.name} takes {knob.range_text()}")
    return value


VERBS: tuple[Verb[Any], ...] = (
    Verb("config", "view", ConfigArguments, "knobs that are not as the run file says", run=_config),
)
