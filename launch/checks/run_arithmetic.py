"""What the numbers of a run file come to: batch, data, staleness; and valid values that are rarely meant. Pure.

samples of a step = algo.batch_size (groups) x rollout.num_samples
tokens of a step <= samples x (prompt + rollout.max_new_tokens x rollout.max_turns)
updates = steps x algo.epochs x algo.minibatches
passes = steps x algo.batch_size / rows           (more when a filter leaves groups out)
micro-batches of a rank >= tokens / replicas / trainer.max_tokens_per_microbatch
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from ...actors.backends.megatron.layout import ParallelLayout
from ...actors.models.model_config import ModelConfig
from ...algos.staleness import make_policy
from ...core.config import RunConfig
from ...core.config.loading import Finding
from ...core.config.run import LOCAL_HOSTS
from ...core.errors import DataError
from .check import CheckedRun, warnings
from .files import train_rows

# -- batch -------------------------------------------------------------------------------------------------------------


def batch_plan(run: CheckedRun) -> dict[str, float | None]:
    """Counts of a run, as `myxa plan` shows them; None where the data or the model cannot be read. Of a step, but for
    those of the whole run: `num_steps` (0: endless), `num_updates`, `num_rows` and `num_draws` (in all passes over all
    sources that have a weight; None: endless), `passes` (at least). Tokens and micro-batches are at most."""
    config, model, world_size = run.config, run.model, max(1, len(run.of("trainer")))
    algo, rollout, steps = config.algo, config.rollout, config.run.num_steps
    samples = algo.batch_size * rollout.num_samples
    counts = {name: rows.num_rows for name, rows in run.once(train_rows).items()}
    num_rows = None if None in counts.values() else sum(count or 0 for count in counts.values())
    parts = {name: part for name, part in config.data.parts().items() if not name or config.data.sources[name].weight}
    draws = [(counts[name] or 0) * part.max_passes for name, part in parts.items()]
    return {
        "num_prompts": algo.batch_size,
        "samples_per_prompt": rollout.num_samples,
        "num_samples": samples,
        "num_steps": steps,
        "updates_per_step": algo.updates_per_step,
        "num_updates": config.policy_updates,
        "samples_per_update": samples // algo.minibatches,
        "tokens_per_step": None if model is None else samples * longest_answer(config, model),
        "num_replicas": num_replicas(config, world_size),
        "micro_batches_per_replica": None if model is None else num_micro_batches(config, model, world_size),
        "num_rows": num_rows,
        "num_draws": sum(draws) if all(draws) else None,
        "passes": steps * algo.batch_size / num_rows if num_rows and steps else None,
    }


def longest_answer(config: RunConfig, model: ModelConfig) -> int:
    """Tokens that a sample's model turns may have together."""
    context = config.engine.context_length or model.context_length
    if config.algo.is_given:
        return context
    return min(context, config.rollout.max_new_tokens * config.rollout.max_turns)


def trainer_layout(config: RunConfig) -> ParallelLayout:
    """How the model is cut; the torch trainer does not cut it."""
    return ParallelLayout.of(config.megatron) if config.roles.trainer.kind == "megatron" else ParallelLayout()


def num_replicas(config: RunConfig, world_size: int) -> int:
    """Data-parallel replicas of the trainer."""
    return max(1, world_size // trainer_layout(config).model_size)


def num_micro_batches(config: RunConfig, model: ModelConfig, world_size: int) -> int:
    """Passes of one replica for one update when all answers are as long as they may be."""
    samples = config.algo.batch_size * config.rollout.num_samples / config.algo.minibatches
    fitting = max(1, config.trainer.max_tokens_per_microbatch // max(1, longest_answer(config, model)))
    return max(1, math.ceil(samples / fitting / num_replicas(config, world_size)))


# -- data --------------------------------------------------------------------------------------------------------------


def amount_of_data(run: CheckedRun) -> Iterator[Finding]:
    """Data that is less than the run asks for."""
    config, batch = run.config, run.config.algo.batch_size
    plan, num_steps = run.once(batch_plan), config.run.num_steps
    num_rows, num_draws = plan["num_rows"], plan["num_draws"]
    if not num_rows:
        return
    key = "data.sources" if config.data.sources else "data.train"
    bound = "max_passes of the sources" if config.data.sources else f"data.max_passes = {config.data.max_passes}"
    more = "raise data.max_passes (0 = endless)"
    if num_draws is not None and num_draws < batch:
        text = f"{key}: {num_rows} rows and {bound} are fewer prompts than one batch, algo.batch_size = {batch}"
        yield Finding("algo.batch_size", DataError(text, remedy=f"lower algo.batch_size, or {more}"))
    elif num_draws is not None and num_steps and num_draws < batch * num_steps:
        end = f"the data ends after {num_draws // batch} of {num_steps} steps, earlier if groups are left out"
        error = DataError(f"{bound}: {end}", remedy=f"{more}, or lower run.num_steps")
        yield Finding("data.max_passes", error, "warning")


# -- staleness ---------------------------------------------------------------------------------------------------------


def staleness_plan(run: CheckedRun) -> dict[str, Any] | None:
    """Numbers of the bound; None: nothing is generated. `concurrency`: groups that all rollout actors take at once."""
    config, num_rollouts, settings = run.config, len(run.of("rollout")), run.config.asynchrony
    if not (run.config.generates and run.actors):
        return None
    batch = config.algo.batch_size
    policy = make_policy(settings.policy, settings.max_staleness, batch)
    return {
        "policy": settings.policy,
        "max_staleness": settings.max_staleness,
        "num_slots": policy.num_slots,
        "batch_size": batch,
        "num_engines": num_rollouts,
        "concurrency": num_rollouts * config.rollout.max_groups,
    }


# -- what is rarely meant ----------------------------------------------------------------------------------------------

MANY_STEPS = 100
"""From so many steps on, a run without checkpoints is warned about."""


def rarely_meant(run: CheckedRun) -> Iterator[Finding]:
    config, trainer = run.config, run.config.roles.trainer
    is_long = not config.run.num_steps or config.run.num_steps >= MANY_STEPS
    num_updates, optimizer = config.policy_updates, config.optimizer
    far = [url for url in config.engine.attach if urlsplit(url).hostname not in LOCAL_HOSTS]
    return warnings(
        *((True, key, f"has no effect: it {needs}", "leave it out, or set that too")
          for key, needs in config.without_effect()),
        (is_long and not config.trainer.checkpoint_every, "trainer.checkpoint_every",
         "= 0: a run that is killed cannot be resumed, and a trainer rank that dies throws training back to its start",
         "set it to so many steps as may be lost, and trainer.keep_last to how many checkpoints stay"),
        (0 < optimizer.rate_is_zero_from(num_updates) < num_updates, "optimizer.decay_steps",
         f"= {optimizer.decay_steps}: the learning rate is 0 from that update on, and the run makes {num_updates}",
         "set it to 0 (the end of the run), or optimizer.min_lr_ratio above 0"),
        (0 < num_updates <= optimizer.warmup_steps, "optimizer.warmup_steps",
         f"= {optimizer.warmup_steps}: the learning rate never gets to its top, the run makes {num_updates} updates",
         "lower it, or raise run.num_steps"),
        (len(trainer.device_ids) > trainer.count, "roles.trainer.devices",
         (f'= "{trainer.devices}": {len(trainer.device_ids)} GPUs for {trainer.count} ranks on a node, each of which '
         "uses one"), "set roles.trainer.count to the number of GPUs"),
        (far and not config.engine.key_env, "engine.attach",
         f"names {', '.join(far)} without engine.key_env: every client that reaches one can load weights",
         "start servers with --admin-api-key, and name the variable that holds it in engine.key_env"),
    )  # fmt: skip


CUT = (
    "tokens are drawn from a part of the distribution, their log-probs and the trainer's are of all of it: what is "
    "cut off is never tried, and no correction sees that (rollout.replay_sampling = true: with the embedded engine)"
)
PENALISED = (
    "log-probs of sampled tokens are those after the penalty, the trainer scores without it: its ratios are not 1 "
    "on fresh samples either, and the correction (algo.correction) weighs that"
)
PLAIN_SAMPLING = {
    "top_p": (1, CUT), "top_k": (-1, CUT), "min_p": (0, CUT), "repetition_penalty": (1, PENALISED),
    "frequency_penalty": (0, PENALISED), "presence_penalty": (0, PENALISED), "min_new_tokens": (0, PENALISED),
}  # fmt: skip
"""Key of `[rollout]` -> the value that switches it off, and what it does otherwise."""


def sampling(run: CheckedRun) -> Iterator[Finding]:
    """Sampling that the trainer cannot score, and seeds that decide less than they seem to."""
    rollout, data, eta = run.config.rollout, run.config.data, run.config.asynchrony.max_staleness
    if not run.config.generates:
        return
    for key, (off, text) in PLAIN_SAMPLING.items():
        value = getattr(rollout, key)
        watch = ", or watch the importance weights (docs/algorithms.md)" if text is PENALISED else ""
        remedy = f"set it to {off} for training{watch}"
        is_told = text is CUT and rollout.replay_sampling
        yield from warnings((value != off and not is_told, f"rollout.{key}", f"= {value:g}: {text}", remedy))
    window = f"{data.difficulty_low:g} to {data.difficulty_high:g}"
    yield from warnings(
        (rollout.deterministic and eta, "rollout.deterministic",
         (f"= true with async.max_staleness = {eta}: turns have their own seeds, but which weights a token meets is a "
         "matter of time: two runs are not equal"), "set async.max_staleness = 0 for runs that repeat to the bit"),
        (rollout.deterministic and data.difficulty_low < data.difficulty_high, "rollout.deterministic",
         (f"= true with a difficulty window of {window}: a prompt that comes twice within a step may be passed over or "
         "not, as its first group is finished by then or not: two runs are not equal"),
         "leave the window out (data.difficulty_low = data.difficulty_high) for runs that repeat to the bit"),
    )  # fmt: skip
