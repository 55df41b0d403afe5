"""A server that tells log-probs of given tokens as SGLang does, or lies about them; and samples to ask it of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from tests.harness.fake_sglang import serving

from myxa.core.samples import Message, Prompt, Sample

Fault = Callable[[web.Request, dict[str, Any], dict[str, Any]], Awaitable[Any]]
"""Of the request, its body and the right answer: what is answered instead."""

PROMPT = Prompt(group_id=5, row=0, pass_index=0, messages=(Message(role="user", content="q"),))


class Letters:
    """A tokenizer of 200 tokens, each with a name."""

    vocab_size = 200
    eos_token_ids: tuple[int, ...] = (0,)
    template_place = ""

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return "".join(f"<{i}>" for i in ids)

    def encode(self, text: str) -> list[int]:
        return [7] * len(text)

    def render(self, messages: Any, **more: Any) -> list[int]:
        return [1, 2, 3]

    def render_text(self, messages: Any, **more: Any) -> str:
        return "q"


def right(token: int) -> float:
    """What a teacher says of a token, whatever stands before it."""
    return -0.01 * token - 0.5


@dataclass
class Teacher:
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of what was asked, but for the look at its vocabulary."""
    keys: list[str] = field(default_factory=list)
    biases: list[Any] = field(default_factory=list)
    num_looks: int = 0
    fault: Fault | None = None
    text_of: Callable[[int], str | None] = lambda token: f"<{token}>"
    at_once: int = 0
    most_at_once: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_look = body["return_text_in_logprobs"]
        self.num_looks += is_look
        if not is_look:
            self.asked.append(body)
        self.biases.append(body["sampling_params"].get("logit_bias"))
        self.keys.append(request.headers.get("Authorization", ""))
        ids, start = body["input_ids"], body["logprob_start_len"]
        told = [[right(i), i, self.text_of(i) if is_look else None] for i in ids[start:]]
        told[0][0] = None
        answer = {"text": "", "output_ids": [], "meta_info": {"id": "x", "input_token_logprobs": told}}
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            found = answer if self.fault is None else await self.fault(request, body, answer)
        finally:
            self.at_once -= 1
        return found if isinstance(found, web.StreamResponse) else web.json_response(found)


@asynccontextmanager
async def teacher(fault: Fault | None = None, **more: Any) -> AsyncIterator[Teacher]:
    here = Teacher(fault=fault, **more)
    async with serving(here.answer) as here.url:
        yield here


def only_once_known(fault: Fault) -> Fault:
    """The fault, but not while the vocabulary is looked at."""

    async def answer(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> Any:
        return answer if body["return_text_in_logprobs"] else await fault(request, body, answer)

    return answer


def made(mask: str = "111", *, index: int = 0, temperature: float = 1.0) -> Sample:
    """A sample whose tokens are 10, 11, 12 (prompt) and 20, 21, ...; `mask`: 1 for what the policy drew."""
    size = len(mask)
    loss_mask = np.array([int(one) for one in mask], np.uint8)
    return Sample(
        group_id=5, index=index, prompt_ids=np.array([10, 11, 12], np.int32),
        response_ids=np.arange(20, 20 + size, dtype=np.int32), logprobs=np.zeros(size, np.float32), loss_mask=loss_mask,
        versions=np.where(loss_mask == 1, 0, -1).astype(np.int32), finish="stop", temperature=temperature,
    )  # fmt: skip


def expected(sample: Sample) -> list[float]:
    """What the teacher says of it, where the policy drew it."""
    values = [right(i) if m else 0.0 for i, m in zip(sample.response_ids.tolist(), sample.loss_mask, strict=True)]
    return np.asarray(values, np.float32).tolist()


async def out_of_order(request: web.Request, body: dict[str, Any], answer: dict[str, Any]) -> Any:
    return web.Response(status=500, text="out of order")
