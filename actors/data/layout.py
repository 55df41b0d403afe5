"""From the columns of a row to a prompt: which column is what, and what it may hold. Pure.

Conventions: slime and miles (prompt, label, metadata), verl (prompt, reward_model, data_source, extra_info), chat
(messages). `RowRewards` is what the rewards of a run ask of its rows: a label, and the name of a function that exists.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import orjson

from ...core.config import RewardSettings
from ...core.config.data import DataSettings
from ...core.samples import DEMONSTRATION, DEMONSTRATION_TURNS, LOSS_KEYS, MARGIN, PAIR, Message, Prompt
from ...core.suggestion import suggest
from .conversation import (
    check_switches,
    check_unified,
    holds_tools,
    parse_json_messages,
    parse_messages,
    parse_tools,
)
from .row_file import Columns, NotJson, RowError, exact_json

LABEL_REWARDS = frozenset({"exact", "numeric", "math", "f1", "choice", "unit_tests"})
"""Built-in rewards that compare with the label."""


class RowRewards:
    """Of one source of prompts."""

    def __init__(self, reward: RewardSettings, defaults: Mapping[str, str]) -> None:
        """`defaults`: metadata of prompts whose rows do not say it."""
        self._key = reward.choose_by
        self._default = defaults.get(self._key) or reward.choose_else
        self._needs_label = {name: part.fn in LABEL_REWARDS for name, part in reward.parts().items()}

    @property
    def all_need_label(self) -> bool:
        """Whether no row can do without one."""
        needs = self._needs_label.values()
        return all(needs) if self._key else any(needs)

    def check(self, metadata: Mapping[str, Any], *, has_label: bool) -> None:
        """Whether the function that the row chooses can judge it. Raises RowError."""
        if not self._key:
            return
        name = metadata.get(self._key, self._default)
        if not isinstance(name, str) or name not in self._needs_label:
            finding = f"says {self._key} = {name!r}" if self._key in metadata else f"has no {self._key}"
            hint = suggest(name, tuple(self._needs_label)) if isinstance(name, str) and name else "name one"
            raise RowError(
                f"the row's metadata {finding}, which is to name one of reward.functions",
                f"{hint}; for rows that name none, set reward.choose_else",
            )
        if self._needs_label[name] and not has_label:
            raise RowError(
                f"the row has no label, with which reward.functions.{name} compares",
                "fill it, or choose another function",
            )


SHOWN_COLUMNS = 12
MEDIA_COLUMNS = ("images", "videos", "audios", "image", "video", "audio")
"""The model would read their place holders as text. The last ones may be a text that is the name of something else."""
ARGUMENT_COLUMNS = ("chat_template_kwargs", "enable_thinking")
"""Of TRL and verl: arguments of the chat template for one row."""
TOOL_COLUMNS = ("tools", "functions", "tool_defs")
"""Names of the tools in OpenAI's rows and in those of `verifiers`: without them a prompt is another one."""
NOT_ASKED = ("assistant", "system", "developer")
"""Roles that ask nothing."""
CONVERSATIONS = "conversations"
"""The column of ShareGPT's rows."""
SYSTEM_COLUMNS = ("system", "system_prompt")
"""Where rows have their system message apart."""
INSTRUCTION, INPUT = "instruction", "input"
"""Columns of Alpaca's rows: what is to be done, and with what."""


@dataclass(frozen=True, slots=True)
class Column:
    """One thing a row holds."""

    key: str
    """Column name, dots reaching into objects; empty = not in this layout."""
    setting: str
    """The key of the run file that names it."""
    is_required: bool = False


PRESETS: Mapping[str, Mapping[str, str]] = {
    "slime": {"prompt": "prompt", "label": "label", "metadata": "metadata", "tools": "tools"},
    "verl": {"prompt": "prompt", "label": "reward_model.ground_truth", "metadata": "extra_info"},
    "chat": {"prompt": "messages", "label": "label", "metadata": "metadata", "tools": "tools"},
    "plain": {"prompt": "prompt", "label": "label"},
    "pairs": {"prompt": "prompt", "metadata": "metadata", "tools": "tools"} | {name: name for name in PAIR},
    "recorded": {},
}
"""Column names of each convention."""
SOURCE_COLUMNS = {"verl": "data_source"}
"""A column whose value is added to the metadata under its own name."""


class RowLayout:
    """How the rows of a run's data are read."""

    def __init__(
        self,
        settings: DataSettings,
        rewards: RowRewards | None = None,
        *,
        needs_demonstration: bool = False,
    ) -> None:
        preset, self._is_plain = PRESETS[settings.preset], not settings.apply_chat_template

        def column(name: str, *, setting: str = "", is_required: bool = False) -> Column:
            setting = setting or f"{name}_key"
            default = "" if name == "tools" and self._is_plain else preset.get(name, "")
            key: str = getattr(settings, setting)
            return Column(key or default, setting, is_required or (bool(key) and name != "answer"))

        self.is_recorded = settings.preset == "recorded"
        """Whether rows are finished groups, which hold their prompts."""
        self._rewards = rewards
        self._compares = rewards is not None and rewards.all_need_label
        """Whether the reward of each row compares with its label."""
        self._is_chat = settings.preset == "chat"
        self._is_pairs = settings.preset == "pairs"
        self._system, self._arguments = settings.system, settings.chat_template_kwargs
        self._needs_demonstration = needs_demonstration
        self._learns_last = settings.learn == "last"
        self._source = SOURCE_COLUMNS.get(settings.preset, "")
        wants_label = settings.preset in ("plain", "verl") and not needs_demonstration
        self._prompt = column(
            "prompt", setting="messages_key" if self._is_chat else "prompt_key", is_required=not self._is_pairs
        )
        self._label = column("label", is_required=self._compares or wants_label)
        self._metadata, self._tools = column("metadata"), column("tools")
        self._answer = column("answer", is_required=bool(settings.answer_key) and needs_demonstration)
        self._margin = column(MARGIN)
        self._pair = {name: column(name, is_required=True) for name in PAIR} if self._is_pairs else {}
        self._or_prompt: Column | None = None
        """Where the prompt is if its own column is not there."""
        if self._is_chat and not settings.messages_key:
            self._or_prompt = Column(CONVERSATIONS, self._prompt.setting)

    @property
    def columns(self) -> tuple[str, ...]:
        """Top-level columns that are looked at. A name with dots is also looked for as it is."""
        keys = (self._prompt.key, self._label.key, self._metadata.key, self._answer.key, self._source, self._tools.key)
        keys += (self._margin.key, *(column.key for column in self._pair.values()))
        keys += () if self._or_prompt is None else (self._or_prompt.key,)
        keys += (INPUT,) if self._prompt.key == INSTRUCTION else ()
        names = (name for key in keys if key for name in (key, key.partition(".")[0]))
        return (*names, *MEDIA_COLUMNS, *ARGUMENT_COLUMNS, *SYSTEM_COLUMNS, *TOOL_COLUMNS)

    def is_of_tools(self, name: str) -> bool:
        """Whether tools are in that top-level column."""
        return bool(name) and name in (self._tools.key, self._tools.key.partition(".")[0])

    def check_unified(self, columns: Columns) -> None:
        """Refuse what one schema for all rows may have changed in tools and tool calls. Raises RowError."""
        for column in (self._tools, self._column_of_prompt(columns), self._answer, *self._pair.values()):
            value = _value(columns, Column(column.key, column.setting))
            check_unified(value, column.key, is_tools=column is self._tools)

    def prompt(self, columns: Columns) -> Prompt:
        """What a row means; its place in the data is 0. Raises RowError."""
        if self.is_recorded:
            return cast("Prompt", columns["prompt"])
        metadata = self._metadata_of(columns)
        if self._is_pairs:
            columns, metadata = self._take_pair(columns, metadata)
        column = self._column_of_prompt(columns)
        prompt = self._conversation(columns, column)
        if self._is_plain and not isinstance(prompt, str):
            raise RowError(
                f'column "{self._prompt.key}" holds {type(prompt).__name__}, not the text that '
                "data.apply_chat_template = false wants",
                "write the whole prompt as a text, or have the chat template write the messages",
            )
        messages = parse_messages(prompt, self._prompt.key)
        self._check_unread(columns, messages)
        messages = self._take_demonstration(columns, messages, metadata)
        if not any(message.content.strip() or message.tool_calls or message.extra for message in messages):
            raise RowError(f'no message of "{self._prompt.key}" says anything', "fill one or leave the row out")
        texts = () if self._is_plain else (columns.get(name) for name in SYSTEM_COLUMNS if name != self._prompt.key)
        system = next((text for text in texts if isinstance(text, str) and text), self._system)
        if system and messages[0].role != "system":
            messages = (Message(role="system", content=system), *messages)
        tools = parse_tools(_value(columns, self._tools), self._tools.key)
        label = self._label_of(columns)
        if self._rewards is not None:
            self._rewards.check(metadata, has_label=bool(label and label.strip()))
        return Prompt(
            group_id=0, row=0, pass_index=0, messages=messages, tools=tools, label=label or "", metadata=metadata
        )

    def _conversation(self, columns: Columns, column: Column) -> Any:
        """A text, or a conversation, which may be JSON in a text. Raises RowError."""
        value = _value(columns, column)
        return value if self._is_plain else parse_json_messages(value, column.key)

    def _check_unread(self, columns: Columns, messages: tuple[Message, ...]) -> None:
        """Refuse what would be left out of the row without a word. Raises RowError."""
        for name in MEDIA_COLUMNS:
            value, placeholder = columns.get(name), f"<{name}>"
            is_name = isinstance(value, str) and not name.endswith("s")
            if value and not (is_name and all(placeholder not in message.content for message in messages)):
                raise RowError(f'column "{name}" is not empty: only text is trained on', "leave such rows out")
        if self._prompt.key == INSTRUCTION and columns.get(INPUT):
            raise RowError(
                f'column "{INPUT}" is not empty, and belongs to the prompt in "{INSTRUCTION}"',
                "write both as one text in one column, and name it with data.prompt_key",
            )
        above = self._prompt.key.rpartition(".")[0]
        for name in () if self._is_plain else TOOL_COLUMNS:
            for key in {name, f"{above}.{name}" if above else name} - {self._tools.key}:
                if holds_tools(_value(columns, Column(key, self._tools.setting))):
                    raise RowError(
                        f'column "{key}" holds tools, which the prompt would be without',
                        "name it with data.tools_key, or leave the column out",
                    )
        for name in () if self._is_plain else ARGUMENT_COLUMNS:
            value = columns.get(name)
            table = cast("Columns", value) if isinstance(value, dict) else {name: value}
            if any(argument is not None and self._arguments.get(key) != argument for key, argument in table.items()):
                raise RowError(
                    f'column "{name}" says {table!r:.80}, and the run file says otherwise or nothing',
                    "set data.chat_template_kwargs for all rows, or leave the column out",
                )

    def _column_of_prompt(self, columns: Columns) -> Column:
        other = self._or_prompt
        if other is not None and other.key in columns and self._prompt.key not in columns:
            return other
        return self._prompt

    def _label_of(self, columns: Columns) -> str | None:
        """As text, None if the row has none. Raises RowError."""
        value = _value(columns, self._label)
        if value is None:
            if self._rewards is not None and self._label.key in columns:
                raise RowError(
                    f'column "{self._label.key}" is null',
                    f'write "" for a row without, or name another column with data.{self._label.setting}',
                )
            return None
        if self._compares and (lack := _lack(value)):
            raise RowError(
                f'column "{self._label.key}" is {lack}, and the reward compares with it',
                "write the answer, or a list of those that are accepted",
            )
        return value if isinstance(value, str) else _json(value, self._label.key)

    def _metadata_of(self, columns: Columns) -> dict[str, Any]:
        value = _value(columns, self._metadata)
        if isinstance(value, str):
            with contextlib.suppress(NotJson):
                value = exact_json(value)
        if value is not None and not isinstance(value, dict):
            raise RowError(
                f'column "{self._metadata.key}" holds {type(value).__name__}, not an object',
                "make it an object, or name another column with data.metadata_key",
            )
        metadata = dict(cast("dict[str, Any]", value or {}))
        _json(metadata, self._metadata.key)
        if self._source and columns.get(self._source) is not None:
            metadata.setdefault(self._source, columns[self._source])
        return metadata

    def _take_demonstration(
        self, columns: Columns, messages: tuple[Message, ...], metadata: dict[str, Any]
    ) -> tuple[Message, ...]:
        """Put the answer to be learnt into the metadata; what is left is the prompt."""
        answer = self._conversation(columns, self._answer)
        reserved = next((key for key in (DEMONSTRATION, DEMONSTRATION_TURNS) if key in metadata), "")
        if reserved and (answer is not None or self._is_chat):
            raise RowError(f'"{reserved}" in the metadata is the name of what is to be learnt', "rename it")
        if isinstance(answer, str):
            metadata[DEMONSTRATION] = answer
        elif answer is not None:
            turns = parse_messages(answer, self._answer.key)
            check_switches(turns, self._answer.key)
            metadata[DEMONSTRATION_TURNS] = [_as_row(turn) for turn in turns]
        elif self._is_chat and self._needs_demonstration and messages[-1].role == "assistant":
            messages, turns = self._split_learnt(messages)
            is_text = len(turns) == 1 and turns[0] == Message(role="assistant", content=turns[0].content)
            metadata[DEMONSTRATION if is_text else DEMONSTRATION_TURNS] = (
                turns[0].content if is_text else [_as_row(turn) for turn in turns]
            )
        elif self._is_chat and messages[-1].role == "assistant":
            last = messages[-1]
            metadata |= {DEMONSTRATION_TURNS: [_as_row(last)]} if last.tool_calls else {DEMONSTRATION: last.content}
            messages = messages[:-1]
        elif self._needs_demonstration:
            raise RowError(
                f'the last message of "{self._prompt.key}" is from {messages[-1].role}: there is no demonstration',
                "end the conversation with an assistant message, or name a column with data.answer_key",
            )
        is_answered = answer is not None or self._is_chat or self._needs_demonstration
        if not is_answered and messages[-1].role == "assistant" and any(m.role not in NOT_ASKED for m in messages):
            return messages  # the model continues the turn that is begun
        if not messages or messages[-1].role in ("assistant", "system"):
            role = messages[-1].role if messages else "none"
            raise RowError(
                f'the prompt in "{self._prompt.key}" ends with a message from {role}: there is nothing to answer',
                'end it with a user message, or use preset = "chat" if the last message is the answer',
            )
        return messages

    def _take_pair(self, columns: Columns, metadata: dict[str, Any]) -> tuple[Columns, dict[str, Any]]:
        """The row with its prompt, and the turns of both answers in the metadata. Without a prompt of its own that is
        what both have in common at their beginning. Raises RowError."""
        prompt = _value(columns, self._prompt)
        names = [column.key for column in self._pair.values()]
        answers: list[Any] = [self._conversation(columns, column) for column in self._pair.values()]
        for name, answer in zip(names, answers, strict=True):
            if not isinstance(answer, (str, list)) or not answer:
                kind = "nothing" if answer in ("", []) else type(cast(object, answer)).__name__
                raise RowError(f'column "{name}" holds {kind}, not an answer', "write a text or a list of messages")
        if prompt is None and all(isinstance(answer, str) for answer in answers):
            texts = cast("list[str]", answers)
            size = _num_common(*texts)
            size -= texts[0][:size].endswith(" ")  # a word's tokens begin with the space before it
            prompt, answers = texts[0][:size], [text[size:] for text in texts]
            if not all(answers):
                raise RowError("one answer is the beginning of the other one", "leave such rows out, or set prompt")
        pair = [
            (Message(role="assistant", content=answer),) if isinstance(answer, str) else parse_messages(answer, name)
            for name, answer in zip(names, answers, strict=True)
        ]
        if prompt is None or all(turns[0].role != "assistant" for turns in pair):  # both begin with the prompt
            beginning = self._common_beginning(prompt, *pair)
            pair, prompt = [turns[len(beginning) :] for turns in pair], [_as_row(turn) for turn in beginning]
        if not prompt:
            raise RowError("the row has no prompt", "name its column with data.prompt_key, or begin both with it")
        for name, turns in zip(names, pair, strict=True):
            if not turns or turns[0].role != "assistant":
                raise RowError(
                    f'what "{name}" adds to the prompt does not begin with an assistant message',
                    "both answers must follow the same prompt, and differ",
                )
        if pair[0] == pair[1]:
            raise RowError("both answers are the same", "leave such rows out")
        turns_of = {name: [_as_row(turn) for turn in turns] for name, turns in zip(PAIR, pair, strict=True)}
        return {**columns, self._prompt.key: prompt}, {**metadata, **turns_of, MARGIN: self._margin_of(columns)}

    def _common_beginning(
        self, prompt: Any, chosen: Sequence[Message], rejected: Sequence[Message]
    ) -> Sequence[Message]:
        """The messages that both have at their beginning. Raises RowError if the row's own prompt is another one."""
        beginning = chosen[: _num_common(chosen, rejected)]
        key, texts = self._prompt.key, {(message.role, message.content.strip()) for message in beginning}
        messages = () if prompt is None else parse_messages(parse_json_messages(prompt, key), key)
        if not {(message.role, message.content.strip()) for message in messages} <= texts:
            raise RowError(f'both answers begin with another prompt than "{key}"', "leave one of the prompts out")
        return beginning

    def _margin_of(self, columns: Columns) -> float:
        if not self._margin.key:
            return 0.0  # whatever the row's own metadata call so
        margin = _value(columns, self._margin)
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < math.inf:
            raise RowError(f'column "{self._margin.key}" holds {margin!r:.80}', "write a number from 0 on")
        return float(margin)

    def _split_learnt(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The messages before the first turn that is learnt, and those from there to the last one. Raises RowError."""
        check_switches(messages, self._prompt.key)
        end = len(messages)
        question = next((index for index, message in enumerate(messages) if message.role not in NOT_ASKED), end)
        if question == end:
            return messages[:-1], messages[-1:]  # which is refused: there is nothing to answer
        first = end - 1 if self._learns_last else question + 1
        learnt = [index for index in range(first, end) if messages[index].is_learnt]
        if not learnt:
            raise RowError(
                f'no message of "{self._prompt.key}" is learnt',
                f"switch one on ({', '.join(LOSS_KEYS)}), or leave the row out",
            )
        return messages[: learnt[0]], messages[learnt[0] : learnt[-1] + 1]


def _num_common(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _value(columns: Columns, column: Column) -> Any:
    """The value of a column, None if it may be missing. Raises RowError."""
    key = column.key
    if not key:
        return None
    value: Any = columns.get(key)
    if value is not None or not (column.is_required or "." in key or key in columns):
        return value
    level: Any = columns
    path = [column.key] if column.key in columns else column.key.split(".")
    for depth, part in enumerate(path):
        table = cast("Columns", level) if isinstance(level, dict) else {}
        if isinstance(level, str) and column.is_required:
            raise RowError(f'"{".".join(path[:depth])}" is a text, not an object', "store the object, or name the text")
        if part not in table:
            if column.is_required:
                raise _missing(column, ".".join(path[:depth]), table, part)
            return None
        level = table[part]
    if level is None and column.is_required:
        raise RowError(f'column "{column.key}" is null', f"fill it, or name another column with data.{column.setting}")
    return level


def _lack(label: object) -> str:
    """What makes a label no answer, or no list of accepted ones: saying nothing would be right."""
    if not isinstance(label, list):
        return "empty" if isinstance(label, str) and not label.strip() else ""
    answers = cast("list[Any]", label)
    if not answers:
        return "a list without answers"
    lacks = "null" if None in answers else next(("an empty text" for answer in answers if _lack(answer) == "empty"), "")
    return lacks and f"a list that holds {lacks}"


def _as_row(message: Message) -> dict[str, Any]:
    """As a row would hold it."""
    return orjson.loads(msgspec.json.encode(message))


def _missing(column: Column, above: str, table: Columns, part: str) -> RowError:
    names = sorted(table)
    shown = ", ".join(names[:SHOWN_COLUMNS]) + (", ..." if len(names) > SHOWN_COLUMNS else "")
    holder = f'"{above}"' if above else "the row"
    hint = suggest(part, names)
    remedy = f"name it with data.{column.setting}" + (f"; {hint}" if "did you mean" in hint else "")
    return RowError(f'column "{column.key}" is missing; {holder} has {shown or "no columns"}', remedy)


def _json(value: object, key: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError) as error:
        raise RowError(f'column "{key}" cannot be written as JSON: {error}', "store it as text") from error
