"""Random conversations over HTTP with the embedded engine, and what must hold of each turn.

The model of a family is tiny, but speaks: its next token depends mostly on the last one, so that it thinks, calls tools,
ends its turns and, between, draws bytes that no text encodes to. Whole phrases are tokens of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import tokenizers
from tests.data.token_layouts import byte_level
from tests.workflows.chat_models import CHATML, GLM4, LLAMA3, TEMPLATES

from myxa.actors.gateway.server import Gateway, OpenSession
from myxa.actors.gateway.session import AgentSession
from myxa.actors.models.hf_folder import write_folder
from myxa.actors.models.model_config import parse_model_config
from myxa.actors.models.tiny import init_weights, named_array, tiny_config
from myxa.actors.models.tokenizer import FolderTokenizer, load_tokenizer
from myxa.actors.workflows.episode import Episode, ModelAccess
from myxa.core.errors import DataError, TemplateError
from myxa.core.messages import SamplingParams
from myxa.core.protocols import Delta, GenerateRequest, NamedArray
from myxa.core.samples import Message, Prompt, Sample

CONTEXT, MAX_NEW = 900, 24
TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
BAR = "<｜{}｜>"


@dataclass(frozen=True)
class Family:
    """A format, and what its model likes to say."""

    name: str
    marks: tuple[str, ...]
    ends: tuple[str, ...]
    calls: tuple[tuple[str, ...], ...] = ()
    """Pieces of a tool call, in their order; each is a token of its own."""
    opens: tuple[str, ...] = ("\n",)
    """What the text before a turn of the model ends with: a token."""
    thinks: bool = True
    writes_thoughts: bool = True
    """The template does, given as `reasoning_content`."""

    @property
    def has_tools(self) -> bool:
        return bool(self.calls)


HERMES = tuple(
    ("<tool_call>", f'\n{{"name": "look", "arguments": {arguments}}}\n', "</tool_call>")
    for arguments in ('{"at": "ü 1"}', '{"at": 1.0, "deep": {"b": [1, null], "a": 1e3}}', '{"at": ')
)
FAMILIES = {
    one.name: one
    for one in (
        Family("qwen3", CHATML, ("<|im_end|>", "<|endoftext|>"), HERMES),
        Family("qwen2_5", CHATML, ("<|im_end|>", "<|endoftext|>"), HERMES, thinks=False, writes_thoughts=False),
        Family("think_open", CHATML, ("<|im_end|>", "<|endoftext|>")),
        Family("llama3", LLAMA3.marks, LLAMA3.ends, (('{"name": "look", "parameters": {"at": "x"}}',),), ("\n\n",), thinks=False, writes_thoughts=False),
        Family("glm4", GLM4.marks, GLM4.ends, (), ("<|assistant|>",), thinks=False, writes_thoughts=False),
        Family(
            "glm4_5", GLM4.marks, GLM4.ends,
            (("<tool_call>", "look\n<arg_key>at</arg_key>\n<arg_value>", "2", "</arg_value>\n", "</tool_call>"),),
            ("<|assistant|>",),
        ),
        Family(
            "deepseek", tuple(BAR.format(one) for one in ("begin▁of▁sentence", "User", "Assistant", "end▁of▁sentence")),
            (BAR.format("end▁of▁sentence"),),
            (("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", 'function<｜tool▁sep｜>look\n```json\n{"at": "y"}\n```',
              "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),),
            ("<｜Assistant｜>",), writes_thoughts=False,
        ),
    )
}  # fmt: skip
PHRASES = ("Look. ", "\n\nSo: ", "E, ", " Observation: ")
THINK = ("<think>", "</think>")
SPECIALS = {"qwen3": {}, "llama3": dict(LLAMA3.special)}


def make_folder(folder: Path, family: Family, seed: int = 0) -> FolderTokenizer:
    """A model folder of that family."""
    bpe = byte_level(family.marks)
    pieces = dict.fromkeys((*THINK, *PHRASES, *(piece for call in family.calls for piece in call if len(piece) > 1)))
    bpe.add_tokens([tokenizers.AddedToken(text, normalized=False, special=False) for text in pieces])
    size = -(-bpe.get_vocab_size() // 64) * 64
    ends = [bpe.token_to_id(one) for one in family.ends]
    source = dict(tiny_config("0p5m", size, CONTEXT).source) | {"eos_token_id": ends, "tie_word_embeddings": False}
    source["pad_token_id"] = None
    config = parse_model_config(source, family.name)
    write_folder(folder, source, [spoken(one, bpe, family, seed) for one in init_weights(config, seed)])
    bpe.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.ends[0], **SPECIALS.get(family.name, {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"clean_up_tokenization_spaces": False}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{family.name}.jinja").read_text())
    return load_tokenizer(folder)


def spoken(one: NamedArray, bpe: tokenizers.Tokenizer, family: Family, seed: int) -> NamedArray:
    """The weights so that `links` are likely; what attention and layers add stays small."""
    name, shape = one.spec.name, one.spec.shape
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return named_array(name, np.frombuffer(one.data, np.float32).reshape(shape) * np.float32(0.3))
    if name not in ("model.embed_tokens.weight", "lm_head.weight"):
        return one
    rows = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    if name == "model.embed_tokens.weight":
        return named_array(name, rows)
    head = np.random.default_rng(seed + 1).standard_normal(shape, dtype=np.float32) * np.float32(0.4 / shape[1] ** 0.5)
    for source, targets in links(bpe, family).items():
        for target, logit in targets.items():
            head[target] += rows[source] * np.float32(logit / shape[1])
    return named_array(name, head)


def links(bpe: tokenizers.Tokenizer, family: Family) -> dict[int, dict[int, float]]:
    """By token: logits of those that may well follow it."""

    def of(text: str) -> int:
        ids = bpe.encode(text).ids
        assert len(ids) == 1, f"{text!r} is no token"
        return ids[0]

    end = of(family.ends[0])
    begins = {of(one): 5.5 for one in PHRASES} | {of(call[0]): 6.5 for call in family.calls}
    if family.thinks:
        begins[of(THINK[0])] = 7.0
    found = {one: {end: 2.5} for one in range(bpe.get_vocab_size())}
    for opening in family.opens:
        found[of(opening)] = dict(begins)
    for phrase in PHRASES:
        found[of(phrase)] = {of(THINK[1]): 5.0, end: 4.5, of(PHRASES[0]): 4.0}
    found[of(THINK[0])] = {of(one): 5.5 for one in PHRASES}
    found[of(THINK[1])] = {of("\n"): 4.0, **begins}
    for call in family.calls:
        for piece, following in pairwise(call):
            found[of(piece)] = found.get(of(piece), {}) | {of(following): 8.0}
        found[of(call[-1])] = {end: 8.0, of(call[0]): 5.0}
    return found


@dataclass
class Call:
    """What the engine was asked for and drew."""

    request: GenerateRequest
    prompt: list[int]
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    is_claimed: bool = False

    @property
    def fact(self) -> tuple[Any, ...]:
        return tuple(self.ids), tuple(self.logprobs), tuple(self.versions)


class Witness:
    """Stands between a session and the engine, and writes down what passes."""

    def __init__(self, generate: Callable[[GenerateRequest], AsyncIterator[Delta]]) -> None:
        self._generate = generate
        self.calls: list[Call] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        call = Call(request, request.input_ids.tolist())
        self.calls.append(call)
        async for delta in self._generate(request):
            call.ids += delta.output_ids.tolist()
            call.logprobs += delta.logprobs.tolist()
            call.versions += delta.versions.tolist()
            yield delta


@dataclass(frozen=True)
class Said:
    """A message as the client keeps it, whatever dialect it came by."""

    role: str
    content: str
    thought: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    """Ids, names, arguments as JSON."""
    call_id: str = ""
    answer_id: str = ""
    response_id: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What it says, apart from thoughts and the ids of calls."""
        if self.role != "assistant":
            return self.role, self.content, self.call_id
        return self.role, self.content.strip(), tuple((name, plain(json.loads(text))) for _, name, text in self.calls)

    def message(self, *, has_thought: bool) -> Message:
        calls = tuple(
            {"id": number, "type": "function", "function": {"name": name, "arguments": json.loads(text)}}
            for number, name, text in self.calls
        )
        extra = {"reasoning_content": self.thought} if self.thought and has_thought else {}
        return Message(role=self.role, content=self.content, tool_calls=calls, tool_call_id=self.call_id, extra=extra)


def plain(value: object) -> str:
    return json.dumps(without_points(value), sort_keys=True)


def without_points(value: Any) -> Any:
    """Numbers as JavaScript writes them."""
    if isinstance(value, dict):
        return {name: without_points(one) for name, one in value.items()}
    if isinstance(value, list):
        return [without_points(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


History = tuple[Said, ...]


@dataclass
class Tally:
    """Of a whole test."""

    turns: int = 0
    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    naive_drift: int = 0
    """Turns whose prompt a client that encodes its texts again would get otherwise."""
    continued: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    """Of the sessions."""
    calls: int = 0
    thoughts: int = 0
    cut: int = 0


class Talk:
    """One session and its client."""

    def __init__(self, url: str, key: str, one: OpenSession, witness: Witness, tokenizer: FolderTokenizer,
                 family: Family, rng: random.Random, tally: Tally, http: aiohttp.ClientSession) -> None:  # fmt: skip
        self.url, self.key, self.one, self.witness = url, key, one, witness
        self.tokenizer, self.family, self.rng, self.tally, self.http = tokenizer, family, rng, tally, http
        self.ends: dict[tuple[Any, ...], list[tuple[tuple[str, ...], list[int]]]] = {}
        """By conversations up to a turn of the model: thoughts in them, tokens up to there."""
        begins_with = family.has_tools and rng.random() < 0.6
        self.histories: list[tuple[History, bool]] = [((Said("user", self.words()),), begins_with)]
        """With whether tools are told."""
        self.orphans = set[tuple[Any, ...]]()
        """Conversations with a turn that the client may not have got."""
        self.edited = [0, 0]
        """How many turns were asked for with a history that tells a turn of the model's otherwise: at least, at most."""

    def words(self) -> str:
        few = ("hi", "é ü 😀", " two  spaces ", "<|im_end|>?", "ab aab\n\n\nx", "", "</think>")
        text = "long " * 80 if self.rng.random() < 0.05 else self.rng.choice(few)
        return f"{text}{self.rng.randrange(1000)}"

    # -- what the client sends

    def changed(self, history: History) -> History:
        """An edit, or none."""
        rng, said = self.rng, list(history)
        what = rng.random()
        if what < 0.55:
            return history
        at = rng.randrange(len(said))
        if what < 0.62:
            said[at] = replace(said[at], content=self.words())
        elif what < 0.68 and len(said) > 1:
            del said[at]
        elif what < 0.74:
            said.insert(at, Said(rng.choice(("user", "assistant", "system")), self.words()))
        elif what < 0.78 and len(said) > 1:
            said[at - 1], said[at] = said[at], said[at - 1]
        elif what < 0.84:
            told = said[0].role == "system"
            said[: int(told)] = [Said("system", self.words())]
        elif what < 0.92:
            said = [replace(one, thought="") for one in said]
        elif said[at].role == "assistant" and self.family.thinks:
            said[at] = replace(said[at], thought="I never thought that")
        return tuple(said)

    def asked(self) -> tuple[History, bool, dict[str, Any]]:
        history, has_tools = self.rng.choice(self.histories[-6:])
        was, history = history, self.changed(history)
        if history != was:  # answers that are named stand for what they were told
            history = tuple(replace(one, response_id="") for one in history)
        while history and history[-1].role == "assistant":  # its end is the model's to write
            history = history[:-1]
        if not history or history[-1].role == "system":
            history = (*history, Said("user", self.words()))
        if self.family.has_tools and self.rng.random() < 0.15:
            has_tools = not has_tools
        params: dict[str, Any] = {"max_tokens": self.rng.choice((3, MAX_NEW, MAX_NEW, 1000))}
        if self.rng.random() < 0.1:
            params["temperature"] = self.rng.choice((0.7, 1.3))
        if self.rng.random() < 0.2:
            params["stop"] = self.rng.choice((["Observation"], ["zz", "k. "], ["E,"]))
        return history, has_tools, params

    async def turn(self) -> None:
        """One request, or several that belong together."""
        history, has_tools, params = self.asked()
        dialect, what = self.rng.choice(DIALECTS), self.rng.random()
        if any(a.role == b.role == "assistant" for a, b in pairwise(history)):
            dialect = chat  # items of the Responses dialect would be one message
        if what < 0.06:
            return await self.completed(params)
        if what < 0.12:
            await asyncio.gather(*(self.sent(dialect, history, has_tools, params) for _ in range(2)))
            return None
        if what < 0.18 and dialect is not chat:
            await self.left(dialect, history, has_tools, params)
            return await self.sent(dialect, history, has_tools, params, is_again=True)
        return await self.sent(dialect, history, has_tools, params)

    async def completed(self, params: dict[str, Any]) -> None:
        text = self.words()
        _, body = await self.post("/v1/completions", {"prompt": text, **params, "n": 2})
        calls = [one for one in self.witness.calls if not one.is_claimed and one.prompt == self.tokenizer.encode(text)]
        assert len(calls) >= 2, body
        for call in calls:
            call.is_claimed = True
        assert body["usage"]["completion_tokens"] == sum(len(call.ids) for call in calls)
        self.tally.turns += 2

    async def left(self, dialect: Dialect, history: History, has_tools: bool, params: dict[str, Any]) -> None:
        """Ask for a stream and go away. The same again is the same turn, if it has not come to its end before."""
        self.edited[1] += self.is_edited(history, has_tools)
        self.orphans.add((has_tools, *(one.key for one in history)))
        path, body = dialect.body(history, self.tools(has_tools), params, self.rng)
        response = await self.http.post(f"{self.url}{path}", json={**body, "stream": True}, headers=self.headers())
        await response.content.readany()
        response.close()

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def tools(self, has_tools: bool) -> list[dict[str, Any]]:
        return [TOOL] if has_tools else []

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with self.http.post(f"{self.url}{path}", json=body, headers=self.headers()) as response:
            return response.status, await response.json()

    def is_edited(self, history: History, has_tools: bool) -> bool:
        size, _ = self.known(history, has_tools)
        return any(one.role == "assistant" for one in history[size:])

    async def sent(
        self, dialect: Dialect, history: History, has_tools: bool, params: dict[str, Any], *, is_again: bool = False
    ) -> None:
        self.tally.requests += 1
        path, body = dialect.body(history, self.tools(has_tools), params, self.rng)
        num = 2 if dialect is chat and self.rng.random() < 0.15 else 1
        if num > 1:
            body["n"] = num
        is_edited, had_turns = self.is_edited(history, has_tools), bool(self.ends)
        self.edited[1] += num * is_edited
        if self.rng.random() < 0.5:
            async with self.http.post(f"{self.url}{path}", json={**body, "stream": True, **dialect.streams},
                                      headers=self.headers()) as response:  # fmt: skip
                found = None if response.status != 200 else dialect.streamed(events(await response.text()))
                status, fault = response.status, None if found else await response.json()
        else:
            status, fault = await self.post(path, body)
            found = dialect.whole(fault) if status == 200 else None
        if found is None:
            assert status == 400, fault
            self.refused(history, has_tools, str(fault))
            return
        self.edited[0] += num * (is_edited and had_turns and not is_again)
        for answer in found:
            self.check(history, has_tools, answer, () if dialect is responses else params.get("stop", ()))
            follow = [Said("user", self.words())]
            if answer.said.calls:
                follow[:0] = [Said("tool", self.words(), call_id=number) for number, _, _ in answer.said.calls]
                follow = follow[: len(follow) - (self.rng.random() < 0.7)]
            self.histories.append(((*history, answer.said, *follow), has_tools))

    # -- what must hold

    def known(self, history: History, has_tools: bool) -> tuple[int, list[tuple[tuple[str, ...], list[int]]]]:
        """Messages up to the last turn of the model that was said so; thoughts and tokens that may stand for them."""
        for size in range(len(history), 0, -1):
            key = (has_tools, *(one.key for one in history[:size]))
            thoughts = [one.thought.strip() for one in history[:size] if one.role == "assistant"]
            fits = [
                (had, ids)
                for had, ids in self.ends.get(key, ())
                if all(not told or told == was for told, was in zip(thoughts, had, strict=True))
            ]
            if fits and key[:-1] in self.orphans:  # the turn that was not got may say the same
                told = tuple(thoughts)
                fits += [(told, call.prompt + call.ids) for call in self.witness.calls if not call.is_claimed]
            if fits:
                return size, fits
        return 0, []

    def refused(self, history: History, has_tools: bool, fault: str) -> None:
        """Only what does not fit, or what the template does not take."""
        messages = [one.message(has_thought=self.family.writes_thoughts) for one in history]
        try:
            ids = self.tokenizer.render(messages, add_generation_prompt=True, tools=self.spoken_tools(has_tools))
        except (DataError, TemplateError):
            self.tally.refused["template"] += 1
            return
        _, fits = self.known(history, has_tools)
        is_long = max([len(ids), *(len(one) for _, one in fits)]) > CONTEXT * 0.5
        assert ("room for an answer" in fault or "context" in fault) == is_long or "append" in fault, (fault, len(ids))
        self.tally.refused["append" if "append" in fault else "long"] += 1

    def spoken_tools(self, has_tools: bool) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {k: v for k, v in TOOL.items() if v}} for _ in range(has_tools)]

    def check(self, history: History, has_tools: bool, answer: Answered, stops: Sequence[str]) -> None:
        size, fits = self.known(history, has_tools)
        messages = [one.message(has_thought=self.family.writes_thoughts) for one in history]
        text = self.tokenizer.render_text(messages, add_generation_prompt=True, tools=self.spoken_tools(has_tools))
        told = [one.content.split(THINK[1])[-1].strip() for one in history[size:] if one.role == "user"]

        def is_prompt(ids: list[int]) -> bool:
            """What was said, verbatim, and the rest as the template writes it."""
            if not size:
                return ids == self.tokenizer.encode(text)
            begun = next((one for _, one in fits if ids[: len(one)] == one), None)
            tail = "" if begun is None else self.tokenizer.decode(ids[len(begun) :], skip_special=False)
            return bool(tail) and text.endswith(tail) and all(one in tail for one in told)

        calls = [c for c in self.witness.calls if not c.is_claimed and c.ids == answer.ids]
        calls = [c for c in calls if len(c.prompt) == answer.num_prompt and is_prompt(c.prompt)]
        assert calls, self.explained(size, fits, text, answer)
        call = calls[0]
        call.is_claimed = True
        if size:
            self.tally.continued += 1
            self.tally.naive_drift += self.tokenizer.encode(text) != call.prompt
        assert not any(stop in answer.said.content for stop in stops)
        said = (*history, answer.said)
        key = (has_tools, *(one.key for one in said))
        thoughts = tuple(one.thought.strip() for one in said if one.role == "assistant")
        had = next((had for had, one in fits if call.prompt[: len(one)] == one), ())
        thoughts = (*had, *thoughts[len(had) :])
        self.ends.setdefault(key, []).append((thoughts, call.prompt + call.ids))
        self.tally.turns += 1
        self.tally.calls += len(answer.said.calls)
        self.tally.thoughts += bool(answer.said.thought)
        self.tally.cut += answer.is_cut

    def explained(self, size: int, fits: list[tuple[tuple[str, ...], list[int]]], text: str, answer: Answered) -> str:
        def shown(ids: list[int]) -> str:
            return repr(self.tokenizer.decode(ids, skip_special=False))

        left = [call for call in self.witness.calls if not call.is_claimed]
        return "\n".join(
            (
                f"no turn of the engine is {answer}, whose history is",
                repr(text),
                f"of {size} known messages:",
                *(shown(one) for _, one in fits),
                "turns that are not told:",
                *(f"{len(call.prompt)}: {shown(call.prompt)} -> {shown(call.ids)}" for call in left),
            )
        )

    async def end(self) -> tuple[Sample, ...]:
        """What is learnt of it is what was drawn, each token once."""
        while self.one.session.counts["turns"] < len(self.witness.calls):
            await asyncio.sleep(0.002)
        samples = self.one.session.samples(1.0)
        learnt = Counter(run for sample in samples for run in runs(sample))
        drawn = Counter(call.fact for call in self.witness.calls)
        assert learnt == drawn
        assert self.edited[0] <= self.one.session.counts["edited"] <= self.edited[1]
        self.tally.counts += self.one.session.counts
        return samples


def runs(sample: Sample) -> list[tuple[Any, ...]]:
    """Each run of learnt tokens: ids, log-probs, versions."""
    mask = np.concatenate([[0], sample.loss_mask, [0]])
    cuts = np.flatnonzero(np.diff(mask))
    return [
        (tuple(sample.response_ids[a:b].tolist()), tuple(sample.logprobs[a:b].tolist()), tuple(sample.versions[a:b].tolist()))
        for a, b in zip(cuts[::2], cuts[1::2], strict=True)
    ]  # fmt: skip


def events(text: str) -> list[dict[str, Any]]:
    """Of a stream."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


# -- dialects


@dataclass(frozen=True)
class Answered:
    said: Said
    ids: list[int]
    num_prompt: int
    is_cut: bool


class Dialect:
    """One of the door's languages."""

    streams: dict[str, Any] = {}

    def body(
        self, history: History, tools: list[dict[str, Any]], params: dict[str, Any], rng: random.Random
    ) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        raise NotImplementedError

    def whole(self, body: dict[str, Any]) -> list[Answered]:
        raise NotImplementedError

    def streamed(self, found: list[dict[str, Any]]) -> list[Answered]:
        raise NotImplementedError


def functions(calls: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    return [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]


class Chat(Dialect):
    streams = {"stream_options": {"include_usage": True}}

    def body(self, history, tools, params, rng):
        messages: list[dict[str, Any]] = []
        for one in history:
            content: Any = one.content
            if rng.random() < 0.2:
                content = [{"type": "text", "text": one.content}]
            more: dict[str, Any] = {"tool_call_id": one.call_id} if one.role == "tool" else {}
            if one.calls:
                more["tool_calls"] = functions(one.calls)
                content = content or None
            if one.thought:
                more["reasoning_content"] = one.thought
            messages.append({"role": one.role, "content": content, **more})
        said = {"tools": [{"type": "function", "function": tool} for tool in tools]} if tools else {}
        return "/v1/chat/completions", {"model": "m", "messages": messages, **said, **params}

    def whole(self, body):
        usage = body["usage"]["prompt_tokens"]
        return [
            self._answered(one["message"], one["token_ids"], usage, one["finish_reason"]) for one in body["choices"]
        ]

    def _answered(self, message: dict[str, Any], ids: list[int], usage: int, finish: str) -> Answered:
        calls = tuple(
            (one["id"], one["function"]["name"], one["function"]["arguments"])
            for one in message.get("tool_calls") or ()
        )
        said = Said("assistant", message["content"] or "", message.get("reasoning_content") or "", calls)
        return Answered(said, ids, usage, finish == "length")

    def streamed(self, found):
        messages: dict[int, dict[str, Any]] = {}
        ends: dict[int, dict[str, Any]] = {}
        for choice in (choice for one in found for choice in one["choices"]):
            message = messages.setdefault(choice["index"], {"content": "", "reasoning_content": ""})
            for name in ("content", "reasoning_content"):
                message[name] += choice["delta"].get(name) or ""
            message.setdefault("tool_calls", []).extend(choice["delta"].get("tool_calls", ()))
            if choice["finish_reason"]:
                ends[choice["index"]] = choice
        usage = next(one["usage"] for one in found if one.get("usage"))
        return [
            self._answered(messages[at], one["token_ids"], usage["prompt_tokens"], one["finish_reason"])
            for at, one in sorted(ends.items())
        ]


class Responses(Dialect):
    def body(self, history, tools, params, rng):
        params = {"max_output_tokens" if name == "max_tokens" else name: value for name, value in params.items()}
        params.pop("stop", None)
        body: dict[str, Any] = {"model": "m", **params}
        if tools:
            body["tools"] = [{"type": "function", **tool} for tool in tools]
        start = 0
        named = [at for at, one in enumerate(history) if one.response_id]
        if named and rng.random() < 0.5:
            start = named[-1] + 1
            body["previous_response_id"] = history[named[-1]].response_id
        items: list[dict[str, Any]] = []
        for one in history[start:]:
            if one.role == "tool":
                items.append({"type": "function_call_output", "call_id": one.call_id, "output": one.content})
                continue
            if one.thought:
                items.append(
                    {
                        "type": "reasoning",
                        "id": "r",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": one.thought}],
                    }
                )
            if one.content or not one.calls:
                kind = "output_text" if one.role == "assistant" else "input_text"
                items.append({"type": "message", "role": one.role, "content": [{"type": kind, "text": one.content}]})
            items += [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in one.calls]
        return "/v1/responses", {**body, "input": items}

    def whole(self, body):
        texts = {"reasoning": "", "message": ""}
        calls: list[tuple[str, str, str]] = []
        for item in body["output"]:
            if item["type"] == "function_call":
                calls.append((item["call_id"], item["name"], item["arguments"]))
            else:
                texts[item["type"]] += "".join(part["text"] for part in item["content"])
        said = Said("assistant", texts["message"], texts["reasoning"], tuple(calls), response_id=body["id"])
        return [Answered(said, body["token_ids"], body["usage"]["input_tokens"], body["status"] == "incomplete")]

    def streamed(self, found):
        (whole,) = self.whole(found[-1]["response"])
        told = "".join(one["delta"] for one in found if one["type"] == "response.output_text.delta")
        assert told == whole.said.content, (told, whole.said.content)
        return [whole]


class Anthropic(Dialect):
    def body(self, history, tools, params, rng):
        params = {"stop_sequences" if name == "stop" else name: value for name, value in params.items()}
        body: dict[str, Any] = {"model": "m", **params, "messages": []}
        if tools:
            body["tools"] = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]
        if history[0].role == "system" and history[0].content:
            body["system"], history = history[0].content, history[1:]
        for one in history:
            if one.role == "tool":
                blocks = [{"type": "tool_result", "tool_use_id": one.call_id, "content": one.content}]
            else:
                thought = [{"type": "thinking", "thinking": one.thought, "signature": "s"}] if one.thought else []
                words = [{"type": "text", "text": one.content}] if one.content or not one.calls else []
                used = [{"type": "tool_use", "id": i, "name": n, "input": json.loads(a)} for i, n, a in one.calls]
                blocks = [*thought, *words, *used]
            role = "user" if one.role == "tool" else one.role
            body["messages"].append({"role": role, "content": blocks})
        return "/v1/messages", body

    def whole(self, body):
        kinds = {"thinking": "", "text": ""}
        calls: list[tuple[str, str, str]] = []
        for block in body["content"]:
            if block["type"] == "tool_use":
                calls.append((block["id"], block["name"], json.dumps(without_points(block["input"]))))
            else:
                kinds[block["type"]] += block[block["type"]]
        said = Said("assistant", kinds["text"], kinds["thinking"], tuple(calls))
        return [Answered(said, body["token_ids"], body["usage"]["input_tokens"], body["stop_reason"] == "max_tokens")]

    def streamed(self, found):
        blocks: list[dict[str, Any]] = []
        for one in found:
            if one["type"] == "content_block_start":
                blocks.append({**one["content_block"], "json": ""})
            elif one["type"] == "content_block_delta":
                for name, field_ in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    if name in one["delta"]:
                        blocks[one["index"]][field_] += one["delta"][name]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"])
        last = next(one for one in found if one["type"] == "message_delta")
        body = {"content": blocks, "usage": last["usage"], "stop_reason": last["delta"]["stop_reason"]}
        return self.whole({**body, "token_ids": last["token_ids"]})


chat, responses, anthropic = Chat(), Responses(), Anthropic()
DIALECTS: tuple[Dialect, ...] = (chat, responses, anthropic)
_numbers = count()


def open_session(
    gateway: Gateway, tokenizer: FolderTokenizer, witness: Witness, sampling: SamplingParams
) -> tuple[OpenSession, str]:
    row = Prompt(group_id=next(_numbers), row=3, pass_index=0, messages=(Message(role="user", content="task"),))
    access = ModelAccess(
        generate=witness.generate, sampling=sampling, context_length=CONTEXT, request_prefix=f"{next(_numbers)}."
    )
    episode = Episode(prompt=row, index=0, tokenizer=tokenizer, model=access)
    one = OpenSession(AgentSession(episode, tokenizer), row)
    return one, gateway.open(one)
