"""From a path and a body to an answer, in whatever dialect; over HTTP, or by a call in a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ..workflows.episode import ModelsOfRollout
from .anthropic_messages import AnthropicMessage, anthropic_fault
from .exchange import MODEL, Exchange, event, fingerprint, read_body
from .openai_chat import ChatCompletion, TextCompletion, openai_fault
from .openai_responses import Response
from .session import AgentSession, Answer, ComingTurn, RequestFault
from .turn_text import TurnText

PATHS = (ChatCompletion.path, TextCompletion.path, Response.path, AnthropicMessage.path)
_DIALECTS: Mapping[str, Callable[[bytes, bytes], Exchange]] = {
    dialect.path: dialect for dialect in (ChatCompletion, TextCompletion, AnthropicMessage)
}
COUNT_PATH = "/v1/messages/count_tokens"
MODELS_PATH = "/v1/models"
MAX_UNDER_WAY = 256
"""Turns of one session that may be drawn at a time."""


def fault_body(path: str, fault: RequestFault) -> dict[str, Any]:
    """In the form of the dialect that the path belongs to."""
    return (anthropic_fault if path.startswith(AnthropicMessage.path) else openai_fault)(fault)


def models(path: str, is_anthropic: bool, policy: AgentSession, others: ModelsOfRollout) -> dict[str, Any]:
    """What `/v1/models` lists, the policy and the models of the run's own; or a model, of any name as in requests. With
    the length of its context, by which agents know when to shorten a conversation."""
    name = path.removeprefix(MODELS_PATH).strip("/")
    lengths = {MODEL: policy.context_length} | {other: model.root.context_length for other, model in others.items()}
    lengths = {name: lengths.get(name, policy.context_length)} if name else lengths
    names = list(lengths)
    if is_anthropic:
        facts = {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
        rows = [{"id": one, "display_name": one, "max_input_tokens": lengths[one], **facts} for one in names]
        return rows[0] if name else {"data": rows, "has_more": False, "first_id": MODEL, "last_id": names[-1]}
    facts = {"object": "model", "created": 0, "owned_by": "myxa"}
    rows = [{"id": one, "max_model_len": lengths[one], **facts} for one in names]
    return rows[0] if name else {"object": "list", "data": rows}


class _Named(msgspec.Struct):
    model: str = ""


_named = msgspec.json.Decoder(_Named)


def session_of(body: bytes, policy: AgentSession, models: ModelsOfRollout) -> AgentSession:
    """Whose conversations a request is about: those of the model of the run's own that it names, else the policy's."""
    if models:
        with contextlib.suppress(msgspec.MsgspecError):  # a body that is refused below
            if (name := _named.decode(body).model) in models:
                return models[name].clients.session
    return policy


def read_exchange(path: str, body: bytes, session: AgentSession, retry_key: str = "") -> Exchange:
    """Raises RequestFault."""
    session.check_size(len(body))
    mark = fingerprint(path, body, retry_key)
    if path == Response.path:
        exchange: Exchange = Response(body, mark, session)
    else:
        if path not in _DIALECTS:
            raise RequestFault("not-found", f"there is no {path}: there are {', '.join((*PATHS, MODELS_PATH))}")
        exchange = _DIALECTS[path](body, mark)
    exchange.id, exchange.decode = session.new_id(), session.decode
    return exchange


def num_tokens(body: bytes, session: AgentSession) -> dict[str, int]:
    """What Anthropic's `count_tokens` answers. Raises RequestFault."""
    session.check_size(len(body))
    table = read_body(body, dict[str, Any])
    request = AnthropicMessage(msgspec.json.encode({"max_tokens": 1, **table}), b"").request
    return {"input_tokens": session.num_tokens(request)}


def answer_of(
    path: str, body: bytes, headers: Mapping[str, str], policy: AgentSession, others: ModelsOfRollout
) -> dict[str, Any] | Answering:
    """What a request is answered with: a body, or turns, which begin. Raises RequestFault."""
    if path.startswith(MODELS_PATH):
        return models(path, "anthropic-version" in headers, policy, others)
    session = session_of(body, policy, others)
    if path == COUNT_PATH:
        return num_tokens(body, session)
    retry_key = headers.get("Idempotency-Key", "")  # of clients that mark repetitions; SDKs count them
    is_retry = bool(retry_key) or headers.get("x-stainless-retry-count", "0") != "0"
    return Answering(read_exchange(path, body, session, retry_key), session, is_retry=is_retry)


class Answering:
    """The turns that answer one request."""

    def __init__(self, exchange: Exchange, session: AgentSession, *, is_retry: bool = False) -> None:
        """Begins them. `is_retry`: the client says that it asks again. Raises RequestFault."""
        if session.num_drawing + exchange.num > MAX_UNDER_WAY:
            reason = f"this session may draw {MAX_UNDER_WAY} turns at a time: wait for one to end"
            raise RequestFault("busy", reason)
        self._exchange, self.is_stream = exchange, exchange.is_stream
        self._turns: list[ComingTurn] = []
        values = exchange.request.sampling
        for number in range(exchange.num):
            fingerprint = exchange.request.fingerprint + bytes([number])
            sampling = {**values, "seed": values["seed"] + number} if "seed" in values else values
            request = replace(exchange.request, sampling=sampling, fingerprint=fingerprint, is_retry=is_retry)
            self._turns.append(session.ask(request))

    async def body(self) -> dict[str, Any]:
        """The body. Raises RequestFault."""
        return self._exchange.body([await turn.answer() for turn in self._turns])

    async def events(self) -> AsyncGenerator[str]:
        """Server-sent events. A fault on the way is the last of them."""
        exchange = self._exchange
        parts: asyncio.Queue[tuple[int, TurnText | Answer | RequestFault]] = asyncio.Queue(maxsize=len(self._turns))
        answers: dict[int, Answer] = {}
        sent = dict.fromkeys(range(len(self._turns)), TurnText())

        async def follow(index: int, turn: ComingTurn) -> None:
            try:
                async for part in turn.parts():
                    await parts.put((index, part))
            except RequestFault as fault:
                await parts.put((index, fault))

        yield exchange.begin(self._turns[0].num_prompt)
        # no TaskGroup: it makes an error of its own of a generator that is closed, as that of a client that left is
        followers = [asyncio.ensure_future(follow(index, turn)) for index, turn in enumerate(self._turns)]  # noqa: TID251 -- ended below
        try:
            while len(answers) < len(self._turns):
                index, part = await parts.get()
                if isinstance(part, RequestFault):
                    yield event(exchange.fault(part), "error")
                    return
                text = part.text if isinstance(part, Answer) else part
                before, sent[index] = sent[index], text
                reasoning = text.reasoning[len(before.reasoning) :]
                content = text.content[len(before.content) :]
                if reasoning or content:
                    yield exchange.delta(index, reasoning, content)
                if isinstance(part, Answer):
                    answers[index] = part
                    yield exchange.end(index, part)
        finally:
            for task in followers:
                task.cancel()
        yield exchange.close([answers[index] for index in range(len(self._turns))])

    @contextlib.contextmanager
    def delivering(self) -> Generator[None]:
        """Its client takes it meanwhile, and then has all of it: who asks the same again gets another turn. Where that
        fails, it gets this one."""
        try:
            yield
            for turn in self._turns:
                turn.mark_delivered()
        finally:
            for turn in self._turns:
                turn.is_awaited = False
