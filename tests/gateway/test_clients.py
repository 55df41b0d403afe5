"""`ctx.openai` and `ctx.anthropic`: SDKs that talk to the policy in the workflow's own process."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from tests.gateway.scripted import CALL, SAMPLING, Says
from tests.workflows.chat_models import QWEN3

from myxa.actors.gateway.clients import SessionClients
from myxa.actors.workflows.episode import Episode, ModelAccess, WorkflowContext
from myxa.core.errors import UserCodeError
from myxa.core.samples import Message, Prompt

ROW = Prompt(group_id=7, row=3, pass_index=0, messages=(Message(role="user", content="task"),), source="d")
ASKS: Any = [{"role": "user", "content": "weather?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def context(says: Says, *, is_plain: bool = False) -> WorkflowContext:
    access = ModelAccess(generate=says.generate, sampling=SAMPLING, context_length=8192)
    episode = Episode(prompt=ROW, index=0, tokenizer=says.tokenizer, model=access)
    clients = SessionClients(episode, says.tokenizer, asyncio.get_running_loop())
    return WorkflowContext(
        episode=episode, tokenizer=says.tokenizer, max_turns=1, index=0, clients=clients, is_plain=is_plain
    )


async def test_the_sdk_of_openai_with_tools_and_streams() -> None:
    ctx = context(Says(QWEN3, lambda prompt: "cold" if "tool_response" in prompt else CALL))
    async with ctx.openai as client:
        first = await client.chat.completions.create(model="policy", messages=ASKS, tools=TOOLS)
        message = first.choices[0].message
        history = [*ASKS, message.model_dump(exclude_none=True)]
        history.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"})
        stream = await client.chat.completions.create(model="policy", messages=history, tools=TOOLS, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "cold"
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="policy", messages=[])
    (sample,) = ctx.samples(reward=0.5)
    assert (sample.num_turns, sample.reward) == (2, 0.5)


async def test_the_sdk_of_anthropic() -> None:
    ctx = context(Says(QWEN3, lambda prompt: "hello"))
    async with ctx.anthropic as client:
        answer = await client.messages.create(model="policy", max_tokens=99, messages=ASKS)
    assert answer.content[0].text == "hello"
    assert len(ctx.samples()) == 1


async def test_clients_that_wait_for_a_plain_workflow() -> None:
    ctx = context(Says(QWEN3, lambda prompt: "hello"), is_plain=True)

    def plain() -> list[str]:
        with ctx.openai as client:
            whole = client.chat.completions.create(model="policy", messages=ASKS)
            stream = client.chat.completions.create(model="policy", messages=ASKS, stream=True)
            return [whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in stream)]

    assert await asyncio.to_thread(plain) == ["hello", "hello"]
    assert len(ctx.samples()) == 2


async def test_samples_before_any_turn() -> None:
    with pytest.raises(UserCodeError, match="before any turn"):
        context(Says(QWEN3, lambda prompt: "hello")).samples()
