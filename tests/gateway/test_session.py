"""Which tokens a request continues, and that each drawn token is learnt once, as it was drawn."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.gateway.scripted import CALL, Says, session_of
from tests.workflows.chat_models import (
    GLM4,
    LLAMA3,
    MISTRAL,
    QWEN2_5,
    QWEN3,
    TEMPLATES,
    ChatModel,
    tokenizer_of,
)  # fmt: skip

from myxa.actors.gateway.session import AgentSession, Answer, RequestFault, TurnRequest, text_parameters
from myxa.actors.models.chat_template import ChatTemplate, TemplateParts
from myxa.actors.models.tokenizer import FolderTokenizer
from myxa.core.errors import MyxaError, RequestRefused, UserCodeError
from myxa.core.messages import SamplingParams
from myxa.core.samples import Message, Sample

USER = (Message(role="user", content="hi"),)


def user(text: str) -> Message:
    return Message(role="user", content=text)


async def told(session: AgentSession, *messages: Message, mark: str = "", **more: Any) -> Answer:
    """The answer, taken as a client does that got it."""
    asked = TurnRequest(messages=messages, fingerprint=repr((messages, mark, more)).encode(), **more)
    coming = session.ask(asked)
    answer = await coming.answer()
    coming.mark_delivered()
    return answer


def learnt(samples: tuple[Sample, ...]) -> Counter[tuple[int, ...]]:
    """Each run of tokens that is learnt."""
    found: Counter[tuple[int, ...]] = Counter()
    for one in samples:
        run: list[int] = []
        for token, is_learnt in zip([*one.response_ids.tolist(), 0], [*one.loss_mask.tolist(), 0], strict=True):
            if is_learnt:
                run.append(token)
            elif run:
                found[tuple(run)] += 1
                run = []
    return found


@pytest.mark.parametrize("is_glued", [False, True])
async def test_a_history_as_it_was_told_continues_the_same_tokens(is_glued: bool) -> None:
    """`is_glued`: the client put the thought before the words, as LiteLLM does with merge_reasoning_content_in_choices."""
    says = Says(QWEN3, lambda prompt: f"<think>\nsecret\n</think>\n\nanswer {prompt.count('user')}")
    session = session_of(says).session
    first = await told(session, *USER)
    glued = Message(role="assistant", content=f"<think>secret</think>\n{first.text.content}")
    second = await told(session, *USER, glued if is_glued else first.message(), user("more"))
    assert second.text.content == "answer 2"
    assert says.prompts[1][: len(says.prompts[0])] == says.prompts[0]
    assert "secret" in says.tokenizer.decode(says.prompts[1])  # the template would leave the thought out
    (sample,) = session.samples()
    assert sample.num_turns == 2
    assert learnt((sample,)) == Counter([first.token_ids, second.token_ids])
    other = Message(role="assistant", content=glued.content.replace("secret", "other"))
    await told(session, *USER, other, user("more"))
    assert (session.counts["edited"], len(session.samples())) == (1, 2)


@pytest.mark.parametrize("kind", [UserCodeError, RequestRefused])
async def test_what_follows_a_refused_turn_has_its_reply_once(kind: type[MyxaError]) -> None:
    def answer(prompt: str) -> str:
        if "more" in prompt and not refused:
            refused.append(prompt)
            raise kind("not so", remedy="otherwise")
        return "answer"

    refused: list[str] = []
    says = Says(QWEN3, answer)
    session = session_of(says).session
    first = await told(session, *USER)
    with pytest.raises(RequestFault, match="not so"):
        await told(session, *USER, first.message(), user("more"))
    second = await told(session, *USER, first.message(), user("more"))
    assert says.prompts[2] == says.prompts[1] and session.fault is None
    assert learnt(session.samples()) == Counter([first.token_ids, second.token_ids])


async def test_an_edited_turn_forks_where_it_differs() -> None:
    says = Says(QWEN3, lambda prompt: f"answer {len(prompt)}")
    session = session_of(says).session
    first = await told(session, *USER)
    second = await told(session, *USER, first.message(), user("more"))
    edited = Message(role="assistant", content="I never said that")
    third = await told(session, *USER, first.message(), user("more"), edited, user("and"))
    assert session.counts["edited"] == 1
    assert session.counts["forked"] == 1
    assert says.prompts[2][: len(says.prompts[0])] == says.prompts[0]
    samples = session.samples()
    assert learnt(samples) == Counter([first.token_ids, second.token_ids, third.token_ids])
    assert "I never said that" in says.tokenizer.decode(
        samples[-1].prompt_ids.tolist() + samples[-1].response_ids.tolist()
    )


async def test_the_same_question_again_is_another_turn_once_it_was_answered() -> None:
    says = Says(QWEN3, lambda prompt: "yes")
    session = session_of(says).session
    await told(session, *USER)
    await told(session, *USER)
    assert len(session.samples()) == 2


@pytest.mark.parametrize(("leaves", "is_retry", "num"), [(False, False, 2), (True, False, 1), (False, True, 1)])
async def test_the_same_question_before_its_answer_came(leaves: bool, is_retry: bool, num: int) -> None:
    """Two samples of one question, a connection that broke, a client that says that it asks again."""
    says = Says(QWEN3, lambda prompt: "yes")
    says.may_go.clear()
    session = session_of(says).session
    first = session.ask(TurnRequest(messages=USER, fingerprint=b"1"))
    first.is_awaited = not leaves
    second = session.ask(TurnRequest(messages=USER, fingerprint=b"1", is_retry=is_retry))
    says.may_go.set()
    assert ((await first.answer()) is (await second.answer())) == (num == 1)
    assert len(session.samples()) == num


async def test_a_stop_string_ends_the_text_and_not_the_tokens() -> None:
    says = Says(QWEN3, lambda prompt: "Look. Observation: 3")
    session = session_of(says).session
    first = await told(session, *USER, sampling={"stop": ("Observation", "zz")})
    assert (first.text.content, first.stop, first.finish) == ("Look. ", "Observation", "stop")
    await told(session, *USER, first.message(), user("4"))
    assert says.tokenizer.decode(says.prompts[1], skip_special=False).count("Look. Observation<|im_end|>") == 1
    assert session.counts["continued"] == 1


async def test_what_does_not_fit_is_refused_and_leaves_no_trace() -> None:
    says = Says(QWEN3, lambda prompt: "yes")
    session = session_of(says).session
    first = await told(session, *USER)
    for _ in range(2):
        with pytest.raises(RequestFault, match="no room"):
            await told(session, *USER, first.message(), user("long" * 3000))
    await told(session, *USER, first.message(), user("short"))
    text = says.tokenizer.decode(says.prompts[1], skip_special=False)
    assert text.count("yes<|im_end|>\n<|im_start|>user\nshort") == 1
    (sample,) = session.samples()
    assert sample.finish == "stop"


async def test_turns_that_differ_by_their_thoughts_alone_are_told_apart_by_them() -> None:
    thoughts = iter(("one", "two", "", ""))
    says = Says(QWEN3, lambda prompt: f"<think>\n{next(thoughts)}\n</think>\n\nyes")
    session = session_of(says).session
    first, _ = await told(session, *USER, mark="1"), await told(session, *USER, mark="2")
    await told(session, *USER, first.message(), user("more"))
    assert "one" in says.tokenizer.decode(says.prompts[2])
    other = Message(role="assistant", content="yes", extra={"reasoning_content": "three"})
    await told(session, *USER, other, user("more"))
    assert session.counts["edited"] == 1


async def test_a_turn_that_its_client_began_is_continued() -> None:
    says = Says(QWEN2_5, lambda prompt: " and more")
    session = session_of(says).session
    first = await told(session, *USER)
    await told(session, *USER, first.message(), user("go"), Message(role="assistant", content="It is"))
    assert says.tokenizer.decode(says.prompts[1], skip_special=False).endswith("<|im_start|>assistant\nIt is")


async def test_a_session_that_has_ended_begins_no_turn() -> None:
    says = Says(QWEN3, lambda prompt: "yes")
    session = session_of(says).session
    await session.close()
    with pytest.raises(RequestFault, match="has ended"):
        session.ask(TurnRequest(messages=USER))
    assert says.prompts == []


async def test_thoughts_are_left_out_where_the_template_writes_none() -> None:
    says = Says(LLAMA3, lambda prompt: "yes")
    session = session_of(says).session
    thinking = Message(role="assistant", content="so", extra={"reasoning_content": "hm"})
    await told(session, *USER, thinking, user("go"))
    assert "hm" not in says.tokenizer.decode(says.prompts[0])


async def test_two_questions_at_once_after_one_turn_are_two_samples() -> None:
    says = Says(QWEN3, lambda prompt: "yes")
    session = session_of(says).session
    first = await told(session, *USER)
    both = await asyncio.gather(
        told(session, *USER, first.message(), user("a")), told(session, *USER, first.message(), user("b"))
    )
    assert learnt(session.samples()) == Counter([first.token_ids, *(one.token_ids for one in both)])


async def test_tools_called_and_answered() -> None:
    says = Says(QWEN3, lambda prompt: "cold" if "tool_response" in prompt else f"Let me look.\n{CALL}")
    session = session_of(says).session
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    first = await told(session, *USER, tools=(tool,))
    assert [call.name for call in first.text.calls] == ["weather"]
    reply = Message(role="tool", content="7", tool_call_id=first.call_ids[0])
    second = await told(session, *USER, first.message(), reply, tools=(tool,))
    assert second.text.content == "cold"
    assert len(session.samples()) == 1


class TextArguments(ChatModel):
    """DeepSeek's templates put a call's arguments behind its name, which fails for a table."""

    def tokenizer(self, **arguments: Any) -> FolderTokenizer:
        source = (TEMPLATES / "deepseek.jinja").read_text().replace("arguments | tojson", "arguments + ''")
        return tokenizer_of(ChatTemplate(TemplateParts(source, "deepseek")), self.marks, self.ends)


DEEPSEEK = TextArguments("deepseek", ("<｜User｜>", "<｜end▁of▁sentence｜>"), ("<｜end▁of▁sentence｜>",), ("tool",), {})
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}


async def test_calls_of_a_template_that_takes_arguments_as_a_text() -> None:
    call = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"q": "7"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    says = Says(DEEPSEEK, lambda prompt: "cold" if "tool▁output" in prompt else call)
    session = session_of(says).session
    first = await told(session, *USER, tools=(TOOL,))
    assert [(one.name, one.arguments) for one in first.text.calls] == [("find", {"q": "7"})]
    reply = Message(role="tool", content="7", tool_call_id=first.call_ids[0])
    second = await told(session, *USER, first.message(), reply, tools=(TOOL,))
    assert second.text.content == "cold" and session.counts["continued"] == 1
    await told(session, user("another"), first.message(), reply, tools=(TOOL,))
    assert 'find\n```json\n{"q":"7"}\n```' in says.tokenizer.decode(says.prompts[2], skip_special=False)


class Systems(ChatModel):
    """Qwen3.5 refuses a system message that is not the first one, Gemma 3 leaves it out."""

    def tokenizer(self, **arguments: Any) -> FolderTokenizer:
        source, later = (TEMPLATES / "qwen2_5.jinja").read_text(), "message.role == 'system' and not loop.first"
        wrong = "{{ raise_exception('System message must be at the beginning.') }}" if self.name == "strict" else ""
        source = source.replace(f"({later})", "false").replace(
            "{%- if message.role == 'user'", f"{{%- if {later} %}}{wrong}{{%- elif message.role == 'user'"
        )
        return tokenizer_of(ChatTemplate(TemplateParts(source, self.name)), self.marks, self.ends)


@pytest.mark.parametrize("name", ["strict", "drops", "qwen2_5"])
async def test_system_messages_behind_the_first_one_are_written(name: str) -> None:
    """Codex sends two of them, Claude Code one behind the first question."""
    model = QWEN2_5 if name == "qwen2_5" else Systems(name, QWEN2_5.marks, QWEN2_5.ends, (), {})
    says = Says(model, lambda prompt: "yes")
    session = session_of(says).session
    rules = (Message(role="system", content="one"), Message(role="system", content="two"), *USER)
    first = await told(session, *rules, Message(role="system", content="three"))
    history = (*rules, Message(role="system", content="three"), first.message())
    await told(session, *history, Message(role="system", content="four"), user("more"))
    parts = [
        part.rstrip() for part in says.tokenizer.decode(says.prompts[1], skip_special=False).split("<|im_start|>")[1:]
    ]
    as_they_stand = name == "qwen2_5"
    assert [part.removesuffix("<|im_end|>") for part in parts] == [
        *(("system\none", "system\ntwo") if as_they_stand else ("system\none\n\ntwo",)),
        "user\nhi",
        "system\nthree" if as_they_stand else "user\n<system>three</system>",
        "assistant\nyes",
        "system\nfour" if as_they_stand else "user\n<system>four</system>",
        "user\nmore",
        "assistant",
    ]
    assert (session.counts["continued"], len(session.samples())) == (1, 1)


class UnknownForm(ChatModel):
    """A family whose calls stand in marks of its own."""

    def tokenizer(self, **arguments: Any) -> FolderTokenizer:
        source = (TEMPLATES / "qwen3.jinja").read_text().replace("tool_call>", "my_call>")
        return tokenizer_of(ChatTemplate(TemplateParts(source, "unknown")), self.marks, self.ends)


async def test_calls_in_a_form_that_is_not_read_are_refused_and_no_words() -> None:
    model = UnknownForm("unknown", QWEN3.marks, QWEN3.ends, (), {})
    session = session_of(Says(model, lambda prompt: "<my_call>...")).session
    with pytest.raises(RequestFault, match='a form that is not read here: say tool_choice = "none"') as caught:
        await told(session, *USER, tools=(TOOL,))
    assert caught.value.param == "tools"
    answer = await told(session, *USER, tools=(TOOL,), may_call=False)
    assert answer.text.content.startswith("<my_call>")


CODER = replace(QWEN3, name="qwen3_coder")
KIMI = ChatModel("kimi_k2", tuple(
    f"<|{name}|>" for name in ("im_system", "im_user", "im_assistant", "im_middle", "im_end", "tool_calls_section_begin",
    "tool_calls_section_end", "tool_call_begin", "tool_call_argument_begin", "tool_call_end")), ("<|im_end|>",), (), {})  # fmt: skip
MINIMAX = ChatModel("minimax_m2", ("]~!b[", "]~b]", "[e~["), ("[e~[",), (), {})
MISTRAL_ARGS = replace(MISTRAL, name="mistral_args", marks=(*MISTRAL.marks, "[ARGS]"))
WRITTEN_CALLS: list[tuple[ChatModel, str, dict[str, Any], str, str]] = [
    (CODER, ("Look.\n<tool_call>\n<function=find>\n<parameter=q>\n007\n\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
     "<parameter=deep>\n{\"a\": [True]}\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n</function>\n</tool_call>"),
     {"q": "007\n", "n": 12, "deep": '{"a": [True]}', "on": True}, "",
     "<|im_end|>\n<|im_start|>user\n<tool_response>\ncold\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n"),
    (KIMI, ("Look.<|tool_calls_section_begin|><|tool_call_begin|>functions.find:3<|tool_call_argument_begin|>"
     '{"q": "007"}<|tool_call_end|><|tool_calls_section_end|>'), {"q": "007"}, "functions.find:3",
     "<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.find:3\ncold<|im_end|><|im_assistant|>assistant<|im_middle|>"),
    (MINIMAX, ('hm</think>\n\nLook.\n<minimax:tool_call>\n<invoke name="find">\n<parameter name="q">007</parameter>\n'
     '<parameter name="n">12</parameter>\n</invoke>\n</minimax:tool_call>'), {"q": "007", "n": 12}, "",
     "[e~[\n]~b]tool\n<response>cold</response>[e~[\n]~b]ai\n<think>\n"),
    (MISTRAL, 'Look.[TOOL_CALLS] [{"name": "find", "arguments": {"q": "007"}, "id": "abcdefgh1"}]', {"q": "007"}, "abcdefgh1",
     '</s>[TOOL_RESULTS] {"content": "cold", "call_id": "abcdefgh1"}[/TOOL_RESULTS]'),
    (MISTRAL_ARGS, 'Look.[TOOL_CALLS]find[ARGS]{"q": "007"}', {"q": "007"}, "", "</s>[TOOL_RESULTS]cold[/TOOL_RESULTS]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "call", "arguments", "number", "tail"), WRITTEN_CALLS, ids=lambda one: getattr(one, "name", "")
)
async def test_calls_of_other_families_are_read_and_answered_token_by_token(
    model: ChatModel, call: str, arguments: dict[str, Any], number: str, tail: str
) -> None:
    says = Says(model, lambda prompt: "done" if "cold" in prompt else call)
    session = session_of(says).session
    first = await told(session, *USER, tools=(TOOL,))
    assert ([(one.name, one.arguments) for one in first.text.calls], first.text.is_malformed) == (
        [("find", arguments)],
        False,
    )
    assert first.text.content == "Look."
    assert not number or first.call_ids == (number,)
    back = Message(role="assistant", content="Look.", tool_calls=first.message().tool_calls)
    reply = Message(role="tool", content="cold", tool_call_id=first.call_ids[0])
    await told(session, *USER, back, reply, tools=(TOOL,))
    assert says.prompts[1][: len(says.prompts[0]) + len(first.token_ids)] == [*says.prompts[0], *first.token_ids]
    assert says.tokenizer.decode(says.prompts[1], skip_special=False).endswith(f"{call}{tail}")
    assert (session.counts["continued"], len(session.samples())) == (1, 1)


@pytest.mark.parametrize("model", [MINIMAX, MISTRAL, MISTRAL_ARGS], ids=lambda model: model.name)
async def test_a_tool_answers_a_call_that_was_cut_off_behind_it(model: ChatModel) -> None:
    """Where the template takes a tool's answer behind a call alone: the end of the turn is written once."""
    call = next(call for one, call, *_ in WRITTEN_CALLS if one is model)
    says = Says(model, lambda prompt: "done" if "cold" in prompt else call)
    size = len(says.tokenizer.encode(call))
    session = session_of(says, sampling=SamplingParams(max_new_tokens=size)).session
    first = await told(session, *USER, tools=(TOOL,))
    assert (first.finish, len(first.text.calls)) == ("length", 1)
    reply = Message(role="tool", content="cold", tool_call_id=first.call_ids[0])
    await told(session, *USER, first.message(), reply, tools=(TOOL,))
    tail = next(tail for one, *_, tail in WRITTEN_CALLS if one is model)
    assert says.tokenizer.decode(says.prompts[1], skip_special=False).endswith(f"{call}{tail}")


def test_parameters_that_are_texts_by_their_schemas() -> None:
    schemas: dict[str, Any] = {
        "a": {"type": "string"}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "c": {"type": ["string", "null"]},
        "d": {"type": ["string", "integer"]}, "e": {"anyOf": [{"type": "string"}, {"$ref": "#"}]}, "f": {}, "g": {"type": {"x": []}},
        "h": {"anyOf": "string"}, "i": {"oneOf": [3, None]}, "j": None,
    }  # fmt: skip
    tools = [{"function": {"name": "f", "parameters": {"properties": schemas}}}, {"function": None}, {}]
    assert text_parameters(tools) == {("f", "a"): False, ("f", "b"): True, ("f", "c"): True}


@pytest.mark.parametrize(("kind", "value"), [("string", "12"), ("integer", 12)])
async def test_arguments_without_quotes_are_what_the_schema_says(kind: str, value: object) -> None:
    text = "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>12</arg_value>\n</tool_call>"
    says = Says(replace(GLM4, name="glm4_5"), lambda prompt: text)
    tool = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"q": {"type": kind}}}}}
    answer = await told(session_of(says).session, *USER, tools=(tool,))
    assert [one.arguments for one in answer.text.calls] == [{"q": value}]


async def test_another_temperature_is_another_sample() -> None:
    says = Says(QWEN3, lambda prompt: "yes")
    session = session_of(says).session
    first = await told(session, *USER)
    await told(session, *USER, first.message(), user("a"), sampling={"temperature": 0.5})
    assert sorted(one.temperature for one in session.samples()) == [0.5, 1.0]


async def test_a_client_that_draws_greedily_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """It is the default of some agents; then no member of a group differs from another."""
    says = Says(QWEN3, lambda prompt: "yes")
    for runs, asks, is_warned in ((0.0, 0.0, False), (1.0, 0.5, False), (1.0, 0.0, True)):
        session = session_of(says, sampling=SamplingParams(temperature=runs)).session
        await told(session, *USER, sampling={"temperature": asks})
        session.samples()
        assert ("temperature 0" in caplog.text) == is_warned


async def test_limits_of_the_run_hold_for_a_client() -> None:
    says = Says(QWEN3, lambda prompt: "long answer")
    session = session_of(says, sampling=SamplingParams(max_new_tokens=4, min_new_tokens=3)).session
    answer = await told(session, *USER, sampling={"max_new_tokens": 1000})
    assert (len(answer.token_ids), answer.finish) == (4, "length")
    shorter = await told(session, *USER, sampling={"max_new_tokens": 2})
    assert (len(shorter.token_ids), shorter.finish) == (2, "length"), "no least length of the run is in its way"
    with pytest.raises(RequestFault, match="temperature"):
        await told(session, *USER, sampling={"temperature": -1.0})


async def test_a_turn_that_has_ended_is_not_asked_for_again() -> None:
    session = session_of(Says(QWEN3, lambda prompt: "yes")).session
    first = await told(session, *USER)
    with pytest.raises(RequestFault, match="append"):
        await told(session, *USER, first.message())


async def test_an_engine_that_fails_is_told_and_ends_the_session() -> None:
    def answer(prompt: str) -> str:
        raise RuntimeError("no memory")

    session = session_of(Says(QWEN3, answer)).session
    with pytest.raises(RequestFault, match="no memory"):
        await told(session, *USER)
    assert isinstance(session.fault, RuntimeError)
    with pytest.raises(RequestFault, match="interrupted"):
        await told(session, *USER)


async def test_rewards_of_turns() -> None:
    says = Says(QWEN3, lambda prompt: "yes")
    session = session_of(says).session
    first = await told(session, *USER)
    second = await told(session, *USER, first.message(), user("a"))
    session.reward_turn(second.id, 0.5)
    session.reward_turn(first.id, 1.0)
    (sample,) = session.samples()
    assert sample.reward == 1.5
    assert sample.token_rewards is not None
    ends = [len(first.token_ids) - 1, len(sample.response_ids) - 1]
    assert [sample.token_rewards[at] for at in ends] == [1.0, 0.5]
    with pytest.raises(RequestFault, match="no answer"):
        session.reward_turn("other", 1.0)


async def test_arguments_come_back_as_another_language_writes_them() -> None:
    says = Says(
        QWEN3, lambda prompt: '<tool_call>{"name": "f", "arguments": {"x": 1.0, "y": {"b": 2, "a": 1e3}}}</tool_call>'
    )
    session = session_of(says).session
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    first = await told(session, *USER, tools=(tool,))
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": {"y": {"a": 1000, "b": 2}, "x": 1}}}
    back = Message(role="assistant", content="", tool_calls=(call,))
    await told(session, *USER, back, Message(role="tool", content="7"), tools=(tool,))
    assert (session.counts["continued"], session.counts["edited"], len(first.call_ids)) == (1, 0, 1)


async def test_a_turn_that_cannot_be_read_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    says = Says(QWEN3, lambda prompt: "yes")
    session = session_of(says).session
    decode = says.tokenizer.decode

    def broken(ids: Any, *, skip_special: bool = True) -> str:
        if not skip_special and len(ids) == 3:
            raise ValueError("a tokenizer with a fault")
        return decode(ids, skip_special=skip_special)

    monkeypatch.setattr(says.tokenizer, "decode", broken)
    with pytest.raises(RequestFault, match="a tokenizer with a fault"):
        await told(session, *USER)
    assert isinstance(session.fault, ValueError)
