"""The clients that people use, against the gateway: fields, chunks, errors, tools, in each dialect."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections.abc import AsyncGenerator
from importlib.util import find_spec
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest
import pytest_asyncio
from tests.gateway.scripted import CALL, Says, serving, talk

from myxa.actors.gateway.exchange import event
from myxa.actors.gateway.server import Gateway, OpenSession

TOOL = {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {"city": {}}}}
CHAT_TOOLS: Any = [{"type": "function", "function": TOOL}]
FLAT_TOOLS: Any = [{"type": "function", **TOOL}]
CLAUDE_TOOLS: Any = [{"name": "weather", "input_schema": TOOL["parameters"]}]
ASKS: Any = [{"role": "user", "content": "weather?"}]
HELLO: Any = [{"role": "user", "content": "hello"}]
TOLD = "It is 7 degrees, ünïcödé."


def reply(prompt: str) -> str:
    last = ("<|im_start|>" * 2 + prompt).rsplit("<|im_start|>", 2)[-2]
    if "say nothing" in last:
        return ""
    if "both cities" in last:
        return f"{CALL}\n{CALL.replace('Bern', 'Rome')}"
    if "<tool_response>" in last:
        return TOLD
    if "patch?" in last:
        return 'Now.\n<tool_call>[{"name": "mcp__sky__weather", "arguments": {"city": "Bern"}}, {"name": "patch", "arguments": {"input": "*** 1\\n+a"}}]</tool_call>'
    if "emoji" in last:
        return "ok \U0001f600"
    return f"Let me look.\n{CALL}" if "weather?" in last else "<think>\nhm\n</think>\n\nHello there."


class Door:
    """A living gateway and what it has said."""

    def __init__(self, says: Says, one: OpenSession, gateway: Gateway, key: str, url: str) -> None:
        self.says, self.one, self.gateway, self.key, self.url = says, one, gateway, key, url
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)

    def num_samples(self) -> int:
        return len(self.one.session.samples())


@pytest_asyncio.fixture
async def door() -> AsyncGenerator[Door]:
    says, one, gateway, key = talk(reply)
    async with serving(gateway) as url:
        opened = Door(says, one, gateway, key, url)
        async with opened.openai, opened.anthropic:
            yield opened
        await gateway.close(key)


async def test_openai_chat(door: Door) -> None:
    chat = door.openai.chat.completions
    assert [(one.id, one.model_extra) async for one in door.openai.models.list()] == [
        ("policy", {"max_model_len": 8192})
    ]
    assert [one.max_input_tokens async for one in door.anthropic.models.list()] == [8192]
    assert (
        (await door.openai.models.retrieve("org/any")).id
        == (await door.anthropic.models.retrieve("org/any")).id
        == "org/any"
    )
    first = await chat.create(model="any", messages=ASKS, tools=CHAT_TOOLS, logprobs=True)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    call: Any = (choice.message.tool_calls or [])[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bern"})
    assert choice.logprobs is not None
    assert first.usage is not None
    assert len(choice.logprobs.content or ()) == first.usage.completion_tokens
    history = [*ASKS, choice.message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    stream = await chat.create(
        model="any", messages=history, tools=CHAT_TOOLS, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == TOLD
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert sum(bool(one.choices and one.choices[0].delta.content) for one in chunks) > 1
    assert door.num_samples() == 1


async def test_openai_streams_calls_and_thoughts(door: Door) -> None:
    async with door.openai.chat.completions.stream(model="any", messages=ASKS, tools=CHAT_TOOLS) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert [call.function.name for call in message.tool_calls or ()] == ["weather"]
    async with door.openai.chat.completions.stream(model="any", messages=HELLO) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert (message.content, message.model_extra) == ("Hello there.", {"parsed": None, "reasoning_content": "hm"}) or (
        message.content == "Hello there." and (message.model_extra or {}).get("reasoning_content") == "hm"
    )


async def test_openai_several_choices(door: Door) -> None:
    several = await door.openai.chat.completions.create(model="any", messages=HELLO, n=3)
    assert [one.index for one in several.choices] == [0, 1, 2]
    stream = await door.openai.chat.completions.create(model="any", messages=HELLO, n=2, stream=True)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "Hello there.", 1: "Hello there."}
    assert door.num_samples() == 5


async def test_bytes_of_a_token_that_is_part_of_a_character_are_not_told(door: Door) -> None:
    asks: Any = [{"role": "user", "content": "emoji"}]
    choice = (await door.openai.chat.completions.create(model="any", messages=asks, logprobs=True)).choices[0]
    assert choice.message.content == "ok \U0001f600" and choice.logprobs is not None
    told = [one.bytes for one in choice.logprobs.content or ()]
    assert told[:3] == [[111], [107], [32]] and told[3:7] == [None] * 4


async def test_a_refusal_in_a_history_is_what_was_said(door: Door) -> None:
    part: Any = {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]}
    field: Any = {"role": "assistant", "content": None, "refusal": "never"}
    for number, said in enumerate((part, field)):
        await door.openai.chat.completions.create(model="any", messages=[*HELLO, said, *HELLO])
        assert "assistant\nnever<|im_end|>" in door.says.tokenizer.decode(door.says.prompts[number], skip_special=False)
    items: Any = [{"role": "user", "content": "a"}, {"type": "message", **part}, {"role": "user", "content": "b"}]
    await door.openai.responses.create(model="any", input=items)
    assert "assistant\nnever<|im_end|>" in door.says.tokenizer.decode(door.says.prompts[2], skip_special=False)


CITIES: Any = [{"role": "user", "content": "both cities"}]


async def test_one_call_a_turn_where_the_client_allows_no_more(door: Door) -> None:
    """LangGraph's supervisor and the Agents SDK ask for it; the turn stays as it was drawn."""
    chat = door.openai.chat.completions
    whole = await chat.create(model="any", messages=CITIES, tools=CHAT_TOOLS)
    assert len(whole.choices[0].message.tool_calls or ()) == 2
    one = (await chat.create(model="any", messages=CITIES, tools=CHAT_TOOLS, parallel_tool_calls=False)).choices[0]
    (call,) = one.message.tool_calls or [None]
    assert call is not None
    history: Any = [*CITIES, one.message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
    await chat.create(model="any", messages=history, tools=CHAT_TOOLS, parallel_tool_calls=False)
    assert (door.one.session.counts["continued"], door.one.session.counts["edited"]) == (1, 0)
    async with chat.stream(model="any", messages=CITIES, tools=CHAT_TOOLS, parallel_tool_calls=False) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert len(message.tool_calls or ()) == 1
    told = await door.openai.responses.create(
        model="any", input="both cities", tools=FLAT_TOOLS, parallel_tool_calls=False
    )
    assert ([one.type for one in told.output], told.parallel_tool_calls) == (["function_call"], False)
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    said = await door.anthropic.messages.create(
        model="any", max_tokens=500, messages=CITIES, tools=CLAUDE_TOOLS, tool_choice=choice
    )
    assert [one.type for one in said.content] == ["tool_use"]


async def test_an_answer_without_words_is_an_empty_text(door: Door) -> None:
    """Agents take `.content.strip()`; null stands beside calls alone."""
    nothing: Any = [{"role": "user", "content": "say nothing"}]
    choice = (await door.openai.chat.completions.create(model="any", messages=nothing)).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    calls = (await door.openai.chat.completions.create(model="any", messages=CITIES, tools=CHAT_TOOLS)).choices[0]
    assert calls.message.content is None


async def test_a_call_without_arguments_in_a_history(door: Door) -> None:
    call: Any = {"id": "a", "type": "function", "function": {"name": "look", "arguments": ""}}
    history: Any = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]
    await door.openai.chat.completions.create(model="any", messages=history)
    assert '{"name": "look", "arguments": {}}' in door.says.tokenizer.decode(door.says.prompts[0], skip_special=False)


async def test_results_of_tools_keep_their_place_and_say_that_they_are_errors(door: Door) -> None:
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    results = [{"type": "text", "text": "first"}, {"type": "tool_result", "tool_use_id": "t", "content": "gone", "is_error": True},
               {"type": "text", "text": "then"}]  # fmt: skip
    history: Any = [*ASKS, {"role": "assistant", "content": [use]}, {"role": "user", "content": results}]
    await door.anthropic.messages.create(model="any", max_tokens=50, messages=history)
    text = door.says.tokenizer.decode(door.says.prompts[0], skip_special=False)
    order = [
        text.find(words) for words in ("first<|im_end|>", "<tool_response>\n<error>gone</error>\n", "then<|im_end|>")
    ]
    assert order == sorted(order) and order[0] > 0


LACKING: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": [*HELLO, {"role": "tool", "tool_call_id": "a"}]}, "messages[1].content"),
    ("/v1/responses", {"input": [{"role": "user", "text": "hi"}]}, "input[0].content"),
    ("/v1/responses", {"input": [{"content": "hi"}]}, "input[0].role"),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "content": "hi"}]}]}, "messages.0.text"),
    ("/v1/messages", {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages.1.name"),
    ("/v1/messages", {"messages": HELLO, "system": [{"type": "text"}]}, "system.text"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "place"), LACKING)
async def test_what_an_entry_lacks_is_no_empty_text(door: Door, path: str, body: dict[str, Any], place: str) -> None:
    async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {door.key}"}) as client:
        answer = await client.post(f"{door.url}{path}", json={"max_tokens": 5, **body} if "messages" in path else body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, f"{place} is missing or null")
    assert door.says.prompts == []


async def test_instructions_are_of_one_response(door: Door) -> None:
    """OpenAI carries them to no later response, and system messages of the input to all."""
    responses = door.openai.responses
    items: Any = [{"role": "system", "content": "rule"}, {"role": "user", "content": "hello"}]
    first = await responses.create(model="any", input=items, instructions="be nice")
    for number, instructions in enumerate((None, "be brief"), 1):
        await responses.create(model="any", input="b", previous_response_id=first.id, instructions=instructions)
        text = door.says.tokenizer.decode(door.says.prompts[number], skip_special=False)
        assert ("be nice" in text, "be brief" in text, "rule" in text) == (False, instructions is not None, True)
    with pytest.raises(openai.BadRequestError, match="include cannot ask for log-probs"):
        await responses.create(model="any", input="b", include=["message.output_text.logprobs"])


CLAUDE_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, r"output_config\.format must be left out"),
    ({"messages": [*HELLO, {"role": "user", "content": []}]}, r"messages\.1\.content is an empty list"),
]


@pytest.mark.parametrize(("more", "words"), CLAUDE_WRONG)
async def test_what_anthropics_clients_ask_for_in_vain_is_refused(door: Door, more: dict[str, Any], words: str) -> None:
    body = {"model": "any", "max_tokens": 5, "messages": HELLO, **more}
    with pytest.raises(anthropic.BadRequestError, match=words):
        await door.anthropic.post("/v1/messages", cast_to=object, body=body)
    body = {
        "model": "any",
        "max_tokens": 5,
        "messages": HELLO,
        "output_config": {"effort": "low"},
        "cache_control": None,
    }
    await door.anthropic.post("/v1/messages", cast_to=object, body=body)


NULL_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": None, "index": None, "function": {"name": "f", "arguments": None}}],
}
NULL_USE = {"type": "tool_use", "id": None, "name": "f", "input": None, "text": None, "is_error": None}
NULLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [NULL_CALL, *HELLO], "functions": None, "audio": None, "n": None, "thinking": {}}),
    ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "call_id": None, "arguments": None}, *HELLO],
                       "text": {"format": None}, "conversation": None}),
    ("/v1/messages", {"messages": [{"role": "assistant", "content": [NULL_USE]}, *HELLO], "max_tokens": 5, "container": None}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), NULLS)
async def test_a_null_is_a_field_left_out(door: Door, path: str, body: dict[str, Any]) -> None:
    """Clients in Java and Go write every field of theirs."""
    async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {door.key}"}) as client:
        assert (await client.post(f"{door.url}{path}", json=body)).status_code == 200
        refused = await client.post(f"{door.url}{path}", json={**body, "unknown": 0})
        assert refused.status_code == 400 and "`unknown`" in refused.json()["error"]["message"]
    said = '{"name": "f", "arguments": {}}'
    assert said in door.says.tokenizer.decode(door.says.prompts[-1], skip_special=False)


def test_a_line_separator_in_a_text_ends_no_line_of_a_stream() -> None:
    """httpx, and with it LiteLLM, splits lines as `str.splitlines` does."""
    said = {"text": "a\u2028b\u2029c\x85d\ne"}
    (line,) = filter(None, event(said).splitlines())
    assert json.loads(line.removeprefix("data: ")) == said


async def test_openai_completions(door: Door) -> None:
    """Agents that render prompts themselves send texts, or token ids, and read thoughts in the text."""
    ids = door.says.tokenizer.encode("once")
    for prompt in ("once", ["once"], ids, [ids]):
        whole = await door.openai.completions.create(model="any", prompt=prompt, max_tokens=100)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (reply("once"), "stop")
        assert door.says.prompts[-1] == ids
        told: Any = whole.choices[0].model_extra
        assert door.says.tokenizer.decode(told["token_ids"]) == reply("once")
    stream = await door.openai.completions.create(model="any", prompt="once", max_tokens=100, stream=True)
    assert "".join([one.choices[0].text async for one in stream]) == reply("once")
    wrong: Any = ([1, "a"], ["a", "b"], [], [[]], "", [True], [None], [{}], [[[1]]], [-1], [10**9], [10**30])
    for prompt in wrong:
        with pytest.raises(openai.BadRequestError, match="prompt must be one text|an id of no token"):
            await door.openai.completions.create(model="any", prompt=prompt, max_tokens=100)
    with pytest.raises(openai.BadRequestError, match="logprobs must be 0 or 1"):
        await door.openai.completions.create(model="any", prompt="once", logprobs=5)
    stream = await door.openai.completions.create(model="any", prompt="once", max_tokens=5, stream=True)
    assert [one.choices[0].finish_reason async for one in stream][-1] == "length"


async def test_openai_responses(door: Door) -> None:
    responses = door.openai.responses
    first = await responses.create(model="any", input="hello", instructions="be nice")
    assert (first.output_text, first.status) == ("Hello there.", "completed")
    assert [one.type for one in first.output] == ["reasoning", "message"]
    second = await responses.create(
        model="any", input="weather?", previous_response_id=first.id, instructions="be nice"
    )
    assert second.output_text
    asked = await responses.create(model="any", input="weather?", tools=FLAT_TOOLS)
    call: Any = next(one for one in asked.output if one.type == "function_call")
    answer: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"}]
    async with responses.stream(model="any", input=answer, previous_response_id=asked.id, tools=FLAT_TOOLS) as stream:
        kinds = [event.type async for event in stream]
        assert (await stream.get_final_response()).output_text == TOLD
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert door.num_samples() == 2


async def test_a_turn_that_was_cut_off_behind_a_call_says_so(door: Door) -> None:
    size = len(door.says.tokenizer.encode(f"{CALL}\n{CALL}")) - 3
    whole = await door.openai.chat.completions.create(model="any", messages=CITIES, tools=CHAT_TOOLS, max_tokens=size)
    choice = whole.choices[0]
    assert (choice.finish_reason, len(choice.message.tool_calls or ())) == ("length", 1)
    said = await door.anthropic.messages.create(model="any", max_tokens=size, messages=CITIES, tools=CLAUDE_TOOLS)
    assert (said.stop_reason, [one.type for one in said.content]) == ("max_tokens", ["text", "tool_use"])


async def test_codex(door: Door) -> None:
    """Its requests name tools of OpenAI's own servers, and what they are for."""
    developer: Any = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]}
    asks: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]}
    body: dict[str, Any] = {
        "model": "any", "instructions": "You are Codex.", "input": [developer, asks], "tool_choice": "auto",
        "tools": [*FLAT_TOOLS, {"type": "web_search", "external_web_access": False}, {"type": "tool_search"}],
        "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": False,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": {"x-codex": "1"},
    }  # fmt: skip
    response: Any = await door.openai.post("/responses", cast_to=object, body=body)
    assert [one["type"] for one in response["output"]] == ["message", "function_call"]
    assert [tool["name"] for tool in response["tools"]] == ["weather"]
    prompt = door.says.tokenizer.decode(door.says.prompts[0], skip_special=False)
    assert "web_search" not in prompt and prompt.index("You are Codex.") < prompt.index("be brief")
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.name is missing"):
        await door.openai.post(
            "/responses", cast_to=object, body={**body, "tools": [*FLAT_TOOLS, {"type": "function"}]}
        )


@pytest.mark.parametrize("namespace", ["mcp__sky", "mcp__sky__"])
async def test_codex_gets_calls_of_its_namespaces_and_of_tools_whose_input_is_a_text(
    door: Door, namespace: str
) -> None:
    tools: Any = [
        {"type": "namespace", "name": namespace, "description": "of the sky", "tools": FLAT_TOOLS},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X+"}},
    ]
    asks: Any = [{"role": "user", "content": "patch?"}]
    async with door.openai.responses.stream(model="any", input=asks, tools=tools) as stream:
        kinds = [one.type async for one in stream]
        response = await stream.get_final_response()
    assert {f"response.custom_tool_call_input.{kind}" for kind in ("delta", "done")} < set(kinds)
    items: Any = [item.model_dump(exclude_none=True) for item in response.output]
    _, weather, patch = items
    assert (weather["type"], weather["namespace"], weather["name"]) == ("function_call", namespace, "weather")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** 1\n+a")
    assert "start: X+" in door.says.tokenizer.decode(door.says.prompts[0], skip_special=False)
    outputs: Any = [
        {
            "type": "function_call_output",
            "call_id": weather["call_id"],
            "output": [{"type": "input_text", "text": "7"}],
        },
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "done"},
    ]
    again = await door.openai.responses.create(model="any", input=[*asks, *items, *outputs], tools=tools)
    assert again.output_text == TOLD
    assert door.num_samples() == 1, "its own items are what it said"


async def test_a_conversation_that_is_too_long_is_refused_in_words_that_clients_know(door: Door) -> None:
    """LiteLLM and Claude Code read the text: they shorten the conversation."""
    long: Any = [{"role": "user", "content": "long " * 3000}]
    with pytest.raises(openai.BadRequestError, match="this model's maximum context length is 8192 tokens") as caught:
        await door.openai.chat.completions.create(model="any", messages=long)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        await door.anthropic.messages.create(model="any", max_tokens=5, messages=long)


async def test_anthropic(door: Door) -> None:
    messages = door.anthropic.messages
    first = await messages.create(model="any", max_tokens=500, messages=ASKS, tools=CLAUDE_TOOLS, system="be nice")
    assert first.stop_reason == "tool_use"
    assert [one.type for one in first.content] == ["text", "tool_use"]
    use: Any = first.content[1]
    assert use.input == {"city": "Bern"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "7"}]}
    history: Any = [*ASKS, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    async with messages.stream(
        model="any", max_tokens=500, messages=history, tools=CLAUDE_TOOLS, system="be nice"
    ) as stream:
        assert "".join([text async for text in stream.text_stream]) == TOLD
        final = await stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 1
    assert door.num_samples() == 1


async def test_anthropics_tool_runner(door: Door) -> None:
    """It asks for a thread first, which no gateway keeps."""

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Of a city."""
        return f"7 in {city}"

    runner = door.anthropic.beta.messages.tool_runner(model="any", max_tokens=500, tools=[weather], messages=ASKS)
    said = await runner.until_done()
    assert [one.text for one in said.content if one.type == "text"] == [TOLD]
    assert "7 in Bern" in door.says.tokenizer.decode(door.says.prompts[-1], skip_special=False)
    assert door.num_samples() == 1


async def test_anthropic_streams_thoughts_and_calls(door: Door) -> None:
    async with door.anthropic.messages.stream(model="any", max_tokens=500, messages=HELLO) as stream:
        found = [event async for event in stream]
        assert [one.type for one in (await stream.get_final_message()).content] == ["thinking", "text"]
    begun: Any = found[0]
    assert (begun.type, found[-1].type) == ("message_start", "message_stop")
    assert begun.message.usage.input_tokens == len(door.says.prompts[0])  # Claude Code counts its context so
    async with door.anthropic.messages.stream(model="any", max_tokens=500, messages=ASKS, tools=CLAUDE_TOOLS) as stream:
        use: Any = (await stream.get_final_message()).content[1]
    assert (use.type, use.input) == ("tool_use", {"city": "Bern"})
    counted = await door.anthropic.messages.count_tokens(model="any", messages=HELLO)
    assert counted.input_tokens == len(door.says.prompts[0])


LITELLM = """
import json, sys
import litellm
url, key, tools, asks = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
common = {"api_base": url + "/v1", "api_key": key, "model": "openai/any", "tools": tools}
message = litellm.completion(messages=asks, **common).choices[0].message
call = message.tool_calls[0]
asks += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "7"}]
stream = litellm.completion(messages=asks, stream=True, **common)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
print(json.dumps([call.function.name, text]))
"""


@pytest.mark.skipif(find_spec("litellm") is None, reason="LITELLM IS NOT INSTALLED: pip install litellm")
async def test_litellm(door: Door) -> None:
    out = await output_of(sys.executable, "-c", LITELLM, door.url, door.key, json.dumps(CHAT_TOOLS), json.dumps(ASKS))
    assert json.loads(out.splitlines()[-1]) == ["weather", TOLD]
    assert door.num_samples() == 1


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-2000:]
    return out.decode()


async def test_curl(door: Door) -> None:
    body = json.dumps({"messages": HELLO, "stream": True})
    key = f"Authorization: Bearer {door.key}"
    out = await output_of("curl", "-sN", f"{door.url}/v1/chat/completions", "-H", key, "-d", body)
    lines = [line for line in out.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": []}, "messages"),
    ({"temperature": -1}, "temperature"),
    ({"seed": 2**70}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"logit_bias": {"1": 2}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required", "tools": CHAT_TOOLS}, "tool_choice"),
    ({"n": 1000}, "n"),
    ({"unknown": 1}, "unknown"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
]


async def test_a_wrong_request_names_its_field(door: Door) -> None:
    for more, param in WRONG:
        body: dict[str, Any] = {"model": "any", "messages": HELLO, **more}
        with pytest.raises(openai.BadRequestError) as caught:
            await door.openai.post("/chat/completions", cast_to=object, body=body)
        assert caught.value.param == param
        if param in ("messages[0].content", "n", "unknown"):
            with pytest.raises(anthropic.BadRequestError):
                await door.anthropic.post("/v1/messages", cast_to=object, body={"max_tokens": 5, **body})
    others: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/messages", {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5, "stop_sequences": [""]}, "stop_sequences"),
        ("/v1/responses", {"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ]
    async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {door.key}"}) as client:
        for path, body, param in others:
            refused = await client.post(door.url + path, json=body)
            assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(f"{param} ")
    assert door.num_samples() == 0


async def test_keys_of_nobody_and_of_ended_sessions(door: Door) -> None:
    for key, words in (("sk-other", "no session"), (door.key, "has ended")):
        if key == door.key:
            await door.gateway.close(key)
        with pytest.raises(openai.AuthenticationError, match=words):
            await door.openai.with_options(api_key=key).chat.completions.create(model="any", messages=HELLO)
        with pytest.raises(anthropic.AuthenticationError, match=words):
            other = door.anthropic.with_options(api_key=key)
            await other.messages.create(model="any", max_tokens=9, messages=HELLO)


async def test_bodies_that_are_too_large_or_not_json(door: Door) -> None:
    async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {door.key}"}) as client:
        large = await client.post(f"{door.url}/v1/chat/completions", content=b"x" * (17 << 20))
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
        broken = await client.post(f"{door.url}/v1/messages", content=b"{")
        assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
        nowhere = await client.post(f"{door.url}/v1/v1/messages", json={})
        assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "invalid_request_error")
        assert "there are POST /v1/chat/completions, " in nowhere.json()["error"]["message"]
        packed = {
            "content": gzip.compress(json.dumps({"messages": HELLO}).encode()),
            "headers": {"Content-Encoding": "gzip"},
        }
        assert (await client.post(f"{door.url}/v1/chat/completions", **packed)).status_code == 200
        torn = await client.post(f"{door.url}/v1/chat/completions", **{**packed, "content": b"no gzip"})
        assert (torn.status_code, torn.json()["error"]["type"]) == (400, "invalid_request_error")
        both = {"x-api-key": door.key, "Authorization": "Bearer sk-of-another-service"}
        assert (await client.get(f"{door.url}/v1/models", headers=both)).status_code == 200
        for said in (b"1e999", b"1e39", b"true", b'"1"', b"null", b"[1]"):
            reward = await client.post(f"{door.url}/v1/session/reward", content=b'{"reward": %s}' % said)
            assert (reward.status_code, reward.json()["error"]["param"]) == (400, "reward")


async def test_a_client_that_left_gets_its_turn_when_it_asks_again(door: Door) -> None:
    door.says.may_go.clear()
    with pytest.raises(openai.APITimeoutError):
        await door.openai.with_options(timeout=0.3).chat.completions.create(model="any", messages=HELLO)
    door.says.may_go.set()
    again = await door.openai.chat.completions.create(model="any", messages=HELLO)
    assert again.choices[0].message.content == "Hello there."
    assert door.num_samples() == 1


async def test_task_reward_and_end(door: Door) -> None:
    async with httpx.AsyncClient(
        timeout=60, base_url=door.url, headers={"Authorization": f"Bearer {door.key}"}
    ) as client:
        task = (await client.get("/v1/session")).json()
        assert (task["messages"], task["label"], task["metadata"]) == (
            [{"role": "user", "content": "task"}],
            "L",
            {"k": 1},
        )
        chat = (await client.post("/v1/chat/completions", json={"messages": HELLO})).json()
        await client.post("/v1/session/reward", json={"reward": 0.25, "answer": chat["myxa"]["answers"][0]})
        await client.post("/v1/session/end", json={"reward": 0.75})
    assert door.one.ended.is_set()
    (sample,) = door.one.session.samples(door.one.reward)
    assert sample.reward == 0.75
    assert sample.token_rewards is not None
    assert sample.token_rewards.sum() == 0.25
