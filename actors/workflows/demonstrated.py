"""Token ids of a conversation that the model did not write, and which of them are learnt. Pure.

The ids are those of the whole conversation as the chat template writes it: where it begins the model's turn otherwise
than it writes the demonstration (thinking switched off, and a demonstration that thinks), the row is refused. Earlier
turns may lack the thinking that the template opens where the model begins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...core.errors import DataError
from ...core.protocols import Tokenizer
from ...core.samples import Message
from .turn_renderer import TurnRenderer

OPENED_THINKING = re.compile(r"<think>\s*(</think>\s*)?\Z")
"""What a template writes behind the head of a turn where the model begins."""
THINKING = re.compile(r"<think>(.*?)</think>|\A(.*?)</think>", re.DOTALL)
REASONING = ("reasoning_content", "thinking", "reasoning")

Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """A conversation up to the end of the last turn that is learnt."""

    ids: list[int]
    mask: list[int]
    """1 where a token is learnt."""
    num_prompt: int
    """Tokens before the first turn that is learnt."""


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int
    needs_end: bool = False
    """The template writes nothing at the end of the last turn: the model's own end token is put there."""


def demonstrate(
    tokenizer: Tokenizer,
    renderer: TurnRenderer,
    prompt: Sequence[Message],
    turns: Sequence[Message],
    tools: Tools = (),
    *,
    is_whole: bool = False,
) -> Demonstrated:
    """`is_whole`: with what the template writes behind the last turn, which is not learnt. Raises DataError for a
    conversation that the template writes otherwise than it would be learnt."""
    writer = _Writer(tokenizer, renderer, (*prompt, *turns), tools)
    return writer.write(len(prompt), is_whole=is_whole)


class _Writer:
    def __init__(
        self, tokenizer: Tokenizer, renderer: TurnRenderer, messages: tuple[Message, ...], tools: Tools
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        last = max((number for number, message in enumerate(messages) if message.is_learnt), default=-1)
        self._messages = messages[: last + 1]
        self._tools = tools
        self._text = self._render(self._messages)
        self._ids = tokenizer.encode(self._text)
        self._boundaries = {len(self._text): len(self._ids)}

    def write(self, num_before: int, *, is_whole: bool) -> Demonstrated:
        learnt = [number for number in range(num_before, len(self._messages)) if self._messages[number].is_learnt]
        if not learnt:
            raise DataError("no turn of the demonstration is learnt", remedy="switch a turn of the assistant on")
        spans = [self._span(number) for number in learnt]
        blocks = self._blocks()
        ids = self._ids[: self._boundary(spans[-1].end)]
        mask = [0] * len(ids)
        for number, span in zip(learnt, spans, strict=True):
            first, end = self._boundary(span.start), self._boundary(span.end)
            for index in range(first, end):
                mask[index] = int(blocks is None or index in blocks)
            if not any(mask[first:end]) and not span.needs_end:
                raise self._refusal(number, "marks nothing of it as the model's ({% generation %})")
        if spans[-1].needs_end and ids[-1] not in self._tokenizer.eos_token_ids:
            ids, mask = [*ids, self._tokenizer.eos_token_ids[0]], [*mask, 1]
        elif is_whole:
            mask += [0] * (len(self._ids) - len(ids))
            ids = self._ids
        return Demonstrated(ids, mask, self._boundary(spans[0].start))

    def _span(self, number: int) -> _Span:
        start = self._start(number)
        span = self._closed(number, start)
        self._check_whole(number, self._text[span.start : span.end])
        return span

    def _start(self, number: int) -> int:
        opened = self._render(self._messages[:number], opens=True)
        if self._text.startswith(opened):
            return len(opened)
        thinks = OPENED_THINKING.search(opened)
        head = opened[: thinks.start()] if thinks else opened
        is_last, is_same = number == len(self._messages) - 1, self._text.startswith(head)
        if thinks is None or not is_same or is_last or self._text.startswith("<think>", len(head)):
            fault = f"begins the model's turn with {opened[-40:]!r}, which is not how it writes the conversation there"
            raise self._refusal(number, fault)
        return len(head)

    def _closed(self, number: int, start: int) -> _Span:
        """The turn up to the mark that ends it, the mark included."""
        messages = self._messages
        after = next((k for k in range(number + 1, len(messages)) if messages[k].role == "assistant"), len(messages))
        marks, closing = self._renderer.ends(messages[number + 1 : after], self._tools)
        places = [(place, len(mark)) for mark in marks if (place := self._text.find(mark, start)) >= 0]
        if places:
            place, length = min(places)
            return _Span(start, place + length)
        if number == len(messages) - 1:
            end = len(self._text) - (len(closing) if self._text.endswith(closing) else 0)
            return _Span(start, max(start, end), needs_end=True)
        so_far = self._render(messages[: number + 1])
        if not self._text.startswith(so_far):
            raise self._refusal(number, "does not mark where it ends")
        return _Span(start, len(so_far))

    def _check_whole(self, number: int, written: str) -> None:
        """What the row says must be in what is learnt: its text, names of calls, and the thinking of the last turn."""
        message = self._messages[number]
        texts = [THINKING.sub("", message.content).strip()]
        for call in message.tool_calls:
            table: object = call.get("function", call)
            name: object = cast("dict[str, object]", table).get("name") if isinstance(table, dict) else None
            texts.append(str(name or ""))
        if number == len(self._messages) - 1:
            texts += [text.strip() for pair in THINKING.findall(message.content) for text in pair]
            texts += [str(message.extra.get(key) or "").strip() for key in REASONING]
        lacks = next((text for text in texts if text not in written), "")
        if lacks:
            raise self._refusal(number, f"does not write {lacks[:80]!r} in the model's turn")

    def _blocks(self) -> frozenset[int] | None:
        """Tokens inside of `{% generation %}` blocks; None: the template has none."""
        spans_of = getattr(self._tokenizer, "model_spans", None)  # of tokenizers with a template
        spans = spans_of(self._messages, self._tools) if spans_of else None
        if spans is None:
            return None
        return frozenset(index for start, end in spans for index in range(self._boundary(start), self._boundary(end)))

    def _boundary(self, place: int) -> int:
        """Number of tokens before a place in the text; one that lies across it is before it."""
        if place not in self._boundaries:
            self._boundaries[place] = self._num_before(place)
        return self._boundaries[place]

    def _num_before(self, place: int) -> int:
        before = self._tokenizer.encode(self._text[:place])
        if self._ids[: len(before)] == before:
            return len(before)
        same = next(k for k, (a, b) in enumerate(zip(self._ids, before, strict=False)) if a != b)
        return same + 1

    def _render(self, messages: Sequence[Message], *, opens: bool = False) -> str:
        return self._tokenizer.render_text(messages, add_generation_prompt=opens, tools=self._tools)

    def _refusal(self, number: int, fault: str) -> DataError:
        remedy = "mend the template or the row; data.chat_template_kwargs may switch thinking on or off"
        if number < len(self._messages) - 1:
            remedy += ', and data.learn = "last" leave earlier turns out'
        return DataError(
            f"message {number + 1} of the conversation cannot be learnt: the chat template of "
            f"{self._tokenizer.template_place} {fault}",
            remedy=remedy,
        )
