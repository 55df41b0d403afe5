"""Parts of rollout actors from the run file: sampling, evaluation sets, the engine that replays dumps, the reference.

Part of the composition root: this file and `program.py` name the concrete classes, and import them where they are
built.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from ...actors.engines.sglang.server_args import SglangNeeds
from ...core.clock import Clock
from ...core.config import RewardSettings, RunConfig
from ...core.config.data import EvalSetSettings, parse_sources
from ...core.config.learning import RECORDED_REFERENCE
from ...core.errors import DataError
from ...core.messages import SamplingParams
from ...core.protocols import Engine, Tokenizer

if TYPE_CHECKING:
    from ...actors.engines.recorded import RecordedEngine, Recordings
    from ...actors.models.model_config import ModelConfig
    from ...actors.rewards.guard import Reference
    from ...actors.rewards.rewarder import Rewarder


SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "min_new_tokens", "repetition_penalty"),
    *("frequency_penalty", "presence_penalty", "stop_token_ids", "stop"),
)
"""Keys of `[rollout]` that each request has."""


def train_sampling(config: RunConfig) -> SamplingParams:
    return SamplingParams(seed=_seed(config), **{name: getattr(config.rollout, name) for name in SAMPLED})


def eval_sampling(config: RunConfig) -> SamplingParams:
    """How held-out prompts are answered, but for the temperature: by the whole distribution."""
    return SamplingParams(
        max_new_tokens=config.rollout.max_new_tokens,
        stop_token_ids=config.rollout.stop_token_ids,
        stop=config.rollout.stop,
        seed=_seed(config),
    )


def _seed(config: RunConfig) -> int | None:
    return config.run.seed if config.rollout.deterministic else None


def sglang_needs(config: RunConfig) -> SglangNeeds:
    """What servers must have been started with, or without, for this sampling."""
    rollout = config.rollout
    return SglangNeeds(
        tokenizer=bool(rollout.stop or rollout.min_new_tokens),
        seeds=rollout.deterministic,
        min_p=rollout.min_p > 0,
    )


def eval_sets(config: RunConfig) -> dict[str, EvalSetSettings]:
    """In the order of names; the only one, of `eval.data`, is called ""."""
    alone = EvalSetSettings(path=config.eval.data or "none", pass_reward=config.reward.pass_reward)
    return dict(sorted(config.eval.sets.items())) or {"": alone}


def eval_rewards(config: RunConfig) -> dict[str, RewardSettings]:
    """By the name of the set, of those that are not judged as training samples are."""
    return {
        name: config.reward.alone(one.reward, pattern=one.reward_pattern, args=one.reward_args)
        for name, one in sorted(config.eval.sets.items())
        if one.reward
    }


def eval_rewarders(config: RunConfig) -> dict[str, Rewarder]:
    """The same, loaded. Raises ConfigError or UserCodeError for a function that cannot be."""
    from ...actors.rewards.call import RewardKeys
    from ...actors.rewards.rewarder import Rewarder

    return {name: Rewarder(settings, RewardKeys.of_eval_set(name)) for name, settings in eval_rewards(config).items()}


FIRST_GROUPS = 50
"""Of each dump: looked at here. Those of another model or template differ from the first one on."""


def recorded_engine(name: str, config: RunConfig, model: ModelConfig, tokenizer: Tokenizer) -> RecordedEngine:
    """Raises DataError for a file that is no dump, or whose prompts this run's tokenizer or chat template writes
    otherwise than they were asked."""
    from ...actors.data.recorded import RecordedGroups, terms_of
    from ...actors.engines.recorded import RecordedEngine, RecordedOptions, Recordings

    terms, sources = terms_of(config), dict[str, Recordings]()
    for _, value in config.data_files():
        for source in parse_sources(value):
            file = RecordedGroups(source.path, terms)
            sources[str(source)] = found = Recordings(file, source.rows(file.num_rows))
            _check_prompts(found, tokenizer)
    options = RecordedOptions(
        vocab_size=model.vocab_size,
        context_length=config.engine.context_length or model.context_length,
        max_running=config.engine.max_running,
        end_ids=frozenset(tokenizer.eos_token_ids),
        name=name,
    )
    return RecordedEngine(sources, options)


def _check_prompts(recordings: Recordings, tokenizer: Tokenizer) -> None:
    from ...actors.data.row_file import RowError
    from ...actors.workflows.turn_renderer import TurnRenderer

    renderer = TurnRenderer(tokenizer)
    for row in recordings.rows[:FIRST_GROUPS]:
        try:
            group = recordings.file.group(row)
        except RowError:  # the reader of the data reports it, or leaves it out
            continue
        asked, now = group.samples[0].prompt_ids, renderer.prompt(group.prompt)
        if not np.array_equal(asked, now):
            common = min(len(asked), len(now))
            at = next(iter(np.flatnonzero(asked[:common] != now[:common]).tolist()), common)
            raise DataError(
                f"{recordings.file.place(row)}: its prompt was asked by {len(asked)} tokens, this run would ask by "
                f"{len(now)}, others from token {at} on",
                remedy="name the model that it was recorded with (model.path), and the same data.apply_chat_template "
                "and data.chat_template_kwargs",
            )


def served_reference(config: RunConfig, engine: Engine | None, tokenizer: Tokenizer, clock: Clock) -> Reference | None:
    """None where the trainer keeps it, or there is none. Raises ConfigError if the servers' key is not there."""
    algo = config.algo
    if not algo.ref_urls:
        return None
    if algo.ref_urls == RECORDED_REFERENCE:
        from ...actors.engines.recorded import RecordedEngine, RecordedReference

        assert isinstance(engine, RecordedEngine)  # the run file was checked
        return RecordedReference(engine)
    from ...actors.reference.server import ReferenceServers, ServedReference, key_from  # a client for HTTP

    servers = ReferenceServers(
        algo.ref_urls,
        tokenizer=tokenizer,
        model_path=config.model.path,
        timeout_s=algo.ref_timeout_s,
        key=key_from(os.environ, algo.ref_key_env),
    )
    return ServedReference(servers, config.reward, clock)
