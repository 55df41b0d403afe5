"""A gateway before an engine that says what a test gives it to say, with the tokens and template of a real family."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.harness.group_runner import delta
from tests.workflows.chat_models import QWEN3, ChatModel

from myxa.actors.gateway.server import Gateway, OpenSession
from myxa.actors.gateway.session import AgentSession
from myxa.actors.workflows.episode import Episode, ModelAccess
from myxa.core.messages import SamplingParams
from myxa.core.protocols import Delta, GenerateRequest
from myxa.core.samples import Message, Prompt

SAMPLING = SamplingParams(max_new_tokens=4000)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


class Says:
    """An engine. `answer(prompt)` gives the next turn's text for a prompt with its special tokens."""

    def __init__(self, model: ChatModel, answer: Callable[[str], str]) -> None:
        self.tokenizer = model.tokenizer()
        self.answer, self._end = answer, model.ends[0]
        self.prompts: list[list[int]] = []
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        ids: list[int] = request.input_ids.tolist()
        self.prompts.append(ids)
        text = self.answer(self.tokenizer.decode(ids, skip_special=False))
        drawn = self.tokenizer.encode(f"{text}{self._end}")
        limit = request.sampling.max_new_tokens
        for at, one in enumerate(drawn[:limit]):
            await self.may_go.wait()
            last = at == min(len(drawn), limit) - 1
            yield delta([one], ("stop" if limit >= len(drawn) else "length") if last else None, version=3)
            if at % 8 == 0:
                await asyncio.sleep(0)


def session_of(
    says: Says, prompt: str = "task", *, recorded: Any = (), sampling: SamplingParams = SAMPLING
) -> OpenSession:
    row = Prompt(group_id=7, row=3, pass_index=0, messages=(Message(role="user", content=prompt),), label="L",
                 metadata={"k": 1}, source="d.jsonl")  # fmt: skip
    access = ModelAccess(generate=says.generate, sampling=sampling, context_length=8192)
    episode = Episode(prompt=row, index=0, tokenizer=says.tokenizer, model=access, recorded=recorded)
    return OpenSession(AgentSession(episode, says.tokenizer), row)


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncGenerator[str]:
    """Its address."""
    await gateway.start()
    try:
        yield (await gateway.served()).base_url
    finally:
        await gateway.stop()


def talk(answer: Callable[[str], str], model: ChatModel = QWEN3) -> tuple[Says, OpenSession, Gateway, str]:
    says = Says(model, answer)
    one, gateway = session_of(says), Gateway()
    return says, one, gateway, gateway.open(one)
