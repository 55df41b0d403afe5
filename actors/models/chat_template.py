"""The chat template of a model folder: finds it, compiles it, renders conversations as transformers does.

Of a template it decides nothing: the same conversation, tools and arguments give the text of transformers'
`apply_chat_template`, or a DataError. The date of `strftime_now` is the run file's, so that a run that is resumed on
another day has the same prompts. Library considered: transformers, which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol, cast

import jinja2

from ...core.errors import DataError, ModelError, TemplateError
from ...core.samples import REASONING_KEYS, Message
from .template_sandbox import NoDate, OverBudget, Sandbox, run
from .tokenizer_files import TOKENIZER_CONFIG, read_hf_tokenizer

TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
MAX_TEMPLATE_CHARS = 1_000_000
DEFAULT_NAME, TOOL_NAME = "default", "tool_use"

TO_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
PRINTED_PARTS = "{'type': 'text'"
"""What a template writes that takes content for a text, where it is a list of parts."""

Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    generation: tuple[tuple[int, int], ...] = ()
    """Places of its `{% generation %}` blocks."""


class ChatTemplate:
    """A compiled template. `render` is pure: same messages, same text."""

    def __init__(
        self,
        source: str,
        place: str,
        special_tokens: Mapping[str, str],
        arguments: Mapping[str, Any] | None = None,
        *,
        day: date | None = None,
        with_tools: str = "",
    ) -> None:
        """`arguments`: further names that it sees, such as `enable_thinking`. `with_tools`: the source of the one that
        is taken where there are tools. Raises ModelError."""
        self.place = place
        """Where it was found, for messages."""
        self._arguments = {**special_tokens, **(arguments or {})}
        self._plain = _Compiled(source, place, day)
        self._with_tools = _Compiled(with_tools, place, day) if with_tools else self._plain

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = (), goes_on: bool = False
    ) -> str:
        """Text of a conversation. `goes_on`: the last message is the beginning of a turn, which is left open. Raises
        DataError when the template refuses it, TemplateError when it asks for a date that the run file has not."""
        if goes_on:
            return self._left_open(messages, tools)
        return self.write(messages, add_generation_prompt=add_generation_prompt, tools=tools).text

    def write(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Tools = ()
    ) -> RenderedChat:
        """The same, with the places of what the template calls the model's."""
        compiled = self._with_tools if tools else self._plain
        self._check_thinking(messages, compiled)
        has_parts = any(message.parts for message in messages)
        try:
            written = self._run(compiled, _seen(messages), add_generation_prompt, tools)
            if not (has_parts and PRINTED_PARTS in written.text):
                return written
        except DataError:
            if not has_parts:
                raise
        return self._run(compiled, _seen(messages, as_text=True), add_generation_prompt, tools)

    def has_blocks(self, tools: Tools = ()) -> bool:
        """Whether there are `{% generation %}` blocks in it."""
        return (self._with_tools if tools else self._plain).has_blocks

    def _left_open(self, messages: Sequence[Message], tools: Tools) -> str:
        compiled = self._with_tools if tools else self._plain
        self._check_thinking(messages, compiled)
        seen = _seen(messages, as_text=True)
        last = seen[-1].get("content")
        roles = _roles(seen)
        if not last or "content" not in compiled.source:
            raise self._refusal(roles, "the last message has no content to continue")
        seen[-1]["content"] = last + TO_CONTINUE
        text = self._run(compiled, seen, False, tools).text
        tag = TO_CONTINUE.strip()
        if last.strip() not in text or tag not in text:
            raise self._refusal(roles, "it changes the last message, which the model is to continue")
        at = text.rindex(tag)
        return text[:at] if text[at:].startswith(TO_CONTINUE) else text[:at].rstrip()

    def _run(self, compiled: _Compiled, seen: list[dict[str, Any]], opens: bool, tools: Tools) -> RenderedChat:
        names = {
            **self._arguments,
            "messages": seen,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": opens,
        }
        try:
            text, spans = run(compiled.template, names)
        except NoDate as err:
            raise TemplateError(
                f"the chat template of {self.place} writes today's date (strftime_now)",
                remedy='set data.date = "YYYY-MM-DD", so that a resumed run has the same prompts',
            ) from err
        except (OverBudget, RecursionError, MemoryError) as err:
            raise self._refusal(_roles(seen), f"{err}" or "no memory", remedy="do not use this template") from err
        except jinja2.TemplateError as err:
            raise self._refusal(_roles(seen), str(err)) from err
        except Exception as err:
            raise self._refusal(_roles(seen), f"{err}" if str(err) else type(err).__name__) from err
        return RenderedChat(text, tuple(spans))

    def _refusal(self, roles: str, why: str, remedy: str = "") -> DataError:
        return DataError(
            f"the chat template of {self.place} refuses a conversation of roles [{roles}]: {why}",
            remedy=remedy or "use the roles this model was made for, in the order it expects",
        )

    def _check_thinking(self, messages: Sequence[Message], compiled: _Compiled) -> None:
        """Thinking that is given on its own must be looked at."""
        given = next((key for one in messages for key in REASONING_KEYS if one.extra.get(key) is not None), None)
        if given and not any(key in compiled.source for key in REASONING_KEYS):
            raise DataError(
                f"a message has {given}, which the chat template of {self.place} does not write",
                remedy="put it into content, as the model writes it (<think>...</think>), or leave it out",
            )


class _Compiled:
    def __init__(self, source: str, place: str, day: date | None) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"{place}: the chat template has {len(source)} characters", remedy="use an honest one")
        self.source = source
        try:
            self.template = Sandbox(day).from_string(source)
        except Exception as err:  # depth, memory and what the compiler of Python says
            why = str(err) or type(err).__name__
            raise ModelError(f"{place}: the chat template does not compile: {why}", remedy="mend the template") from err
        self.has_blocks = "endgeneration" in source


class PlainText:
    """Used where there is no chat template: texts as they are, one after the other."""

    place = "plain text"

    def has_blocks(self, tools: Tools = ()) -> bool:
        return False

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = (), goes_on: bool = False
    ) -> str:
        return "".join(message.content for message in messages)

    def write(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Tools = ()
    ) -> RenderedChat:
        return RenderedChat(self.render(messages, add_generation_prompt=add_generation_prompt))


def _seen(messages: Sequence[Message], *, as_text: bool = False) -> list[dict[str, Any]]:
    """What the template is given. Thinking has all of its names, as transformers gives it."""
    seen: list[dict[str, Any]] = []
    for message in messages:
        table = message.as_template_sees()
        if as_text and message.parts:
            table["content"] = message.content
        thinking = next((table[key] for key in REASONING_KEYS if table.get(key) is not None), None)
        if thinking is not None:
            table = {"thinking": thinking, **table, REASONING_KEYS[0]: thinking}
        seen.append(table)
    return seen


def _roles(seen: Sequence[dict[str, Any]]) -> str:
    return ", ".join(message["role"] for message in seen)


def load_chat_template(
    folder: str | Path, arguments: Mapping[str, Any] | None = None, *, day: date | None = None, found: Any = None
) -> ChatTemplate:
    """The template that transformers finds in the folder. `arguments`: see `ChatTemplate`; `found`: its tokenizer, if
    it was read already. Raises ModelError naming the files when there is none."""
    root = Path(folder)
    found = read_hf_tokenizer(root) if found is None else found
    given: Any = found.chat_template
    templates = cast("dict[str, Any]", given) if isinstance(given, dict) else {DEFAULT_NAME: given}
    if not any(templates.values()):
        is_of_processor = (root / PROCESSOR_TEMPLATE).exists()
        more = f"; {PROCESSOR_TEMPLATE} is for processors of images, not for tokenizers" if is_of_processor else ""
        raise ModelError(
            f"{root} has no chat template: neither {TEMPLATE_FILE} nor chat_template in {TOKENIZER_CONFIG}{more}",
            remedy=f"put the template of the model's chat variant into {root / TEMPLATE_FILE}, "
            "or set data.apply_chat_template = false",
        )
    source, with_tools = templates.get(DEFAULT_NAME), templates.get(TOOL_NAME, "")
    if not isinstance(source, str) or not isinstance(with_tools, str):
        raise ModelError(
            f"{root} has chat templates named {', '.join(sorted(templates))}, and none named {DEFAULT_NAME} is a text",
            remedy=f"put the one that is meant into {root / TEMPLATE_FILE}",
        )
    place = root / (TEMPLATE_FILE if (root / TEMPLATE_FILE).exists() else TOKENIZER_CONFIG)
    return ChatTemplate(source, str(place), found.special_tokens_map, arguments, day=day, with_tools=with_tools)


class TemplateSettings(Protocol):
    """Keys of the section `[data]`."""

    @property
    def apply_chat_template(self) -> bool: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...
    @property
    def date(self) -> str: ...


def template_of(folder: str | Path, data: TemplateSettings, *, found: Any = None) -> ChatTemplate | PlainText:
    """How a run's conversations are written; see `load_chat_template`. Raises ModelError."""
    if not data.apply_chat_template:
        return PlainText()
    day = date.fromisoformat(data.date) if data.date else None
    return load_chat_template(folder, data.chat_template_kwargs, day=day, found=found)
