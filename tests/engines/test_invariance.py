"""A deterministic run's engine: a sequence's tokens and log-probs are the same to the bit, whatever surrounds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from myxa.actors.engines.embedded.attention import padded_lengths
from myxa.actors.engines.embedded.core import CoreOptions, EngineCore
from myxa.actors.engines.embedded.model import Decoder
from myxa.actors.engines.embedded.weights import DecoderWeights
from myxa.core.errors import EngineError
from myxa.core.messages import SamplingParams
from myxa.core.protocols import Delta, GenerateRequest

Answer = tuple[bytes, bytes]
"""Tokens and log-probs, as bytes: nothing is compared up to a tolerance."""
NUM_NEW = 24
CONTEXT = 128


def core_of(
    folder: Path, load: Callable[..., DecoderWeights], *, dtype: str = "float32", num_slots: int = 48
) -> EngineCore:
    weights = load(folder, dtype)
    options = CoreOptions(
        num_slots=num_slots, context_length=CONTEXT, eos_token_ids=frozenset(), stream_interval=3, is_invariant=True
    )
    return EngineCore(weights.config, weights, options)


def request(name: str, prompt: list[int], *, num_new: int = NUM_NEW, top_p: float = 1.0) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=num_new, seed=len(name) * 1000 + prompt[0], top_p=top_p, temperature=0.9)
    return GenerateRequest(request_id=name, input_ids=np.asarray(prompt, dtype=np.int32), sampling=sampling)


def answers(core: EngineCore) -> dict[str, Answer]:
    ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[np.float32]] = {}
    while core.has_work:
        core.step()
        for event in core.take_events():
            assert isinstance(event.news, Delta), event.news
            name = str(event.owner)
            ids.setdefault(name, []).extend(event.news.output_ids.tolist())
            logprobs.setdefault(name, []).extend(event.news.logprobs)
    return {name: (np.asarray(ids[name]).tobytes(), np.asarray(logprobs[name]).tobytes()) for name in ids}


def submit(core: EngineCore, *requests: GenerateRequest) -> None:
    for one in requests:
        core.submit(one, one.request_id)


PROMPTS: Mapping[str, list[int]] = {
    "a": [5, 6, 7],
    "bb": list(range(40, 75)),
    "ccc": [9],
    "dddd": list(range(100, 155)),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16", "grouped"])
def make(
    request: pytest.FixtureRequest,
    folders: list[Path],
    family: Callable[[str], Path],
    load: Callable[..., DecoderWeights],
) -> Callable[..., EngineCore]:
    if request.param == "grouped":
        folder = family("qwen3")
        return lambda **more: core_of(folder, load, **more)
    return lambda **more: core_of(folders[0], load, dtype=request.param, **more)


@pytest.fixture(scope="module")
def alone(make: Callable[..., EngineCore]) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for name, prompt in PROMPTS.items():
        core = make()
        submit(core, request(name, prompt))
        found |= answers(core)
    return found


def test_c_a_crowd_changes_no_bit(make: Callable[..., EngineCore], alone: dict[str, Answer]) -> None:
    rng = np.random.default_rng(0)
    for num_others, num_slots in ((1, 48), (60, 48), (12, 5)):
        core = make(num_slots=num_slots)
        others = [
            request(
                f"other {i}",
                rng.integers(0, 256, int(rng.integers(1, 60))).tolist(),
                num_new=int(rng.integers(1, 60)),
                top_p=float(rng.choice([1.0, 0.7])),
            )
            for i in range(num_others)
        ]
        submit(core, *others[: num_others // 2])
        for _ in range(4):
            core.step()
        submit(core, *(request(name, prompt) for name, prompt in PROMPTS.items()))
        submit(core, *others[num_others // 2 :])
        found = answers(core)
        assert {name: found[name] for name in PROMPTS} == alone


def test_c_continued_from_a_prefix_it_is_the_same(make: Callable[..., EngineCore], alone: dict[str, Answer]) -> None:
    """What was decoded token by token is prefilled as part of the prompt."""
    for name, prompt in PROMPTS.items():
        ids = np.frombuffer(alone[name][0], dtype=np.int64).tolist()
        for num_done in (1, 7, NUM_NEW - 1):
            core = make()
            submit(core, request("someone else", [1, 2]))
            whole = request(name, prompt)
            rest = GenerateRequest(
                request_id=name,
                input_ids=np.asarray([*prompt, *ids[:num_done]], dtype=np.int32),
                sampling=whole.sampling.for_rest(num_done=num_done, limit=NUM_NEW - num_done),
            )
            submit(core, rest)
            found = answers(core)[name]
            assert found == (alone[name][0][8 * num_done :], alone[name][1][4 * num_done :])


def test_c_retracted_on_the_way_it_is_the_same(make: Callable[..., EngineCore], alone: dict[str, Answer]) -> None:
    core = make()
    submit(core, *(request(name, prompt) for name, prompt in PROMPTS.items()))
    for num_steps in (3, 11):
        for _ in range(num_steps):
            core.step()
        core.retract()
    assert answers(core) == alone


def test_a_group_of_one_prompt_is_prefilled_once_and_equal(make: Callable[..., EngineCore]) -> None:
    one, several = make(), make()
    submit(one, request("xyz", [3, 4, 5]))
    submit(several, *(request(name, [3, 4, 5]) for name in ("uvw", "xyz", "opq")))
    assert answers(one)["xyz"] == answers(several)["xyz"]


def test_a_machine_whose_rows_differ_by_their_place_is_refused(
    folders: list[Path], load: Callable[..., DecoderWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library of matrix products might do it that has another kernel for the last rows."""
    exact = Decoder.logits

    def by_place(self: Decoder, weights: DecoderWeights, hidden: torch.Tensor) -> torch.Tensor:
        found = exact(self, weights, hidden)
        found[-1] *= 1.0000002
        return found

    monkeypatch.setattr(Decoder, "logits", by_place)
    with pytest.raises(EngineError, match="depend on a row's place in its batch") as caught:
        core_of(folders[0], load)
    assert "rollout.deterministic = false" in str(caught.value)


def test_keys_looked_at_follow_from_the_position() -> None:
    positions = np.asarray([0, 63, 64, 127, 128, 1000])
    assert padded_lengths(positions).tolist() == [64, 64, 128, 128, 256, 1024]
