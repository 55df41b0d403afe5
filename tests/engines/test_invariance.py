"""A deterministic run's engine: a sequence's tokens and log-probs are the same to the bit, whatever surrounds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.contract import Result, ask

from myxa.actors.engines.embedded.core import EngineCore
from myxa.actors.engines.embedded.model import Decoder, DecoderWeights, padded_lengths
from myxa.core.errors import EngineError
from myxa.core.protocols import GenerateRequest

Bits = tuple[bytes, bytes]
"""Tokens and log-probs: nothing is compared up to a tolerance."""
NUM_NEW = 10
OPTIONS: dict[str, Any] = {"eos_token_ids": frozenset(), "stream_interval": 3, "is_invariant": True, "num_slots": 32}
PROMPTS: Mapping[str, list[int]] = {
    "a": [5, 6, 7], "bb": list(range(40, 75)), "ccc": [9], "dddd": list(range(100, 155)),
}  # fmt: skip


def request(name: str, prompt: list[int], *, num_new: int = NUM_NEW, top_p: float = 1.0) -> GenerateRequest:
    seed = len(name) * 1000 + prompt[0]
    return ask(name, prompt, max_new_tokens=num_new, seed=seed, top_p=top_p, temperature=0.9)


def bits(results: dict[str, Result]) -> dict[str, Bits]:
    return {
        name: (results[name].ids.tobytes(), results[name].logprobs.tobytes()) for name in PROMPTS if name in results
    }


EVERY = [request(name, prompt) for name, prompt in PROMPTS.items()]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def make(
    request: pytest.FixtureRequest, folders: list[Path], family: Callable[[str], Path],
    make_core: Callable[..., EngineCore],
) -> Callable[..., EngineCore]:  # fmt: skip
    """In bfloat16 with grouped queries."""
    folder = folders[0] if request.param == "float32" else family("qwen3")
    return lambda **more: make_core(folder, dtype=request.param, **(OPTIONS | more))


@pytest.fixture(scope="module")
def alone(make: Callable[..., EngineCore], run_core: Callable[..., dict[str, Result]]) -> dict[str, Result]:
    return {one.request_id: run_core(make(), [one])[one.request_id] for one in EVERY}


def test_c_a_crowd_changes_no_bit(make, run_core, alone) -> None:
    rng = np.random.default_rng(0)
    for num_others, num_slots in ((24, 32), (6, 5)):
        core = make(num_slots=num_slots)
        prompts = [rng.integers(0, 256, int(rng.integers(1, 60))).tolist() for _ in range(num_others)]
        others = [
            request(f"other {i}", prompt, num_new=int(rng.integers(1, 30)), top_p=float(rng.choice([1.0, 0.7])))
            for i, prompt in enumerate(prompts)
        ]
        for one in others[: num_others // 2]:
            core.submit(one, one.request_id)
        for _ in range(4):
            core.step()
        assert bits(run_core(core, [*EVERY, *others[num_others // 2 :]])) == bits(alone)


def test_c_continued_from_a_prefix_it_is_the_same(make, run_core, alone) -> None:
    """What was decoded token by token is prefilled as part of the prompt."""
    for whole in EVERY:
        was = alone[whole.request_id]
        for num_done in (1, NUM_NEW - 1):
            rest = GenerateRequest(
                request_id=whole.request_id,
                input_ids=np.concatenate([whole.input_ids, was.ids[:num_done]]),
                sampling=whole.sampling.for_rest(num_done=num_done, limit=NUM_NEW - num_done),
            )
            got = run_core(make(), [request("other", [1, 2]), rest])[whole.request_id]
            assert got.ids.tobytes() == was.ids[num_done:].tobytes()
            assert got.logprobs.tobytes() == was.logprobs[num_done:].tobytes()


def test_c_retracted_on_the_way_it_is_the_same(make, run_core, alone) -> None:
    core = make()
    found = run_core(core, EVERY, lambda number: core.retract() if number in (3, 7) else None)
    assert bits(found) == bits(alone)


def test_a_group_of_one_prompt_is_prefilled_once_and_equal(make, run_core) -> None:
    one = run_core(make(), [request("a", [3, 4, 5])])
    several = run_core(make(), [request(name, [3, 4, 5]) for name in ("u", "a", "o")])
    assert bits(one) == bits(several)


def test_a_machine_whose_rows_differ_by_their_place_is_refused(folders, make_core, monkeypatch) -> None:
    """As a library of matrix products might do it that has another kernel for the last rows."""
    exact = Decoder.logits

    def by_place(self: Decoder, weights: DecoderWeights, hidden: torch.Tensor) -> torch.Tensor:
        found = exact(self, weights, hidden)
        found[-1] *= 1.0000002
        return found

    monkeypatch.setattr(Decoder, "logits", by_place)
    with pytest.raises(EngineError, match="depend on a row's place in its batch") as caught:
        make_core(folders[0], **OPTIONS)
    assert "rollout.deterministic = false" in str(caught.value)


def test_keys_looked_at_follow_from_the_position() -> None:
    positions = np.asarray([0, 63, 64, 127, 128, 1000])
    assert padded_lengths(positions).tolist() == [64, 64, 128, 128, 256, 1024]
