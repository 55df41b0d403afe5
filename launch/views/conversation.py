"""Groups of samples.jsonl as conversations: who said what, thoughts and tool calls apart, and what the tokens of each
turn say. Pure. What cannot be read is shown as text, lines of older versions too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec

from ...actors.gateway.turn_text import THOUGHT_BEGINS, THOUGHT_ENDS, form_of, read_turn
from ...core.messages import AnswerText, GroupText, SaidText
from .numbers import short

_CALL = re.compile(r"<tool_call>|<\|python_tag\|>|<｜tool▁call")
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def visible(text: str) -> str:
    """Letters that a terminal would obey, that turn the direction of the text around or show nothing are spelt out."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def prompt_of(group: dict[str, Any]) -> str:
    """Of a line as it was read; `role: content` of its messages."""
    if "prompt" in group:
        return str(group["prompt"])
    return "\n".join(f"{one.get('role')}: {one.get('content')}" for one in _tables(group.get("messages")))


def words_of_group(group: dict[str, Any]) -> str:
    """All that is said in a line, for a search, in small letters."""
    said = [prompt_of(group), str(group.get("label"))]
    for answer in _tables(group.get("answers")):
        said += [str(answer.get("text", "")), *(str(one.get("content")) for one in _tables(answer.get("messages")))]
    return "\n".join(said).lower()


def _tables(value: object) -> list[dict[str, Any]]:
    several = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", one) for one in several if isinstance(one, dict)]


def shown(group: dict[str, Any]) -> dict[str, Any]:
    """The line with its messages as views show them, `prompt`, and the `text` of each answer."""
    try:
        found = msgspec.convert(group, GroupText)
    except msgspec.ValidationError:
        return _shown_older(group)
    return {
        **group,
        "prompt": found.prompt,
        "tools": [_call(tool) for tool in found.tools],
        "messages": [_message(one) for one in found.messages],
        "answers": [
            {
                **table,
                "text": answer.text,
                "tools": [_call(tool) for tool in answer.tools],
                "messages": _turns(answer),
                "note": _note(answer),
            }
            for answer, table in zip(found.answers, group["answers"], strict=True)
        ],
    }


def _shown_older(group: dict[str, Any]) -> dict[str, Any]:
    """Of a line that is not of this version: its texts."""
    prompt = SaidText(role="", content=prompt_of(group))
    answers: list[dict[str, Any]] = []
    for answer in _tables(group.get("answers")):
        said = SaidText(role="assistant", content=str(answer.get("text", "")), is_model=True)
        numbers = _numbers(answer, "index", "reward", "num_tokens")
        parts = _numbers(answer.get("reward_parts"))
        texts = {"finish": str(answer.get("finish", "")), "text": said.content}
        answers.append({"reward": 0.0, **numbers, **texts, "reward_parts": parts, "messages": [_message(said)]})
    numbers = _numbers(group, "step", "group_id", "wall_s", "oldest_version", "newest_version", "num_answers")
    texts = {name: str(group.get(name, "")) for name in ("outcome", "reason", "eval_set", "label", "source")}
    known = {**numbers, **texts, "is_held_out": bool(group.get("is_held_out"))}
    return {**known, "prompt": prompt.content, "messages": [_message(prompt)], "answers": answers}


def _numbers(table: object, *names: str) -> dict[str, float]:
    """Those of a table, all where none is named."""
    known = cast("dict[str, Any]", table) if isinstance(table, dict) else {}
    return {name: value for name, value in known.items() if name in (names or known) and isinstance(value, int | float)}


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
        yield "no engine" if high < 0 else f"version {high}" if low == high else f"versions {low} to {high}"
        if one.num_learnt < one.num_tokens:
            yield f"{one.num_learnt} of them learnt" if one.num_learnt else "not learnt"
    if is_shared:
        yield "learnt in the other sample"
    if one.reward is not None:
        yield f"reward {short(one.reward)}"


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
    name = f" {group['eval_set']}" if group.get("eval_set") else ""
    why = f" ({group['reason']})" if group.get("reason") else ""
    low, high = group.get("oldest_version", -1), group.get("newest_version", -1)
    versions = "no engine" if high < 0 else f"version {high}" if low == high else f"versions {low} to {high}"
    yield visible(
        f"step {group.get('step')}, group {group.get('group_id')}: {group.get('outcome')}{name}{why}, {versions}"
    )
    yield from _tool_lines(group.get("tools", ()), "  ")
    for message in group["messages"]:
        yield from _message_lines(message, "  ")
    if group.get("label"):
        yield visible(f"  label: {group['label']}")
    for answer in group["answers"]:
        parts = "".join(f", {name} {value:g}" for name, value in answer.get("reward_parts", {}).items())
        facts = f"{answer.get('num_tokens')} tokens ({answer.get('finish')})"
        branch = f".{answer['branch']}" if answer.get("branch") else ""
        note = f", {answer['note']}" if answer.get("note") else ""
        yield visible(f"  [{answer.get('index')}{branch}] reward {answer.get('reward', 0.0):g}{parts}, {facts}{note}")
        yield from _tool_lines(answer.get("tools", ()), "      ")
        is_short = len(answer["messages"]) == 1
        for message in answer["messages"]:
            yield from _message_lines({**message, "role": "", "facts": ()} if is_short else message, "      ")
    left = group.get("num_answers", 0) - len(group["answers"])
    if left > 0:
        yield f"  and {left} more answers"


def _tool_lines(tools: Sequence[dict[str, str]], indent: str) -> Iterator[str]:
    for tool in tools:
        yield visible(f"{indent}offers {tool['name']}: {tool['text']}")


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
