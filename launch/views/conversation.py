"""Groups of samples.jsonl as conversations: who said what, thoughts and tool calls apart, and what the tokens of each
turn say. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ...actors.gateway.turn_text import THOUGHT_BEGINS, THOUGHT_ENDS, form_of, read_turn
from ...core.messages import AnswerText, GroupText, SaidText
from .numbers import short

_CALL = re.compile(r"<tool_call>|<\|python_tag\|>|<｜tool▁call|<\|tool_call_begin\|>|<invoke name=|\[TOOL_CALLS\]")
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def visible(text: str) -> str:
    """Letters that a terminal would obey, that turn the direction of the text around or show nothing are spelt out."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def shown(group: GroupText) -> dict[str, Any]:
    """The group with its messages as views show them, `prompt`, and the `text` of each answer."""
    answers = [
        {**msgspec.to_builtins(answer), "text": answer.text, "tools": [_call(tool) for tool in answer.tools],
         "messages": _turns(answer), "note": _note(answer)} for answer in group.answers
    ]  # fmt: skip
    messages, tools = [_message(message) for message in group.messages], [_call(tool) for tool in group.tools]
    shown_parts = {"prompt": group.prompt, "tools": tools, "messages": messages, "answers": answers}
    return msgspec.to_builtins(group) | shown_parts


def _turns(answer: AnswerText) -> list[dict[str, Any]]:
    turns, number = list[dict[str, Any]](), 0
    for message in answer.messages:
        number += message.is_model
        is_shared = bool(message.is_model) and number <= answer.num_shared
        turns.append(_message(message, number if message.is_model else 0, is_shared=is_shared))
    return turns


def _note(answer: AnswerText) -> str:
    """What a sample has to do with the others of its rollout."""
    if answer.num_shared:
        turns = "first turn" if answer.num_shared == 1 else f"first {answer.num_shared} turns"
        sample = f"sample {answer.index}.{answer.shared_with}" if answer.shared_with >= 0 else "another sample"
        return f"shares its {turns} with {sample}, where they are learnt"
    return "a conversation of its own" if answer.num_opening else ""


def _message(said: SaidText, turn: int = 0, *, is_shared: bool = False) -> dict[str, Any]:
    text, calls = said.content, [_call(call) for call in said.calls]
    fields: dict[str, Any] = {"role": said.role, "name": said.name, "text": text, "thought": said.thought,
                              "calls": calls, "call_id": said.call_id}  # fmt: skip
    if said.is_model:
        begins_inside = THOUGHT_ENDS in text and THOUGHT_BEGINS not in text.partition(THOUGHT_ENDS)[0]
        turn_read = read_turn(text, form_of(text) if _CALL.search(text) else None, begins_inside=begins_inside)
        calls = [{"name": call.name, "text": _json(call.arguments)} for call in turn_read.calls]
        fields |= {"text": turn_read.content, "thought": turn_read.reasoning, "calls": calls}
        fields["is_malformed"] = turn_read.is_malformed
    facts = [*(f"turn {turn}" for _ in range(turn > 0)), *_facts(said, is_shared=is_shared)]
    return {**fields, "is_model": said.is_model, "is_learnt": said.num_learnt > 0 and not is_shared, "facts": facts}


def _facts(message: SaidText, *, is_shared: bool) -> Iterator[str]:
    if message.num_tokens:
        low, high = message.oldest_version, message.newest_version
        yield f"{message.num_tokens} tokens"
        yield _versions(low, high)
        if message.num_learnt < message.num_tokens:
            yield f"{message.num_learnt} of them learnt" if message.num_learnt else "not learnt"
    if is_shared:
        yield "learnt in the other sample"
    if message.reward is not None:
        yield f"reward {short(message.reward)}"


def _versions(low: int, high: int) -> str:
    return "no engine" if high < 0 else f"version {high}" if low == high else f"versions {low} to {high}"


def _call(text: str) -> dict[str, str]:
    """The name and the rest of a tool, or of its call."""
    try:
        table = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {"name": "", "text": text}
    name, arguments = str(table.pop("name", "")), table.get("arguments", table.get("parameters", table))
    return {"name": name, "text": arguments if isinstance(arguments, str) else _json(arguments)}


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# -- for a terminal ------------------------------------------------------------------------------------------------


def group_lines(group: dict[str, Any]) -> Iterator[str]:
    """A group that `shown` made, as text."""
    name, why = (f" {group['eval_set']}".rstrip(), f" ({group['reason']})" if group["reason"] else "")
    low, high = group["oldest_version"], group["newest_version"]
    versions = _versions(low, high)
    yield visible(f"step {group['step']}, group {group['group_id']}: {group['outcome']}{name}{why}, {versions}")
    yield from _said(group, "  ")
    if group["label"]:
        yield visible(f"  label: {group['label']}")
    for answer in group["answers"]:
        parts = "".join(f", {name} {value:g}" for name, value in answer["reward_parts"].items())
        branch = f".{answer['branch']}" if answer["branch"] else ""
        note = f", {answer['note']}" if answer["note"] else ""
        facts = f"{answer['num_tokens']} tokens ({answer['finish']}){note}"
        yield visible(f"  [{answer['index']}{branch}] reward {answer['reward']:g}{parts}, {facts}")
        yield from _said(answer, "      ")
    if (num_more := group["num_answers"] - len(group["answers"])) > 0:
        yield f"  and {num_more} more answers"


def _said(table: dict[str, Any], indent: str) -> Iterator[str]:
    for tool in table["tools"]:
        yield visible(f"{indent}offers {tool['name']}: {tool['text']}")
    for message in table["messages"]:
        is_alone = len(table["messages"]) == 1 and message["is_model"]  # the answer says all of it
        yield from _message_lines({**message, "role": "", "facts": ()} if is_alone else message, indent)


def _message_lines(message: dict[str, Any], indent: str) -> Iterator[str]:
    who = " ".join(filter(None, (message["role"], message["name"])))
    if message["thought"]:
        yield visible(f"{indent}{who} thinks: {message['thought']}")
    if message["text"] or not (message["calls"] or message["thought"]):
        text = message["text"].replace("\n", f"\n{indent}  ")
        yield visible(f"{indent}{f'{who}: ' * bool(who)}{text}")
    for call in message["calls"]:
        yield visible(f"{indent}{who} calls {call['name']}({call['text']})")
    if message["facts"]:
        malformed = ["a tool call that cannot be read"] if message.get("is_malformed") else []
        yield f"{indent}  ({', '.join([*message['facts'], *malformed])})"
