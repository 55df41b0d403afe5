"""The section `[data]`: one source of prompts, or several with names and weights.

A source is read like `[data]` says, but for the keys that it has itself. A data file may be named with a slice of its
rows: `file.jsonl@[10:100]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from .section import Conflict, CountInt, NonNegativeFloat, OrElse, Section, SourceText, Table, as_table, check_json

SLICED = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)
FORM = "a slice must look like file@[10:100], with whole numbers on either side of the colon"


@dataclass(frozen=True, slots=True)
class Source:
    """A data file and which of its rows are meant: Python's slice rules, no step; None = open at that end."""

    path: str
    start: int | None = None
    stop: int | None = None

    def rows(self, num_rows: int) -> range:
        """The chosen rows of a file that has `num_rows`."""
        return range(num_rows)[self.start : self.stop]

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return self.path
        start = "" if self.start is None else self.start
        stop = "" if self.stop is None else self.stop
        return f"{self.path}@[{start}:{stop}]"


def parse_source(text: str) -> Source:
    """Split a name from its slice. Raises ValueError saying what is wrong with it."""
    if not text:
        raise ValueError("must not be empty")
    match = SLICED.fullmatch(text)
    if match is None:
        if "@[" in text:
            raise ValueError(FORM)
        return Source(text)
    if "-" in (match["start"], match["stop"]):
        raise ValueError(FORM)
    start = int(match["start"]) if match["start"] else None
    stop = int(match["stop"]) if match["stop"] else None
    return Source(match["path"], start, stop)


def parse_sources(value: str | tuple[str, ...]) -> tuple[Source, ...]:
    """One name or several; empty for an empty text. Raises ValueError."""
    if isinstance(value, str):
        return (parse_source(value),) if value else ()
    return tuple(parse_source(one) for one in value)


def check_sources(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """The value itself if every name parses; raises ValueError naming the one that does not."""
    if isinstance(value, tuple):
        for one in value:
            try:
                parse_source(one)
            except ValueError as error:
                raise ValueError(f'"{one}": {error}') from error
    else:
        parse_sources(value)
    return value


SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
MAX_SOURCES = 64
MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e9
MAX_SKIPS = 100
"""Every draw that is passed over is a row of the ledger."""
_FOR_TEMPLATES = "is for the chat template: set apply_chat_template = true"
_COLUMN_KEYS = ("prompt_key", "label_key", "metadata_key", "messages_key", "answer_key", "tools_key")
TEMPLATE_NAMES = ("messages", "tools", "documents", "add_generation_prompt")
"""What a chat template is given anyway."""


class RowSource(Section, frozen=True):
    """A table with its own files, whose rows are read like `[data]` says but for what it says itself."""

    path: Annotated[SourceText, Field(min_length=1)]
    """JSONL or parquet file, or a list of them; `file@[10:100]` takes rows 10 to 99."""
    preset: Literal["", "slime", "verl", "chat", "plain", "recorded"] = ""
    """How rows are laid out; empty = as in `[data]`."""
    prompt_key: str = ""
    """Column with the prompt. Empty = as in `[data]`, or the preset's."""
    label_key: str = ""
    """Column with the expected answer. Empty = likewise."""
    metadata_key: str = ""
    """Column with an object handed to reward and workflow as it is. Empty = likewise."""
    messages_key: str = ""
    """Column with the conversation of the `chat` preset. Empty = likewise."""
    answer_key: str = ""
    """Column with the demonstration to be learnt by SFT. Empty = likewise."""
    tools_key: str = ""
    """Column with the tools that the model may call. Empty = likewise."""
    system: str = ""
    """System message put in front of conversations that have none; empty = as in `[data]`."""

    @field_validator("path")
    @classmethod
    def _sources_parse(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return check_sources(value)


class SourceSettings(RowSource, frozen=True):
    """One of several sources of prompts, `NAME` is its own: letters, digits, `_`, `-`, at most 64. Keys that are left
    out are as in `[data]`, but for the columns of a source with its own preset, which are that preset's."""

    weight: Annotated[NonNegativeFloat, Field(le=MAX_WEIGHT)] = 1.0
    """Its share of the prompts, in proportion to the others' weights; 0 = none for now. Live knob: `mix`."""
    max_passes: Annotated[int, Field(ge=-1)] = -1
    """Passes over this source after which it is exhausted and only the others are used; 0 = endless, -1 = as in
    `[data]`."""

    @field_validator("weight")
    @classmethod
    def _weight_counts(cls, value: float) -> float:
        if 0 < value < MIN_WEIGHT:
            raise ValueError(f"must be 0 or at least {MIN_WEIGHT:g}")
        return value


class DataSettings(Section, frozen=True):
    """The prompts that are trained on."""

    train: Annotated[SourceText, OrElse("sources")]
    """JSONL or parquet file, or a list of them; `file@[10:100]` takes rows 10 to 99.
    Folders, patterns and further formats: rewards-and-data.md. Left out where `sources` names several."""
    sources: dict[str, SourceSettings] = {}
    """Several sources instead of `train`, each a table `[data.sources.NAME]`: see there."""
    preset: Literal["slime", "verl", "chat", "plain", "recorded"] = "slime"
    """How rows are laid out: slime (prompt, label, metadata), verl (prompt, reward_model, data_source, extra_info),
    chat (messages; the last assistant message is the demonstration), plain (prompt, label), recorded (the prompts of a
    dump that `myxa dump` wrote; the default where `roles.rollout.kind = "recorded"`)."""
    prompt_key: str = ""
    """Column with the prompt: text, or a list of messages. Dots reach into objects. Empty = the preset's."""
    label_key: str = ""
    """Column with the expected answer. Empty = the preset's."""
    metadata_key: str = ""
    """Column with an object handed to reward and workflow as it is. Empty = the preset's."""
    messages_key: str = ""
    """Column with the conversation of the `chat` preset. Empty = "messages"."""
    answer_key: str = ""
    """Column with the demonstration to be learnt by SFT. Empty = the preset's (chat: last assistant message)."""
    tools_key: str = ""
    """Column with a list of tools, handed to the chat template. Empty = the preset's (slime, chat: "tools")."""
    learn: Literal["all", "last"] = "all"
    """Which of the assistant's turns of a conversation of `preset = "chat"` SFT learns. A message of a row switches
    itself off or on with `train`, `weight`, `loss_mask`, `step_loss_mask` or `loss` (true, false, 1, 0)."""
    system: str = ""
    """System message put in front of conversations that have none; empty = none."""
    apply_chat_template: bool = True
    """Whether conversations are written by the model's chat template; false: a prompt is a text, which is encoded as it
    is, and so are replies. For base models."""
    chat_template_kwargs: Table = {}
    """Further named arguments of the chat template, for example `enable_thinking = false`."""
    date: str = ""
    """Day that the chat template writes as today's (`strftime_now`), `YYYY-MM-DD`: the same on the day that a run is
    resumed. Empty = none; a template that asks for it is refused."""
    shuffle: bool = True
    """Whether each pass goes through the rows in a new order (from `run.seed`); false = file order, the default where
    `roles.rollout.kind = "recorded"`."""
    max_passes: CountInt = 0
    """Passes over the data after which it is exhausted; 0 = endless."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """stop: a bad row ends the run with its place; skip: bad rows are left out and counted."""
    overlong: Literal["pass", "refuse", "drop"] = "pass"
    """What becomes of rows, held-out ones too, whose prompt has more than `max_prompt_tokens` tokens. refuse: the first
    one ends the run at its start, with its place; drop: they are left out at the start, and counted; pass: rows are not
    measured at the start, and a prompt that does not fit into the context costs its group whenever it is drawn."""
    max_prompt_tokens: CountInt = 0
    """For `overlong`, as the chat template writes the prompt; 0 = as many as the context has room for, less one."""
    difficulty_low: float = 0.0
    """A prompt whose newest finished group has a mean reward below this (or above `difficulty_high`) is passed over
    when it comes up again; equal to `difficulty_high` = no such window."""
    difficulty_high: float = 0.0
    """The window's upper end; both ends are inside."""
    difficulty_skips: Annotated[int, Field(ge=0, le=MAX_SKIPS)] = 3
    """Passes in a row that such a prompt is passed over at most, after which it is tried again; 0 = never again."""

    @model_validator(mode="before")
    @classmethod
    def _train_may_be_left_out(cls, raw: object) -> object:
        table = as_table(raw)
        return {"train": "", **table} if table is not None and table.get("sources") else raw

    @field_validator("train")
    @classmethod
    def _sources_parse(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return check_sources(value)

    @field_validator("date", mode="before")
    @classmethod
    def _date_is_a_day(cls, value: object) -> object:
        if isinstance(value, date) and not isinstance(value, datetime):
            return value.isoformat()  # a date of TOML
        if isinstance(value, str) and value:
            try:
                return date.fromisoformat(value).isoformat()
            except ValueError:
                raise ValueError('must be a day, such as "2026-11-28"') from None
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _arguments_are_json(cls, value: Table) -> Table:
        if taken := sorted(set(TEMPLATE_NAMES) & value.keys()):
            raise ValueError(f"must not hold {', '.join(taken)}, which the template is given anyway")
        return check_json(value)

    def conflicts(self) -> Iterator[Conflict]:
        """Columns that the preset does not look at, and sources that do not go together."""
        if not (self.train or self.sources):
            yield Conflict(("train",), "must not be empty")
        if self.preset == "chat" and self.prompt_key:
            yield Conflict(("prompt_key", "preset"), 'is not used by preset = "chat"; set messages_key')
        if self.preset != "chat" and self.messages_key:
            yield Conflict(("messages_key", "preset"), f'is used by preset = "chat" only, not "{self.preset}"')
        if self.difficulty_low > self.difficulty_high:
            yield Conflict(
                ("difficulty_low", "difficulty_high"), f"is above difficulty_high = {self.difficulty_high:g}"
            )
        if self.max_prompt_tokens and self.overlong == "pass":
            yield Conflict(("max_prompt_tokens", "overlong"), 'needs overlong = "refuse" or "drop"')
        yield from _plain_conflicts(self)
        yield from _recorded_conflicts(self)
        yield from _mix_conflicts(self)

    def parts(self) -> Mapping[str, Self]:
        """Each source by its name, as a complete section; the only one is called ""."""
        if not self.sources:
            return {"": self}
        return {
            name: self.read_like(source, self.max_passes if source.max_passes < 0 else source.max_passes)
            for name, source in sorted(self.sources.items())
        }

    def key_of(self, name: str) -> str:
        """The key of the run file that names a source's files."""
        return f"data.sources.{name}.path" if name else "data.train"

    def read_like(self, source: RowSource, max_passes: int = 0) -> Self:
        """A complete section for rows that are read like `[data]` but for what `source` says
        itself."""
        own: dict[str, Any] = {"train": source.path, "sources": {}}
        inherits = source.preset in ("", self.preset)
        for key in _COLUMN_KEYS:
            own[key] = getattr(source, key) or (getattr(self, key) if inherits else "")
        own["preset"] = source.preset or self.preset
        own["system"] = source.system or self.system
        own["max_passes"] = max_passes
        return self.model_copy(update=own)


def _plain_conflicts(data: DataSettings) -> Iterator[Conflict]:
    if data.apply_chat_template:
        return
    for key in ("chat_template_kwargs", "date"):
        if getattr(data, key):
            yield Conflict((key, "apply_chat_template"), _FOR_TEMPLATES)
    yield from plain_conflicts(data, "", "apply_chat_template")
    for name, source in data.sources.items():
        yield from plain_conflicts(source, f"sources.{name}.", "apply_chat_template")


def plain_conflicts(rows: DataSettings | RowSource, place: str, switch: str) -> Iterator[Conflict]:
    """What rows whose texts are encoded as they are cannot have. `place`: of their table. `switch`: the key that says
    so."""
    for key in ("system", "tools_key"):
        if getattr(rows, key):
            yield Conflict((f"{place}{key}", switch), _FOR_TEMPLATES)
    if rows.preset == "chat":
        yield Conflict((f"{place}preset", switch), '"chat" is for conversations; with plain texts use "plain"')


def _recorded_conflicts(data: DataSettings) -> Iterator[Conflict]:
    for name, part in data.parts().items():
        for key in (*_COLUMN_KEYS, "system") if part.preset == "recorded" else ():
            if getattr(part, key):
                is_own = bool(name and getattr(data.sources[name], key))
                place = f"sources.{name}." if name else ""
                yield Conflict(
                    (f"{place if is_own else ''}{key}", f"{place}preset"),
                    'is not used by preset = "recorded": dumped prompts are as they were read',
                )


def _mix_conflicts(data: DataSettings) -> Iterator[Conflict]:
    if not data.sources:
        return
    if data.train:
        yield Conflict(("train", "sources"), "does not go with [data.sources]: make it one of them, with a name")
    if len(data.sources) > MAX_SOURCES:
        yield Conflict(("sources",), f"has {len(data.sources)} sources, but at most {MAX_SOURCES} are mixed")
    for name, source in data.sources.items():
        if not SOURCE_NAME.fullmatch(name):
            yield Conflict(
                (f"sources.{name}",), "a source's name is 1 to 64 letters, digits, '_' or '-', no sign first"
            )
        preset = source.preset or data.preset
        if preset == "chat" and source.prompt_key:
            yield Conflict((f"sources.{name}.prompt_key",), 'is not used by preset = "chat"; set messages_key')
        if preset != "chat" and source.messages_key:
            yield Conflict((f"sources.{name}.messages_key",), f'is used by preset = "chat" only, not "{preset}"')
    if not any(source.weight for source in data.sources.values()):
        paths = tuple(f"sources.{name}.weight" for name in data.sources)
        yield Conflict(paths, "so no source has a weight: give one of them more than 0")
