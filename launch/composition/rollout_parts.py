"""Parts of rollout actors from the run file: sampling, evaluation sets, the reference.

Part of the composition root: this file and `program.py` name the concrete classes, and import them where they are
built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...actors.engines.sglang.server_args import SglangNeeds
from ...actors.models.adapters import adapted_matrices
from ...core.actor import Actor
from ...core.clock import Clock
from ...core.config import RewardSettings, RunConfig
from ...core.config.data import EvalSetSettings
from ...core.config.run import AGENT_WORKFLOW
from ...core.messages import SamplingParams
from ...core.protocols import Tokenizer
from ..actor_spec import ActorSpec

if TYPE_CHECKING:
    from ...actors.gateway.server import Gateway
    from ...actors.models.model_config import ModelConfig
    from ...actors.rewards.guard import Reference
    from ...actors.rewards.judge import Judges
    from ...actors.rewards.rewarder import Rewarder
    from ...actors.rollout.other_models import OtherModel


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


def sglang_needs(config: RunConfig, model: ModelConfig, channel: str) -> SglangNeeds:
    """What servers must have been started with, or without, for this sampling and this way of new weights."""
    rollout, lora = config.rollout, config.lora
    adapted = adapted_matrices(lora, model.tensor_shapes()) if lora.rollout == "adapter" else ()
    return SglangNeeds(
        tokenizer=bool(rollout.stop or rollout.min_new_tokens), seeds=rollout.deterministic, channel=channel,
        trains_layers=config.megatron.mtp > 0, adapter_rank=lora.rank if adapted else 0,
        adapted=tuple(sorted({name.rpartition(".")[2] for name in adapted})),
    )  # fmt: skip


def gateway(spec: ActorSpec, config: RunConfig, run_dir: Path) -> Gateway | None:
    """That of a rollout actor; None: nothing is to be served."""
    if config.rollout.workflow != AGENT_WORKFLOW and not config.gateway.eval_requests:
        return None
    from ...actors.gateway.server import Gateway, ListenOptions

    agent, is_behind = config.agent, bool(config.roles.gateway.count)
    options = ListenOptions(
        host=agent.host,
        port=agent.port + spec.index if agent.port else 0,
        file="" if is_behind else str(run_dir / f"agents.{spec.index}.json"),
        has_eval_key=config.gateway.eval_requests > 0,
    )
    return Gateway(options, prefix=f"r{spec.index}-", is_behind=is_behind)


def gateway_role(config: RunConfig, run_dir: Path, clock: Clock) -> Actor:
    from ...actors.gateway.relay import GatewayRelay
    from ...actors.gateway.server import ListenOptions

    role = config.roles.gateway
    options = ListenOptions(
        host=role.host, port=role.port, key="roles.gateway.port", file=str(run_dir / "agents.json"),
        has_eval_key=config.gateway.eval_requests > 0,
    )  # fmt: skip
    return GatewayRelay(options, clock)


MAX_SERVED = 1000
"""Requests at a time, without a run; those that the engine does not decode yet wait in it."""


async def serve_model(
    folder: Path, tell: Callable[[dict[str, Any]], None], *, host: str, port: int, num: int, threads: int
) -> None:
    """Answer requests from a model's folder until the task is cancelled. `tell` gets the address and the key."""
    from ...actors.engines.embedded.core import EmbeddedOptions
    from ...actors.engines.embedded.engine import EmbeddedEngine
    from ...actors.gateway.server import Gateway, ListenOptions
    from ...actors.models.tokenizer import load_tokenizer
    from ...actors.workflows.episode import ModelAccess

    engine = EmbeddedEngine(str(folder), EmbeddedOptions(max_running=num, num_threads=threads))
    gateway = Gateway(ListenOptions(host=host, port=port, key="--port", has_eval_key=True))
    tokenizer = load_tokenizer(str(folder))
    try:
        length = (await engine.start()).context_length
        model = ModelAccess(
            generate=engine.generate, sampling=SamplingParams(max_new_tokens=length), context_length=length
        )
        gateway.answer_eval(tokenizer, model, limit=lambda: MAX_SERVED, is_serving=lambda: True)
        await gateway.start()
        tell(msgspec.to_builtins(await gateway.served()))
        await engine.until_lost()
    finally:
        await gateway.stop()
        await engine.close()


def eval_sets(config: RunConfig) -> dict[str, EvalSetSettings]:
    """In the order of names; the only one, of `eval.data`, is called ""."""
    alone = EvalSetSettings(path=config.eval.data or "none", pass_reward=config.reward.pass_reward)
    return dict(sorted(config.eval.sets.items())) or {"": alone}


def eval_rewards(config: RunConfig) -> dict[str, RewardSettings]:
    """By the name of the set, of those that are not judged as training samples are."""
    return {
        name: config.reward.alone(settings.reward, pattern=settings.reward_pattern, args=settings.reward_args)
        for name, settings in sorted(config.eval.sets.items())
        if settings.reward
    }


def other_models(config: RunConfig) -> dict[str, OtherModel]:
    """How a rollout actor reaches the models of the run's own. Raises ModelError for a folder that cannot be read."""
    if not config.models:
        return {}
    from ...actors.models.hf_folder import read_config
    from ...actors.rollout.other_models import OtherModel
    from ...actors.workflows.episode import ModelSpec

    models: dict[str, OtherModel] = {}
    for name, settings in config.models.items():
        spec = ModelSpec(
            model_path=settings.path,
            chat_template_kwargs=settings.chat_template_kwargs,
            date=config.data.date,
            sampling=train_sampling(config.of_model(name)),
            context_length=settings.engine.context_length or read_config(settings.path).context_length,
        )
        num = settings.count * len(settings.nodes)
        models[name] = OtherModel(
            name, spec, num_actors=num, max_requests=settings.max_requests, timeout_s=settings.timeout_s
        )
    return models


def make_judges(config: RunConfig, models: Mapping[str, OtherModel]) -> Judges | None:
    """What asks language models for rewards; None: no reward does."""
    if all(fn != "judge" for _, fn in config.named_rewards()):
        return None
    from ...actors.rewards.judge import Judges  # a client for HTTP

    return Judges(config.judge, os.environ, {name: model.chat for name, model in models.items()})


def eval_rewarders(config: RunConfig, judges: Judges | None) -> dict[str, Rewarder]:
    """The same, loaded. Raises ConfigError or UserCodeError for a function that cannot be."""
    from ...actors.rewards.call import RewardKeys
    from ...actors.rewards.rewarder import Rewarder

    rewards = eval_rewards(config).items()
    return {name: Rewarder(settings, RewardKeys.of_eval_set(name), judges) for name, settings in rewards}


def served_reference(config: RunConfig, tokenizer: Tokenizer, clock: Clock) -> Reference | None:
    """None where it is not served. Raises ConfigError if the servers' key is not there."""
    algo = config.algo
    if not algo.ref_urls:
        return None
    from ...actors.http_client import key_from
    from ...actors.reference.server import ReferenceServers, ServedReference  # a client for HTTP

    servers = ReferenceServers(
        algo.ref_urls, tokenizer=tokenizer, model_path=config.model.path, timeout_s=algo.ref_timeout_s,
        key=key_from(os.environ, algo.ref_key_env, "algo.ref_key_env"),
    )  # fmt: skip
    return ServedReference(servers, config.reward, clock)
