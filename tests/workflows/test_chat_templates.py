"""Replies by the chat templates of well-known models: what the template would write, and the drawn tokens as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.workflows.chat_models import (
    CHAT_MODELS,
    GLM4,
    LLAMA3,
    MISTRAL,
    QWEN2_5,
    QWEN3,
    ChatModel,
    talk,
    tokenizer_of,
)  # fmt: skip

from myxa.actors.models.chat_template import ChatTemplate, PlainText, TemplateParts
from myxa.actors.models.tokenizer import FolderTokenizer
from myxa.actors.workflows.turn_renderer import ANSWER, QUESTION, REPLY, TurnRenderer
from myxa.core.errors import TemplateError
from myxa.core.messages import SamplingParams
from myxa.core.samples import Message, Sample

TESTS = Path(__file__).parents[1]
CALL_ID = "abcdefghi"
"""Nine characters, as Mistral's format wants them."""
WORDS = st.text("ab é:\n\"{}<>'中", min_size=1, max_size=12).filter(lambda text: text == text.strip())


def message(role: str, content: str) -> Message:
    return Message(role=role, content=content, tool_call_id=CALL_ID if role == "tool" else "")


def whole(sample: Sample, tokenizer: FolderTokenizer) -> str:
    return tokenizer.decode([*sample.prompt_ids.tolist(), *sample.response_ids.tolist()], skip_special=False)


def learnt(sample: Sample, tokenizer: FolderTokenizer) -> list[str]:
    """Texts of the runs of tokens that the loss sees."""
    mask = np.concatenate([[0], sample.loss_mask, [0]])
    edges = np.flatnonzero(np.diff(mask))
    runs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    return [tokenizer.decode(sample.response_ids[a:b].tolist(), skip_special=False) for a, b in runs]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[ChatModel, list[Message], list[tuple[str, Message]], str]:
    """A model, a prompt, turns with what is replied to each, and the last turn."""
    model = draw(st.sampled_from(CHAT_MODELS))
    prompt = [message("user", draw(WORDS))]
    if model is not MISTRAL and draw(st.booleans()):  # which moves the system message to the last question
        prompt.insert(0, message("system", draw(WORDS)))
    roles = st.sampled_from(model.replies)
    turns = draw(st.lists(st.tuples(WORDS, st.builds(message, roles, WORDS)), max_size=4))
    return model, prompt, turns, draw(WORDS)


@settings(max_examples=40)
@given(conversations())
def test_the_stream_is_what_the_template_writes_of_the_whole_conversation(
    case: tuple[ChatModel, list[Message], list[tuple[str, Message]], str],
) -> None:
    model, prompt, turns, last = case
    tokenizer = model.tokenizer()

    async def play() -> None:
        one, talked = talk(tokenizer, prompt), list(prompt)
        for words, reply in turns:
            await one.says(f"{model.lead}{words}{model.end_before(reply.role)}")
            assert one.episode.reply_with(reply)
            talked += [message("assistant", words), reply]
            assert whole(one.episode.sample(), tokenizer) == tokenizer.render_text(talked, add_generation_prompt=True)
            assert one.episode.sample().response_ids[-1] == tokenizer.render(talked, add_generation_prompt=True)[-1]
        await one.says(f"{model.lead}{last}{model.ends[0]}")
        drawn = [f"{model.lead}{words}{model.end_before(reply.role)}" for words, reply in turns]
        assert learnt(one.episode.sample(), tokenizer) == [*drawn, f"{model.lead}{last}{model.ends[0]}"]
        assert not any(probe in whole(one.episode.sample(), tokenizer) for probe in (ANSWER, REPLY, QUESTION.content))

    asyncio.run(play())


@settings(max_examples=40)
@given(conversations())
def test_a_demonstration_is_what_the_template_writes(
    case: tuple[ChatModel, list[Message], list[tuple[str, Message]], str],
) -> None:
    model, prompt, turns, last = case
    tokenizer = model.tokenizer(enable_thinking=False)
    one, shown = talk(tokenizer, prompt), list[Message]()
    for words, reply in turns:
        shown += [message("assistant", words), reply]
    shown.append(message("assistant", last))
    sample = one.episode.demonstration(shown)
    drawn = [f"{model.lead}{words}{model.end_before(reply.role)}" for words, reply in turns]
    assert learnt(sample, tokenizer) == [*drawn, f"{model.lead}{last}{model.ends[0]}"]
    written = tokenizer.render_text([*prompt, *shown], add_generation_prompt=False)
    assert written.startswith(whole(sample, tokenizer).removesuffix("<|endoftext|>"))
    ids = [*sample.prompt_ids.tolist(), *sample.response_ids.tolist()]
    assert tokenizer.encode(written)[: len(ids) - 1] == ids[:-1]
    entire = talk(tokenizer, prompt).episode.demonstration(shown, is_whole=True)
    ids = [*entire.prompt_ids.tolist(), *entire.response_ids.tolist()]
    has_end = len(ids) > len(tokenizer.encode(written))  # the template writes none
    assert ids[: len(ids) - has_end] == tokenizer.encode(written)
    assert learnt(entire, tokenizer) == learnt(sample, tokenizer)


@pytest.mark.parametrize("model", CHAT_MODELS, ids=lambda one: one.name)
def test_a_turn_that_a_stop_string_ended_is_closed_before_the_reply(model: ChatModel) -> None:
    tokenizer, question = model.tokenizer(), message("user", "ab?")

    async def play(role: str) -> None:
        one = talk(tokenizer, [question])
        one.engine.next = (f"{model.lead}a</call>bbb", "stop")
        turn = await one.episode.generate(SamplingParams(stop=("</call>",), max_new_tokens=100))
        assert (turn.text, turn.finish) == (f"{model.lead}a</call>", "stop")
        assert one.episode.reply_with(message(role, "b"))
        talked = [question, message("assistant", "a</call>"), message(role, "b")]
        assert whole(one.episode.sample(), tokenizer) == tokenizer.render_text(talked, add_generation_prompt=True)
        assert learnt(one.episode.sample(), tokenizer) == [f"{model.lead}a</call>"]

    for role in model.replies:
        asyncio.run(play(role))


THOUGHT = "<think>\na b\n</think>\n\nb"


@pytest.mark.parametrize("role", QWEN3.replies)
def test_thinking_that_the_template_leaves_out_later_stays_as_it_was_drawn(role: str) -> None:
    tokenizer = QWEN3.tokenizer()

    async def play() -> Sample:
        one = talk(tokenizer, [message("user", "a")])
        for _ in range(2):
            await one.says(f"{THOUGHT}<|im_end|>")
            assert one.episode.reply(role, "a")
        await one.says(f"{THOUGHT}<|im_end|>")
        return one.episode.sample()

    sample = asyncio.run(play())
    assert learnt(sample, tokenizer) == [f"{THOUGHT}<|im_end|>"] * 3
    shown = "<tool_response>\na\n</tool_response>" if role == "tool" else "a"
    reply = f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    assert whole(sample, tokenizer) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n" + reply.join([f"{THOUGHT}<|im_end|>"] * 3)
    )


def replied(model: ChatModel, words: str, finish: str, *replies: Message) -> str:
    """All that stands behind the prompt and the words of the model's turn."""
    tokenizer = model.tokenizer()

    async def play() -> str:
        one = talk(tokenizer, [message("user", "a")])
        await one.says(words, finish)  # pyright: ignore[reportArgumentType]
        start = len(one.episode.sample().response_ids)
        assert one.episode.reply_with(*replies)
        return tokenizer.decode(one.episode.sample().response_ids[start:].tolist(), skip_special=False)

    return asyncio.run(play())


HEAD = "<|start_header_id|>user<|end_header_id|>\n\nb<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize(("model", "words", "finish", "role", "tail"), [
    (QWEN2_5, "a<|im_end|>", "stop", "user", "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"),
    (QWEN2_5, "a<|endoftext|>", "stop", "user", "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"),
    (QWEN2_5, "a", "length", "user", "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"),
    (QWEN2_5, "ab", "stop", "user", "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"),
    (GLM4, "\na<|user|>", "stop", "user", "\nb<|assistant|>"),
    (GLM4, "\na<|observation|>", "stop", "observation", "\nb<|assistant|>"),
    (GLM4, "\na<|endoftext|>", "stop", "user", "<|user|>\nb<|assistant|>"),
    (GLM4, "\na<|user|>", "stop", "observation", "<|observation|>\nb<|assistant|>"),
    (GLM4, "\na", "length", "observation", "<|observation|>\nb<|assistant|>"),
    (LLAMA3, "a<|eom_id|>", "stop", "user", HEAD), (LLAMA3, "a", "length", "user", f"<|eot_id|>{HEAD}"),
    (MISTRAL, " a", "length", "user", "</s>[INST] b[/INST]"),
    (
        MISTRAL, " a</s>", "stop", "tool", f'[TOOL_RESULTS] {{"content": "b", "call_id": "{CALL_ID}"}}[/TOOL_RESULTS]',
    ),
])  # fmt: skip
def test_the_end_of_a_turn_is_written_once(model: ChatModel, words: str, finish: str, role: str, tail: str) -> None:
    assert replied(model, words, finish, message(role, "b")) == tail


def test_answers_of_several_tools_stand_side_by_side() -> None:
    answers = (message("tool", "a"), message("tool", "b"))
    assert replied(QWEN3, "a<|im_end|>", "stop", *answers) == (
        "\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_reply_that_looks_like_the_probe_or_a_mark_is_a_reply_like_others() -> None:
    for text in (ANSWER, f"{REPLY}0End", "?"):
        assert replied(QWEN2_5, "a<|im_end|>", "stop", message("user", text)) == (
            f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        )


TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
CALL = {"type": "function", "id": CALL_ID, "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(("model", "call"), [
    (QWEN2_5, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'),
    (QWEN3, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'),
    (LLAMA3, '{"name": "add", "parameters": {"a": 1}}<|eot_id|>'),
    (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>'),
])  # fmt: skip
def test_calls_of_tools_are_demonstrated_as_the_template_writes_them(model: ChatModel, call: str) -> None:
    tokenizer = model.tokenizer(enable_thinking=False)
    prompt = [message("user", "a")]
    shown = [Message(role="assistant", content="", tool_calls=(CALL,)), message("tool", "b")]
    sample = talk(tokenizer, prompt, TOOLS).episode.demonstration([*shown, message("assistant", "ab")])
    assert learnt(sample, tokenizer)[0] == call
    written = tokenizer.render_text(
        [*prompt, *shown, message("assistant", "ab")], add_generation_prompt=False, tools=TOOLS
    )
    assert written.rstrip() == whole(sample, tokenizer)


def plain(source: str, ends: Sequence[str] = ("</s>",)) -> FolderTokenizer:
    return tokenizer_of(ChatTemplate(TemplateParts(source, "here")), ("</s>",), ends)


LOOP = "{% for m in messages %}{{ m.role }}: %s\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def test_a_template_without_marks_and_no_template_at_all_append_as_well() -> None:
    for tokenizer, reply in (
        (plain(LOOP.replace("%s", "{{ m.content }}")), "\nuser: b\nassistant:"),
        (tokenizer_of(PlainText(), ("</s>",), ("</s>",)), "b"),
    ):
        ids = TurnRenderer(tokenizer).reply([message("user", "b")], ended_by=tokenizer.eos_token_ids[0])
        assert tokenizer.decode(ids.tolist()) == reply


ONCE = "does not write that turn as it is, then the message, each once"


@pytest.mark.parametrize(("source", "role", "cause"), [
    (GLM4, "tool", ONCE), (MISTRAL, "observation", "refuses it"), (MISTRAL, "assistant", "refuses it"),
    (LOOP.replace("%s", "{{ m.content | upper }}"), "user", ONCE),
    (LOOP.replace("%s", "{{ m.content }}{{ m.content }}"), "user", ONCE),
    (LOOP.replace("in messages", "in messages[-1:]").replace("%s", "{{ m.content }}"), "user", ONCE),
    (LOOP.replace("in messages", "in messages[::-1]").replace("%s", "{{ m.content }}"), "user", ONCE),
])  # fmt: skip
def test_what_cannot_be_appended_is_told(source: ChatModel | str, role: str, cause: str) -> None:
    tokenizer = source.tokenizer() if isinstance(source, ChatModel) else plain(source)
    with pytest.raises(TemplateError) as caught:
        TurnRenderer(tokenizer).reply([Message(role=role, content="b")], ended_by=None)
    assert f"the chat template of {tokenizer.template_place} cannot append" in str(caught.value)
    assert repr(role) in str(caught.value)
    assert cause in str(caught.value)
    if source is GLM4:
        shown = str(caught.value).replace("glm4.jinja", "<file>")
        assert shown in " ".join((TESTS / "error_cases.md").read_text().split())
