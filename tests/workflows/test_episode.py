"""Episodes: token exact, multi-turn, continued after an interruption without repeating what was generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.harness.group_runner import delta
from tests.simulation.simulator import run

from myxa.actors.workflows.episode import Episode, Interrupted, ModelAccess, joined, unstamped
from myxa.core.errors import EngineError, PromptTooLong, UserCodeError
from myxa.core.messages import SamplingParams
from myxa.core.protocols import Delta, GenerateRequest
from myxa.core.samples import NO_VERSION, FinishReason, Message, Prompt, Sample

END = 99


class Letters:
    """One id per character, `<role>` marks as single ids above 100, END after every message."""

    vocab_size = 200
    eos_token_ids: tuple[int, ...] = (END,)
    roles = {"system": 101, "user": 102, "assistant": 103, "tool": 104}

    template_place = "letters"

    def render_text(self, messages: Sequence[Message], *, add_generation_prompt: bool, **more: Any) -> str:
        text = "".join(f"{mark(self.roles[m.role])}{m.content}{mark(END)}" for m in messages)
        return text + mark(self.roles["assistant"]) if add_generation_prompt else text

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, **more: Any) -> list[int]:
        return self.encode(self.render_text(messages, add_generation_prompt=add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 32 for c in text]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(chr(i + 32) for i in ids if i < END or not skip_special)


def mark(token: int) -> str:
    """How a mark is written."""
    return chr(token + 32)


class Script:
    """An engine that answers requests from a list and remembers what it was asked."""

    def __init__(self, *answers: tuple[str, int, FinishReason]) -> None:
        self.answers = list(answers)
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.asked.append(request)
        text, version, finish = self.answers.pop(0)
        ids = Letters().encode(text)
        for i in ids:
            yield delta([i], None, version)
        yield delta([END] if finish == "stop" else [], finish, version)


PROMPT = Prompt(group_id=7, row=3, pass_index=0, messages=(Message(role="user", content="2+2"),), source="d.jsonl")


def episode(
    script: Script, *, recorded: Sequence[Sample] = (), context_length: int = 64,
    goes_on: Callable[[], bool] = lambda: False, index: int = 0, sampling: SamplingParams | None = None,
) -> Episode:  # fmt: skip
    return Episode(
        prompt=PROMPT, index=index, tokenizer=Letters(),
        model=ModelAccess(
            generate=script.generate, sampling=sampling or SamplingParams(max_new_tokens=16),
            context_length=context_length, goes_on=goes_on,
        ),
        recorded=recorded,
    )  # fmt: skip


async def interrupted(doing: Awaitable[object]) -> Sample:
    """What is left of an episode that is interrupted."""
    with pytest.raises(Interrupted) as caught:
        await doing
    (sample,) = caught.value.partial
    return sample


async def calculator(ep: Episode) -> Sample:
    turn = await ep.generate()
    if turn.text.startswith("@") and turn.finish == "stop" and ep.reply("tool", "4"):
        await ep.generate()
    return ep.sample()


async def test_two_turns_with_a_tool_reply_masked_out() -> None:
    script = Script(("@2+2", 3, "stop"), ("four", 4, "stop"))
    sample = await calculator(episode(script))
    tool = [104, ord("4") - 32, END, 103]
    enc = Letters().encode
    assert sample.response_ids.tolist() == [*enc("@2+2"), END, *tool, *enc("four"), END]
    assert sample.loss_mask.tolist() == [1] * 5 + [0] * 4 + [1] * 5
    assert sample.versions.tolist() == [3] * 5 + [NO_VERSION] * 4 + [4] * 5
    assert sample.logprobs[5:9].tolist() == [0.0] * 4
    assert (sample.finish, sample.num_turns, sample.text, sample.turns) == ("stop", 2, "four", ("@2+2", "four"))
    assert sample.oldest_version() == 3
    # The second request holds exactly the ids produced so far: nothing was decoded and encoded again.
    assert script.asked[1].input_ids.tolist() == [*sample.prompt_ids.tolist(), *sample.response_ids[:9].tolist()]


async def test_interrupted_turn_continues_with_its_tokens_and_their_stamps() -> None:
    partial = await interrupted(calculator(episode(Script(("@2+2", 3, "stop"), ("fo", 4, "abort")))))
    assert partial.finish == "abort"
    again = Script(("ur", 6, "stop"))
    sample = await calculator(episode(again, recorded=[partial]))
    assert sample.text == "four"
    assert sample.versions.tolist() == [3] * 5 + [NO_VERSION] * 4 + [4, 4, 6, 6, 6]
    assert len(again.asked) == 1, "the first turn was recorded and must not be generated again"
    assert again.asked[0].sampling.max_new_tokens == 14


async def test_a_different_tool_reply_ends_the_replay() -> None:
    partial = await interrupted(calculator(episode(Script(("@2+2", 3, "stop"), ("fo", 4, "abort")))))

    async def other(ep: Episode) -> Sample:
        await ep.generate()
        ep.reply("tool", "5")
        await ep.generate()
        return ep.sample()

    again = Script(("five", 6, "stop"))
    sample = await other(episode(again, recorded=[partial]))
    assert sample.turns == ("@2+2", "five")


async def test_abort_during_a_weight_swap_goes_on_at_once() -> None:
    script = Script(("fo", 1, "abort"), ("ur", 2, "stop"))
    ep = episode(script, goes_on=lambda: True)
    turn = await ep.generate()
    assert turn.text == "four"
    assert ep.sample().versions.tolist() == [1, 1, 2, 2, 2]


def test_aborts_for_ever_are_the_engines_failure_and_say_so() -> None:
    nothing: tuple[str, int, FinishReason] = ("", 1, "abort")
    script = Script(("fo", 1, "abort"), *[nothing] * 100)

    async def asked_for_ever(seed: int) -> None:
        with pytest.raises(EngineError, match="the engine aborted a turn of row 3 20 times without a token between"):
            await episode(script, goes_on=lambda: True).generate()

    run(asked_for_ever, 0)
    assert len(script.asked) == 21


async def test_a_full_context_ends_as_length_and_a_prompt_beyond_it_is_a_data_error() -> None:
    ep = episode(Script(("@2+2", 1, "stop")), context_length=14)
    await ep.generate()
    assert not ep.reply("tool", "4444444")
    assert ep.sample().finish == "length"
    with pytest.raises(PromptTooLong, match=r"prompt of row 3 in d\.jsonl has 6 tokens, the engine's context is 6"):
        episode(Script(), context_length=6)


async def test_stream_without_an_end_is_an_engine_error() -> None:
    class Silent(Script):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            yield delta([1], None, 0)

    with pytest.raises(EngineError, match="ended request 7.0.0 without saying why"):
        await episode(Silent()).generate()


@pytest.mark.parametrize("values", [{"top_k": 2**63}, {"temperature": "hot"}, {"top_p": float("nan")}, {"stop": "x"}])
async def test_e03_a_workflow_that_passes_values_out_of_range_is_wrong(values: dict[str, Any]) -> None:
    with pytest.raises(UserCodeError, match=rf"row {PROMPT.row} is asked for, {next(iter(values))} is"):
        await episode(Script()).generate(SamplingParams(**values))


def test_reply_before_a_turn_is_a_workflow_mistake() -> None:
    with pytest.raises(UserCodeError, match="without a model turn before it"):
        episode(Script()).reply("tool", "4")


ENDS = SamplingParams(max_new_tokens=16, stop=("###", "now"))


async def test_a_stop_string_that_the_engine_runs_past_ends_the_turn_where_it_ends() -> None:
    script = Script(("it is now or", 3, "length"))
    ep = episode(script, sampling=ENDS)
    turn = await ep.generate()
    assert (turn.text, turn.finish) == ("it is now", "stop")
    sample = ep.sample()
    assert sample.finish == "stop"
    assert len(sample.response_ids) == len(sample.logprobs) == len(sample.versions) == len("it is now")
    assert script.asked[0].sampling.stop == ENDS.stop


async def test_an_end_as_the_last_token_allowed_is_an_end() -> None:
    """SGLang calls it "length", and the turn is whole."""
    text = "a" * 15
    for end, sampling in (
        (mark(END), SamplingParams(max_new_tokens=16)),
        ("b", SamplingParams(max_new_tokens=16, stop_token_ids=(ord("b") - 32,))),
        ("b", SamplingParams(max_new_tokens=16, stop=("ab",))),
    ):
        ep = episode(Script((text + end, 0, "length")), sampling=sampling)
        turn = await ep.generate()
        assert (turn.finish, len(turn.token_ids), ep.sample().finish) == ("stop", 16, "stop")
    ep = episode(Script((text + mark(END), 0, "length")), sampling=SamplingParams(max_new_tokens=16, ignore_eos=True))
    assert (await ep.generate()).finish == "length"


async def test_a_stop_string_may_begin_in_the_tokens_of_an_earlier_attempt() -> None:
    partial = await interrupted(episode(Script(("a##", 3, "abort")), sampling=ENDS).generate())
    ep = episode(Script(("#b", 4, "stop")), recorded=[partial], sampling=ENDS)
    turn = await ep.generate()
    assert (turn.text, turn.finish) == ("a###", "stop")
    assert ep.sample().versions.tolist() == [3, 3, 3, 4]


async def test_a_recorded_turn_that_a_stop_string_ended_is_not_asked_for_again() -> None:
    partial = await interrupted(episode(Script(("a###", 3, "abort"))).generate())
    nobody = Script()
    turn = await episode(nobody, recorded=[partial], sampling=ENDS).generate()
    assert (turn.text, turn.finish, nobody.asked) == ("a###", "stop", [])


async def test_a_turn_that_goes_on_needs_fewer_tokens_to_be_long_enough() -> None:
    least = SamplingParams(max_new_tokens=16, min_new_tokens=6)
    first, again = Script(("four", 3, "abort")), Script(("teen", 4, "stop"))
    partial = await interrupted(episode(first, sampling=least).generate())
    await episode(again, recorded=[partial], sampling=least).generate()
    asked = [one.sampling for one in (*first.asked, *again.asked)]
    assert [(one.min_new_tokens, one.max_new_tokens) for one in asked] == [(6, 16), (2, 12)]


async def test_c_a_seeded_turn_that_was_interrupted_is_made_again_from_its_beginning() -> None:
    by_seed = SamplingParams(max_new_tokens=16, min_new_tokens=6, seed=7)
    first = Script(("@2+2", 3, "stop"), ("four", 3, "abort"))
    partial = await interrupted(calculator(episode(first, sampling=by_seed)))
    again = Script(("fo", 4, "abort"), ("four", 4, "stop"))
    await calculator(episode(again, recorded=[partial], sampling=by_seed, goes_on=lambda: True))
    fresh = first.asked[1]
    for one in again.asked:
        assert one.input_ids.tolist() == fresh.input_ids.tolist(), "the finished turn is kept, the other begins anew"
        assert one.sampling == fresh.sampling


async def test_each_turn_has_a_seed_of_its_own_that_every_attempt_has_again() -> None:
    by_seed = SamplingParams(max_new_tokens=16, seed=7)

    async def seeds(index: int, sampling: SamplingParams | None = by_seed) -> list[int | None]:
        script = Script(("@2+2", 3, "stop"), ("four", 3, "stop"))
        await calculator(episode(script, index=index, sampling=sampling))
        return [one.sampling.seed for one in script.asked]

    found = [*(await seeds(0)), *(await seeds(1)), *(await seeds(0, SamplingParams(max_new_tokens=16, seed=8)))]
    assert len(set(found)) == 6
    assert all(seed is not None and 0 <= seed < 1 << 63 for seed in found)
    assert await seeds(0) == found[:2]
    assert await seeds(0, SamplingParams(max_new_tokens=16)) == [None, None]
    ep = episode(script := Script(("four", 3, "stop")), sampling=by_seed)
    await ep.generate(SamplingParams(seed=99))
    assert script.asked[0].sampling.seed == 99, "a workflow's own seed is its own"


def test_what_tokens_were_drawn_from_stays_beside_them() -> None:
    def turn(token: int, *kept: int) -> Delta:
        one = np.asarray([token], np.int32)
        return Delta(
            output_ids=one, logprobs=np.zeros(1, np.float32), versions=one * 0, kept=np.asarray([kept], np.int32)
        )

    found = joined([turn(1, 1, 4), unstamped([7, 8], is_model=False), turn(2, 2), unstamped([9], is_model=True)])
    assert found.kept is not None
    assert found.kept.tolist() == [[1, 4], [-1, -1], [-1, -1], [2, -1], [-1, -1]]
    begun = found.first(1).kept
    assert begun is not None
    assert begun.tolist() == [[1, 4]]
    assert joined([unstamped([1], is_model=True)]).kept is None


async def test_a_branch_continues_from_the_tokens_so_far_which_are_learnt_once() -> None:
    script = Script(("plan", 3, "stop"), ("left", 3, "stop"), ("right", 4, "stop"))
    ep = episode(script)
    await ep.generate()
    other = ep.branch()
    for one, question in ((ep, "l?"), (other, "r?")):
        one.reply("user", question)
        await one.generate()
    first, second = ep.sample(turn_rewards=[0.25, 0.5]), other.sample(loss_weight=0.5)
    said = Letters().encode
    assert second.prompt_ids.tolist() == [*first.prompt_ids, *said("plan"), END]
    assert second.response_ids.tolist() == [102, *said("r?"), END, 103, *said("right"), END]
    assert second.loss_mask.tolist() == [0] * 5 + [1] * 6
    assert [(one.index, one.branch) for one in (first, second)] == [(0, 0), (0, 1)]
    assert first.reward == 0.75
    assert first.token_rewards is not None
    assert np.flatnonzero(first.token_rewards).tolist() == [4, 14], "at the last tokens of the turns"
    assert second.loss_weights is not None
    assert set(second.loss_weights.tolist()) == {0.5}
    assert len({request.request_id for request in script.asked}) == 3


async def test_a_session_is_a_conversation_of_its_own() -> None:
    script = Script(("plan", 3, "stop"), ("done", 3, "stop"))
    ep = episode(script)
    await ep.generate()
    helper = ep.session([Message(role="user", content="do it")])
    await helper.generate()
    sample = helper.sample()
    assert sample.prompt_ids.tolist() == [102, *Letters().encode("do it"), END, 103]
    assert (sample.branch, sample.loss_mask.tolist()) == (1, [1] * 5)
    assert len({request.request_id for request in script.asked}) == 2


async def test_a_rollout_of_several_samples_continues_with_the_tokens_of_each() -> None:
    async def two(ep: Episode) -> list[Sample]:
        await ep.generate()
        helper = ep.session([Message(role="user", content="do it")])
        await helper.generate()
        return [ep.sample(), helper.sample()]

    with pytest.raises(Interrupted) as caught:
        await two(episode(Script(("plan", 3, "stop"), ("do", 4, "abort"))))
    recorded = caught.value.partial
    assert [(one.branch, one.finish) for one in recorded] == [(0, "stop"), (1, "abort")]
    again = Script(("ne", 5, "stop"))
    plan, helper = await two(episode(again, recorded=recorded))
    assert len(again.asked) == 1, "the first session is replayed"
    assert plan.versions.tolist() == [3] * 5
    assert helper.response_ids.tolist() == [*Letters().encode("done"), END]
    assert helper.versions.tolist() == [4, 4, 5, 5, 5]


async def test_two_turns_of_one_episode_at_a_time_are_refused() -> None:
    """Both would be one behind the other in the sample, and neither was drawn so."""
    may_go = asyncio.Event()

    class Waiting(Script):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
            await may_go.wait()
            async for part in super().generate(request):
                yield part

    ep = episode(Waiting(("a", 1, "stop")))
    drawing = asyncio.ensure_future(ep.generate())
    await asyncio.sleep(0)
    with pytest.raises(UserCodeError, match=r"row 3 is asked for a turn while one is drawn -- .*branch\(\)"):
        await ep.generate()
    may_go.set()
    await drawing
    assert ep.num_turns == 1


@pytest.mark.parametrize("content", [None, 5, {"a": 1}, ["a"]])
async def test_a_reply_that_is_no_text_is_refused(content: Any) -> None:
    """A template would write `None`, or what Python prints of a table."""
    ep = episode(Script(("a", 1, "stop")))
    await ep.generate()
    with pytest.raises(UserCodeError, match=f"content is of type {type(content).__name__}"):
        ep.reply("tool", content)
    message: Any = {"role": "user", "content": "x"}
    with pytest.raises(UserCodeError, match="a message that is of type dict"):
        ep.session([message])


@pytest.mark.parametrize("rewards", [("a",), (float("nan"),), (1e39,), 1.0])
async def test_rewards_of_turns_are_finite_numbers(rewards: Any) -> None:
    ep = episode(Script(("a", 1, "stop")))
    await ep.generate()
    with pytest.raises(UserCodeError, match="row 3 got turn_rewards"):
        ep.sample(turn_rewards=rewards)
    assert ep.sample(turn_rewards=(np.float64(0.5),)).reward == 0.5
    for number in (0, 2, -1):
        with pytest.raises(UserCodeError, match=f"row 3 has 1 turns, not {number}"):
            ep.branch(number)


async def test_rewards_of_turns_must_be_as_many_as_the_turns() -> None:
    ep = episode(Script(("plan", 3, "stop")))
    await ep.generate()
    with pytest.raises(UserCodeError, match=r"row 3 has 1 turns and got 2 turn_rewards"):
        ep.sample(turn_rewards=[1.0, 2.0])
