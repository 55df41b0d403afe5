"""Warnings about valid settings that are rarely intended: odd counts, sampling that the trainer cannot score. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from ...core.config import RunConfig
from ...core.errors import ConfigError
from ..preflight.finding import ConfigFinding
from .batch import BatchPlan

LOOPBACKS = frozenset({"127.0.0.1", "localhost", "::1"})

MANY_STEPS = 100
"""From so many steps on, a run without checkpoints is warned about."""


def odd_counts(config: RunConfig, batch: BatchPlan, held_out: Mapping[str, int | None]) -> Iterator[ConfigFinding]:
    """All of them. `held_out`: name of each evaluation set -> its rows, where they were counted."""
    yield from _schedules(config)
    yield from _held_out(config, held_out)
    if batch.samples_per_update < batch.num_replicas:
        yield _odd(
            "algo.batch_size",
            f"= {config.algo.batch_size}: one update has {batch.samples_per_update} samples for {batch.num_replicas} "
            "trainer ranks, so some of them have nothing to do",
            "raise it, lower algo.minibatches, or use fewer ranks",
        )
    trainer = config.roles.trainer
    if len(trainer.device_ids) > trainer.count:
        yield _odd(
            "roles.trainer.devices",
            f'= "{trainer.devices}": {len(trainer.device_ids)} GPUs for {trainer.count} ranks on a node, each of which '
            "uses one",
            "set roles.trainer.count to the number of GPUs",
        )
    open_servers = [url for url in config.engine.attach if urlsplit(url).hostname not in LOOPBACKS]
    if open_servers and not config.engine.key_env:
        yield _odd(
            "engine.attach",
            f"names {', '.join(open_servers)} without engine.key_env: every client that reaches one can load weights",
            "start servers with --admin-api-key, and name the variable that holds it in engine.key_env",
        )
    needed = config.rollout.max_new_tokens * config.rollout.max_turns
    length = config.engine.context_length
    if config.algo.kind != "sft" and length and needed >= length > config.rollout.max_new_tokens:
        yield _odd(
            "engine.context_length",
            f"= {length}: {config.rollout.max_turns} turns of {config.rollout.max_new_tokens} tokens do not fit, later "
            "ones are cut short",
            "raise it, or lower rollout.max_new_tokens",
        )


def _held_out(config: RunConfig, held_out: Mapping[str, int | None]) -> Iterator[ConfigFinding]:
    for name, num_rows in held_out.items():
        own = config.eval.sets[name].num_prompts if name else 0
        wanted = own or config.eval.num_prompts
        if num_rows is None or num_rows == wanted:
            continue
        files = f"eval.sets.{name}.path" if name else "eval.data"
        key = f"eval.sets.{name}.num_prompts" if own else "eval.num_prompts"
        if num_rows > wanted:
            text = f"{files} has {num_rows:,} rows, of which the last {num_rows - wanted:,} are not evaluated"
            yield _odd(key, f"= {wanted}: {text}", f"set it to {num_rows} to evaluate on all")
        elif own or "num_prompts" in config.eval.model_fields_set:
            yield _odd(
                key, f"= {wanted}: {files} has {num_rows} rows, which are all used", "lower it, or use more data"
            )


def _schedules(config: RunConfig) -> Iterator[ConfigFinding]:
    """What happens every so many steps, beside how many there are."""
    steps = config.run.num_steps
    if steps and config.trainer.checkpoint_every > steps:
        yield _odd(
            "trainer.checkpoint_every",
            f"= {config.trainer.checkpoint_every}: the run has {steps} steps, so no checkpoint is written",
            "lower it, or set it to 0",
        )
    if not config.trainer.checkpoint_every and (not steps or steps >= MANY_STEPS):
        back = (
            "" if config.trainer.standby_every else ", and a trainer rank that dies throws training back to its start"
        )
        yield _odd(
            "trainer.checkpoint_every",
            f"= 0: a run that is killed cannot be resumed{back}",
            "set it to so many steps as may be lost, and trainer.keep_last to how many checkpoints stay",
        )
    if steps and config.eval.every > steps:
        yield _odd(
            "eval.every",
            f"= {config.eval.every}: the run has {steps} steps, so there is no evaluation after the first",
            "lower it",
        )


def _odd(key: str, text: str, remedy: str) -> ConfigFinding:
    return ConfigFinding(key, ConfigError(f"{key} {text}", remedy=remedy), is_warning=True)


def sampling_findings(config: RunConfig) -> Iterator[ConfigFinding]:
    """One warning for each key that does so."""
    if config.algo.kind == "sft":
        return
    rollout = config.rollout
    for key, value, rest in (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, -1), ("min_p", rollout.min_p, 0)):
        if value != rest:
            yield _warning(
                key,
                f"= {value:g}: tokens are drawn from a part of the distribution, their log-probs and the trainer's are "
                "of all of it: what is cut off is never tried, and no correction sees that",
                f"set it to {rest} for training",
            )
    if rollout.deterministic and config.asynchrony.max_staleness:
        yield _warning(
            "deterministic",
            f"= true with async.max_staleness = {config.asynchrony.max_staleness}: turns have their own seeds, but "
            "which weights a token meets is a matter of time: two runs are not equal",
            "set async.max_staleness = 0 for runs that repeat to the bit",
        )
    if rollout.deterministic and config.data.difficulty_low < config.data.difficulty_high:
        yield _warning(
            "deterministic",
            f"= true with a difficulty window of {config.data.difficulty_low:g} to {config.data.difficulty_high:g}: a "
            "prompt that comes twice within a step may be passed over or not, as its first group is finished by then "
            "or not: two runs are not equal",
            "leave the window out (data.difficulty_low = data.difficulty_high) for runs that repeat to the bit",
        )
    for key, value, rest in (
        ("repetition_penalty", rollout.repetition_penalty, 1),
        ("frequency_penalty", rollout.frequency_penalty, 0),
        ("presence_penalty", rollout.presence_penalty, 0),
        ("min_new_tokens", rollout.min_new_tokens, 0),
    ):
        if value != rest:
            yield _warning(
                key,
                f"= {value:g}: log-probs of sampled tokens are those after the penalty, the trainer scores without it: "
                "its ratios are not 1 on fresh samples either, and the correction (algo.correction) weighs that",
                f"set it to {rest} for training, or watch the importance weights (docs/algorithms.md)",
            )


def _warning(key: str, text: str, remedy: str) -> ConfigFinding:
    return ConfigFinding(f"rollout.{key}", ConfigError(f"rollout.{key} {text}", remedy=remedy), is_warning=True)
