"""What a workflow returned, looked at before anybody believes it. Pure."""

from __future__ import annotations

from typing import cast

import msgspec
import orjson

from ...algos.rewards import outcome_of
from ...core.errors import EngineError, UserCodeError
from ...core.samples import Prompt, Sample, check_sample
from ..user_code import what_was_raised, words_of

MAX_METADATA_BYTES = 64 << 10
"""Of a sample, as JSON: it travels to the reward function and is kept with the group."""


def checked_sample(
    sample: object, prompt: Prompt, index: int, *, temperature: float | None, vocab_size: int | None
) -> Sample:
    """User code may return anything: only a consistent Sample of this very prompt passes, with the temperature that its
    turns were drawn at, and its reward and metadata as plain values. Raises UserCodeError, EngineError."""
    where = f"(group {prompt.group_id}, sample {index})"
    if not isinstance(sample, Sample):
        raise UserCodeError(
            f"workflow returned a value of type {type(sample).__name__}, not a Sample {where}",
            remedy="end it with `return ctx.episode.sample()`",
        )
    if (sample.group_id, sample.index) != (prompt.group_id, index):
        raise UserCodeError(
            f"workflow returned sample {sample.group_id}/{sample.index} for {prompt.group_id}/{index}",
            remedy="return the sample of the episode it was given",
        )
    try:
        check_sample(sample, vocab_size)
    except ValueError as err:
        raise EngineError(str(err), remedy="the engine or workflow broke the per-token contract") from err
    except Exception as err:
        raise UserCodeError(
            f"workflow returned a sample that cannot be checked: {what_was_raised(err)} {where}",
            remedy="end it with `return ctx.episode.sample()`",
        ) from err
    sample = _with_plain_outcome(sample, where)
    if temperature is None or sample.temperature == temperature:
        return sample
    return msgspec.structs.replace(sample, temperature=temperature)


def _with_plain_outcome(sample: Sample, where: str) -> Sample:
    """Reward and metadata as they will be after a journey: a float, and what JSON makes of the rest."""
    if sample.reward is None and not sample.metadata:
        return sample
    reward = sample.reward
    if reward is not None:
        try:
            reward = outcome_of(_bare(reward)).value
        except (TypeError, ValueError) as err:
            raise UserCodeError(
                f"workflow: reward of its sample: {words_of(err)} {where}",
                remedy="give episode.sample(reward=...) a finite number",
            ) from err
    return msgspec.structs.replace(sample, reward=reward, metadata=_plain(sample.metadata, where))


def _bare(reward: object) -> object:
    """A dict is what reward functions may return, and no reward of a sample."""
    if isinstance(reward, dict):
        raise TypeError("returned a value of type dict, not a number")
    return reward


def _plain(metadata: object, where: str) -> dict[str, object]:
    remedy = f"give episode.sample(metadata=...) a dict of JSON values, of at most {MAX_METADATA_BYTES:,} bytes in all"
    try:
        written = orjson.dumps(metadata)
    except (TypeError, ValueError, RecursionError) as err:
        raise UserCodeError(
            f"workflow: the metadata of its sample cannot be written as JSON: {words_of(err)} {where}", remedy=remedy
        ) from err
    if len(written) > MAX_METADATA_BYTES:
        raise UserCodeError(
            f"workflow: the metadata of its sample has {len(written):,} bytes as JSON {where}", remedy=remedy
        )
    read = orjson.loads(written)
    if not isinstance(read, dict):
        raise UserCodeError(f"workflow: the metadata of its sample is no dict {where}", remedy=remedy)
    return cast("dict[str, object]", read)
