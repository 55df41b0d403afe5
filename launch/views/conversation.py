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
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shown(group: GroupText) -> dict[str, Any]:
    """The group with its messages as views show them, `prompt`, and the `text` of each answer."""
    answers = [
        {**msgspec.to_builtins(answer), "text": answer.text, "tools": [_call(tool) for tool in answer.tools],
         "messages": _turns(answer), "note": _note(answer)} for answer in group.answers
    ]  # fmt: skip
    messages, tools = [_message(said) for said in group.messages], [_call(tool) for tool in group.tools]
    shown_parts = {"prompt": group.prompt, "tools": tools, "messages": messages, "answers": answers}
    return msgspec.to_builtins(group) | shown_parts


def _turns(answer: AnswerText) -> list[dict[str, Any]]:
    found, number = list[dict[str, Any]](), 0
    for one in answer.messages:
        number += one.is_model
        is_shared = bool(one.is_model) and number <= answer.num_shared
        found.append(_message(one, number if one.is_model else 0, is_shared=is_shared))
    return found


def _note(answer: AnswerText) -> str:
    """What a sample has to do with the others of its rollout."""
    if answer.num_shared:
        turns = "first turn" if answer.num_shared == 1 else f"first {answer.num_shared} turns"
        of = f"sample {answer.index}.{answer.shared_with}" if answer.shared_with >= 0 else "another sample"
        return f"shares its {turns} with {of}, where they are learnt"
    return "a conversation of its own" if answer.num_opening else ""


def _message(one: SaidText, turn: int = 0, *, is_shared: bool = False) -> dict[str, Any]:
    told: dict[str, Any] = {"role": one.role, "name": one.name, "text": one.content, "thought": one.thought,
                            "calls": [_call(call) for call in one.calls], "call_id": one.call_id}  # fmt: skip
    if one.is_model:
        begins_inside = THOUGHT_ENDS in one.content and THOUGHT_BEGINS not in one.content.partition(THOUGHT_ENDS)[0]
        form = form_of(one.content) if _CALL.search(one.content) else None
        read = read_turn(one.content, form, begins_inside=begins_inside)
        calls = [{"name": call.name, "text": _json(call.arguments)} for call in read.calls]
        told |= {"text": read.content, "thought": read.reasoning, "calls": calls, "is_malformed": read.is_malformed}
    facts = [*(f"turn {turn}" for _ in range(turn > 0)), *_facts(one, is_shared=is_shared)]
    return {**told, "is_model": one.is_model, "is_learnt": one.num_learnt > 0 and not is_shared, "facts": facts}


def _facts(one: SaidText, *, is_shared: bool) -> Iterator[str]:
    if one.num_tokens:
        low, high = one.oldest_version, one.newest_version
        yield f"{one.num_tokens} tokens"
        yield _versions(low, high)
        if one.num_learnt < one.num_tokens:
            yield f"{one.num_learnt} of them learnt" if one.num_learnt else "not learnt"
    if is_shared:
        yield "learnt in the other sample"
    if one.reward is not None:
        yield f"reward {short(one.reward)}"


def _versions(low: int, high: int) -> str:
    return "no engine" if high < 0 else f"version {high}" if low == high else f"versions {low} to {high}"


def _call(text: str) -> dict[str, str]:
    """The name and the rest of a tool, or of its call."""
    try:
        table = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {"name": "", "text": text}
    name, rest = str(table.pop("name", "")), table.get("arguments", table.get("parameters", table))
    return {"name": name, "text": rest if isinstance(rest, str) else _json(rest)}


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
    if (left := group["num_answers"] - len(group["answers"])) > 0:
        yield f"  and {left} more answers"


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
