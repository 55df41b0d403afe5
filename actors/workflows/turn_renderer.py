r"""Token ids around the model's turns, as the chat template writes them: prompts and replies.

A reply must continue a token stream whose turns are never encoded again. So it is cut out of a conversation made for
it: a question, a sentinel as answer, the reply. What follows the sentinel follows any answer. So the rendering of
earlier turns does not matter (Qwen3 leaves out their thinking): the stream has the tokens that were drawn for them.

Between answer and reply is the end of the turn, of which the model may have drawn a part:

    own mark            `answer<|im_end|>` + `\n<|im_start|>user\n...`    drawn: what follows the mark is the reply
    next role's mark    `answer<|user|>`   + `\n...`                      GLM-4: the model draws the next role
    no mark             `answer`           + `\nUser: ...`                the whole is the reply

An answer that was cut off lacks its mark; then the reply begins with it. Where a template takes a tool's answer behind
a call alone (Mistral, MiniMax), the sentinel is an argument of one. A template that leaves out the answer or the
reply, or writes them twice or in another order, raises a TemplateError that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np

from ...algos.rewards.extraction import opens_thought
from ...core.errors import DataError, TemplateError
from ...core.protocols import Tokenizer
from ...core.samples import I32, Message, Prompt

ANSWER = "Myxa5d1fc7e2Answer"
REPLY = "Myxa93b60a5eReply"
QUESTION = Message(role="user", content="?")
ANSWERED = (QUESTION, Message(role="assistant", content=ANSWER))
_CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "look", "arguments": {"at": ANSWER}}}
CALLED = (QUESTION, Message(role="assistant", content="", tool_calls=(_CALL,)))
KNOWN_ROLES = ("user", "tool", "observation", "ipython", "function")
"""What templates call those who speak after the model."""

Render = Callable[[Sequence[Message]], str]
"""A conversation as text, up to where the model begins to speak."""


def between(render: Render, messages: Sequence[Message], place: str, before: Sequence[Message] = ANSWERED) -> str:
    """The text between a turn of the model and the text of the first of these messages, for any such text. `place`: of
    the template. `before`: a conversation that ends with that turn. Raises TemplateError if it cannot append them."""
    marks = [f"{REPLY}{number}End" for number in range(len(messages))]
    probes = [message.with_text(mark) for message, mark in zip(messages, marks, strict=True)]
    try:
        text = render((*before, *probes))
    except DataError as err:
        raise unfit(messages, place, f"refuses it ({err.message})") from err
    places = [text.find(mark) for mark in (ANSWER, *marks)]
    if -1 in places or places != sorted(places) or any(text.count(mark) > 1 for mark in (ANSWER, *marks)):
        raise unfit(messages, place, "does not write that turn as it is, then the message, each once")
    return text.partition(ANSWER)[2].partition(marks[0])[0]


def can_append(render: Render) -> bool:
    """Whether it is so of a message of any known role."""
    for role in KNOWN_ROLES:
        with suppress(TemplateError):
            between(render, (Message(role=role, content=""),), "")
            return True
    return False


def unfit(messages: Sequence[Message], place: str, how: str) -> TemplateError:
    """The template cannot append them: it does `how`."""
    roles = ", ".join(repr(message.role) for message in messages)
    return TemplateError(
        f"the chat template of {place} cannot append a message of role {roles} after a turn of the model: it {how}",
        remedy="reply in a role that the model was made for, or mend the template",
    )


MAX_KNOWN = 256
"""Kinds of replies that are remembered."""

Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Joint:
    """What ends the model's turn before a reply."""

    mark: int | None
    is_own: bool
    """The mark belongs to the turn; otherwise it is the next role's."""
    is_called: bool = False
    """The turn before must be a call."""


MARK_IDS = 16
"""The mark that opens a thought, and the white space behind it, are no longer."""


def begins_in_thought(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Whether the last of the ids that the model was given open a thought."""
    return _open_thought(tokenizer, tuple(ids[-MARK_IDS:]))


@lru_cache(maxsize=256)
def _open_thought(tokenizer: Tokenizer, last: tuple[int, ...]) -> bool:
    """Kept, since all samples of a prompt ask the same."""
    return opens_thought(tokenizer.decode(last, skip_special=False))


class TurnRenderer:
    """For one tokenizer. Keeps what it found out about its template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._joints: dict[tuple[object, ...], _Joint] = {}
        self._toolless_closing: tuple[str, int | None] | None = None

    def prompt(self, prompt: Prompt) -> I32:
        """Token ids int32 [P] of the prompt's messages, up to where the model begins to speak, or continues a turn that
        the prompt ends with. Raises DataError when the template refuses it or writes nothing."""
        messages, tools = prompt.messages, prompt.tools
        if messages and messages[-1].role == "assistant":
            ids = self._tokenizer.render(messages, add_generation_prompt=False, tools=tools, goes_on=True)
        else:
            ids = self._tokenizer.render(messages, add_generation_prompt=True, tools=tools)
        if not ids:
            raise DataError(
                f"the chat template of {self._tokenizer.template_place} writes nothing of the prompt",
                remedy="mend the template, or leave the row out",
            )
        return np.asarray(ids, dtype=np.int32)

    def left_out(self, prompt: Prompt) -> str:
        """What the template does not write of a prompt; empty: nothing, or it refuses to be tried out."""
        marks = [
            f"{REPLY}{number}End" * bool(message.content.strip()) for number, message in enumerate(prompt.messages)
        ]
        probes = [message.with_text(mark) for message, mark in zip(prompt.messages, marks, strict=True)]
        calls = [call for message in prompt.messages for call in message.tool_calls]
        try:
            text = self._text(probes, prompt.tools, opens=True)
        except DataError:
            return ""
        for message, mark in zip(prompt.messages, marks, strict=True):
            if mark not in text:
                return f"the message of role {message.role!r}"
        for part, tables in (("the tools", prompt.tools), ("the calls of tools", calls)):
            for table in tables:
                function: object = table.get("function", table)
                if isinstance(function, dict) and str(cast("dict[str, object]", function).get("name", "")) not in text:
                    return part
        return ""

    def reply(self, messages: Sequence[Message], *, ended_by: int | None, tools: Tools = ()) -> I32:
        """Token ids from the end of a turn to where the model begins to speak again. `ended_by`: the token that the
        turn was ended with by the model; None: it was cut off. Raises TemplateError for messages of a kind that the
        template cannot append, DataError for texts that it refuses."""
        joint = self._joint(messages, tools)
        ids = self._tokenizer.encode(self._behind_answer(messages, tools, is_called=joint.is_called))
        is_drawn = ended_by is not None and (ended_by == joint.mark or (joint.is_own and ended_by in self._ends))
        if joint.mark is not None and (is_drawn or joint.is_called):
            ids = ids[ids.index(joint.mark) + is_drawn :]
        return np.asarray(ids, dtype=np.int32)

    def end_mark(self) -> int | None:
        """The token that the template ends a turn of the model with, if it is one of its own."""
        return self._closing(())[1]

    def ends(self, replies: Sequence[Message], tools: Tools = ()) -> tuple[tuple[str, ...], str]:
        """Texts that may end a turn of the model before these replies, none where nothing does, and what the template
        writes behind the last turn of a conversation. Raises TemplateError, DataError as above."""
        closing, own_mark = self._closing(tools)
        if own_mark is not None:
            marks = {own_mark, *self._ends}
            return tuple(self._tokenizer.decode([mark], skip_special=False) for mark in marks), closing
        if closing.strip():  # words, not a token of their own
            return (closing.strip(),), closing
        mark = self._joint(replies, tools).mark if replies else None
        return (() if mark is None else (self._tokenizer.decode([mark], skip_special=False),)), closing

    def _closing(self, tools: Tools) -> tuple[str, int | None]:
        """What the template writes behind the last turn of a conversation, and the mark in it."""
        if not tools and self._toolless_closing is not None:
            return self._toolless_closing
        closing = self._text(ANSWERED, tools).partition(ANSWER)[2]
        closing_and_mark = closing, self._first_mark(closing)
        if not tools:
            self._toolless_closing = closing_and_mark
        return closing_and_mark

    def _text(self, messages: Sequence[Message], tools: Tools, *, opens: bool = False) -> str:
        return self._tokenizer.render_text(messages, add_generation_prompt=opens, tools=tools)

    def _behind_answer(self, messages: Sequence[Message], tools: Tools, *, is_called: bool) -> str:
        text = self._text((*(CALLED if is_called else ANSWERED), *messages), tools, opens=True)
        _, answer, behind = text.partition(ANSWER)
        if not answer:  # it depends on what the messages say
            raise unfit(messages, self._tokenizer.template_place, "leaves the model's turn before it out")
        return behind

    def _joint(self, messages: Sequence[Message], tools: Tools) -> _Joint:
        key = (bool(tools), *((m.role, bool(m.name), bool(m.tool_calls), bool(m.tool_call_id)) for m in messages))
        joint = self._joints.get(key)
        if joint is None:
            if len(self._joints) >= MAX_KNOWN:  # roles may come from data
                self._joints.clear()
            joint = self._joints[key] = self._find_joint(messages, tools)
        return joint

    def _find_joint(self, messages: Sequence[Message], tools: Tools) -> _Joint:
        render, place = partial(self._text, tools=tools, opens=True), self._tokenizer.template_place
        own_mark, is_called = self._closing(tools)[1], False
        try:
            head = between(render, messages, place)
        except TemplateError:
            if own_mark is None or messages[0].role != "tool":
                raise
            head, is_called = between(render, messages, place, CALLED), True
        if own_mark is None:
            return _Joint(self._first_mark(head), is_own=False)
        return _Joint(own_mark if own_mark in self._tokenizer.encode(head) else None, is_own=True, is_called=is_called)

    def _first_mark(self, text: str) -> int | None:
        """The first token of a text that ends generations, or is special."""
        ids = self._tokenizer.encode(text)
        return next((token for token in ids if token in self._ends or self._is_special(token)), None)

    def _is_special(self, token: int) -> bool:
        return not self._tokenizer.decode([token]) and bool(self._tokenizer.decode([token], skip_special=False))
